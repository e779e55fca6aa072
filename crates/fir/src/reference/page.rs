//! Writing tokens into a paged cache.

use super::{Precision, round, values};
use crate::error::Result;
use crate::tensor::{DType, E2M1_VALUES, TensorRef};

/// The values stored in `cache: [pages, page_size, …]` (not fp4) after token `t`, a row of `x`, went to
/// `slots[t] = page * page_size + offset`: `x / scale` there, what it was elsewhere. `None` goes nowhere.
pub fn append(
    p: Precision,
    cache: TensorRef<'_>,
    x: TensorRef<'_>,
    slots: &[Option<usize>],
    scale: f32,
) -> Result<Vec<f64>> {
    let x = values(x)?;
    append_values(p, cache, &x, slots, scale)
}

/// As [`append`], for tokens given as numbers.
pub fn append_values(
    p: Precision,
    cache: TensorRef<'_>,
    x: &[f64],
    slots: &[Option<usize>],
    scale: f32,
) -> Result<Vec<f64>> {
    let row: usize = cache.shape()[2..].iter().product();
    let mut out = values(cache)?;
    for (t, slot) in slots.iter().enumerate() {
        if let Some(slot) = slot {
            for i in 0..row {
                out[slot * row + i] = p.store(p.acc(x[t * row + i] / f64::from(scale)));
            }
        }
    }
    Ok(out)
}

/// NVFP4 of one row: the e2m1 codes, one per element, and the values of the block scales, one per 16.
pub fn nvfp4(p: Precision, x: &[f64], scale: f32) -> (Vec<u8>, Vec<f64>) {
    let scale = f64::from(scale);
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks(16) {
        let mut largest = 0.0f64;
        for &x in block {
            largest = if x.is_nan() || x.abs() > largest { x.abs() } else { largest };
            if largest.is_nan() {
                break;
            }
        }
        let block_scale = round(DType::E4M3, p.acc(largest / p.acc(6.0 * scale)));
        let unit = p.acc(block_scale * scale);
        for &x in block {
            // A block too small for any scale is zero.
            let x = if unit == 0.0 { 0.0 * x } else { p.acc(x / unit) };
            codes.push(nearest_e2m1(x));
        }
        scales.push(block_scale);
    }
    (codes, scales)
}

/// Code of the nearest e2m1, of two equally near the even one; 0 for NaN.
fn nearest_e2m1(x: f64) -> u8 {
    let mut best = 0u8;
    let distance = |code: u8| (f64::from(E2M1_VALUES[code as usize]) - x.abs().min(6.0)).abs();
    for code in 1..8u8 {
        if distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 == 0) {
            best = code;
        }
    }
    match () {
        () if x.is_nan() => 0,
        () if x.is_sign_negative() => best | 8,
        () => best,
    }
}
