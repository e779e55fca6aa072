//! What every operator's test uses.

use fir::Exec;
use fir::exec::Level;
use fir::reference::Precision;
use fir::testing::{Compare, compare};
use fir::{DType, TensorRef};

/// Calls `check` with an executor of every level this CPU has, with one and with three threads; says what it skips.
pub(crate) fn every_exec(check: impl Fn(&Exec)) {
    for level in Level::ALL {
        if !Level::available().contains(&level) {
            eprintln!("skipped: this CPU has no {level}");
            continue;
        }
        for threads in [1, 3] {
            check(&Exec::cpu_with(level, threads).unwrap());
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
    let naive = match got.dtype() {
        // fp8 outputs come from bf16-sized arithmetic: the rounding of the output is in the comparer's ulp.
        DType::E4M3 | DType::E5M2 => DType::BF16,
        d => d,
    };
    let (exact, naive) = (reference(Precision::Exact).unwrap(), reference(Precision::Naive(naive)).unwrap());
    if let Err(e) = compare(got, Compare { exact: &exact, naive: &naive, row }) {
        panic!("{what}: {e}");
    }
}

/// The float types operators take and give.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
