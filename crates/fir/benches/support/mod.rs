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
//! ratio to what this machine can do:
//!
//! * `bw`: reading 1 GB (more than the last-level cache) with as many threads as the operators use. Data that stays
//!   in a cache goes past 100 %.
//! * `fma`: multiply-adds on registers, at the highest level, with as many threads.
//!
//! Both are measured in the same run, before the first bench. `--markdown` prints rows of a table instead.
//!
//! Without `--bench`, which `cargo bench` adds, nothing is timed: `cargo test --benches` runs every check once.
#![allow(dead_code, clippy::print_stdout, reason = "no bench uses all of it; printing is what it is for")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use fir::exec::Level;
use fir::reference::Precision;
use fir::testing::{Compare, Rng, compare};
use fir::{DType, Exec, Tensor, TensorRef};

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
    /// Bytes and operations per second; measured when first needed.
    ceilings: Option<(f64, f64)>,
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
        let ceilings = *self.ceilings.get_or_insert_with(|| measure_ceilings(self.threads, self.markdown));
        let mut calls = 1u32;
        loop {
            let took = time(calls, || run(&mut state));
            if took >= self.sample / 2 {
                calls = (f64::from(calls) * self.sample.as_secs_f64() / took.as_secs_f64()).ceil() as u32;
                break;
            }
            calls = calls.saturating_mul(if took < self.sample / 100 { 20 } else { 2 });
        }
        let mut times: Vec<f64> =
            (0..11).map(|_| time(calls, || run(&mut state)).as_secs_f64() / f64::from(calls)).collect();
        times.sort_by(f64::total_cmp);
        self.print(id, work, times[0], times[times.len() / 2], ceilings);
    }

    fn print(&self, id: &str, work: Work, least: f64, median: f64, (bandwidth, fma): (f64, f64)) {
        let rate = |amount: usize, ceiling: f64| {
            let rate = amount as f64 / least;
            let ratio = if ceiling > 0.0 { format!("{:.0} %", 100.0 * rate / ceiling) } else { "-".into() };
            if amount == 0 { ("-".into(), "-".into()) } else { (format!("{:.1}", rate / 1e9), ratio) }
        };
        let ((bytes, of_bandwidth), (flops, of_fma)) = (rate(work.bytes, bandwidth), rate(work.flops, fma));
        let (least, median) = (micros(least), micros(median));
        if self.markdown {
            println!("| `{id}` | {least} | {median} | {bytes} | {of_bandwidth} | {flops} | {of_fma} |");
        } else {
            println!(
                "{id:<56} {least:>11} µs {median:>11} µs {bytes:>8} GB/s {of_bandwidth:>6} {flops:>8} GFLOP/s {of_fma:>6}"
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

/// Bytes read and multiply-adds done per second by `threads` threads; the best of five tries each.
fn measure_ceilings(threads: usize, markdown: bool) -> (f64, f64) {
    const WORDS: usize = (1 << 30) / 8;
    let memory = vec![0x9e37_79b9_7f4a_7c15u64; WORDS];
    let per_thread = WORDS.div_ceil(threads);
    let best = |amount: f64, run: &dyn Fn()| (0..5).map(|_| amount / time(1, run).as_secs_f64()).fold(0.0, f64::max);
    let bandwidth = best((WORDS * 8) as f64, &|| {
        std::thread::scope(|s| {
            for part in memory.chunks(per_thread) {
                s.spawn(move || {
                    black_box(
                        part.chunks_exact(16).fold([0u64; 16], |sum, words| std::array::from_fn(|i| sum[i] ^ words[i])),
                    )
                });
            }
        });
    });
    let rounds = 1 << 22;
    let fma = best((rounds * fma_flops() * threads) as f64, &|| {
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(move || black_box(fma_rounds(rounds)));
            }
        });
    });
    let ceilings = format!("{threads} threads; ceilings {:.1} GB/s read, {:.0} GFLOP/s", bandwidth / 1e9, fma / 1e9);
    if markdown {
        println!("\n{ceilings}\n\n| bench | min, µs | median, µs | GB/s | bw | GFLOP/s | fma |");
        println!("|---|--:|--:|--:|--:|--:|--:|");
    } else {
        println!("{ceilings}");
    }
    (bandwidth, fma)
}

/// Operations of one round of [`fma_rounds`]; 0 where it has none.
fn fma_flops() -> usize {
    #[cfg(target_arch = "x86_64")]
    match Level::available().last() {
        Some(Level::Avx512) => return 16 * 16 * 2,
        Some(Level::Avx2) => return 12 * 8 * 2,
        _ => {}
    }
    0
}

/// Independent chains of multiply-adds, enough to hide their latency.
fn fma_rounds(rounds: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        fn avx512(rounds: usize) -> f32 {
            let (a, b) = (_mm512_set1_ps(0.999), _mm512_set1_ps(0.001));
            let mut sums = [b; 16];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, a, b);
                }
            }
            sums.iter().map(|&s| _mm512_reduce_add_ps(s)).sum()
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(rounds: usize) -> f32 {
            let (a, b) = (_mm256_set1_ps(0.999), _mm256_set1_ps(0.001));
            let mut sums = [b; 12];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm256_fmadd_ps(*sum, a, b);
                }
            }
            sums.iter().map(|&s| _mm256_cvtss_f32(s)).sum()
        }
        match Level::available().last() {
            // SAFETY: `available` saw AVX-512 F on this CPU.
            Some(Level::Avx512) => return unsafe { avx512(rounds) },
            // SAFETY: `available` saw AVX2 and FMA on this CPU.
            Some(Level::Avx2) => return unsafe { avx2(rounds) },
            _ => {}
        }
    }
    rounds as f32
}
