//! What every operator's test uses.

use fir::Exec;
use fir::exec::Level;
use fir::reference::Precision;
use fir::testing::{Compare, compare};
use fir::{DType, TensorRef};

/// Calls `check` with an executor of every level this CPU has, with one and with three threads, and with the GPU, which
/// takes the tests' host tensors by staging; says what it skips.
#[expect(clippy::print_stderr, reason = "a skip must be seen")]
#[track_caller]
pub(crate) fn every_exec(check: impl Fn(&Exec)) {
    // `FIR_TEST_GPU_ONLY=1`, for sanitizers of GPU code: minutes of the CPU's kernels say nothing there.
    let gpu_alone = std::env::var("FIR_TEST_GPU_ONLY").is_ok_and(|v| v == "1");
    for level in Level::ALL {
        if gpu_alone {
            eprintln!("skipped: {level}, as FIR_TEST_GPU_ONLY=1");
            continue;
        }
        if !Level::available().contains(&level) {
            eprintln!("skipped: this CPU has no {level}");
            continue;
        }
        for threads in [1, 3] {
            check(&Exec::cpu_with(level, threads).unwrap());
        }
    }
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gpu() {
        let file = std::path::Path::new(std::panic::Location::caller().file());
        let family = file.strip_prefix(file.ancestors().find(|a| a.ends_with("it")).unwrap()).unwrap();
        let name = family.iter().next().unwrap().to_string_lossy();
        if crate::matrix::NOT_ON_CUDA.contains(&name.trim_end_matches(".rs")) {
            eprintln!("skipped on the GPU: {} (it is in NOT_ON_CUDA of tests/it/matrix.rs)", family.display());
        } else {
            check(gpu);
        }
    }
}

/// The GPU, if there is one; else says so once, and fails when there must be one.
#[cfg(feature = "cuda")]
#[expect(clippy::print_stderr, reason = "a skip must be seen")]
pub(crate) fn gpu() -> Option<&'static Exec> {
    static GPU: std::sync::OnceLock<Option<Exec>> = std::sync::OnceLock::new();
    GPU.get_or_init(|| match fir::exec::Gpu::new(0) {
        Ok(gpu) => Some(Exec::Cuda(gpu.staged())),
        Err(e) if std::env::var(fir::env::FIR_REQUIRE_GPU).is_ok_and(|v| v == "1") => panic!("{e}"),
        Err(e) => {
            eprintln!("skipped on the GPU: {e}");
            None
        }
    })
    .as_ref()
}

/// The cases that a GPU's kernels tell apart, if there is one; else the first `few` of them, which do for the CPU's.
pub(crate) fn cases_of<T>(all: &[T], few: usize) -> &[T] {
    #[cfg(feature = "cuda")]
    if gpu().is_some() {
        return all;
    }
    &all[..few]
}

/// A reference's results, for outputs of one type: computed once where several executors are compared with them.
pub(crate) struct Wanted {
    exact: Vec<f64>,
    naive: Vec<f64>,
}

impl Wanted {
    /// `reference`: its function of the precision.
    #[track_caller]
    pub(crate) fn of(out: DType, reference: impl Fn(Precision) -> fir::Result<Vec<f64>>) -> Self {
        let naive = match out {
            // fp8 outputs come from bf16-sized arithmetic: the rounding of the output is in the comparer's ulp.
            DType::E4M3 | DType::E5M2 => DType::BF16,
            d => d,
        };
        Self { exact: reference(Precision::Exact).unwrap(), naive: reference(Precision::Naive(naive)).unwrap() }
    }

    #[track_caller]
    pub(crate) fn check(&self, what: &str, got: TensorRef<'_>, row: usize) {
        if let Err(e) = compare(got, Compare { exact: &self.exact, naive: &self.naive, row }) {
            panic!("{what}: {e}");
        }
    }
}

/// Compares `got` with a reference, given as its function of the precision.
#[track_caller]
pub(crate) fn assert_matches(
    what: &str,
    got: TensorRef<'_>,
    row: usize,
    reference: impl Fn(Precision) -> fir::Result<Vec<f64>>,
) {
    Wanted::of(got.dtype(), reference).check(what, got, row);
}

/// Checks by Pearson's statistic that tokens were drawn from `dist`, with a bound that a right sampler exceeds but once
/// in a million. Tokens expected fewer than 5 times count as one, as the statistic's law needs.
#[track_caller]
pub(crate) fn assert_distributed(what: &str, tokens: impl Iterator<Item = i32>, dist: &[f64]) {
    let mut counts = vec![0usize; dist.len()];
    tokens.for_each(|t| counts[t as usize] += 1);
    let n: usize = counts.iter().sum();
    let (mut chi2, mut cells, mut rare) = (0.0, 0.0, (0.0, 0.0));
    let term = |count: f64, expected: f64| (count - expected).powi(2) / expected;
    for (t, (&count, &p)) in counts.iter().zip(dist).enumerate() {
        let expected = n as f64 * p;
        assert!(p > 0.0 || count == 0, "{what}: token {t} has no mass and was drawn {count} times");
        if expected >= 5.0 {
            chi2 += term(count as f64, expected);
            cells += 1.0;
        } else {
            rare = (rare.0 + count as f64, rare.1 + expected);
        }
    }
    if rare.1 > 0.0 {
        chi2 += term(rare.0, rare.1);
        cells += 1.0;
    }
    let df = f64::max(cells - 1.0, 1.0);
    let bound = df + 5.0 * (2.0 * df).sqrt() + 10.0;
    assert!(n > 0 && chi2 < bound, "{what}: {chi2} >= {bound}: {counts:?} for {dist:?}");
}

/// The float types operators take and give.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
