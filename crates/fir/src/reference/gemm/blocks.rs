//! Products with weights in GGUF's block formats.

use crate::error::Result;
use crate::reference::Precision;
use crate::tensor::{BlockFields, BlockFormat, Steps, TensorRef};

/// `d * q`, `d * q + m`, `d * sc * q` or `d * sc * q - dmin * min`, for every weight of every block.
pub fn dequantize_blocks(p: Precision, format: BlockFormat, data: &[u8]) -> Vec<f64> {
    let mut out = Vec::with_capacity(data.len() / format.bytes() * format.elements());
    let mut block = BlockFields::ZERO;
    for bytes in data.chunks_exact(format.bytes()) {
        block.read(format, bytes);
        let (d, m) = (block.d.to_f64(), block.m.to_f64());
        for (e, &code) in block.codes[..format.elements()].iter().enumerate() {
            let j = e / format.sub();
            let x = p.acc(d * f64::from(block.scales[j]) * f64::from(format.level(code)));
            out.push(p.acc(match (format.has_min(), format.elements()) {
                (false, _) => x,
                (true, 32) => x + m,
                (true, _) => x - m * f64::from(block.mins[j]),
            }));
        }
    }
    out
}

/// The weights that products take: those of [`dequantize_blocks`]; but in Q4_0, Q4_1, Q5_0 and Q5_1 with `d` and `m` rounded to
/// multiples of a step, a power of two, that is the same in 256 weights of a row: the least from 2^-24 on by which `d * q + m` is not over 32000 for any
/// code `q` of one of these blocks; NaN if a `d` or `m` is not finite.
///
/// `data` holds rows of `k` weights.
pub fn product_weights(p: Precision, format: BlockFormat, data: &[u8], k: usize) -> Vec<f64> {
    if !format.is_stepped() {
        return dequantize_blocks(p, format, data);
    }
    let (mut out, mut block) = (Vec::new(), BlockFields::ZERO);
    for row in data.chunks_exact((k / format.elements()).max(1) * format.bytes()) {
        for cell in row.chunks(8 * format.bytes()) {
            let blocks = cell.chunks_exact(format.bytes()).map(|bytes| {
                block.read(format, bytes);
                block
            });
            let blocks: Vec<BlockFields> = blocks.collect();
            let scales: Vec<_> = blocks.iter().map(|b| (b.d, b.m)).collect();
            let Steps { step, d, m } = Steps::new(format, &scales);
            for (b, block) in blocks.iter().enumerate() {
                let (d, m) = (step.to_f64() * f64::from(d[b]), step.to_f64() * f64::from(m[b]));
                let weight = |&code: &u8| p.acc(p.acc(d * f64::from(format.level(code))) + m);
                out.extend(block.codes[..format.elements()].iter().map(weight));
            }
        }
    }
    out
}

/// Most elements of 256 that are not quantized.
const TAKEN: usize = 4;
/// How many times as large as the mean of their maxima they are.
const LARGE: f32 = 3.0;

/// `out[i, j] = Σ_l xq[i, l] * w[j, l]`, where `w` is [`product_weights`] and `xq` is `x` quantized: per 256 elements of a row,
/// `sa = max|x| / 127` in f32, and `xq = sa * round(x / sa)`, ties to even, within ±127; NaN if one of them is not finite. Elements over
/// three times the mean of 16 maxima, those of the elements 16 apart, stay as they are and count for no `sa`, unless they are more than
/// four.
///
/// `data` holds `n` rows of blocks.
pub fn block_gemm(p: Precision, x: TensorRef<'_>, format: BlockFormat, data: &[u8], n: usize) -> Result<Vec<f64>> {
    let (m, k) = (x.shape()[0], x.shape()[1]);
    let (x, w) = (x.to_f32_vec()?, product_weights(p, format, data, k));
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        let xq: Vec<f64> = x[i * k..(i + 1) * k].chunks(256).flat_map(quantize).collect();
        for j in 0..n {
            let mut sum = 0.0;
            for l in 0..k {
                sum = p.acc(sum + p.acc(xq[l] * w[j * k + l]));
            }
            out.push(p.store(sum));
        }
    }
    Ok(out)
}

fn quantize(x: &[f32]) -> Vec<f64> {
    let finite = x.iter().all(|x| x.is_finite());
    let most = |x: &mut dyn Iterator<Item = f32>| x.fold(0f32, |most, x| most.max(x.abs()));
    let mut maxima: Vec<f32> = (0..16).map(|c| most(&mut x.iter().skip(c).step_by(16).copied())).collect();
    while maxima.len() > 1 {
        let upper = maxima.split_off(maxima.len() / 2);
        maxima.iter_mut().zip(upper).for_each(|(sum, x)| *sum += x);
    }
    let bound = LARGE / 16.0 * maxima[0];
    let bound = if x.iter().filter(|x| x.abs() > bound).count() > TAKEN { f32::INFINITY } else { bound };
    let scale = if finite { most(&mut x.iter().copied().filter(|x| x.abs() <= bound)) / 127.0 } else { f32::NAN };
    let code = |x: f32| if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even().clamp(-127.0, 127.0) };
    let number = |&x: &f32| if x.abs() > bound { x.into() } else { f64::from(code(x)) * f64::from(scale) };
    x.iter().map(number).collect()
}
