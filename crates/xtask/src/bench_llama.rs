//! `cargo xtask bench-llama PYTHON`: a model's steps here and in llama.cpp, on the same GGUF file, in one run.
//!
//! Each side is a process that answers a case by tokens per second (`crates/fir-engine/examples/speed.rs`, `benches/llama.py`
//! beside it). Samples alternate, so that what else happens on the machine happens to both; ratios are medians of those of
//! neighbours in time. All of it once more beside processes that keep every core busy, unless `--alone`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::step::cargo;

/// Cases, and how many times as fast as llama.cpp we want to be.
const CASES: [(&str, f64); 7] = [
    ("pp128", 2.5),
    ("pp512", 2.5),
    ("pp2048", 2.5),
    ("tg128", 1.1),
    ("tg512", 1.1),
    ("tg128x16", 3.0),
    ("tg128x32", 3.0),
];
/// Of our own quiet speed, what should be left beside a busy neighbour.
const BESIDE: f64 = 0.4;

pub(crate) fn run(
    python: &str,
    model: Option<&str>,
    threads: usize,
    rounds: usize,
    alone: bool,
    filter: &str,
) -> Result<()> {
    let cases: Vec<_> = CASES.into_iter().filter(|(case, _)| case.contains(filter)).collect();
    let fetched;
    let model = match model {
        Some(path) => path,
        None => {
            fetched = cargo("run --release -q -p fir-cli -- pull").quiet()?;
            fetched.trim()
        }
    };
    let messages = cargo("build --release -p fir-engine --example speed --message-format json").quiet()?;
    let binary = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|m| m["target"]["name"] == "speed")
        .find_map(|m| m["executable"].as_str().map(String::from))
        .context("cargo named no binary of the example")?;
    let mut ours = Command::new(binary);
    ours.args([model, "-"]).env("FIR_CPU_THREADS", threads.to_string());
    let mut theirs = Command::new(python);
    theirs.args(["crates/fir-engine/benches/llama.py", "speed", model, &threads.to_string()]);
    let (mut ours, mut theirs) = (Side::start(ours)?, Side::start(theirs)?);
    println!("{model}, {threads} threads, {rounds} rounds\n");
    let quiet = table("alone", &cases, &mut ours, &mut theirs, rounds)?;
    if alone {
        return Ok(());
    }
    let neighbours = Neighbours::start(python, threads)?;
    let busy = table("beside busy neighbours", &cases, &mut ours, &mut theirs, rounds)?;
    drop(neighbours);
    println!("beside neighbours, of our own quiet speed (wanted: {:.0} %):", 100.0 * BESIDE);
    for ((case, _), (quiet, busy)) in cases.iter().zip(quiet.iter().zip(&busy)) {
        println!("  {case:<10} {:.0} %", 100.0 * busy / quiet);
    }
    Ok(())
}

/// Prints a table; our median of each case.
fn table(name: &str, cases: &[(&str, f64)], ours: &mut Side, theirs: &mut Side, rounds: usize) -> Result<Vec<f64>> {
    println!(
        "| {name} | fir, tokens/s: median (best) | llama.cpp: median (best) | times | wanted |\n|---|---|---|---|---|"
    );
    let mut medians = Vec::new();
    for &(case, target) in cases {
        ours.ask(case)?;
        theirs.ask(case)?;
        let (mut own, mut other) = (Vec::new(), Vec::new());
        for _ in 0..rounds.max(1) {
            own.push(ours.ask(case)?);
            other.push(theirs.ask(case)?);
        }
        let times = median(own.iter().zip(&other).map(|(a, b)| a / b).collect());
        let best = |all: &[f64]| all.iter().copied().fold(0.0, f64::max);
        let met = if times >= target { "yes" } else { "no" };
        println!(
            "| {case} | {:.0} ({:.0}) | {:.0} ({:.0}) | {times:.2} | {target}: {met} |",
            median(own.clone()),
            best(&own),
            median(other.clone()),
            best(&other)
        );
        medians.push(median(own));
    }
    println!();
    Ok(medians)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// A process that answers a line with a number.
struct Side {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Side {
    fn start(mut command: Command) -> Result<Self> {
        let what = format!("cannot start {command:?}");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context(what)?;
        let questions = child.stdin.take().context("a piped stdin")?;
        let answers = BufReader::new(child.stdout.take().context("a piped stdout")?);
        Ok(Self { child, questions, answers })
    }

    fn ask(&mut self, case: &str) -> Result<f64> {
        let mut line = String::new();
        let sent = writeln!(self.questions, "{case}").and_then(|()| self.questions.flush());
        if sent.is_err() || self.answers.read_line(&mut line)? == 0 {
            bail!("no answer to `{case}`: {}", self.child.wait()?);
        }
        line.trim().parse().with_context(|| format!("`{case}` was answered `{}`", line.trim()))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that do nothing, as fast as they can.
struct Neighbours(Vec<Child>);

impl Neighbours {
    fn start(python: &str, count: usize) -> Result<Self> {
        let one = || Command::new(python).args(["-c", "while True: pass"]).spawn();
        Ok(Self((0..count).map(|_| one()).collect::<Result<_, _>>().context("a busy neighbour")?))
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
