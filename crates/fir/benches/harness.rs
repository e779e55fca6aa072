//! Timing: a warm-up, then the median of many runs.

use std::time::{Duration, Instant};

use fir::Exec;
use fir::exec::Level;

/// What one run moves and computes; a bench states both.
#[derive(Clone, Copy, Default)]
pub(crate) struct Work {
    /// Bytes read and written, each once.
    pub(crate) bytes: usize,
    /// Additions and multiplications.
    pub(crate) flops: usize,
}

/// Runs benches whose name contains the filter, and prints a line for each.
pub(crate) struct Bench {
    filter: String,
    timed: bool,
    count: usize,
}

impl Bench {
    /// `cargo bench` passes `--bench`; without it nothing is timed.
    pub(crate) fn from_args() -> Self {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let filter = args.iter().find(|a| !a.starts_with('-')).cloned().unwrap_or_default();
        Self { filter, timed: args.iter().any(|a| a == "--bench"), count: 0 }
    }

    /// Executors of every level this CPU has, on all its cores, lowest first.
    pub(crate) fn execs(&self) -> Vec<(Level, Exec)> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Level::available().into_iter().map(|l| (l, Exec::cpu_with(l, threads).expect("an available level"))).collect()
    }

    /// Times `run`, after one call and `check`.
    ///
    /// `name` is a path: operator, problem, batch, level; `norm/rms_norm/h4096-bf16/t64/avx512`.
    pub(crate) fn case(&mut self, name: &str, work: Work, mut run: impl FnMut(), check: impl FnOnce(&str)) {
        if !name.contains(&self.filter) {
            return;
        }
        self.count += 1;
        run();
        check(name);
        if !self.timed {
            return;
        }
        let median = median(&mut run).as_secs_f64();
        let rate = |n: usize| n as f64 / median * 1e-9;
        println!("bench\t{name}\t{:.2}\t{:.1}\t{:.1}", median * 1e6, rate(work.bytes), rate(work.flops));
    }

    /// The closing line; in a check, in the form of a test binary's, so that it is counted as one.
    pub(crate) fn finish(self) {
        if self.timed {
            println!("{} benches", self.count);
        } else {
            println!("test result: ok. {} passed; 0 failed; 0 ignored; benches checked, not timed", self.count);
        }
    }
}

/// Median time of a run: 100 ms of warm-up, then at least 11 runs and at least half a second.
fn median(run: &mut impl FnMut()) -> Duration {
    let time = |run: &mut dyn FnMut()| {
        let start = Instant::now();
        run();
        start.elapsed()
    };
    let warm = Instant::now();
    while warm.elapsed() < Duration::from_millis(100) {
        run();
    }
    let (mut times, begin) = (Vec::new(), Instant::now());
    while times.len() < 11 || begin.elapsed() < Duration::from_millis(500) {
        times.push(time(run));
    }
    times.sort_unstable();
    times[times.len() / 2]
}
