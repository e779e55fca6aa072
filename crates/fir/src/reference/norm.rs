//! Norms over rows.

use super::{Precision, round, values};
use crate::error::Result;
use crate::tensor::{DType, TensorRef};

/// `out[r, h] = x[r, h] / sqrt(mean_h(x[r, h]²) + eps) * weight[h]`, for every row `r` of the leading axes.
pub fn rms_norm(p: Precision, x: TensorRef<'_>, weight: TensorRef<'_>, eps: f32) -> Result<Vec<f64>> {
    Ok(rows(p, values(x)?, &values(weight)?, None, eps))
}

/// [`rms_norm`] with `1 + weight`.
pub fn gemma_rms_norm(p: Precision, x: TensorRef<'_>, weight: TensorRef<'_>, eps: f32) -> Result<Vec<f64>> {
    Ok(rows(p, values(x)?, &one_plus(p, weight)?, None, eps))
}

/// `residual + x`, and [`rms_norm`] of it: `(norm, residual)`.
pub fn fused_add_rms_norm(
    p: Precision,
    x: TensorRef<'_>,
    residual: TensorRef<'_>,
    weight: TensorRef<'_>,
    eps: f32,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let sum = add(p, x, residual)?;
    Ok((rows(p, sum.clone(), &values(weight)?, None, eps), sum))
}

/// `residual + x`, and [`gemma_rms_norm`] of it: `(norm, residual)`.
pub fn gemma_fused_add_rms_norm(
    p: Precision,
    x: TensorRef<'_>,
    residual: TensorRef<'_>,
    weight: TensorRef<'_>,
    eps: f32,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let sum = add(p, x, residual)?;
    Ok((rows(p, sum.clone(), &one_plus(p, weight)?, None, eps), sum))
}

/// `out[r, h] = (x[r, h] - mean) / sqrt(mean_h((x[r, h] - mean)²) + eps) * gamma[h] + beta[h]`.
pub fn layer_norm(
    p: Precision,
    x: TensorRef<'_>,
    gamma: TensorRef<'_>,
    beta: TensorRef<'_>,
    eps: f32,
) -> Result<Vec<f64>> {
    Ok(rows(p, values(x)?, &values(gamma)?, Some(&values(beta)?), eps))
}

/// `s = residual + x * x_scale * gate`, and its layer norm times `scale` plus `shift`, all of them one number per element:
/// `(out, s)`. See [`modulated_layer_norm`](crate::norm::modulated_layer_norm).
pub fn modulated_layer_norm(
    p: Precision,
    x: TensorRef<'_>,
    residual: &[f64],
    [gate, scale, shift]: [&[f64]; 3],
    eps: f32,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let hidden = x.shape().last().copied().unwrap_or(0);
    let terms = values(x)?.into_iter().zip(gate).zip(residual);
    let sum: Vec<f64> = terms.map(|((x, g), r)| p.store(p.store(x * g) + r)).collect();
    let (ones, zeros) = (vec![1.0; hidden], vec![0.0; hidden]);
    let norm = rows(p, sum.clone(), &ones, Some(&zeros), eps);
    let out = norm.iter().zip(scale).zip(shift).map(|((y, a), b)| p.store(p.store(y * a) + b)).collect();
    Ok((out, sum))
}

/// A norm divided by `scale`, and cut to the largest number of `dtype`; not rounded to it.
pub fn quantized(p: Precision, norm: Vec<f64>, scale: f32, dtype: DType) -> Vec<f64> {
    let largest = round(dtype, f64::from(f32::MAX));
    norm.into_iter().map(|x| p.acc(x / f64::from(scale)).clamp(-largest, largest)).collect()
}

fn one_plus(p: Precision, weight: TensorRef<'_>) -> Result<Vec<f64>> {
    Ok(values(weight)?.into_iter().map(|w| p.acc(1.0 + w)).collect())
}

fn add(p: Precision, x: TensorRef<'_>, residual: TensorRef<'_>) -> Result<Vec<f64>> {
    Ok(values(x)?.into_iter().zip(values(residual)?).map(|(x, r)| p.store(x + r)).collect())
}

fn rows(p: Precision, mut x: Vec<f64>, weight: &[f64], bias: Option<&[f64]>, eps: f32) -> Vec<f64> {
    for row in x.chunks_mut(weight.len().max(1)) {
        let n = row.len() as f64;
        if bias.is_some() {
            let mut sum = 0.0;
            for &x in &*row {
                sum = p.acc(sum + x);
            }
            let mean = p.acc(sum / n);
            for x in &mut *row {
                *x = p.acc(*x - mean);
            }
        }
        let mut sum = 0.0;
        for &x in &*row {
            sum = p.acc(sum + p.acc(x * x));
        }
        let scale = p.acc(1.0 / p.acc(sum / n + f64::from(eps)).sqrt());
        for (h, x) in row.iter_mut().enumerate() {
            *x = p.store(p.store(*x * scale) * weight[h]);
            if let Some(bias) = bias {
                *x = p.store(*x + bias[h]);
            }
        }
    }
    x
}
