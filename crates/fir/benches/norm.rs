use std::cell::RefCell;

use fir::reference::Precision;
use fir::testing::{Compare, Rng, compare};
use fir::{DType, Tensor, norm, reference};

use crate::harness::{Bench, Work};

pub(crate) fn benches(bench: &mut Bench) {
    let (tokens, hidden, eps) = (64, 4096, 1e-6);
    for dtype in [DType::F32, DType::BF16] {
        let mut rng = Rng::new(1);
        let (x, weight) = (rng.tensor(dtype, &[tokens, hidden]), rng.tensor(dtype, &[hidden]));
        let work = Work { bytes: (2 * tokens + 1) * hidden * dtype.size(), flops: 4 * tokens * hidden };
        for (level, exec) in bench.execs() {
            let out = RefCell::new(Tensor::zeros(dtype, &[tokens, hidden]).unwrap());
            let run = || norm::rms_norm(&exec, x.view(), weight.view(), eps, out.borrow_mut().view_mut()).unwrap();
            let check = |name: &str| {
                let want = |p| reference::norm::rms_norm(p, x.view(), weight.view(), eps).unwrap();
                let (exact, naive) = (want(Precision::Exact), want(Precision::Naive(dtype)));
                compare(out.borrow().view(), Compare { exact: &exact, naive: &naive, row: hidden }).expect(name);
            };
            bench.case(&format!("norm/rms_norm/h{hidden}-{dtype}/t{tokens}/{level}"), work, run, check);
        }
    }
}
