//! What is answered, to the byte where clients read bytes.

use fir_engine::{Attention, Grammar, Request, Sparse};
use fir_server::{Config, ToolFormat};
use serde_json::{Value, json};

use crate::double::Script;
use crate::http::Live;

const HI: &str = r#"{"model":"double","messages":[{"role":"user","content":"Hi"}]"#;

fn hi(more: &str) -> String {
    format!("{HI}{more}}}")
}

fn saying(answer: fn(&Request, usize) -> String) -> Live {
    Live::new(Script { answer, ..Script::default() }, Config::default())
}

#[test]
fn a_chat_is_answered_whole() {
    let live = Live::plain();
    let answer = live.chat(&hi(r#","seed":7,"temperature":0.5,"stop":["a","b"],"logit_bias":{"65":-3}"#));
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("double")));
    let choice = &body["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "Hello, wörld 0!", "refusal": null}));
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null));
    let prompt = "[user]Hi\n[assistant]".len();
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5,
               "prompt_tokens_details": {"cached_tokens": prompt / 2}, "completion_tokens_details": {"reasoning_tokens": 0}})
    );
    let seen = &live.double.seen.lock().unwrap()[0];
    assert_eq!((seen.sampling.seed, seen.sampling.temperature), (Some(7), 0.5));
    assert_eq!(
        (&seen.sampling.stop[..], &seen.sampling.logit_bias[..]),
        (&["a".to_owned(), "b".into()][..], &[(65, -3.0)][..])
    );
    assert_eq!(seen.sampling.max_tokens, 2000 - prompt);
}

