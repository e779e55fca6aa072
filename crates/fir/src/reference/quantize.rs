//! Numbers in fewer bits. Results are the numbers that codes stand for, without the scale, and the scales.

use super::{Precision, round, values};
use crate::error::Result;
use crate::tensor::{Block, DType, E2m1x2, TensorRef};

/// `scales[b] = max(max|x| / largest, 2^-126)`, `stored = fp8(x * (1 / scales[b]))`: `(stored, scales)` of `[rows, k]`.
pub fn quantize_fp8(p: Precision, x: TensorRef<'_>, block: Block, dtype: DType) -> Result<(Vec<f64>, Vec<f64>)> {
    let (rows, k) = (x.shape()[0], x.shape()[1]);
    let [row_blocks, column_blocks] = block.counts(rows, k);
    let mut largest = vec![0.0f64; row_blocks * column_blocks];
    for (i, &x) in values(x)?.iter().enumerate() {
        let at = block_of(block, column_blocks, i / k, i % k);
        // `max` passes NaN over; an infinity counts as the largest f32.
        largest[at] = largest[at].max(x.abs().min(f64::from(f32::MAX)));
    }
    let of_format = largest_of(dtype);
    let scales: Vec<f64> = largest.iter().map(|x| p.acc(x / of_format).max(2f64.powi(-126))).collect();
    Ok((quantize_fp8_with_scales(p, x, &scales, block, dtype)?, scales))
}

/// `stored = fp8(x * (1 / scales[b]))`, beyond the largest number that.
pub fn quantize_fp8_with_scales(
    p: Precision,
    x: TensorRef<'_>,
    scales: &[f64],
    block: Block,
    dtype: DType,
) -> Result<Vec<f64>> {
    let (rows, k) = (x.shape()[0], x.shape()[1]);
    let [_, column_blocks] = block.counts(rows, k);
    let of = |(i, x): (usize, f64)| {
        let y = p.acc(x * p.acc(1.0 / scales[block_of(block, column_blocks, i / k, i % k)]));
        round(dtype, y.clamp(-largest_of(dtype), largest_of(dtype)))
    };
    Ok(values(x)?.into_iter().enumerate().map(of).collect())
}

/// `x * scales[b]`, of `[rows, k]`.
pub fn dequantize_fp8(p: Precision, x: TensorRef<'_>, scales: &[f64], block: Block) -> Result<Vec<f64>> {
    let (rows, k) = (x.shape()[0], x.shape()[1]);
    let [_, column_blocks] = block.counts(rows, k);
    let of = |(i, x): (usize, f64)| p.store(x * scales[block_of(block, column_blocks, i / k, i % k)]);
    Ok(values(x)?.into_iter().enumerate().map(of).collect())
}

/// Which block the element `(r, c)` is in.
fn block_of(block: Block, column_blocks: usize, r: usize, c: usize) -> usize {
    r / block.rows * column_blocks + c / block.columns
}

fn largest_of(dtype: DType) -> f64 {
    round(dtype, f64::from(f32::MAX))
}

/// MXFP8: `scale = 2^e`, the least with `max|x| <= largest * 2^e` over 32 elements, `stored = fp8(x / 2^e)`.
pub fn quantize_mxfp8(x: TensorRef<'_>, dtype: DType) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut stored, mut scales) = (Vec::new(), Vec::new());
    for block in values(x)?.chunks(32) {
        let scale = power_for(block.iter().fold(0.0, |m, x| f64::max(m, x.abs())), largest_of(dtype));
        stored.extend(block.iter().map(|x| round(dtype, (x / scale).clamp(-largest_of(dtype), largest_of(dtype)))));
        scales.push(scale);
    }
    Ok((stored, scales))
}

/// MXFP4: `scale = 2^e`, the least with `max|x| <= 6 * 2^e` over 32 elements, NaN for a block with one;
/// `stored = e2m1(x / 2^e)`.
pub fn quantize_mxfp4(x: TensorRef<'_>) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut stored, mut scales) = (Vec::new(), Vec::new());
    for block in values(x)?.chunks(32) {
        let nan = block.iter().any(|x| x.is_nan());
        let scale = if nan { f64::NAN } else { power_for(block.iter().fold(0.0, |m, x| f64::max(m, x.abs())), 6.0) };
        stored.extend(block.iter().map(|x| f64::from(E2m1x2::from_f32([(x / scale) as f32, 0.0]).to_f32()[0])));
        scales.push(scale);
    }
    Ok((stored, scales))
}

/// NVFP4: `scale[b] = e4m3(max|x| / (6 * scale))` over 16 elements, `stored = e2m1(x / (scale[b] * scale))`.
pub fn quantize_nvfp4(p: Precision, x: TensorRef<'_>, scale: f32) -> Result<(Vec<f64>, Vec<f64>)> {
    let (codes, scales) = super::page::nvfp4(p, &values(x)?, scale);
    Ok((codes.into_iter().map(|code| f64::from(E2m1x2(code).to_f32()[0])).collect(), scales))
}

/// `stored[i] * (scales[i / block] * scale)`, for any format of blocks.
pub fn dequantize(p: Precision, stored: &[f64], scales: &[f64], block: usize, scale: f32) -> Vec<f64> {
    let unit = |i: usize| p.acc(scales[i / block] * f64::from(scale));
    stored.iter().enumerate().map(|(i, x)| p.store(x * unit(i))).collect()
}

/// The least power of two from `2^-127` to `2^127` that, times `of_format`, is at least `largest`.
fn power_for(largest: f64, of_format: f64) -> f64 {
    let mut e = -127;
    while e < 127 && largest > of_format * 2f64.powi(e) {
        e += 1;
    }
    2f64.powi(e)
}

/// Eight truth values to a byte, the first in the lowest bit if `little`, else in the highest.
pub fn packbits(x: &[bool], little: bool) -> Vec<u8> {
    let byte = |bits: &[bool]| {
        bits.iter().enumerate().fold(0, |byte, (i, &bit)| byte | u8::from(bit) << if little { i } else { 7 - i })
    };
    x.chunks(8).map(byte).collect()
}
