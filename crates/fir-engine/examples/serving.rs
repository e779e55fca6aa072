//! What the engine makes of a model's speed: `cargo run --release -p fir-engine --example serving -- MODEL [LINE]`.
//!
//! | line | what |
//! |---|---|
//! | `one` | a request alone |
//! | `many-32` | 32 requests at once, nothing in common |
//! | `shared` | 16 and 32 requests with 2,000 tokens in common, read once, and the same read by each; three times in turn |
//! | `beside` | an answer, while prompts of 4,000 tokens come one after the other |
//! | `guess` | an answer that repeats its prompt, with and without guesses |

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use fir::Exec;
use fir_engine::{Config, Engine, Event, Handle, Model, Request, Result, Sampling};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (path, line) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let model = Arc::new(Model::load(&Exec::cpu()?, Path::new(&path))?);
    let config = Config { memory: Some(4 << 30), drafts: 0, ..Config::default() };
    let start = Instant::now();
    let handle = Engine::start(Arc::clone(&model), config.clone())?;
    println!("started in {:.2} s\n{}", start.elapsed().as_secs_f64(), handle.memory());
    if "one".contains(&line) {
        ask("one", &handle, vec![prompt(0, 128)], 128);
    }
    if "many-32".contains(&line) {
        ask("many-32", &handle, (1..33).map(|i| prompt(i, 128)).collect(), 128);
    }
    if "shared".contains(&line) {
        let flat = Engine::start(Arc::clone(&model), Config { cascade: false, ..config.clone() })?;
        for many in [16, 32] {
            let common =
                |round: u32| (0..many).map(|i| [prompt(99 + round, 2000), prompt(200 + i, 4)].concat()).collect();
            for round in 0..3 {
                let (shared, fast) = ask(&format!("shared-{many}"), &handle, common(round), 64);
                let (apart, slow) = ask(&format!("shared-{many} read apart"), &flat, common(round), 64);
                let same = shared.iter().zip(&apart).filter(|(a, b)| a == b).count();
                println!("  {same} of {many} answers are the same; {:.2} times as fast", fast / slow);
            }
        }
    }
    if "beside".contains(&line) {
        for round in 0..4 {
            beside(&handle, round)?;
        }
    }
    if !"guess".contains(&line) {
        return Ok(());
    }
    let text =
        "Repeat this list word for word, twice: alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa.";
    let chat = serde_json::json!([{ "role": "user", "content": text }]);
    let rendered = model.chat().map(|c| c.render(&chat, None, true, None)).transpose()?;
    let repeat = model.tokenizer().encode(rendered.as_deref().unwrap_or(text), false)?;
    let (plain, _) = ask("guess: without", &handle, vec![repeat.clone()], 128);
    let guessing = Engine::start(model, Config { drafts: 4, ..config })?;
    let (guessed, _) = ask("guess: with", &guessing, vec![repeat], 128);
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

/// The gaps between an answer's tokens before a long prompt comes, and beside it.
fn beside(handle: &Handle, round: u32) -> Result<()> {
    let sampling = |max_tokens| Sampling { temperature: 0.0, max_tokens, ignore_eos: true, ..Sampling::default() };
    let (tx, answer) = channel();
    let request = Request { prompt: prompt(400 + round, 64), sampling: sampling(1500), ..Request::default() };
    let stream = handle.submit(request, move |_| tx.send(Instant::now()).is_ok())?;
    let mut came: Vec<Instant> = answer.iter().take(60).collect();
    let (tx, done) = channel();
    let begin = Instant::now();
    let request = Request { prompt: prompt(500 + round, 4000), sampling: sampling(1), ..Request::default() };
    handle.submit(request, move |_| tx.send(Instant::now()).is_ok())?;
    let end = done.recv().unwrap_or(begin);
    came.extend(answer.iter().take_while(|at| *at < end));
    handle.abort(stream);
    let gaps = |within: &dyn Fn(Instant) -> bool| {
        let gaps = came.windows(2).filter(|w| within(w[1])).map(|w| (w[1] - w[0]).as_secs_f64() * 1e3);
        let mut gaps: Vec<f64> = gaps.collect();
        gaps.sort_by(f64::total_cmp);
        gaps
    };
    let of = |gaps: &[f64], share: usize| gaps.get(gaps.len() * share / 100).copied().unwrap_or(0.0);
    let (before, during) = (gaps(&|at| at < begin), gaps(&|at| at >= begin));
    println!(
        "beside: a prompt of 4000 took {:.2} s; {} gaps, median {:.1} ms, p99 {:.1} ms, longest {:.1} ms; before it {:.1} ms",
        (end - begin).as_secs_f64(),
        during.len(),
        of(&during, 50),
        of(&during, 99),
        during.last().copied().unwrap_or(0.0),
        of(&before, 50),
    );
    Ok(())
}

/// Asks all at once; prints tokens per second of the prompts and of the answers, and the median gap. The answers, and tokens
/// per second when all had begun.
fn ask(name: &str, handle: &Handle, prompts: Vec<Vec<u32>>, max_tokens: usize) -> (Vec<Vec<u32>>, f64) {
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
    let (mut all, mut gaps, mut times, mut first) = (Vec::new(), Vec::new(), Vec::new(), start);
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
                    times.push(at);
                }
                Event::Prompt(_) | Event::Finished { .. } => {}
                Event::Failed(why) => println!("{name}: {why}"),
            }
        }
        all.push(tokens);
    }
    let took = start.elapsed().as_secs_f64();
    let late = times.into_iter().filter(|at| *at > first).count();
    gaps.sort_by(f64::total_cmp);
    let stats = handle.stats();
    // Counted from the last first token on, when all of them decode.
    let rate = (late as f64) / (took - (first - start).as_secs_f64()).max(1e-9);
    println!(
        "{name}: {:.2} s; all first tokens after {:.2} s; then {:.0} tokens/s; gap median {:.2} ms, p99 {:.2} ms; {} tokens computed; KV read {:.1} of {:.1} GB",
        took,
        (first - start).as_secs_f64(),
        rate,
        gaps.get(gaps.len() / 2).copied().unwrap_or(0.0),
        gaps.get(gaps.len() * 99 / 100).copied().unwrap_or(0.0),
        stats.computed_tokens - before.computed_tokens,
        (stats.kv_bytes_read - before.kv_bytes_read) as f64 / 1e9,
        (stats.kv_bytes_flat - before.kv_bytes_flat) as f64 / 1e9,
    );
    (all, rate)
}
