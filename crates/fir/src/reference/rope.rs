//! Rotary embedding.

use super::{Precision, values};
use crate::error::Result;
use crate::tensor::TensorRef;
use crate::variant::{Rope, frequencies};

/// Rotates each head of `x: [nnz, heads, head_dim]` by its token's position: the pair `(x, y)` of elements
/// `(i, i + rotary_dim / 2)`, or `(2i, 2i + 1)` when interleaved, becomes `(x cos a - y sin a, y cos a + x sin a)` with
/// `a = position * frequency[i]`.
///
/// Angles are f64 in both precisions: an f32 angle at position 10⁶ is wrong in its second digit, which no code should
/// be measured by.
pub fn apply_rope(p: Precision, x: TensorRef<'_>, positions: &[i64], rope: &Rope) -> Result<Vec<f64>> {
    let frequencies = frequencies(rope, x.shape()[2]);
    rotate(p, x, rope.interleave, frequencies.len(), |t, i| {
        let (sin, cos) = (positions[t] as f64 * frequencies[i]).sin_cos();
        (p.acc(cos), p.acc(sin))
    })
}

/// [`apply_rope`], stored, then divided by `scale` and stored again: what a fused rotation and quantization is worth.
pub fn rope_quantize(p: Precision, x: TensorRef<'_>, positions: &[i64], rope: &Rope, scale: f32) -> Result<Vec<f64>> {
    let rotated = apply_rope(p, x, positions, rope)?;
    Ok(rotated.into_iter().map(|x| p.store(p.acc(x / f64::from(scale)))).collect())
}

/// As [`apply_rope`], with cosines and sines from `table: [max_position, rotary_dim]`.
pub fn apply_rope_with_cache(
    p: Precision,
    x: TensorRef<'_>,
    positions: &[i64],
    table: TensorRef<'_>,
    interleave: bool,
) -> Result<Vec<f64>> {
    let dim = table.shape()[1];
    let table = values(table)?;
    rotate(p, x, interleave, dim / 2, |t, i| {
        let row = &table[positions[t] as usize * dim..][..dim];
        (row[i], row[i + dim / 2])
    })
}

/// `[max_position, rotary_dim]`: cosines, then sines, of every position.
pub fn cos_sin_cache(p: Precision, rope: &Rope, max_position: usize, rotary_dim: usize) -> Result<Vec<f64>> {
    let frequencies = frequencies(rope, rotary_dim);
    let mut out = Vec::new();
    for position in 0..max_position {
        out.extend(frequencies.iter().map(|f| p.store((position as f64 * f).cos())));
        out.extend(frequencies.iter().map(|f| p.store((position as f64 * f).sin())));
    }
    Ok(out)
}

/// Rotates `pairs` pairs of each row by `turn(token, pair) = (cos, sin)`.
fn rotate(
    p: Precision,
    x: TensorRef<'_>,
    interleave: bool,
    pairs: usize,
    turn: impl Fn(usize, usize) -> (f64, f64),
) -> Result<Vec<f64>> {
    let (heads, dim) = (x.shape()[1], x.shape()[2]);
    let mut x = values(x)?;
    for (r, row) in x.chunks_mut(dim.max(1)).enumerate() {
        for i in 0..pairs {
            let (a, b) = if interleave { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
            let (cos, sin) = turn(r / heads, i);
            let (x, y) = (row[a], row[b]);
            row[a] = p.store(p.acc(x * cos) - p.acc(y * sin));
            row[b] = p.store(p.acc(y * cos) + p.acc(x * sin));
        }
    }
    Ok(x)
}