#[test]
fn a_stream_has_the_bytes_clients_expect() {
    let live = Live::plain();
    let answer =
        live.chat(&hi(r#","stream":true,"stream_options":{"include_usage":true},"max_tokens":2,"request_id":"me""#));
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!((answer.header("cache-control"), answer.header("x-accel-buffering")), (Some("no-cache"), Some("no")));
    let created = answer.events()[0]["created"].as_u64().unwrap();
    let fingerprint = concat!("fir-", env!("CARGO_PKG_VERSION"));
    let head = format!(
        r#"{{"id":"chatcmpl-me","object":"chat.completion.chunk","created":{created},"model":"double","system_fingerprint":"{fingerprint}","choices":"#
    );
    let usage = r#"{"prompt_tokens":20,"completion_tokens":2,"total_tokens":22,"prompt_tokens_details":{"cached_tokens":10},"completion_tokens_details":{"reasoning_tokens":0}}"#;
    let want = [
        format!(
            r#"{head}[{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],"usage":null}}"#
        ),
        format!(
            r#"{head}[{{"index":0,"delta":{{"content":"Hel"}},"logprobs":null,"finish_reason":null}}],"usage":null}}"#
        ),
        format!(
            r#"{head}[{{"index":0,"delta":{{"content":"lo,"}},"logprobs":null,"finish_reason":null}}],"usage":null}}"#
        ),
        format!(r#"{head}[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}],"usage":null}}"#),
        format!(r#"{head}[],"usage":{usage}}}"#),
        "[DONE]".into(),
    ];
    assert_eq!(answer.body, want.map(|e| format!("data: {e}\n\n")).concat());
    // Without being asked, no chunk speaks of usage.
    let events = live.chat(&hi(r#","stream":true"#)).events();
    assert!(events.iter().all(|e| e.get("usage").is_none() && e["choices"].as_array().unwrap().len() == 1));
}

#[test]
fn several_choices_come_interleaved_and_whole() {
    let live = Live::plain();
    let body = live.chat(&hi(r#","n":3"#)).json();
    for i in 0..3 {
        assert_eq!(body["choices"][i]["message"]["content"], format!("Hello, wörld {i}!"));
    }
    assert_eq!((&body["usage"]["completion_tokens"], &body["usage"]["prompt_tokens"]), (&json!(15), &json!(20)));
    let mut texts = [const { String::new() }; 3];
    let mut roles = 0;
    for event in live.chat(&hi(r#","n":3,"stream":true"#)).events() {
        let choice = &event["choices"][0];
        roles += usize::from(choice["delta"]["role"] == "assistant");
        texts[choice["index"].as_u64().unwrap() as usize] += choice["delta"]["content"].as_str().unwrap_or("");
    }
    assert_eq!((roles, texts), (3, [0, 1, 2].map(|i| format!("Hello, wörld {i}!"))));
}

#[test]
fn log_probabilities_are_told_for_every_token() {
    let live = Live::plain();
    let more = r#","logprobs":true,"top_logprobs":2,"max_tokens":2"#;
    let want = json!([
        {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]}, {"token": "I", "logprob": -1.5, "bytes": [73]}]},
        {"token": "l", "logprob": -0.5, "bytes": [108], "top_logprobs": [
            {"token": "l", "logprob": -0.5, "bytes": [108]}, {"token": "m", "logprob": -1.5, "bytes": [109]}]},
    ]);
    assert_eq!(live.chat(&hi(more)).json()["choices"][0]["logprobs"]["content"], want);
    let events = live.chat(&hi(&format!("{more},\"stream\":true"))).events();
    let told: Vec<Value> = events
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(Value::Array(told), want);
    let body = live.post("/v1/completions", r#"{"prompt":"x","logprobs":1,"max_tokens":2}"#).json();
    assert_eq!(
        body["choices"][0]["logprobs"],
        json!({"tokens": ["H", "l"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [{"H": -0.5}, {"l": -0.5}], "text_offset": [0, 1]})
    );
}

#[test]
fn prompts_are_told_with_their_log_probabilities() {
    let live = Live::plain();
    let more = r#""prompt":"ab","echo":true,"logprobs":1,"max_tokens":2"#;
    let want = json!({"tokens": ["a", "b", "H", "l"], "token_logprobs": [null, -98.0, -0.5, -0.5],
        "top_logprobs": [null, {"b": -98.0, "\0": 0.0}, {"H": -0.5}, {"l": -0.5}], "text_offset": [0, 1, 2, 3]});
    let body = live.post("/v1/completions", &format!("{{{more}}}")).json();
    assert_eq!((&body["choices"][0]["text"], &body["choices"][0]["logprobs"]), (&json!("abHello,"), &want));
    // As a stream, for two answers: each begins with all of the prompt.
    let events = live.post("/v1/completions", &format!("{{{more},\"n\":2,\"stream\":true}}")).events();
    for i in 0..2 {
        let of: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == i).collect();
        assert_eq!((&of[0]["text"], &of[0]["logprobs"]["tokens"]), (&json!("ab"), &json!(["a", "b"])));
        let offsets: Vec<&Value> = of.iter().flat_map(|c| c["logprobs"]["text_offset"].as_array().unwrap()).collect();
        assert_eq!(offsets, [0, 1, 2, 3]);
    }
    // Nothing but the prompt, of any length.
    for (prompt, count) in [(r#""ab""#, 2), ("[97]", 1)] {
        let body = format!(r#"{{"prompt":{prompt},"echo":true,"logprobs":0,"max_tokens":0}}"#);
        let body = live.post("/v1/completions", &body).json();
        let choice = &body["choices"][0];
        assert_eq!((choice["text"].as_str().unwrap().len(), &choice["finish_reason"]), (count, &json!("length")));
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), count);
        assert_eq!(body["usage"]["completion_tokens"], 0);
    }
}

#[test]
fn the_likeliest_of_several_are_told() {
    // The double's tokens are as likely as each other but for the first, which is a prompt's last.
    let live = saying(|_, choice| "abc".repeat(choice + 1));
    let body = live.post("/v1/completions", r#"{"prompt":["x","y"],"n":2,"best_of":3}"#).json();
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(choices.iter().all(|c| c["logprobs"].is_null()));
    assert_eq!(body["usage"]["completion_tokens"], 12, "what was made is counted");
    assert_eq!(live.double.seen.lock().unwrap()[0].n, 3);
}

#[test]
fn what_is_particular_to_local_models_reaches_the_engine() {
    let live = Live::plain();
    let more = r#","bad_words":["no"],"include_stop_str_in_output":true,"attention":{"type":"streaming","window":8}"#;
    let long = "x".repeat(3000);
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}]{more}}}"#);
    assert_eq!(live.chat(&body).status, 200, "what streams may be longer than the context");
    let sparse = r#","attention":{"type":"sparse","local":3,"stride":2}"#;
    assert_eq!(live.chat(&hi(sparse)).status, 200);
    let seen = live.double.seen.lock().unwrap();
    assert_eq!(seen[0].sampling.bad_tokens, [b" no".map(u32::from).to_vec(), b"no".map(u32::from).to_vec()]);
    assert!(seen[0].sampling.include_stop && seen[0].prompt.len() > 3000);
    assert_eq!(seen[0].attention, Attention::Streaming { sinks: 4, window: 8 });
    assert_eq!(seen[1].attention, Attention::Sparse(Sparse { block: 64, sinks: 1, local: 3, stride: 2 }));
}

#[test]
fn messages_have_blocks() {
    let live = saying(hermes);
    let tools = r#""tools":[{"name":"f","input_schema":{"type":"object"}},{"name":"g","description":"G"}]"#;
    let said = r#""system":[{"type":"text","text":"Be brief."}],"messages":[{"role":"user","content":"Hi"},
        {"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"s"},{"type":"text","text":"So."},{"type":"tool_use","id":"t1","name":"f","input":{"x":1}}]},
        {"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"42"}]},{"type":"text","text":"Go on."}]}]"#;
    let body = live.post("/v1/messages", &format!(r#"{{"max_tokens":100,{said},{tools}}}"#)).json();
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    let head = (&body["type"], &body["role"], &body["model"], &body["stop_reason"], &body["stop_sequence"]);
    assert_eq!(head, (&json!("message"), &json!("assistant"), &json!("double"), &json!("tool_use"), &Value::Null));
    let mut content = body["content"].clone();
    assert_ne!(content[2]["id"].take(), content[3]["id"].take());
    assert_eq!(
        content,
        json!([{"type": "thinking", "thinking": "Which?", "signature": ""}, {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": null, "name": "f", "input": {"x": 1}}, {"type": "tool_use", "id": null, "name": "g", "input": {}}])
    );
    let prompt = |i: usize| -> String {
        live.double.seen.lock().unwrap()[i].prompt.iter().map(|&b| char::from(b as u8)).collect()
    };
    let (text, length) = (prompt(0), prompt(0).len());
    let call = r#"{[{"id":"t1","type":"function","function":{"name":"f","arguments":{"x":1}}}]}"#;
    assert!(
        text.starts_with(&format!(
            "[system]Be brief.\n[user]Hi\n[assistant]So.{call}\n[tool]42\n[user]Go on.\n[tools]"
        )),
        "{text}"
    );
    assert!(text.contains("\"enable_thinking\":false"), "{text}");
    let usage = &body["usage"];
    assert_eq!(usage["cache_read_input_tokens"].as_u64(), Some(length as u64 / 2));
    assert_eq!(usage["input_tokens"].as_u64(), Some((length - length / 2) as u64));
    let counted = live.post("/v1/messages/count_tokens", &format!("{{{said},{tools}}}")).json();
    assert_eq!(counted, json!({"input_tokens": length}));

    let streamed = live.post("/v1/messages", &format!(r#"{{"max_tokens":100,"stream":true,{said},{tools}}}"#));
    assert_eq!(streamed.header("content-type"), Some("text/event-stream"));
    let (mut kinds, mut json_text, mut last) = (Vec::new(), String::new(), Value::Null);
    for event in streamed.body.split_terminator("\n\n") {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        json_text += data["delta"]["partial_json"].as_str().unwrap_or("");
        if name == "message_delta" {
            last = data;
        }
        if kinds.last() != Some(&name) {
            kinds.push(name);
        }
    }
    assert_eq!(kinds[..3], ["message_start", "content_block_start", "content_block_delta"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!((json_text.as_str(), &last["delta"]["stop_reason"]), ("{\"x\": 1}{}", &json!("tool_use")));
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 0);

    // Other ends, forced tools, and an answer that has begun.
    let ask = |more: &str| {
        live.post("/v1/messages", &format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}{more}}}"#)).json()
    };
    assert_eq!(ask(r#"],"max_tokens":2"#)["stop_reason"], "max_tokens");
    let stopped = ask(r#"],"max_tokens":99,"stop_sequences":["x","STOP"]"#);
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("STOP")));
    ask(&format!(
        r#",{{"role":"assistant","content":"So far"}}],"max_tokens":9,{tools},"tool_choice":{{"type":"none"}}"#
    ));
    let seen = live.double.seen.lock().unwrap().len();
    assert!(prompt(seen - 1).ends_with("[assistant]So far"), "{}", prompt(seen - 1));
    ask(&format!(
        r#"],"max_tokens":9,{tools},"tool_choice":{{"type":"tool","name":"f"}},"thinking":{{"type":"enabled","budget_tokens":5}}"#
    ));
    let seen = live.double.seen.lock().unwrap();
    assert!(matches!(&seen.last().unwrap().sampling.grammar, Some(Grammar::JsonSchema(_))));
}

#[test]
fn completions_take_texts_and_tokens() {
    let live = Live::plain();
    for (prompt, prompts) in [(r#""ab""#, 1), (r#"["ab","c"]"#, 2), ("[97,98]", 1), ("[[97],[98],[99]]", 3)] {
        let body = live.post("/v1/completions", &format!(r#"{{"prompt":{prompt},"n":2,"echo":true}}"#)).json();
        assert_eq!(body["object"], "text_completion");
        let choices = body["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2 * prompts, "{prompt}");
        for (i, choice) in choices.iter().enumerate() {
            assert_eq!(choice["index"], i);
            assert!(choice["text"].as_str().unwrap().ends_with(&format!("Hello, wörld {}!", i % 2)), "{choice}");
        }
    }
    assert_eq!(live.double.seen.lock().unwrap().last().unwrap().prompt, [99]);
    let answer = live.post(
        "/v1/completions",
        r#"{"prompt":"ab","echo":true,"stream":true,"max_tokens":1,"stream_options":{"include_usage":true}}"#,
    );
    let events = answer.events();
    let texts: Vec<&str> = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(texts, ["ab", "Hel", ""]);
    assert_eq!(events[2]["choices"][0]["finish_reason"], "length");
    assert_eq!((&events[3]["choices"], &events[3]["usage"]["total_tokens"]), (&json!([]), &json!(3)));
}

const TOOLS: &str = r#","tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}},{"type":"function","function":{"name":"g"}}]"#;

fn hermes(_: &Request, _: usize) -> String {
    "<think>\nWhich?\n</think>\n\nLet me look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>".into()
}

#[test]
fn tool_calls_and_thoughts_are_taken_out_of_the_text() {
    let live = saying(hermes);
    let body = live.chat(&hi(TOOLS)).json();
    let choice = &body["choices"][0];
    let message = &choice["message"];
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Let me look."), &json!("Which?")));
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert!(body["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let calls = message["tool_calls"].as_array().unwrap();
    let told: Vec<_> = calls
        .iter()
        .map(|c| (c["type"].as_str(), c["function"]["name"].as_str(), c["function"]["arguments"].as_str()))
        .collect();
    assert_eq!(told, [(Some("function"), Some("f"), Some("{\"x\": 1}")), (Some("function"), Some("g"), Some("{}"))]);
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let events = live.chat(&hi(&format!("{TOOLS},\"stream\":true"))).events();
    let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
    let calls: Vec<&Value> = deltas.iter().filter_map(|d| d["tool_calls"].get(0)).collect();
    assert_eq!(calls.len(), 4);
    assert_eq!(
        (&calls[0]["index"], &calls[0]["type"], &calls[0]["function"]["name"]),
        (&json!(0), &json!("function"), &json!("f"))
    );
    assert_eq!(calls[1], &json!({"index": 0, "function": {"arguments": "{\"x\": 1}"}}));
    assert_eq!((&calls[2]["index"], &calls[2]["function"]["name"]), (&json!(1), &json!("g")));
    let thoughts: String = deltas.iter().filter_map(|d| d["reasoning_content"].as_str()).collect();
    assert_eq!(thoughts, "Which?");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // One call at most, none at all, and tools the model was not told of.
    let one = live.chat(&hi(&format!("{TOOLS},\"parallel_tool_calls\":false"))).json();
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    let none = live.chat(&hi(&format!("{TOOLS},\"tool_choice\":\"none\""))).json();
    assert!(none["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
    let seen = live.double.seen.lock().unwrap();
    let prompt = |r: &Request| String::from_utf8(r.prompt.iter().map(|&b| b as u8).collect()).unwrap();
    assert!(prompt(&seen[0]).contains("[tools]") && !prompt(&seen[3]).contains("[tools]"));
}

#[test]
fn forced_calls_come_through_a_grammar() {
    let live = saying(|request, _| match &request.sampling.grammar {
        Some(Grammar::JsonSchema(schema)) if schema.contains("minItems") => r#"[{"name":"g","arguments":{}}]"#.into(),
        Some(Grammar::JsonSchema(_)) => r#"{"x":5}"#.into(),
        _ => "free".into(),
    });
    let call = |more: &str| live.chat(&hi(&format!("{TOOLS}{more}"))).json()["choices"][0].clone();
    let required = call(r#","tool_choice":"required""#);
    assert_eq!(required["message"]["tool_calls"][0]["function"], json!({"name": "g", "arguments": "{}"}));
    assert_eq!((&required["finish_reason"], &required["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let named = call(r#","tool_choice":{"type":"function","function":{"name":"f"}}"#);
    assert_eq!(named["message"]["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"x\":5}"}));
    assert_eq!(call("")["message"]["content"], "free");
}

#[test]
fn llama_writes_calls_as_json() {
    let answer = |_: &Request, _: usize| r#"{"name": "f", "parameters": {"x": 2}}"#.into();
    let live = Live::new(Script { answer, tools: ToolFormat::Llama3, ..Script::default() }, Config::default());
    let body = live.chat(&hi(TOOLS)).json();
    assert_eq!(
        body["choices"][0]["message"]["tool_calls"][0]["function"],
        json!({"name": "f", "arguments": "{\"x\": 2}"})
    );
}

#[test]
fn what_the_answer_must_look_like_reaches_the_engine() {
    let live = Live::plain();
    for (more, want) in [
        (r#","response_format":{"type":"text"}"#, "None"),
        (r#","response_format":{"type":"json_object"}"#, "Some(Json)"),
        (
            r#","response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"object"}}}"#,
            r#"Some(JsonSchema("{\"type\":\"object\"}"))"#,
        ),
        (r#","structured_outputs":{"regex":"a+"}"#, r#"Some(Regex("a+"))"#),
        (r#","structured_outputs":{"choice":["a","b"]}"#, r#"Some(Choice(["a", "b"]))"#),
        (r#","structured_outputs":{"grammar":"start: \"a\""}"#, r#"Some(Lark("start: \"a\""))"#),
        (r#","structured_outputs":{"json":{"type":"null"}}"#, r#"Some(JsonSchema("{\"type\":\"null\"}"))"#),
    ] {
        assert_eq!(live.chat(&hi(more)).status, 200, "{more}");
        let seen = live.double.seen.lock().unwrap();
        assert_eq!(format!("{:?}", seen.last().unwrap().sampling.grammar), want);
    }
}

#[test]
fn responses_are_items() {
    let live = saying(hermes);
    let tools = r#""tools":[{"type":"function","name":"f","parameters":{}},{"type":"function","name":"g"}]"#;
    let input = r#""instructions":"Be brief.","input":[{"role":"user","content":[{"type":"input_text","text":"Hi"}]},{"type":"function_call","call_id":"1","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"1","output":"42"}]"#;
    let body = live.post("/v1/responses", &format!("{{{input},{tools}}}")).json();
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    let kinds: Vec<_> = body["output"].as_array().unwrap().iter().map(|i| i["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(body["output"][1]["content"][0]["text"], "Let me look.");
    assert_eq!(body["output"][2]["arguments"], "{\"x\": 1}");
    assert!(body["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let prompt: Vec<u8> = live.double.seen.lock().unwrap()[0].prompt.iter().map(|&b| b as u8).collect();
    let prompt = String::from_utf8(prompt).unwrap();
    assert!(
        prompt.starts_with("[system]Be brief.\n[user]Hi\n[assistant]{[") && prompt.contains("[tool]42\n"),
        "{prompt}"
    );

    let streamed = live.post("/v1/responses", r#"{"input":"Hi","stream":true,"max_output_tokens":100}"#);
    let mut kinds = Vec::new();
    for (i, event) in streamed.body.split_terminator("\n\n").enumerate() {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!((data["type"].as_str(), data["sequence_number"].as_u64()), (Some(name), Some(i as u64)));
        if kinds.last() != Some(&name) {
            kinds.push(name);
        }
    }
    assert_eq!(kinds[..3], ["response.created", "response.in_progress", "response.output_item.added"]);
    assert!(
        kinds.contains(&"response.reasoning_text.delta") && kinds.contains(&"response.output_text.done"),
        "{kinds:?}"
    );
    assert_eq!(kinds.last(), Some(&"response.completed"));
    let asked = r#"{"input":"Hi","include":["message.output_text.logprobs"],"top_logprobs":1}"#;
    let told = live.post("/v1/responses", asked).json();
    let logprobs = told["output"][1]["content"][0]["logprobs"].as_array().unwrap();
    assert!(logprobs.len() > 2 && logprobs.iter().all(|l| l["top_logprobs"].as_array().unwrap().len() == 1), "{told}");
    assert_eq!(told["output"][0]["content"][0].get("logprobs"), None, "thoughts have none");
    let cut = live.post("/v1/responses", r#"{"input":"Hi","max_output_tokens":1}"#).json();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[test]
fn messages_become_a_prompt() {
    let live = Live::plain();
    let body = r#"{"messages":[{"role":"developer","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
        {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},{"role":"tool","tool_call_id":"1","content":"42"}],
        "reasoning_effort":"none","chat_template_kwargs":{"k":1},"user":"me","metadata":{"a":"b"},"store":false}"#;
    assert_eq!(live.chat(body).status, 200);
    let prefix = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"so far"}],"continue_final_message":true}"#;
    assert_eq!(live.chat(prefix).status, 200);
    let seen = live.double.seen.lock().unwrap();
    let prompt = |i: usize| String::from_utf8(seen[i].prompt.iter().map(|&b| b as u8).collect()).unwrap();
    assert_eq!(
        prompt(0),
        "[system]Be brief.\n[user]a\nb\n[assistant]{[{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}}]}\n[tool]42\n[extra]{\"k\":1,\"enable_thinking\":false,\"reasoning_effort\":\"none\"}\n[assistant]"
    );
    assert_eq!(prompt(1), "[user]a\n[assistant]so far");
}

#[test]
fn the_other_endpoints_answer() {
    let live = Live::plain();
    let models = live.get("/v1/models").json();
    assert_eq!(
        (&models["object"], &models["data"][0]["id"], &models["data"][0]["object"]),
        (&json!("list"), &json!("double"), &json!("model"))
    );
    assert_eq!(live.get("/v1/models/double").json()["max_model_len"], 2000);
    let tokens = live.post("/tokenize", r#"{"prompt":"ab","return_token_strs":true}"#).json();
    assert_eq!(tokens, json!({"count": 2, "max_model_len": 2000, "tokens": [97, 98], "token_strs": ["a", "b"]}));
    assert_eq!(live.post("/tokenize", r#"{"messages":[{"role":"user","content":"a"}]}"#).json()["count"], 19);
    assert_eq!(live.post("/detokenize", r#"{"tokens":[97,98]}"#).json(), json!({"prompt": "ab"}));
    let vectors = live.post("/v1/embeddings", r#"{"input":["a","bc"],"model":"double"}"#).json();
    assert_eq!(vectors["data"][1], json!({"object": "embedding", "index": 1, "embedding": [2.0, 0.5]}));
    assert_eq!(vectors["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
    let packed = live.post("/v1/embeddings", r#"{"input":[97],"encoding_format":"base64"}"#).json();
    assert_eq!(packed["data"][0]["embedding"], "AACAPwAAAD8=");
    for path in ["/health", "/ready", "/ping"] {
        assert_eq!(live.get(path).status, 200, "{path}");
    }
    assert_eq!(live.get("/load").json(), json!({"server_load": 0}));
    assert_eq!(live.post("/reset_prefix_cache", "").status, 200);
    assert_eq!(live.double.forgotten.load(std::sync::atomic::Ordering::SeqCst), 1);
    assert!(live.get("/version").json()["version"].is_string());
    assert_eq!(live.get("/openapi.json").json()["openapi"], "3.1.0");
    assert!(live.get("/").body.starts_with("<!doctype html>"));
    live.chat(&hi(""));
    let metrics = live.get("/metrics").body;
    assert!(metrics.contains("fir_requests_total{model_name=\"double\"} 1"), "{metrics}");
    assert!(!metrics.contains("vllm:"));
    let live = Live::new(Script::default(), Config { vllm_metrics: true, ..Config::default() });
    assert!(live.get("/metrics").body.contains("vllm:num_requests_running{model_name=\"double\"} 0"));
}
