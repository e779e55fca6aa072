//! What is refused: the status, the field, and both values in the message.

use fir_server::{Config, Limits};

use crate::double::Script;
use crate::http::Live;

const HI: &str = r#"{"messages":[{"role":"user","content":"Hi"}]"#;

#[test]
fn wrong_values_name_their_field_and_what_would_do() {
    let live = Live::plain();
    for (more, param, message) in [
        (r#","temperature":2.5"#, "temperature", "`temperature` is 2.5, but must be from 0 to 2"),
        (r#","temperature":"hot""#, "temperature", "invalid type: string"),
        (r#","top_p":0"#, "top_p", "above"),
        (r#","top_p":1.5"#, "top_p", "from 0 to 1"),
        (r#","n":0"#, "n", "from 1 to 64"),
        (r#","n":65"#, "n", "`n` is 65"),
        (r#","max_tokens":0"#, "max_tokens", "from 1"),
        (
            r#","max_completion_tokens":5000"#,
            "max_completion_tokens",
            "context is 2000 tokens, but 20 of `messages` and 5000",
        ),
        (r#","stop":["a","b","c","d","e"]"#, "stop", "has 5 texts, but at most 4"),
        (r#","stop":"""#, "stop", "0 bytes"),
        (r#","stop":5"#, "stop", "a text or a list of texts"),
        (r#","logit_bias":{"x":1}"#, "logit_bias", "token `x`"),
        (r#","logit_bias":{"256":1}"#, "logit_bias", "from 0 to 255"),
        (r#","logit_bias":{"1":101}"#, "logit_bias", "from -100 to 100"),
        (r#","stop_token_ids":[999]"#, "stop_token_ids", "token 999"),
        (r#","allowed_token_ids":[256]"#, "allowed_token_ids", "token 256"),
        (r#","top_logprobs":3"#, "top_logprobs", "needs `logprobs`"),
        (r#","logprobs":true,"top_logprobs":21"#, "top_logprobs", "from 0 to 20"),
        (r#","min_tokens":9,"max_tokens":8"#, "min_tokens", "at most 8"),
        (r#","temprature":1"#, "temprature", "not a field"),
        (r#","stream_options":{"include_usage":true}"#, "stream_options", "`stream`"),
        (r#","functions":[]"#, "functions", "use `tools`"),
        (r#","chat_template":"x""#, "chat_template", "cannot be set"),
        (r#","tool_choice":"required""#, "tool_choice", "`tools` is empty"),
        (r#","tools":[{"type":"retrieval","function":{"name":"f"}}]"#, "tools[0].type", "only functions"),
        (r#","tools":[{"type":"function","function":{"name":"a b"}}]"#, "tools[0].function.name", "`a b`"),
        (
            r#","tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"f"}}]"#,
            "tools[1].function.name",
            "another tool",
        ),
        (
            r#","tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}}"#,
            "tool_choice",
            "names `g`",
        ),
        (
            r#","tools":[{"type":"function","function":{"name":"f"}}],"response_format":{"type":"json_object"}"#,
            "response_format",
            "cannot both",
        ),
        (r#","structured_outputs":{"regex":"a","choice":["b"]}"#, "structured_outputs", "has 2 of"),
        (r#","structured_outputs":{"choice":[]}"#, "structured_outputs.choice", "not empty"),
        (r#","structured_outputs":{"json":"{"}"#, "structured_outputs.json", "EOF"),
        (r#","response_format":{"type":"yaml"}"#, "response_format.type", "unknown variant"),
        (
            r#","response_format":{"type":"json_schema","json_schema":{"schema":3}}"#,
            "response_format.json_schema.schema",
            "an object",
        ),
        (r#","skip_special_tokens":false"#, "skip_special_tokens", "never"),
        (r#","prompt_logprobs":1"#, "prompt_logprobs", "not offered"),
    ] {
        live.chat(&format!("{HI}{more}}}")).refused(400, Some(param), message);
    }
    for (body, param, message) in [
        (r#"{"messages":[]}"#, "messages", "empty"),
        (r#"{"messages":[{"role":"king","content":"x"}]}"#, "messages[0].role", "unknown variant `king`"),
        (r#"{"messages":[{"role":"user"}]}"#, "messages[0].content", "no content"),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#,
            "messages[0].content[0]",
            "text only",
        ),
        (
            r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"["}}]}]}"#,
            "messages[0].tool_calls[0].function.arguments",
            "not a JSON object",
        ),
        (r#"{"messages":[{"role":"user","content":"FAIL AT ONCE"}]}"#, "messages", "asked to fail"),
    ] {
        live.chat(body).refused(400, Some(param), message);
    }
    for (body, param, message) in [
        (r#"{"prompt":[]}"#, "prompt", "no tokens"),
        (r#"{"prompt":""}"#, "prompt", "no tokens"),
        (r#"{"prompt":[256]}"#, "prompt", "token 256"),
        (r#"{"prompt":"x","best_of":2,"n":3}"#, "best_of", "`best_of` is 2, but must be from 3 to 64"),
        (r#"{"prompt":"x","best_of":2,"stream":true}"#, "best_of", "cannot take back"),
        (r#"{"prompt":"x","max_tokens":0}"#, "max_tokens", "0 with `echo`"),
        (r#"{"prompt":"x","bad_words":[" "]}"#, "bad_words", "1 bytes"),
        (r#"{"prompt":"x","attention":{"type":"streaming"}}"#, "attention", "missing field `window`"),
        (r#"{"prompt":"x","attention":{"type":"sparse","local":1,"block":0}}"#, "attention.block", "is 0"),
        (r#"{"prompt":"x","attention":{"type":"sideways"}}"#, "attention", "unknown variant `sideways`"),
        (r#"{"prompt":"x","suffix":"y"}"#, "suffix", "not offered"),
        (r#"{"prompt":["a","b"],"n":33}"#, "prompt", "2 prompts of 33 answers, but from 1 to 64"),
        (r#"{"prompt":{"a":1}}"#, "prompt", "a list of lists"),
    ] {
        live.post("/v1/completions", body).refused(400, Some(param), message);
    }
    for (body, message) in [
        (r#"{"messages":[{"role":"user","content":"x"}]}"#, "missing field `max_tokens`"),
        (r#"{"max_tokens":5,"messages":[]}"#, "`messages` is empty"),
        (r#"{"max_tokens":5000,"messages":[{"role":"user","content":"x"}]}"#, "context is 2000 tokens"),
        (r#"{"max_tokens":5,"messages":[{"role":"king","content":"x"}]}"#, "unknown variant `king`"),
        (r#"{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}"#, "text only"),
        (r#"{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"n":2}"#, "`n` is not a field"),
        (
            r#"{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"stop_sequences":[""]}"#,
            "`stop_sequences` has",
        ),
        (
            r#"{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"tools":[{"type":"bash_20250124","name":"b"}]}"#,
            "only custom tools",
        ),
    ] {
        let answer = live.post("/v1/messages", body);
        let error = answer.json();
        assert_eq!((answer.status, &error["type"]), (400, &"error".into()), "{error}");
        assert_eq!(error["error"]["type"], "invalid_request_error", "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(message), "{error}");
    }
    live.post("/v1/responses", r#"{"input":"x","previous_response_id":"r"}"#).refused(
        400,
        Some("previous_response_id"),
        "stored",
    );
    live.post("/v1/responses", r#"{"input":"x","top_logprobs":1}"#).refused(400, Some("top_logprobs"), "`include`");
    live.post("/v1/responses", r#"{"input":[]}"#).refused(400, Some("input"), "no message");
    live.post("/v1/embeddings", r#"{"input":"x","dimensions":3}"#).refused(400, Some("dimensions"), "3");
    live.post("/tokenize", r#"{}"#).refused(400, Some("prompt"), "one of");
    assert!(live.double.seen.lock().unwrap().is_empty(), "nothing reached the engine");
}

#[test]
fn bodies_that_are_not_json_are_refused() {
    let live = Live::plain();
    live.chat("{").refused(400, None, "not JSON");
    live.chat("[1]").refused(400, None, "not an object");
    live.chat("{}").refused(400, None, "missing field `messages`");
    live.ask("POST", "/v1/chat/completions", "Content-Type: text/plain\r\n", HI).refused(415, None, "`text/plain`");
    live.ask("POST", "/v1/chat/completions", "", HI).refused(415, None, "application/json");
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    live.chat(&format!("{{\"messages\":{deep}}}")).refused(400, None, "recursion limit");
}

#[test]
fn limits_are_held() {
    let limits =
        Limits { body: 5000, prompt: 100, tools: 1, schema: 200, schema_depth: 4, logit_bias: 2, ..Limits::default() };
    let live = Live::new(Script::default(), Config { limits, ..Config::default() });
    let long = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(6000));
    live.chat(&long).refused(413, None, "larger than 5000 bytes");
    // The same without a length told beforehand.
    let chunked = format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len());
    let answer = {
        use std::io::Write;
        let mut stream = std::net::TcpStream::connect(live.address).unwrap();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        stream.write_all(format!("{head}{chunked}").as_bytes()).unwrap();
        crate::http::Answer::read(stream)
    };
    answer.refused(413, None, "larger than 5000 bytes");
    let medium = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(200));
    let answer = live.chat(&medium);
    answer.refused(400, Some("messages"), "218 tokens, but at most 100 fit");
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    live.chat(&format!(r#"{HI},"tools":[{{"type":"function","function":{{"name":"f"}}}},{{"type":"function","function":{{"name":"g"}}}}]}}"#))
        .refused(400, Some("tools"), "has 2 entries, but at most 1");
    live.chat(&format!(r#"{HI},"logit_bias":{{"1":1,"2":1,"3":1}}}}"#)).refused(400, Some("logit_bias"), "3 entries");
    live.chat(&format!(r#"{HI},"structured_outputs":{{"regex":"{}"}}}}"#, "a".repeat(201))).refused(
        400,
        Some("structured_outputs.regex"),
        "201 bytes, but at most 200",
    );
    live.chat(&format!(r#"{HI},"structured_outputs":{{"json":{{"a":{{"b":{{"c":{{"d":{{}}}}}}}}}}}}}}"#)).refused(
        400,
        Some("structured_outputs.json"),
        "5 levels deep, but at most 4",
    );
}

#[test]
fn models_routes_and_methods_must_exist() {
    let live = Live::plain();
    let answer = live.chat(&format!(r#"{HI},"model":"gpt-9"}}"#));
    answer.refused(404, Some("model"), "`gpt-9` does not exist; this server has `double`");
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    for (path, body) in [
        ("/v1/completions", r#"{"model":"m","prompt":"x"}"#),
        ("/v1/embeddings", r#"{"model":"m","input":"x"}"#),
        ("/v1/responses", r#"{"model":"m","input":"x"}"#),
        ("/tokenize", r#"{"model":"m","prompt":"x"}"#),
        ("/detokenize", r#"{"model":"m","tokens":[]}"#),
    ] {
        live.post(path, body).refused(404, Some("model"), "`m`");
    }
    let answer =
        live.post("/v1/messages", r#"{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}"#);
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (404, &"not_found_error".into()));
    live.get("/v1/models/other").refused(404, Some("model"), "`other`");
    live.get("/nowhere").refused(404, None, "GET /nowhere");
    let answer = live.get("/v1/chat/completions");
    answer.refused(405, None, "GET");
    assert_eq!(answer.header("allow"), Some("POST"));
}

#[test]
fn keys_are_asked_for_and_salt_the_cache() {
    let live = Live::new(Script::default(), Config { api_keys: vec!["one".into(), "two".into()], ..Config::default() });
    live.chat(&format!("{HI}}}")).refused(401, None, "Authorization");
    assert_eq!(live.get("/v1/models").status, 401);
    assert_eq!(live.get("/v1/models").header("www-authenticate"), Some("Bearer"));
    for path in ["/health", "/ready", "/metrics", "/version", "/openapi.json", "/"] {
        assert_eq!(live.get(path).status, 200, "{path}");
    }
    let ask = |key: &str, more: &str| {
        let headers = format!("Content-Type: application/json\r\nAuthorization: Bearer {key}\r\n");
        live.ask("POST", "/v1/chat/completions", &headers, &format!("{HI}{more}}}"))
    };
    ask("three", "").refused(401, None, "not one of");
    for (key, more) in
        [("one", ""), ("two", ""), ("one", ""), ("one", r#","cache_salt":"x""#), ("two", r#","cache_salt":"x""#)]
    {
        assert_eq!(ask(key, more).status, 200);
    }
    let salts: Vec<u64> = live.double.seen.lock().unwrap().iter().map(|r| r.salt).collect();
    assert_eq!(salts[0], salts[2]);
    let mut different = vec![salts[0], salts[1], salts[3], salts[4]];
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), 4);
}

#[test]
fn pages_of_other_origins_ask_if_they_may() {
    let preflight = "Origin: https://a.example\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n";
    let closed = Live::plain();
    assert_eq!(
        closed.ask("OPTIONS", "/v1/chat/completions", preflight, "").header("access-control-allow-origin"),
        None
    );
    let live =
        Live::new(Script::default(), Config { allow_origins: vec!["https://a.example".into()], ..Config::default() });
    let answer = live.ask("OPTIONS", "/v1/chat/completions", preflight, "");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some("https://a.example")));
    assert_eq!(answer.header("access-control-allow-headers"), Some("authorization,content-type"));
    let ask = |origin: &str| {
        let headers = format!("Content-Type: application/json\r\nOrigin: {origin}\r\n");
        let answer = live.ask("POST", "/v1/chat/completions", &headers, &format!("{HI}}}"));
        assert_eq!(answer.status, 200);
        answer.header("access-control-allow-origin").map(str::to_owned)
    };
    assert_eq!(ask("https://a.example").as_deref(), Some("https://a.example"));
    assert_eq!(ask("https://b.example"), None);
    let live = Live::new(Script::default(), Config { allow_origins: vec!["*".into()], ..Config::default() });
    let answer = live.ask("GET", "/health", "Origin: null\r\n", "");
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
}

#[test]
fn request_ids_come_back() {
    let live = Live::plain();
    assert_eq!(live.ask("GET", "/health", "X-Request-Id: mine\r\n", "").header("x-request-id"), Some("mine"));
    let (a, b) = (live.get("/health"), live.get("/nowhere"));
    let id = |a: &crate::http::Answer| a.header("x-request-id").unwrap().to_owned();
    assert!(id(&a).starts_with("req_") && id(&a) != id(&b));
    let long = format!("X-Request-Id: {}\r\n", "x".repeat(129));
    assert!(live.ask("GET", "/health", &long, "").header("x-request-id").unwrap().starts_with("req_"));
}
