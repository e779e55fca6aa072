//! Worker processes: where solutions and references run.
//!
//! A worker answers JSON lines on a socket; tensors go through files. There are two kinds, with one protocol
//! (`worker.py` says it): the user's Python with torch, forked from one process that has imported it, and a native one
//! ([`serve_native`]) for compiled code and the kernel library. Time and memory are watched from here, and a worker that
//! passes its limit is killed.

pub(crate) mod kernel;
mod native;

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub use self::native::serve_native;
use crate::error::{Error, Result};
use crate::inputs::Ready;
use crate::schema::{DType, Definition, TensorSpec, Workload};

const WORKER: &str = include_str!("worker.py");
/// How often a waiting benchmark looks at its worker's memory.
const LOOK: Duration = Duration::from_millis(20);
/// A log that is longer is cut, as upstream's is.
const LOG: usize = 5 << 20;

/// A folder for sockets, logs and tensors, removed with this value.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) folder: PathBuf,
    next: AtomicU64,
}

impl Session {
    pub(crate) fn new() -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        // Tensors are best kept in memory.
        let shm = Path::new("/dev/shm");
        let base = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        remove_orphans(&base);
        let name = format!("fir-bench-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = base.join(name);
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        Ok(Self { folder, next: AtomicU64::new(0) })
    }

    /// A name that no file has yet.
    pub(crate) fn file(&self, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// What a request says of outputs, and files for them.
    pub(crate) fn outputs(&self, definition: &Definition, workload: &Workload) -> Result<(Value, Vec<PathBuf>)> {
        let one = |(_, spec): &(String, TensorSpec)| {
            Ok(json!({"dtype": spec.dtype.name(), "shape": definition.shape(spec, workload.axes())?}))
        };
        let specs = definition.outputs().iter().map(one).collect::<Result<Vec<_>>>()?;
        let files = specs.iter().map(|_| self.file("out")).collect();
        Ok((Value::Array(specs), files))
    }

    /// Writes inputs to files; what a request says of them.
    pub(crate) fn write(&self, inputs: &[Ready]) -> Result<Value> {
        let one = |input: &Ready| {
            let array = &input.array;
            let mut spec = json!({
                "name": input.name, "dtype": array.dtype().name(), "shape": array.shape(), "random": input.random,
            });
            if input.scalar {
                spec["value"] = match array.dtype() {
                    DType::Bool => json!(array.integer(0) != 0),
                    d if d.is_integer() => json!(array.integer(0)),
                    _ => json!(array.get(0)),
                };
            } else {
                let file = self.file("bin");
                fs::write(&file, array.bytes()).map_err(Error::io(&file))?;
                spec["file"] = json!(file);
            }
            Ok(spec)
        };
        Ok(Value::Array(inputs.iter().map(one).collect::<Result<_>>()?))
    }
}

/// Removes folders of processes that were killed before they could.
fn remove_orphans(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix("fir-bench-")?.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| Path::new("/proc/self").exists() && !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Writes the workers' program.
pub(crate) fn script(session: &Session) -> Result<PathBuf> {
    let script = session.folder.join("worker.py");
    fs::write(&script, WORKER).map_err(Error::io(&script))?;
    Ok(script)
}

/// The process that has imported torch and forks workers.
#[derive(Debug)]
pub(crate) struct Python {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    shown: String,
}

impl Python {
    /// Starts `python` and waits until torch is there.
    pub(crate) fn start(python: &Path, session: &Session) -> Result<Self> {
        let script = script(session)?;
        let shown = python.display().to_string();
        let fail = |why: String| Error::Worker { worker: python.display().to_string(), why };
        let errors = session.folder.join("python.err");
        let stderr = fs::File::create(&errors).map_err(Error::io(&errors))?;
        let mut child = Command::new(python)
            .arg("-u")
            .arg(&script)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|e| fail(format!("cannot be started: {e}")))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(fail("has no pipes".into()));
        };
        let mut this = Self { child, to, from: BufReader::new(from), shown };
        let ready = this.read();
        match ready {
            Ok(answer) if answer.get("ready").is_some() => Ok(this),
            _ => {
                let said = fs::read_to_string(&errors).unwrap_or_default();
                Err(fail(format!("cannot import torch:\n{}", tail(&said, 2000))))
            }
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        let fail = |why: String| Error::Worker { worker: self.shown.clone(), why };
        match self.from.read_line(&mut line) {
            Ok(n) if n > 0 => serde_json::from_str(&line).map_err(|e| fail(format!("{line:?}: {e}"))),
            _ => Err(fail("ended".into())),
        }
    }

    fn ask(&mut self, question: &Value) -> Result<Value> {
        let sent = writeln!(self.to, "{question}").and_then(|()| self.to.flush());
        sent.map_err(|e| Error::Worker { worker: self.shown.clone(), why: e.to_string() })?;
        self.read()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug)]
enum Process {
    Forked { pid: u32, from: Arc<Mutex<Python>> },
    Own(Child),
}

/// What a worker may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) time: Duration,
    pub(crate) memory: u64,
}

