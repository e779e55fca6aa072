use fir::testing::Rng;
use fir::{Tensor, norm, reference};

use crate::support::{FLOATS, assert_matches, every_exec};

#[test]
fn rms_norm_matches_reference_at_every_tail_length() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for dtype in FLOATS {
            for hidden in (1..70).chain([128, 576, 4096]) {
                let (x, w) = (rng.tensor(dtype, &[5, hidden]), rng.tensor(dtype, &[hidden]));
                let mut out = Tensor::zeros(dtype, &[5, hidden]).unwrap();
                norm::rms_norm(exec, x.view(), w.view(), 1e-6, out.view_mut()).unwrap();
                assert_matches(&format!("{exec:?} {dtype} {hidden}"), out.view(), hidden, |p| {
                    reference::norm::rms_norm(p, x.view(), w.view(), 1e-6)
                });
            }
        }
    });
}
