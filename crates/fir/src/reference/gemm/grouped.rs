//! Products of many matrices.

use super::scaled::{scaled_gemm, scaled_values};
use crate::error::Result;
use crate::kv::Ragged;
use crate::reference::Precision;
use crate::tensor::Scaled;

/// `out[i, j] = Σ_l x[i, l] * w[weights[g], j, l]` for the rows `i` of group `g`; values are data times scale.
pub fn grouped_gemm(
    p: Precision,
    x: Scaled<'_>,
    indptr: &Ragged,
    w: Scaled<'_>,
    weights: &[usize],
) -> Result<Vec<f64>> {
    let (n, k) = (w.data.shape()[1], w.data.shape()[2]);
    let x = scaled_values(p, x)?;
    let mut out = Vec::new();
    for (g, rows) in indptr.indptr().windows(2).enumerate() {
        let w = scaled_values(p, w.select(weights[g])?)?;
        for i in rows[0] as usize..rows[1] as usize {
            for j in 0..n {
                let mut sum = 0.0;
                for l in 0..k {
                    sum = p.acc(sum + p.acc(x[i * k + l] * w[j * k + l]));
                }
                out.push(p.store(sum));
            }
        }
    }
    Ok(out)
}

/// `out[b, i, j] = Σ_l x[b, i, l] * w[b, j, l]`; values are data times scale.
pub fn batched_gemm(p: Precision, x: Scaled<'_>, w: Scaled<'_>) -> Result<Vec<f64>> {
    let mut out = Vec::new();
    for b in 0..x.data.shape()[0] {
        out.extend(scaled_gemm(p, x.select(b)?, w.select(b)?)?);
    }
    Ok(out)
}
