//! The harness of every bench in this crate.
//!
//! ```text
//! cargo bench -p fir-infer --bench norm -- [filter] [--quick] [--markdown]
//! ```
//!
//! A bench file is a `main` that makes a [`Suite`] and calls [`Suite::bench`] once per id. An id is a path,
//! `op/problem/batch/level`: `rms_norm/h4096-bf16/t64/avx512`. A filter is any part of one.
//!
//! Each bench states the bytes it must move and the operations it must do, and is given as a state, a function that
//! runs the operator on it, and one that checks the result. The operator runs and is checked once; then it is timed:
//! calls are repeated until a sample takes about 20 ms (2 ms with `--quick`), and eleven samples are taken. A line
//! shows the least and the median time of a call, and from the least the bytes and operations per second, with their
//! ratio to what this machine can do with as many threads as the operators use:
//!
//! * `read`: reading memory. Data that stays in a cache goes past 100 %.
//! * `copy`: copying memory, bytes read and written.
//! * `fma`: f32 multiply-adds on vector registers.
//! * `amx`: products of bf16 on tile registers, where the CPU has them.
//!
//! Each is measured in a slice after every sample (see [`ceilings`]); ratios are of the best to the best of one bench.
//! `--markdown` prints rows of a table instead.
//!
//! Without `--bench`, which `cargo bench` adds, nothing is timed: `cargo test --benches` runs every check once.
#![allow(dead_code, clippy::print_stdout, reason = "no bench uses all of it; printing is what it is for")]

pub(crate) mod ceilings;

use std::time::{Duration, Instant};

use fir::exec::Level;
use fir::gemm::BlockFormat;
use fir::reference::Precision;
use fir::testing::{Compare, Rng, compare};
use fir::{DType, Exec, Tensor, TensorRef};

use ceilings::{Ceilings, Rates};

/// What one call must do at the least.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// Bytes read and written.
    pub(crate) bytes: usize,
    /// Additions and multiplications, each counted.
    pub(crate) flops: usize,
}

/// The benches of a file: what was asked for, and what this machine can do.
pub(crate) struct Suite {
    filter: Option<String>,
    sample: Duration,
    markdown: bool,
    timed: bool,
    threads: usize,
    /// Made when first needed.
    ceilings: Option<Ceilings>,
    run: usize,
}

impl Suite {
    /// Reads the command line.
    pub(crate) fn new() -> Self {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let has = |flag: &str| args.iter().any(|a| a == flag);
        Self {
            filter: args.iter().find(|a| !a.starts_with('-')).cloned(),
            sample: Duration::from_millis(if has("--quick") { 2 } else { 20 }),
            markdown: has("--markdown"),
            timed: has("--bench") && !has("--test"),
            threads: Exec::cpu().expect("FIR_CPU_* to be valid").workers(),
            ceilings: None,
            run: 0,
        }
    }

    /// Whether results are checked and nothing is timed: then problems should be small.
    pub(crate) fn checks_only(&self) -> bool {
        !self.timed
    }

    /// An executor for every level this CPU has, by name.
    pub(crate) fn levels(&self) -> Vec<(&'static str, Exec)> {
        let exec = |l: Level| Exec::cpu_with(l, self.threads).expect("an available level");
        Level::available().into_iter().map(|l| (l.name(), exec(l))).collect()
    }

