//! Clients that go away, queues that are full, engines that die, servers that must end.

use std::io::Read;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use fir_server::Config;

use crate::double::Script;
use crate::http::{Answer, Live};

const JSON: &str = "Content-Type: application/json\r\n";
const CHAT: &str = "/v1/chat/completions";

fn hi(more: &str) -> String {
    format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}]{more}}}"#)
}

/// An engine whose answers take half a minute.
fn slow() -> Script {
    Script { answer: |_, _| "abc".repeat(3000), pace: Duration::from_millis(10), slots: 1, ..Script::default() }
}

#[test]
fn a_client_that_goes_away_ends_its_request() {
    let live = Live::new(slow(), Config::default());
    // Running, streamed.
    let mut stream = live.send("POST", CHAT, JSON, &hi(r#","stream":true"#));
    let mut some = [0; 600];
    stream.read_exact(&mut some).unwrap();
    drop(stream);
    live.wait(|d| d.aborts.load(Ordering::SeqCst) == 1 && d.load() == (0, 0));
    // Running, not streamed.
    let stream = live.send("POST", CHAT, JSON, &hi(""));
    live.wait(|d| d.load() == (0, 1));
    drop(stream);
    live.wait(|d| d.aborts.load(Ordering::SeqCst) == 2 && d.load() == (0, 0));
    // Queued, of either kind, behind one that runs.
    let first = live.send("POST", CHAT, JSON, &hi(""));
    live.wait(|d| d.load() == (0, 1));
    let queued = [live.send("POST", CHAT, JSON, &hi("")), live.send("POST", CHAT, JSON, &hi(r#","stream":true"#))];
    live.wait(|d| d.load() == (2, 1));
    drop(queued);
    live.wait(|d| d.aborts.load(Ordering::SeqCst) == 4 && d.load() == (0, 1));
    drop(first);
    live.wait(|d| d.load() == (0, 0));
    let metrics = live.get("/metrics").body;
    assert!(metrics.contains("fir_requests_left_total{model_name=\"double\"} 5"), "{metrics}");
}

#[test]
fn a_storm_of_clients_that_leave_leaves_nothing_behind() {
    let live = Live::new(Script { slots: 8, queue: 500, ..slow() }, Config::default());
    thread::scope(|scope| {
        for i in 0..64 {
            let live = &live;
            scope.spawn(move || {
                let stream =
                    live.send("POST", CHAT, JSON, &hi(if i % 2 == 0 { r#","stream":true,"n":2"# } else { "" }));
                thread::sleep(Duration::from_millis(i * 7 % 100));
                drop(stream);
            });
        }
    });
    live.wait(|d| d.load() == (0, 0));
    assert_eq!(live.chat(&hi(r#","max_tokens":1"#)).status, 200);
}

#[test]
fn overload_is_answered_429_and_nobody_is_forgotten() {
    let script = Script { slots: 2, queue: 4, pace: Duration::from_millis(2), ..Script::default() };
    let live = Live::new(script, Config::default());
    let answers: Vec<Answer> = thread::scope(|scope| {
        let tasks: Vec<_> = (0..60)
            .map(|i| {
                let live = &live;
                scope.spawn(move || live.chat(&hi(if i % 2 == 0 { r#","stream":true"# } else { "" })))
            })
            .collect();
        tasks.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let busy: Vec<&Answer> = answers.iter().filter(|a| a.status == 429).collect();
    assert!(!busy.is_empty() && busy.len() < 60);
    for answer in busy {
        answer.refused(429, None, "the queue is full: 4 requests");
        assert_eq!(
            (answer.header("retry-after"), &answer.json()["error"]["type"]),
            (Some("1"), &"rate_limit_error".into())
        );
    }
    for answer in answers.iter().filter(|a| a.status != 429) {
        assert_eq!(answer.status, 200);
        assert!(answer.body.contains("stop"), "{answer:?}");
    }
}

#[test]
fn failures_have_a_status_before_the_first_token_and_an_event_after_it() {
    let live = Live::plain();
    let ask = |what: &str, stream: bool| {
        live.chat(&format!(r#"{{"messages":[{{"role":"user","content":"{what}"}}],"stream":{stream}}}"#))
    };
    for stream in [false, true] {
        ask("FAIL LATER", stream).refused(500, None, "asked to fail later");
    }
    ask("FAIL MIDWAY", false).refused(500, None, "asked to fail midway");
    let answer = ask("FAIL MIDWAY", true);
    assert_eq!(answer.status, 200);
    let last = answer.body.trim_end().rsplit("\n\n").next().unwrap();
    assert_eq!(
        last,
        r#"data: {"error":{"message":"asked to fail midway","type":"server_error","param":null,"code":null}}"#
    );
}

#[test]
fn silence_is_filled_with_comments() {
    let script = Script { pace: Duration::from_millis(250), ..Script::default() };
    let live = Live::new(script, Config { keep_alive: Duration::from_millis(40), ..Config::default() });
    let answer = live.chat(&hi(r#","stream":true,"max_tokens":2"#));
    assert!(answer.body.matches(": keep-alive\n\n").count() >= 3, "{}", answer.body);
    assert_eq!(answer.events().len(), 4);
}

#[test]
fn who_waits_too_long_is_told_so() {
    let config = Config { queue_timeout: Some(Duration::from_millis(60)), ..Config::default() };
    let live = Live::new(slow(), config);
    let first = live.send("POST", CHAT, JSON, &hi(""));
    live.wait(|d| d.load() == (0, 1));
    let answer = live.chat(&hi(""));
    answer.refused(503, None, "waited");
    assert_eq!(answer.json()["error"]["code"], "queue_timeout");
    drop(first);
}

#[test]
fn a_signal_lets_accepted_requests_end_and_takes_no_more() {
    let script =
        Script { answer: |_, _| "abc".repeat(30), pace: Duration::from_millis(10), slots: 2, ..Script::default() };
    let mut live = Live::new(script, Config::default());
    let accepted: Vec<_> =
        (0..6).map(|i| live.send("POST", CHAT, JSON, &hi(if i % 2 == 0 { r#","stream":true"# } else { "" }))).collect();
    live.wait(|d| d.load().0 + d.load().1 == 6);
    live.signal();
    live.wait(|_| live.get("/health").status == 503);
    let late = live.chat(&hi(""));
    late.refused(503, None, "shutting down");
    assert!(late.header("retry-after").is_some());
    for stream in accepted {
        let answer = Answer::read(stream);
        assert_eq!(answer.status, 200);
        assert!(answer.body.contains("\"finish_reason\":\"stop\""), "{answer:?}");
    }
    live.join().unwrap();
    assert!(std::net::TcpStream::connect(live.address).is_err());
    assert_eq!(live.aborts(), 0);
}

#[test]
fn a_drain_ends_in_time_and_tells_who_was_cut_off() {
    let mut live = Live::new(slow(), Config { drain: Duration::from_millis(200), ..Config::default() });
    let (whole, mut streamed) =
        (live.send("POST", CHAT, JSON, &hi("")), live.send("POST", CHAT, JSON, &hi(r#","stream":true"#)));
    live.wait(|d| d.load() == (1, 1));
    let begin = Instant::now();
    live.signal();
    live.join().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5));
    Answer::read(whole).refused(503, None, "aborted");
    let mut text = String::new();
    streamed.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"code\":\"aborted\""), "{text}");
}

#[test]
fn a_dead_engine_ends_the_server_with_an_error() {
    let mut live = Live::new(slow(), Config::default());
    assert_eq!(live.get("/health").status, 200);
    let waiting = live.send("POST", CHAT, JSON, &hi(""));
    live.wait(|d| d.load() == (0, 1));
    live.double.dead.store(true, Ordering::SeqCst);
    let error = live.join().unwrap_err();
    assert_eq!(error.to_string(), "the engine has stopped: asked to die");
    assert_eq!(Answer::read(waiting).status, 503);
}

#[test]
fn a_server_without_a_model_says_that_it_loads() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(fir_server::Server::bind("127.0.0.1:0", Config::default())).unwrap();
    let address = server.address().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = runtime.spawn(server.run(async { _ = stopped.await }));
    use std::io::Write;
    for path in ["/health", "/ready", "/v1/models", "/metrics"] {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        Answer::read(stream).refused(503, None, "being loaded");
    }
    stop.send(()).unwrap();
    runtime.block_on(task).unwrap().unwrap();
}
