//! A server over the double, and a client that shows every byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fir_server::{Config, Server};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::double::{Double, Script};

pub(crate) struct Live {
    pub(crate) address: SocketAddr,
    pub(crate) double: Arc<Double>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<fir_engine::Result<()>>>,
}

impl Live {
    pub(crate) fn new(script: Script, config: Config) -> Self {
        let double = Double::start(script);
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let backend = double.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let result = runtime.block_on(async {
                let server = Server::bind("127.0.0.1:0", config).await.unwrap();
                server.installer().install(backend);
                tell.send(server.address().unwrap()).unwrap();
                server.run(async { _ = stopped.await }).await
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
            result
        });
        Self { address: told.recv().unwrap(), double, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn plain() -> Self {
        Self::new(Script::default(), Config::default())
    }

    /// As a signal does.
    pub(crate) fn signal(&mut self) {
        let _ = self.stop.take().map(|s| s.send(()));
    }

    /// What `run` returned.
    pub(crate) fn join(&mut self) -> fir_engine::Result<()> {
        self.thread.take().unwrap().join().unwrap()
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        stream
    }

    pub(crate) fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        Answer::read(self.send(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.ask("POST", path, "Content-Type: application/json\r\n", body)
    }

    pub(crate) fn chat(&self, body: &str) -> Answer {
        self.post("/v1/chat/completions", body)
    }

    /// Waits until `what` holds.
    pub(crate) fn wait(&self, what: impl Fn(&Double) -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !what(&self.double) {
            assert!(Instant::now() < end, "load {:?}, aborts {:?}", self.double.load(), self.double.aborts);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn aborts(&self) -> usize {
        self.double.aborts.load(Ordering::SeqCst)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let (head, rest) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let body = if chunked { dechunk(rest) } else { rest.to_owned() };
        Self { status, head: head.to_owned(), body }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().filter_map(|l| l.split_once(": ")).find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|p| p.1)
    }

    /// The data of every event, the last of which must be `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self.body.split("\n\n").filter_map(|e| e.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.iter().map(|d| serde_json::from_str(d).unwrap()).collect()
    }

    /// That it is an error of OpenAI's form.
    #[track_caller]
    pub(crate) fn refused(&self, status: u16, param: Option<&str>, message: &str) {
        assert_eq!(self.status, status, "{self:?}");
        let error = &self.json()["error"];
        assert_eq!(error["param"].as_str(), param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        assert!(error["type"].is_string() && error.get("code").is_some(), "{error}");
    }
}

fn dechunk(mut text: &str) -> String {
    let mut body = Vec::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        if size == 0 {
            break;
        }
        body.extend_from_slice(&rest.as_bytes()[..size]);
        text = &rest[size + 2..];
    }
    String::from_utf8(body).unwrap()
}
