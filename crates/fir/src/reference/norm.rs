//! Norms over rows.

use super::{Precision, values};
use crate::error::Result;
use crate::tensor::TensorRef;

/// `out[r, h] = x[r, h] / sqrt(mean_h(x[r, h]²) + eps) * weight[h]`, for every row `r` of the leading axes.
pub fn rms_norm(p: Precision, x: TensorRef<'_>, weight: TensorRef<'_>, eps: f32) -> Result<Vec<f64>> {
    let (mut x, weight) = (values(x)?, values(weight)?);
    for row in x.chunks_mut(weight.len().max(1)) {
        let mut sum = 0.0;
        for &x in &*row {
            sum = p.acc(sum + p.acc(x * x));
        }
        let scale = p.acc(1.0 / p.acc(sum / row.len() as f64 + f64::from(eps)).sqrt());
        for (x, w) in row.iter_mut().zip(&weight) {
            *x = p.store(p.store(*x * scale) * w);
        }
    }
    Ok(x)
}
