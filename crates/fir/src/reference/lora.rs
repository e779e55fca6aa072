//! Low-rank adapters of experts.

use super::{Precision, values};
use crate::error::Result;
use crate::tensor::TensorRef;

/// Every pair's product with the matrix of its adapter and expert, times its factor; zeros for a pair `(row of x, adapter,
/// expert)` whose adapter is negative. See [`adapt`](crate::lora::adapt).
pub fn adapted(
    p: Precision,
    x: TensorRef<'_>,
    weights: TensorRef<'_>,
    pairs: &[(usize, i64, usize)],
    factors: &[f64],
) -> Result<Vec<f64>> {
    let (n, k, experts) = (weights.shape()[2], weights.shape()[3], weights.shape()[1]);
    let (x, weights) = (values(x)?, values(weights)?);
    let mut out = Vec::new();
    for (&(row, adapter, expert), factor) in pairs.iter().zip(factors) {
        for j in 0..n {
            let Ok(adapter) = usize::try_from(adapter) else {
                out.push(0.0);
                continue;
            };
            let w = &weights[((adapter * experts + expert) * n + j) * k..][..k];
            let products = w.iter().zip(&x[row * k..][..k]);
            out.push(p.acc(products.fold(0.0, |sum, (w, x)| p.acc(sum + p.acc(w * x))) * factor));
        }
    }
    Ok(out)
}
