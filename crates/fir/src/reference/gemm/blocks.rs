//! Products with weights in GGUF's block formats.

use crate::error::Result;
use crate::reference::Precision;
use crate::tensor::{BlockFields, BlockFormat, TensorRef};

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

/// `out[i, j] = Σ_l xq[i, l] * w[j, l]`, where `xq` is `x` quantized: per 256 elements of a row, `sa = max|x| / 127` in
/// f32, and `xq = sa * round(x / sa)`, ties to even, within ±127; NaN if one of them is not finite.
///
/// `data` holds `n` rows of blocks.
pub fn block_gemm(p: Precision, x: TensorRef<'_>, format: BlockFormat, data: &[u8], n: usize) -> Result<Vec<f64>> {
    let (m, k) = (x.shape()[0], x.shape()[1]);
    let (x, w) = (x.to_f32_vec()?, dequantize_blocks(p, format, data));
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
    let scale = if finite { x.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0 } else { f32::NAN };
    let code = |x: f32| if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even().clamp(-127.0, 127.0) };
    x.iter().map(|&x| f64::from(code(x)) * f64::from(scale)).collect()
}
