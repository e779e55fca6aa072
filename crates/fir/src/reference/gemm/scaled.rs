//! Products of fp8 with scales.

use crate::error::Result;
use crate::reference::{Precision, values};
use crate::tensor::Scaled;

/// `out[i, j] = Σ_l (x[i, l] * x_scale) * (w[j, l] * w_scale)`.
pub fn scaled_gemm(p: Precision, x: Scaled<'_>, w: Scaled<'_>) -> Result<Vec<f64>> {
    let (m, n, k) = (x.data.shape()[0], w.data.shape()[0], x.data.shape()[1]);
    let (x, w) = (scaled_values(p, x)?, scaled_values(p, w)?);
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

/// What the elements of a matrix stand for.
pub fn scaled_values(p: Precision, x: Scaled<'_>) -> Result<Vec<f64>> {
    let (rows, k) = (x.data.shape()[0], x.data.shape()[1]);
    let mut out = values(x.data)?;
    if let Some(scales) = x.scales {
        let (scales, [_, column_blocks]) = (values(scales)?, x.block.counts(rows, k));
        for (i, out) in out.iter_mut().enumerate() {
            let at = i / k / x.block.rows * column_blocks + i % k / x.block.columns;
            *out = p.acc(*out * scales[at]);
        }
    }
    Ok(out)
}
