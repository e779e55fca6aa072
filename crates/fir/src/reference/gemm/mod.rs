//! Dense matrix products.

mod blocks;

pub use blocks::{block_gemm, dequantize_blocks};

use crate::error::Result;
use crate::reference::{Precision, values};
use crate::tensor::TensorRef;

/// `out[i, j] = Σ_l x[i, l] * w[j, l]`.
pub fn gemm(p: Precision, x: TensorRef<'_>, w: TensorRef<'_>) -> Result<Vec<f64>> {
    let (m, n, k) = (x.shape()[0], w.shape()[0], x.shape()[1]);
    let (x, w) = (values(x)?, values(w)?);
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let mut sum = 0.0;
            for l in 0..k {
                sum = p.acc(sum + p.acc(x[i * k + l] * w[j * k + l]));
            }
            out.push(p.store(sum));
        }
    }
    Ok(out)
}
