//! Against a server that speaks as the hub does, on a port of this machine.

use super::*;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What the server has, and what it was asked for.
#[derive(Default)]
struct Fake {
    files: Vec<(String, Vec<u8>)>,
    /// Bytes after which the first answers with a large file break off.
    breaks: Vec<usize>,
    /// Says another checksum than the files have.
    lies: bool,
    asked: Vec<(String, Option<u64>)>,
}

fn serve(fake: Fake) -> (String, Arc<Mutex<Fake>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let fake = Arc::new(Mutex::new(fake));
    let shared = Arc::clone(&fake);
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| answer(stream, &shared)));
    (endpoint, fake)
}

fn answer(mut stream: TcpStream, fake: &Mutex<Fake>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(|l| l.ok());
    let path = lines.next().and_then(|l| l.split(' ').nth(1).map(str::to_string)).unwrap_or_default();
    let head: Vec<String> = lines.take_while(|l| !l.is_empty()).map(|l| l.to_lowercase()).collect();
    let value = |name: &str| head.iter().find_map(|l| l.strip_prefix(name)).map(|v| v.trim().to_string());
    let from = value("range: bytes=").and_then(|r| r.trim_end_matches('-').parse::<u64>().ok());
    let mut fake = fake.lock().unwrap();
    fake.asked.push((path.clone(), from));
    let mut send = |head: String, body: &[u8]| {
        let _ = stream.write_all(format!("HTTP/1.1 {head}\r\nconnection: close\r\n\r\n").as_bytes());
        let _ = stream.write_all(body);
    };
    if path.starts_with("/api/models/org/secret/") && value("authorization: ").as_deref() != Some("bearer key") {
        return send("401 Unauthorized\r\ncontent-length: 0".into(), &[]);
    }
    if path.starts_with("/api/models/org/") {
        let one = |(name, data): &(String, Vec<u8>)| {
            let sha = hex(&Sha256::digest(if fake.lies { b"other" } else { &data[..] }));
            let lfs = (data.len() > 100).then(|| json!({"sha256": sha, "size": data.len()}));
            json!({"rfilename": name, "size": data.len(), "lfs": lfs})
        };
        let list: Vec<Value> = fake.files.iter().map(one).collect();
        let body = json!({"sha": "abc123", "siblings": list}).to_string();
        return send(format!("200 OK\r\ncontent-length: {}", body.len()), body.as_bytes());
    }
    // As the hub does, files are elsewhere.
    if let Some(name) = path.strip_prefix("/org/model/resolve/abc123/") {
        return send(format!("302 Found\r\nlocation: /cdn/{name}\r\ncontent-length: 0"), &[]);
    }
    let Some(name) = path.strip_prefix("/cdn/") else { return send("404 Not Found\r\ncontent-length: 0".into(), &[]) };
    let data = fake.files.iter().find(|f| f.0 == name).map(|f| f.1.clone()).unwrap_or_default();
    let rest = &data[(from.unwrap_or(0) as usize).min(data.len())..];
    let status = if from.is_some() { "206 Partial Content" } else { "200 OK" };
    let cut = if rest.len() > 100 { fake.breaks.pop().unwrap_or(rest.len()) } else { rest.len() };
    send(format!("{status}\r\ncontent-length: {}", rest.len()), &rest[..cut.min(rest.len())]);
}

fn files() -> Vec<(String, Vec<u8>)> {
    let large = |seed: usize| (0..300_000).map(|i: usize| (i * 31 / 7 + seed) as u8).collect();
    vec![
        ("README.md".into(), b"not for us".to_vec()),
        ("config.json".into(), b"{}".to_vec()),
        ("model-00001.safetensors".into(), large(1)),
        ("model-00002.safetensors".into(), large(2)),
        ("tokenizer.json".into(), b"{\"a\": 1}".to_vec()),
        ("a.Q4.gguf".into(), large(3)),
    ]
}

