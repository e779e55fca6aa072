//! Gated activations.

use super::{Precision, values};
use crate::error::Result;
use crate::tensor::TensorRef;

/// `out[r, i] = silu(x[r, i]) * x[r, d + i]`, `silu(g) = g / (1 + e^-g)`, for every row `r` of the leading axes.
pub fn silu_and_mul(p: Precision, x: TensorRef<'_>) -> Result<Vec<f64>> {
    and_mul(p, x, |g| silu(p, g))
}

/// `g / (1 + e^-g)`.
pub fn silu(p: Precision, g: f64) -> f64 {
    g * (1.0 / p.acc(1.0 + p.acc((-g).exp())))
}

/// `out[r, i] = gelu(x[r, i]) * x[r, d + i]`, `gelu(g) = g / 2 * (1 + erf(g / √2))`.
pub fn gelu_and_mul(p: Precision, x: TensorRef<'_>) -> Result<Vec<f64>> {
    and_mul(p, x, |g| gelu(p, g))
}

/// `g / 2 * (1 + erf(g / √2))`.
pub fn gelu(p: Precision, g: f64) -> f64 {
    g * 0.5 * p.acc(1.0 + p.acc(erf(p.acc(g * std::f64::consts::FRAC_1_SQRT_2))))
}

/// `out[r, i] = gelu(x[r, i]) * x[r, d + i]`, `gelu(g) = g / 2 * (1 + tanh(√(2/π) * (g + 0.044715 * g³)))`.
pub fn gelu_tanh_and_mul(p: Precision, x: TensorRef<'_>) -> Result<Vec<f64>> {
    and_mul(p, x, |g| gelu_tanh(p, g))
}

/// `g / 2 * (1 + tanh(√(2/π) * (g + 0.044715 * g³)))`.
pub fn gelu_tanh(p: Precision, g: f64) -> f64 {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    g * 0.5 * p.acc(1.0 + p.acc(p.acc(c * p.acc(g + p.acc(0.044715 * g * g * g))).tanh()))
}

fn and_mul(p: Precision, x: TensorRef<'_>, act: impl Fn(f64) -> f64) -> Result<Vec<f64>> {
    let d = x.shape().last().map_or(0, |w| w / 2);
    let x = values(x)?;
    Ok(x.chunks(2 * d.max(1))
        .flat_map(|row| row[..d].iter().zip(&row[d..]).map(|(&g, &u)| p.store(p.store(act(g)) * u)))
        .collect())
}

/// The error function, to 1e-14.
pub fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    // 2/√π e^-x² Σ 2^k x^(2k+1) / (2k+1)!!: all terms of one sign, so nothing cancels.
    let (mut sum, mut term, mut k) = (0.0, x, 0.0);
    while term.abs() > 1e-18 * f64::abs(sum) {
        sum += term;
        k += 1.0;
        term *= 2.0 * x * x / (2.0 * k + 1.0);
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::erf;

    #[test]
    fn erf_matches_tables() {
        for (x, want) in [
            (0.0, 0.0),
            (0.1, 0.112_462_916_018_284_89),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.5, 0.999_999_256_901_627_7),
            (7.0, 1.0),
        ] {
            assert!((erf(x) - want).abs() < 1e-14 && (erf(-x) + want).abs() < 1e-14, "{x}: {}", erf(x));
        }
        assert!(erf(f64::NAN).is_nan());
    }
}
