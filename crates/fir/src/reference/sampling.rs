//! Sampling: distributions by sorting, tokens by walking the cumulative sum.

use super::{Precision, values};
use crate::error::Result;
use crate::filters::{FilterOrder, Filters, PerRow};
use crate::tensor::TensorRef;

/// `out[b, i] = exp(logits[b, i] / T) / Σ_j exp(logits[b, j] / T)`; at `T = 0` 1 for the first largest logit. NaN for a
/// row with a NaN or of -inf alone; +inf takes all the mass, in equal parts.
pub fn softmax(p: Precision, logits: TensorRef<'_>, temperature: PerRow<'_, f32>) -> Result<Vec<f64>> {
    let vocab = logits.shape()[1];
    let mut x = values(logits)?;
    for (b, row) in x.chunks_mut(vocab.max(1)).enumerate() {
        let t = f64::from(temperature.get(b));
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY || row.iter().any(|x| x.is_nan()) {
            row.fill(f64::NAN);
        } else if t == 0.0 {
            let first = row.iter().position(|&x| x == max);
            row.iter_mut().enumerate().for_each(|(i, x)| *x = f64::from(u8::from(Some(i) == first)));
        } else {
            let mut sum = 0.0;
            for x in &mut *row {
                *x = match max {
                    f64::INFINITY => f64::from(u8::from(*x == max)),
                    _ => p.acc(p.acc(p.acc(*x - max) / t).exp()),
                };
                sum = p.acc(sum + *x);
            }
            row.iter_mut().for_each(|x| *x = p.store(*x / sum));
        }
    }
    Ok(x)
}

/// The rows of `probs` with what does not pass the filters set to 0 and the rest scaled to sum to 1; NaN for a row that
/// is no distribution. Row `b` has the parameters `b`.
pub fn filtered(p: Precision, probs: TensorRef<'_>, filters: &Filters<'_>) -> Result<Vec<f64>> {
    let vocab = probs.shape()[1];
    let mut x = values(probs)?;
    for (b, row) in x.chunks_mut(vocab.max(1)).enumerate() {
        filter_row(p, row, filters, b);
    }
    Ok(x)
}

/// As [`filtered`], of `softmax(logits / temperature)`.
pub fn filtered_softmax(p: Precision, logits: TensorRef<'_>, filters: &Filters<'_>) -> Result<Vec<f64>> {
    let vocab = logits.shape()[1];
    let mut x = softmax(p, logits, filters.temperature)?;
    for (b, row) in x.chunks_mut(vocab.max(1)).enumerate() {
        filter_row(p, row, filters, b);
    }
    Ok(x)
}

/// [`filtered`] by `top_k` alone.
pub fn top_k_renorm(p: Precision, probs: TensorRef<'_>, top_k: PerRow<'_, u32>) -> Result<Vec<f64>> {
    filtered(p, probs, &Filters { top_k, ..Filters::default() })
}

/// [`filtered`] by `top_p` alone.
pub fn top_p_renorm(p: Precision, probs: TensorRef<'_>, top_p: PerRow<'_, f32>) -> Result<Vec<f64>> {
    filtered(p, probs, &Filters { top_p, ..Filters::default() })
}

/// `out[b, i] = logits[b, i]` where fewer than `top_k` logits are greater, else -inf; NaN stays.
pub fn top_k_mask_logits(logits: TensorRef<'_>, top_k: PerRow<'_, u32>) -> Result<Vec<f64>> {
    let vocab = logits.shape()[1];
    let mut x = values(logits)?;
    for (b, row) in x.chunks_mut(vocab.max(1)).enumerate() {
        let mut sorted: Vec<f64> = row.iter().copied().filter(|x| !x.is_nan()).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let last = sorted.get(top_k.get(b) as usize - 1).copied().unwrap_or(f64::NEG_INFINITY);
        row.iter_mut().filter(|x| **x < last).for_each(|x| *x = f64::NEG_INFINITY);
    }
    Ok(x)
}

/// Sets to 0 what does not pass the parameters of row `b`, and scales the rest to sum to 1.
fn filter_row(p: Precision, row: &mut [f64], filters: &Filters<'_>, b: usize) {
    row.iter_mut().filter(|x| **x <= 0.0).for_each(|x| *x = 0.0);
    let total: f64 = row.iter().sum();
    if !(total > 0.0 && total.is_finite()) {
        row.fill(f64::NAN);
        return;
    }
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    // A filter lets pass everything from the value of its last element up.
    let k = (filters.top_k.get(b) as usize).min(sorted.len());
    let mut cutoff = sorted[k - 1];
    let top_p = f64::from(filters.top_p.get(b));
    if top_p < 1.0 {
        let whole = match filters.order {
            FilterOrder::Joint => total,
            FilterOrder::TopKFirst => sorted.iter().filter(|&&x| x >= cutoff).sum(),
        };
        let mut sum = 0.0;
        for &x in sorted.iter().filter(|&&x| x > 0.0) {
            sum += x;
            if sum >= top_p * whole {
                cutoff = cutoff.max(x);
                break;
            }
        }
    }
    cutoff = cutoff.max(f64::from(filters.min_p.get(b)) * sorted[0]);
    row.iter_mut().filter(|x| **x < cutoff).for_each(|x| *x = 0.0);
    let mut kept = 0.0;
    for &x in &*row {
        kept = p.acc(kept + x);
    }
    row.iter_mut().for_each(|x| *x = p.store(*x / kept));
}

/// The first `i` with `w[0] + … + w[i] > u · Σ w`, negative weights counted as 0; `None` if `w` is no distribution.
pub fn inverse_cdf(w: &[f64], u: f64) -> Option<usize> {
    let total: f64 = w.iter().map(|w| if *w < 0.0 { 0.0 } else { *w }).sum();
    if !(total > 0.0 && total.is_finite()) {
        return None;
    }
    let mut sum = 0.0;
    let mut found = None;
    for (i, &w) in w.iter().enumerate().filter(|(_, w)| **w > 0.0) {
        found = Some(i);
        sum += w;
        if sum > u * total {
            break;
        }
    }
    found
}
