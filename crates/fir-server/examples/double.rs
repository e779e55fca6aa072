//! The server over the tests' double of an engine, for clients to be tried on without a model.
//!
//! `cargo run -p fir-server --example double -- 127.0.0.1:8000`
#![allow(missing_docs, dead_code, unreachable_pub, reason = "shares its double with the tests")]

#[path = "../tests/it/double.rs"]
mod double;

use std::time::Duration;

use fir_engine::{Grammar, Request};
use fir_server::{Config, Server};

/// Answers as a model with tools would.
fn answer(request: &Request, choice: usize) -> String {
    let prompt: Vec<u8> = request.prompt.iter().map(|&b| b as u8).collect();
    let prompt = String::from_utf8_lossy(&prompt);
    match &request.sampling.grammar {
        Some(Grammar::JsonSchema(schema)) if schema.contains("minItems") => {
            r#"[{"name":"get_weather","arguments":{"city":"Oslo"}}]"#.into()
        }
        Some(Grammar::JsonSchema(_)) => r#"{"city":"Oslo","degrees":7}"#.into(),
        Some(Grammar::Json) => r#"{"a":1}"#.into(),
        Some(Grammar::Choice(texts)) => texts[0].clone(),
        _ if prompt.contains("[tools]") && !prompt.contains("[tool]") => {
            "<think>\nThe weather?\n</think>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>".into()
        }
        _ if prompt.contains("long") => "All work and no play makes a dull double. ".repeat(40),
        _ => format!("Hello, wörld {choice}! \u{1f332}"),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8000".into());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let script = double::Script { answer, pace: Duration::from_millis(3), slots: 8, queue: 32, ..Default::default() };
    let config = Config { vllm_metrics: true, ..Config::default() };
    runtime.block_on(async {
        let server = Server::bind(&address, config).await?;
        server.installer().install(double::Double::start(script));
        println!("{}", server.address()?);
        server.run(std::future::pending()).await?;
        Ok(())
    })
}