/// Why there was no answer.
#[derive(Debug)]
pub(crate) enum Ended {
    Timeout,
    Failed(String),
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    process: Process,
    stream: UnixStream,
    buffer: Vec<u8>,
    log: PathBuf,
    ended: bool,
}

impl Worker {
    /// A fork of `python`.
    pub(crate) fn forked(python: &Arc<Mutex<Python>>, session: &Session) -> Result<Self> {
        let (socket, log) = (session.file("sock"), session.file("log"));
        let listener = UnixListener::bind(&socket).map_err(Error::io(&socket))?;
        let answer = {
            let mut python = python.lock().unwrap_or_else(PoisonError::into_inner);
            python.ask(&json!({"spawn": socket, "log": log}))?
        };
        let pid = answer["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        let fail = || Error::Worker { worker: "python".into(), why: format!("answered {answer}") };
        let process = Process::Forked { pid: pid.ok_or_else(fail)?, from: python.clone() };
        Self::accept(process, &listener, &socket, log)
    }

    /// A native one: `command` with the socket's path as its last argument.
    pub(crate) fn native(command: &[std::ffi::OsString], session: &Session) -> Result<Self> {
        let (socket, log) = (session.file("sock"), session.file("log"));
        let listener = UnixListener::bind(&socket).map_err(Error::io(&socket))?;
        let fail = |why: String| Error::Worker { worker: format!("{command:?}"), why };
        let (program, args) =
            command.split_first().ok_or_else(|| fail("no command for native workers is set".into()))?;
        let output = fs::File::create(&log).map_err(Error::io(&log))?;
        let errors = output.try_clone().map_err(Error::io(&log))?;
        let child = Command::new(program)
            .args(args)
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .map_err(|e| fail(format!("cannot be started: {e}")))?;
        Self::accept(Process::Own(child), &listener, &socket, log)
    }

    fn accept(process: Process, listener: &UnixListener, socket: &Path, log: PathBuf) -> Result<Self> {
        listener.set_nonblocking(true).map_err(Error::io(socket))?;
        let begin = Instant::now();
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(Error::io(socket))?;
                    stream.set_read_timeout(Some(LOOK)).map_err(Error::io(socket))?;
                    let _ = fs::remove_file(socket);
                    return Ok(Self { process, stream, buffer: Vec::new(), log, ended: false });
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock && begin.elapsed() < Duration::from_secs(30) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => {
                    let why = format!("did not connect within 30 s: {e}; {}", read_log(&log));
                    return Err(Error::Worker { worker: format!("{process:?}"), why });
                }
            }
        }
    }

    fn pid(&self) -> u32 {
        match &self.process {
            Process::Forked { pid, .. } => *pid,
            Process::Own(child) => child.id(),
        }
    }

    /// Asks and waits, within the limits; a worker that passes them is ended.
    pub(crate) fn ask(&mut self, question: &Value, limits: Limits) -> std::result::Result<Value, Ended> {
        let begin = Instant::now();
        if self.ended || self.stream.write_all(format!("{question}\n").as_bytes()).is_err() {
            return Err(self.died());
        }
        let mut chunk = [0u8; 1 << 16];
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let answer: Value = serde_json::from_slice(&line)
                    .map_err(|e| Ended::Failed(format!("the worker's answer is not JSON: {e}")))?;
                // An answer with a log is what went wrong.
                return answer["log"].as_str().map_or(Ok(answer.clone()), |log| Err(Ended::Failed(log.into())));
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(self.died()),
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                    if begin.elapsed() > limits.time {
                        self.end();
                        return Err(Ended::Timeout);
                    }
                    let used = resident(self.pid());
                    if used > limits.memory {
                        self.end();
                        let why = format!("used {} MiB of memory, more than {}", used >> 20, limits.memory >> 20);
                        return Err(Ended::Failed(why));
                    }
                }
                Err(_) => return Err(self.died()),
            }
        }
    }

    fn died(&mut self) -> Ended {
        let how = self.end();
        Ended::Failed(format!("the process ended: {how}"))
    }

    /// Kills it; how it ended.
    fn end(&mut self) -> String {
        if std::mem::replace(&mut self.ended, true) {
            return "before".into();
        }
        match &mut self.process {
            Process::Forked { pid, from } => {
                let answer = from.lock().unwrap_or_else(PoisonError::into_inner).ask(&json!({"kill": *pid}));
                answer.map_or_else(|e| e.to_string(), |a| format!("exit code {}", a["code"]))
            }
            Process::Own(child) => {
                let _ = child.kill();
                child.wait().map_or_else(|e| e.to_string(), |status| status.to_string())
            }
        }
    }

    /// What it has printed.
    pub(crate) fn printed(&self) -> String {
        read_log(&self.log)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
        let _ = fs::remove_file(&self.log);
    }
}

fn read_log(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LOG)]).into_owned();
    if bytes.len() > LOG { text + "\n[log truncated]\n" } else { text }
}

fn tail(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].trim()
}

/// Bytes of memory that a process holds; 0 when the system does not say.
fn resident(pid: u32) -> u64 {
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).ok();
    // Linux counts pages of 4 KiB here on x86-64.
    pages.and_then(|s| s.split_whitespace().nth(1)?.parse::<u64>().ok()).map_or(0, |n| n * 4096)
}
