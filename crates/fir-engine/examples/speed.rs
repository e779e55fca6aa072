//! How fast a model's steps are: `cargo run --release -p fir-engine --example speed -- MODEL [CASE...]`.
//!
//! `ppN`: a prompt of N tokens in steps of 512; `tgN`: decode at a context of N; `tgNxB`: B sequences at once, tokens of all
//! of them counted, each with pages of its own; `sharedNxB`: B sequences whose first N tokens are the same pages, read once,
//! `apartNxB`: the same, read B times. The best of five runs; or with `-` for the cases, one run of each that a line of
//! stdin names, tokens per second by line: `cargo xtask bench-llama` asks it beside another program.

use std::io::{BufRead, Write, stdin, stdout};
use std::path::Path;
use std::time::Instant;

use fir::Exec;
use fir_engine::{Batch, Error, KvCache, KvType, Limits, Model, Result, Runner, Seq, Shared};

const PAGE: usize = 16;
const CHUNK: usize = 512;
/// Steps of a run of decode.
const STEPS: usize = 32;
const CASES: [&str; 10] =
    ["pp128", "pp512", "pp2048", "tg128", "tg512", "tg128x16", "tg128x32", "tg512x32", "apart1792x32", "shared1792x32"];

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_default();
    let cases: Vec<String> = args.collect();
    let exec = Exec::cpu()?;
    let start = Instant::now();
    let model = Model::load(&exec, Path::new(&path))?;
    eprintln!("{}: loaded in {:.2} s", model.config().name, start.elapsed().as_secs_f64());
    let kv = KvCache::new(&model, 4096, PAGE, KvType::Bf16)?;
    let runner = Runner::new(&model, Limits { max_tokens: CHUNK, max_seqs: 64, max_logits: 64 })?;
    let mut speed = Speed { exec, model, kv, runner };
    if cases == ["-"] {
        for line in stdin().lock().lines().map_while(|l| l.ok()) {
            println!("{:.3}", speed.run(line.trim())?);
            stdout().flush().map_err(|source| Error::Io { path: "stdout".into(), source })?;
        }
        return Ok(());
    }
    let all = CASES.map(String::from).to_vec();
    for case in if cases.is_empty() { all } else { cases } {
        speed.run(&case)?;
        let mut best = 0f64;
        for _ in 0..5 {
            best = best.max(speed.run(&case)?);
        }
        println!("{case:>10}  {best:>8.1} tokens/s");
    }
    Ok(())
}

struct Speed {
    exec: Exec,
    model: Model,
    kv: KvCache,
    runner: Runner,
}

impl Speed {
    /// Tokens per second of one run.
    fn run(&mut self, case: &str) -> Result<f64> {
        let wrong = || Error::Config(format!("case {case:?}, expected one like {CASES:?}"));
        let number = |s: &str| s.parse::<usize>().ok().filter(|n| (1..=2048).contains(n)).ok_or_else(wrong);
        if let Some(n) = case.strip_prefix("pp") {
            return self.prefill(number(n)?);
        }
        for (name, together) in [("shared", true), ("apart", false)] {
            if let Some((common, many)) = case.strip_prefix(name).and_then(|c| c.split_once('x')) {
                return self.shared(number(common)?, number(many)?.min(64), together);
            }
        }
        let (context, many) = case.strip_prefix("tg").ok_or_else(wrong)?.split_once('x').unwrap_or((&case[2..], "1"));
        self.decode(number(context)?, number(many)?.min(64))
    }

    fn step(&mut self, tokens: &[u32], seqs: &[Seq<'_>], logits: &[u32]) -> Result<()> {
        self.step_of(tokens, seqs, logits, &[])
    }

    fn step_of(&mut self, tokens: &[u32], seqs: &[Seq<'_>], logits: &[u32], shared: &[Shared]) -> Result<()> {
        let batch = Batch { tokens, seqs, logits, shared };
        self.runner.step(&self.exec, &self.model, &mut self.kv, &batch).map(|_| ())
    }

    fn prefill(&mut self, n: usize) -> Result<f64> {
        let tokens = tokens(n);
        let pages: Vec<u32> = (0..n.div_ceil(PAGE) as u32).collect();
        let start = Instant::now();
        for past in (0..n).step_by(CHUNK) {
            let new = CHUNK.min(n - past);
            let last = [new as u32 - 1];
            let logits = if past + new == n { &last[..] } else { &[] };
            let seqs = [Seq { new, past, pages: &pages, ..Seq::default() }];
            self.step(&tokens[past..past + new], &seqs, logits)?;
        }
        Ok(n as f64 / start.elapsed().as_secs_f64())
    }

    fn decode(&mut self, context: usize, many: usize) -> Result<f64> {
        let each = (context + STEPS).div_ceil(PAGE);
        let lists: Vec<Vec<u32>> = (0..many).map(|s| ((s * each) as u32..((s + 1) * each) as u32).collect()).collect();
        let rows: Vec<u32> = (0..many as u32).collect();
        let tokens = tokens(many);
        let start = Instant::now();
        for at in 0..STEPS {
            let seq = |pages| Seq { new: 1, past: context + at, pages, ..Seq::default() };
            let seqs: Vec<Seq<'_>> = lists.iter().map(|pages| seq(&pages[..])).collect();
            self.step(&tokens, &seqs, &rows)?;
        }
        Ok((many * STEPS) as f64 / start.elapsed().as_secs_f64())
    }
}

impl Speed {
    fn shared(&mut self, common: usize, many: usize, together: bool) -> Result<f64> {
        let (common, own) = (common / PAGE * PAGE, STEPS.div_ceil(PAGE));
        let first = (common / PAGE) as u32;
        let list = |s: usize| (0..first).chain(first + (s * own) as u32..first + ((s + 1) * own) as u32);
        let lists: Vec<Vec<u32>> = (0..many).map(|s| list(s).collect()).collect();
        let rows: Vec<u32> = (0..many as u32).collect();
        let tokens = tokens(many);
        let group = [Shared { first: 0, count: many, len: common }];
        let start = Instant::now();
        for at in 0..STEPS {
            let seq = |pages| Seq { new: 1, past: common + at, pages, ..Seq::default() };
            let seqs: Vec<Seq<'_>> = lists.iter().map(|pages| seq(&pages[..])).collect();
            self.step_of(&tokens, &seqs, &rows, if together { &group } else { &[] })?;
        }
        Ok((many * STEPS) as f64 / start.elapsed().as_secs_f64())
    }
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 100 + i * 37 % 9000).collect()
}
