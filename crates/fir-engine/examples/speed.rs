//! How fast a model's steps are: `cargo run --release -p fir-engine --example speed -- MODEL [only]`.
//!
//! `ppN`: a prompt of N tokens in steps of 512; `tgN`: decode at a context of N; `tgNxB`: B sequences at once, tokens of all
//! of them counted. The best of several runs.

use std::path::Path;
use std::time::Instant;

use fir::Exec;
use fir_engine::{Batch, KvCache, KvType, Limits, Model, Runner, Seq};

const PAGE: usize = 16;
const CHUNK: usize = 512;

fn main() -> fir_engine::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_default();
    let only = std::env::args().nth(2).unwrap_or_default();
    let exec = Exec::cpu()?;
    let start = Instant::now();
    let model = Model::load(&exec, Path::new(&path))?;
    println!("{}: loaded in {:.2} s", model.config().name, start.elapsed().as_secs_f64());
    let mut kv = KvCache::new(&model, 2304, PAGE, KvType::Bf16)?;
    let mut runner = Runner::new(&model, Limits { max_tokens: CHUNK, max_seqs: 64, max_logits: 64 })?;
    let tokens: Vec<u32> = (0..4096u32).map(|i| 100 + i * 37 % 9000).collect();
    for n in [128, 512, 2048] {
        let pages: Vec<u32> = (0..n / PAGE as u32).collect();
        let mut run = || -> fir_engine::Result<()> {
            let n = n as usize;
            for past in (0..n).step_by(CHUNK) {
                let new = CHUNK.min(n - past);
                let last = [new as u32 - 1];
                let logits = if past + new == n { &last[..] } else { &[] };
                let seqs = [Seq { new, past, pages: &pages, ..Seq::default() }];
                let batch = Batch { tokens: &tokens[past..past + new], seqs: &seqs, logits, shared: &[] };
                runner.step(&exec, &model, &mut kv, &batch)?;
            }
            Ok(())
        };
        report(&format!("pp{n}"), &only, n as usize, 1, &mut run)?;
    }
    for (context, many) in [(128usize, 1usize), (512, 1), (128, 16), (128, 32), (512, 32)] {
        let each = (context + 64).div_ceil(PAGE);
        let lists: Vec<Vec<u32>> = (0..many).map(|s| ((s * each) as u32..((s + 1) * each) as u32).collect()).collect();
        let rows: Vec<u32> = (0..many as u32).collect();
        let mut at = 0;
        let mut run = || -> fir_engine::Result<()> {
            let seqs: Vec<Seq<'_>> = lists.iter().map(|pages| Seq { new: 1, past: context + at, pages, ..Seq::default() }).collect();
            let batch = Batch { tokens: &tokens[..many], seqs: &seqs, logits: &rows, shared: &[] };
            runner.step(&exec, &model, &mut kv, &batch)?;
            at = (at + 1) % 32;
            Ok(())
        };
        let name = if many == 1 { format!("tg{context}") } else { format!("tg{context}x{many}") };
        report(&name, &only, many, 32, &mut run)?;
    }
    Ok(())
}

/// Tokens per second of `repeat` runs of `tokens` tokens each, the best of several.
fn report(
    name: &str,
    only: &str,
    tokens: usize,
    repeat: usize,
    run: &mut dyn FnMut() -> fir_engine::Result<()>,
) -> fir_engine::Result<()> {
    if !name.starts_with(only) {
        return Ok(());
    }
    run()?;
    let mut best = f64::MAX;
    let begun = Instant::now();
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..repeat {
            run()?;
        }
        best = best.min(start.elapsed().as_secs_f64());
        if begun.elapsed().as_secs() > 10 {
            break;
        }
    }
    println!("{name:>10}  {:>8.1} tokens/s", (tokens * repeat) as f64 / best);
    Ok(())
}
