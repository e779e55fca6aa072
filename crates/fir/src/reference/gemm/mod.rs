//! Matrix products.

mod blocks;
mod grouped;
mod scaled;

pub use self::{
    blocks::{block_gemm, dequantize_blocks, product_weights},
    grouped::{batched_gemm, grouped_gemm},
    scaled::{scaled_gemm, scaled_values},
};
use crate::error::Result;
use crate::reference::{Precision, values};
use crate::tensor::TensorRef;

/// `out[i, j] = Σ_l x[i, l] * w[j, l]`.
pub fn gemm(p: Precision, x: TensorRef<'_>, w: TensorRef<'_>) -> Result<Vec<f64>> {
    Ok(sums(p, x, w)?.into_iter().map(|sum| p.store(sum)).collect())
}

/// `out[i, j] = Σ_l x[i, l] * w[j, l] + bias[j]`.
pub fn gemm_bias(p: Precision, x: TensorRef<'_>, w: TensorRef<'_>, bias: TensorRef<'_>) -> Result<Vec<f64>> {
    let bias = values(bias)?;
    Ok(sums(p, x, w)?.into_iter().zip(bias.iter().cycle()).map(|(sum, b)| p.store(sum + b)).collect())
}

/// `out[i, j] = silu(g[i, j]) * u[i, j]`, `g` and `u` the products by the first and the second half of the rows of `w`.
pub fn gemm_silu_mul(p: Precision, x: TensorRef<'_>, w: TensorRef<'_>) -> Result<Vec<f64>> {
    let n = w.shape()[0] / 2;
    let silu = |g: f64| g * (1.0 / p.acc(1.0 + p.acc((-g).exp())));
    Ok(gemm(p, x, w)?
        .chunks(2 * n.max(1))
        .flat_map(|row| row[..n].iter().zip(&row[n..]).map(|(&g, &u)| p.store(p.store(silu(g)) * u)))
        .collect())
}

/// `out[i, j] = residual[i, j] + Σ_l x[i, l] * w[j, l]`.
pub fn gemm_add(p: Precision, x: TensorRef<'_>, w: TensorRef<'_>, residual: TensorRef<'_>) -> Result<Vec<f64>> {
    Ok(sums(p, x, w)?.into_iter().zip(values(residual)?).map(|(sum, r)| p.store(p.store(sum) + r)).collect())
}

fn sums(p: Precision, x: TensorRef<'_>, w: TensorRef<'_>) -> Result<Vec<f64>> {
    let (m, n, k) = (x.shape()[0], w.shape()[0], x.shape()[1]);
    let (x, w) = (values(x)?, values(w)?);
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let mut sum = 0.0;
            for l in 0..k {
                sum = p.acc(sum + p.acc(x[i * k + l] * w[j * k + l]));
            }
            out.push(sum);
        }
    }
    Ok(out)
}