    /// Whether a bench whose id contains `part` may run: inputs of the others need not be made.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.filter.as_ref().is_none_or(|f| part.contains(f.as_str()) || f.contains(part))
    }

    /// Runs, checks and times one bench.
    ///
    /// # Panics
    /// If the check fails: a wrong result has no speed.
    pub(crate) fn bench<S>(
        &mut self,
        id: &str,
        work: Work,
        mut state: S,
        mut run: impl FnMut(&mut S),
        check: impl FnOnce(&S) -> Result<(), String>,
    ) {
        if self.filter.as_ref().is_some_and(|f| !id.contains(f.as_str())) {
            return;
        }
        self.run += 1;
        run(&mut state);
        if let Err(e) = check(&state) {
            panic!("{id}: {e}");
        }
        if !self.timed {
            return;
        }
        if self.ceilings.is_none() {
            self.print_head();
            self.ceilings = Some(Ceilings::new(self.threads, self.sample < Duration::from_millis(10)));
        }
        let Some(ceilings) = &mut self.ceilings else { return };
        ceilings.reset();
        let mut calls = 1u32;
        loop {
            let took = time(calls, || run(&mut state));
            if took >= self.sample / 2 {
                calls = (f64::from(calls) * self.sample.as_secs_f64() / took.as_secs_f64()).ceil() as u32;
                break;
            }
            calls = calls.saturating_mul(if took < self.sample / 100 { 20 } else { 2 });
        }
        let mut times = [0.0; 11];
        for took in &mut times {
            *took = time(calls, || run(&mut state)).as_secs_f64() / f64::from(calls);
            if work.bytes > 0 {
                ceilings.memory_slice();
            }
            if work.flops > 0 {
                ceilings.arithmetic_slice();
            }
        }
        times.sort_by(f64::total_cmp);
        let best = ceilings.best;
        self.print(id, work, times[0], times[times.len() / 2], best);
    }

    fn print_head(&self) {
        let threads = self.threads;
        if self.markdown {
            println!("{threads} threads.\n");
            println!("| bench | min, µs | median, µs | GB/s | of read | of copy | GFLOP/s | of fma | of amx |");
            println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
        } else {
            println!("{threads} threads; after a rate, its ratios to the read and copy, or fma and amx, ceilings");
        }
    }

    fn print(&self, id: &str, work: Work, least: f64, median: f64, ceilings: Rates) {
        let rate = |amount: usize| if amount == 0 { "-".into() } else { format!("{:.1}", amount as f64 / least / 1e9) };
        let ratio = |amount: usize, ceiling: f64| match amount as f64 / least / ceiling {
            ratio if !(ratio > 0.0 && ratio.is_finite()) => "-".into(),
            ratio if self.markdown => format!("{:.0} %", 100.0 * ratio),
            ratio => format!("{:.0} % of {:.1}", 100.0 * ratio, ceiling / 1e9),
        };
        let (bytes, of_read, of_copy) =
            (rate(work.bytes), ratio(work.bytes, ceilings.read), ratio(work.bytes, ceilings.copy));
        let (flops, of_fma, of_amx) =
            (rate(work.flops), ratio(work.flops, ceilings.fma), ratio(work.flops, ceilings.amx_bf16));
        let (least, median) = (micros(least), micros(median));
        if self.markdown {
            println!(
                "| `{id}` | {least} | {median} | {bytes} | {of_read} | {of_copy} | {flops} | {of_fma} | {of_amx} |"
            );
        } else {
            println!(
                "{id:<56} {least:>11} µs {median:>11} µs {bytes:>8} GB/s {of_read:>12} {of_copy:>12} {flops:>8} GFLOP/s \
                 {of_fma:>14} {of_amx:>14}"
            );
        }
    }
}

impl Drop for Suite {
    fn drop(&mut self) {
        if !self.timed && !std::thread::panicking() {
            println!("{} benches checked, none timed (`cargo bench` does)", self.run);
        }
    }
}

/// A tensor of random values, of which every 65536 are alike.
pub(crate) fn random(seed: u64, dtype: DType, shape: &[usize]) -> Tensor {
    let block = Rng::new(seed).normals(shape.iter().product::<usize>().min(1 << 16));
    let data: Vec<f32> = block.iter().copied().cycle().take(shape.iter().product()).collect();
    Tensor::from_f32(dtype, &data, shape).expect("a float tensor")
}

/// The check of most benches: a result, or some rows of it, with a reference as the tests compare them.
pub(crate) fn matches(
    got: TensorRef<'_>,
    row: usize,
    reference: impl Fn(Precision) -> fir::Result<Vec<f64>>,
) -> Result<(), String> {
    let naive = if got.dtype().size() == 1 { DType::BF16 } else { got.dtype() };
    let exact = reference(Precision::Exact).map_err(|e| e.to_string())?;
    let naive = reference(Precision::Naive(naive)).map_err(|e| e.to_string())?;
    compare(got, Compare { exact: &exact, naive: &naive, row })
}

fn time(calls: u32, mut run: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        run();
    }
    start.elapsed()
}

/// Seconds in microseconds, with four digits.
fn micros(seconds: f64) -> String {
    let us = seconds * 1e6;
    format!("{us:.*}", (3 - us.max(1.0).log10() as i32).max(0) as usize)
}

/// Random blocks, of which every 64 are alike; all f16 numbers are about 0.01.
pub(crate) fn blocks(format: BlockFormat, n: usize, k: usize) -> Vec<u8> {
    let halves: &[usize] = match format.name() {
        "Q4_1" | "Q5_1" | "Q4_K" | "Q5_K" => &[0, 2],
        "Q2_K" => &[80, 82],
        "Q3_K" => &[108],
        "Q6_K" => &[208],
        _ => &[0],
    };
    let mut rng = Rng::new(4);
    let mut some: Vec<u8> = (0..64 * format.bytes()).map(|_| rng.bits() as u8).collect();
    for block in some.chunks_exact_mut(format.bytes()) {
        for &at in halves {
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(0.01 * rng.normal()).to_le_bytes());
        }
    }
    some.iter().copied().cycle().take(n * k / format.elements() * format.bytes()).collect()
}
