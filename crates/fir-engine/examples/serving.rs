//! What the engine makes of a model's speed: `cargo run --release -p fir-engine --example serving -- MODEL`.
//!
//! | line | what |
//! |---|---|
//! | `one` | a request alone |
//! | `many-32` | 32 requests at once, nothing in common |
//! | `shared-32` | 32 requests with 2,000 tokens in common, read once, and the same read 32 times |
//! | `guess` | an answer that repeats its prompt, with and without guesses |

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use fir::Exec;
use fir_engine::{Config, Engine, Event, Handle, Model, Request, Result, Sampling};

fn main() -> Result<()> {
    let path = std::env::args().nth(1).unwrap_or_default();
    let model = Arc::new(Model::load(&Exec::cpu()?, Path::new(&path))?);
    let config = Config { memory: Some(4 << 30), drafts: 0, ..Config::default() };
    let start = Instant::now();
    let handle = Engine::start(Arc::clone(&model), config.clone())?;
    println!("started in {:.2} s\n{}", start.elapsed().as_secs_f64(), handle.memory());
    ask("one", &handle, vec![prompt(0, 128)], 128);
    ask("many-32", &handle, (1..33).map(|i| prompt(i, 128)).collect(), 128);
    let common = || (0..32).map(|i| [prompt(99, 2000), prompt(200 + i, 4)].concat()).collect();
    let shared = ask("shared-32", &handle, common(), 64);
    let flat = Engine::start(Arc::clone(&model), Config { cascade: false, ..config.clone() })?;
    let apart = ask("shared-32 read apart", &flat, common(), 64);
    let same = shared.iter().zip(&apart).filter(|(a, b)| a == b).count();
    println!("  {same} of 32 answers are the same");
    drop(flat);
    let text =
        "Repeat this list word for word, twice: alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa.";
    let chat = serde_json::json!([{ "role": "user", "content": text }]);
    let rendered = model.chat().map(|c| c.render(&chat, None, true, None)).transpose()?;
    let repeat = model.tokenizer().encode(rendered.as_deref().unwrap_or(text), false)?;
    let plain = ask("guess: without", &handle, vec![repeat.clone()], 128);
    let guessing = Engine::start(model, Config { drafts: 4, ..config })?;
    let guessed = ask("guess: with", &guessing, vec![repeat], 128);
    let stats = guessing.stats();
    println!(
        "  {} of {} guesses right; the same answer: {}",
        stats.accepted_tokens,
        stats.drafted_tokens,
        plain == guessed
    );
    Ok(())
}

fn prompt(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 100 + (i * 37 + salt * 1009) % 9000).collect()
}

/// Asks all at once; prints tokens per second of the prompts and of the answers, and the median gap.
fn ask(name: &str, handle: &Handle, prompts: Vec<Vec<u32>>, max_tokens: usize) -> Vec<Vec<u32>> {
    let before = handle.stats();
    let start = Instant::now();
    let answers: Vec<_> = prompts
        .into_iter()
        .map(|prompt| {
            let (tx, rx) = channel();
            let sampling = Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() };
            let request = Request { prompt, sampling, ..Request::default() };
            let sent = handle.submit(request, move |e| tx.send((e, Instant::now())).is_ok());
            (sent.map(|_| ()), rx)
        })
        .collect();
    let (mut all, mut gaps, mut first) = (Vec::new(), Vec::new(), start);
    for (sent, events) in answers {
        let (mut tokens, mut last) = (Vec::new(), None);
        if let Err(error) = sent {
            println!("{name}: {error}");
        }
        for (event, at) in events {
            match event {
                Event::Token { id, .. } => {
                    match last.replace(at) {
                        Some(last) => gaps.push((at - last).as_secs_f64() * 1e3),
                        None => first = first.max(at),
                    }
                    tokens.push(id);
                }
                Event::Prompt(_) | Event::Finished { .. } => {}
                Event::Failed(why) => println!("{name}: {why}"),
            }
        }
        all.push(tokens);
    }
    let took = start.elapsed().as_secs_f64();
    gaps.sort_by(f64::total_cmp);
    let stats = handle.stats();
    let generated = (stats.generated_tokens - before.generated_tokens) as f64;
    println!(
        "{name}: {:.2} s; all first tokens after {:.2} s; then {:.0} tokens/s; gap median {:.2} ms, p99 {:.2} ms; {} tokens computed; KV read {:.1} of {:.1} GB",
        took,
        (first - start).as_secs_f64(),
        (generated - all.len() as f64) / (took - (first - start).as_secs_f64()).max(1e-9),
        gaps.get(gaps.len() / 2).copied().unwrap_or(0.0),
        gaps.get(gaps.len() * 99 / 100).copied().unwrap_or(0.0),
        stats.computed_tokens - before.computed_tokens,
        (stats.kv_bytes_read - before.kv_bytes_read) as f64 / 1e9,
        (stats.kv_bytes_flat - before.kv_bytes_flat) as f64 / 1e9,
    );
    all
}