fn hub(name: &str, endpoint: String) -> Hub {
    let models = std::env::temp_dir().join(format!("fir-hub-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&models);
    Hub { endpoint, token: None, models }
}

#[test]
fn a_repository_comes_whole_however_often_the_connection_breaks() {
    let (endpoint, fake) = serve(Fake { files: files(), breaks: vec![70_000, 100_000, 5], ..Fake::default() });
    let hub = hub("whole", endpoint);
    let mut told = Vec::new();
    let folder = hub.fetch("hf:org/model", "org/model", &mut |p| told.push(p)).unwrap();
    let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "model-00001.safetensors", "model-00002.safetensors", "tokenizer.json"]);
    for (name, data) in files().iter().filter(|f| wants(&f.0, "")) {
        assert_eq!(fs::read(folder.join(name)).unwrap(), *data, "{name}");
    }
    assert_eq!(told.last(), Some(&Progress { done: 600_010, total: Some(600_010) }));
    let asked = std::mem::take(&mut fake.lock().unwrap().asked);
    let resumed: Vec<u64> =
        asked.iter().filter_map(|(path, from)| from.filter(|_| path.starts_with("/cdn/"))).collect();
    assert_eq!(resumed, [5, 100_005, 170_005], "it goes on where it stopped");
    // It is here now; and a file of the same repository comes beside it.
    assert_eq!(hub.fetch("hf:org/model", "org/model", &mut |_| {}).unwrap(), folder);
    assert!(fake.lock().unwrap().asked.is_empty());
    let file = hub.fetch("hf:org/model/a.Q4.gguf", "org/model/a.Q4.gguf", &mut |_| {}).unwrap();
    assert_eq!(file, folder.join("a.Q4.gguf"));
    assert_eq!(fs::read_dir(&hub.models).unwrap().count(), 1, "nothing is left behind");
    fs::remove_dir_all(&hub.models).unwrap();
}

#[test]
fn an_interrupted_fetch_goes_on_another_day() {
    let (endpoint, fake) = serve(Fake { files: files(), breaks: vec![10; TRIES], ..Fake::default() });
    let hub = hub("later", endpoint);
    let said = hub.fetch("hf:org/model", "org/model/a.Q4.gguf", &mut |_| {}).unwrap_err().to_string();
    assert!(said.contains("a.Q4.gguf: 50 bytes came, expected 300000"), "{said}");
    fake.lock().unwrap().asked.clear();
    let file = hub.fetch("hf:org/model", "org/model/a.Q4.gguf", &mut |_| {}).unwrap();
    assert_eq!(fs::read(file).unwrap(), files()[5].1);
    assert!(fake.lock().unwrap().asked.contains(&("/cdn/a.Q4.gguf".into(), Some(50))));
    fs::remove_dir_all(&hub.models).unwrap();
}

#[test]
fn what_is_not_there_or_not_right_is_an_error_and_no_model() {
    let (endpoint, _) = serve(Fake { files: files(), lies: true, ..Fake::default() });
    let mut hub = hub("wrong", endpoint);
    let say = |name: &str| hub.fetch("hf:x", name, &mut |_| {}).unwrap_err().to_string();
    assert!(say("org/model").contains("model-00001.safetensors has SHA-256"), "{}", say("org/model"));
    assert!(say("org/model/no.gguf").contains("there is no no.gguf in org/model"));
    assert!(say("org/secret").contains("HF_TOKEN"));
    assert!(say("nobody/model").contains("404"));
    for bad in ["org", "org/../x", "org/-x", "/a/b", "org/a b"] {
        assert!(say(bad).contains("expected hf:ORG/REPO"), "{bad}");
    }
    assert!(!hub.models.join("org--model").exists());
    hub.token = Some("key".into());
    assert!(!hub.fetch("hf:x", "org/secret/no.gguf", &mut |_| {}).unwrap_err().to_string().contains("HF_TOKEN"));
    fs::remove_dir_all(&hub.models).unwrap();
}
