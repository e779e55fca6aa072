//! Numbers in fewer bits: fp8 with scales per tensor, row or block, MXFP8, MXFP4 and NVFP4; bits packed into bytes.
//!
//! Everywhere `value = stored * scale`. Scales lie in plain row-major order, one row of them per row (or rows) of the
//! matrix; the interleaved layouts that some matrix units read belong to those units.
//!
//! | format | stored | a scale | per |
//! |---|---|---|---|
//! | fp8 | e4m3 or e5m2 | f32 | any [`Block`] |
//! | MXFP8 | e4m3 or e5m2 | e8m0 | 32 of a row |
//! | MXFP4 | e2m1 | e8m0 | 32 of a row |
//! | NVFP4 | e2m1 | e4m3, and an f32 for all | 16 of a row |
//!
//! Scales are chosen so that the largest magnitude of a block is just stored. Infinities are stored as the format's
//! largest number. In fp8 a NaN is stored as NaN and does not count for the scale; fp4 has no NaN, so the block's scale
//! becomes NaN, and with it all that is read back from the block.

use crate::cpu;
pub use crate::cpu::quantize::BitOrder;
use crate::cpu::quantize::{Mxfp4, Mxfp8, Nvfp4};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::Ragged;
pub use crate::tensor::Block;
use crate::tensor::{DType, Dims, E4m3, E5m2, Shaped, TensorMut, TensorRef};

/// Rounds to fp8, with a scale for each block from its largest magnitude.
///
/// `scales[b] = max(max|x| / largest, 2^-126)` over block `b`, `out = fp8(x * (1 / scales[b]))`; `largest` is 448 for
/// e4m3, 57344 for e5m2
///
/// * `x`: `[rows, k]` or `[batch, rows, k]`, f32, f16 or bf16; rows contiguous
/// * `out`: the shape of `x`, e4m3 or e5m2; rows contiguous
/// * `scales`: [`Block::counts`] of `[rows, k]`, after `batch` if there is one, f32; rows contiguous
pub fn quantize_fp8(
    exec: &Exec,
    x: TensorRef<'_>,
    block: Block,
    out: TensorMut<'_>,
    scales: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "quantize_fp8";
    check_fp8(OP, &x, block, &out, &scales)?;
    check_type(OP, "x", x.dtype(), FLOAT)?;
    check_type(OP, "out", out.dtype(), FP8)?;
    cpu::quantize::fp8(exec.cpu_only(OP)?, OP, x, block, out, scales)
}

/// Rounds to fp8 by given scales; what is too large becomes the largest number.
///
/// `out = fp8(x * (1 / scales[b]))` for an element of block `b`
///
/// Shapes and types as in [`quantize_fp8`]. A scale of 0 makes zeros NaN, and other numbers the largest.
pub fn quantize_fp8_with_scales(
    exec: &Exec,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    block: Block,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "quantize_fp8_with_scales";
    check_fp8(OP, &x, block, &out, &scales)?;
    check_type(OP, "x", x.dtype(), FLOAT)?;
    check_type(OP, "out", out.dtype(), FP8)?;
    cpu::quantize::fp8_with_scales(exec.cpu_only(OP)?, OP, x, scales, block, out)
}

/// The numbers that fp8 and its scales stand for.
///
/// `out = x * scales[b]` for an element of block `b`
///
/// * `x`: `[rows, k]` or `[batch, rows, k]`, e4m3 or e5m2; rows contiguous
/// * `scales`: as in [`quantize_fp8`]
/// * `out`: the shape of `x`, f32, f16 or bf16; rows contiguous
pub fn dequantize_fp8(
    exec: &Exec,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    block: Block,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "dequantize_fp8";
    check_fp8(OP, &x, block, &out, &scales)?;
    check_type(OP, "x", x.dtype(), FP8)?;
    check_type(OP, "out", out.dtype(), FLOAT)?;
    cpu::quantize::dequantize_fp8(exec.cpu_only(OP)?, OP, x, scales, block, out)
}

/// Rounds to MXFP8: fp8 with a power of two for each 32 elements of a row.
///
/// `scales[r, b] = 2^e`, the least with `max|x| <= largest * 2^e` over the block, `-127 <= e <= 127`;
/// `out = fp8(x / 2^e)`
///
/// * `x`: `[rows, k]` or `[batch, rows, k]`, f32, f16 or bf16; rows contiguous; `k` a multiple of 32
/// * `out`: the shape of `x`, e4m3 or e5m2; rows contiguous
/// * `scales`: `[rows, k / 32]` or `[batch, rows, k / 32]`, e8m0; rows contiguous
pub fn quantize_mxfp8(exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>, scales: TensorMut<'_>) -> Result<()> {
    const OP: &str = "quantize_mxfp8";
    check_blocks(OP, MX, 1, ("x", &x), ("out", &out), &scales)?;
    check_type(OP, "scales", scales.dtype(), "e8m0")?;
    let cpu = exec.cpu_only(OP)?;
    match out.dtype() {
        DType::E4M3 => cpu::quantize::blocks(cpu, OP, Mxfp8::<E4m3>::new(), x, out, scales),
        DType::E5M2 => cpu::quantize::blocks(cpu, OP, Mxfp8::<E5m2>::new(), x, out, scales),
        other => check_type(OP, "out", other, FP8),
    }
}

/// The numbers that MXFP8 stands for.
///
/// `out[r, i] = x[r, i] * scales[r, i / 32]`
///
/// `x` and `scales` as `out` and `scales` of [`quantize_mxfp8`]; `out`: f32, f16 or bf16.
pub fn dequantize_mxfp8(exec: &Exec, x: TensorRef<'_>, scales: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "dequantize_mxfp8";
    check_blocks(OP, MX, 1, ("out", &out), ("x", &x), &scales)?;
    check_type(OP, "scales", scales.dtype(), "e8m0")?;
    let cpu = exec.cpu_only(OP)?;
    match x.dtype() {
        DType::E4M3 => cpu::quantize::expand(cpu, OP, Mxfp8::<E4m3>::new(), x, scales, out),
        DType::E5M2 => cpu::quantize::expand(cpu, OP, Mxfp8::<E5m2>::new(), x, scales, out),
        other => check_type(OP, "x", other, FP8),
    }
}

/// Rounds to MXFP4: fp4 with a power of two for each 32 elements of a row.
///
/// `scales[r, b] = 2^e`, the least with `max|x| <= 6 * 2^e` over the block, `-127 <= e <= 127`; `out = e2m1(x / 2^e)`
///
/// * `x`: `[rows, k]` or `[batch, rows, k]`, f32, f16 or bf16; rows contiguous; `k` a multiple of 32
/// * `out`: `[rows, k / 2]` or `[batch, rows, k / 2]`, e2m1x2; rows contiguous
/// * `scales`: `[rows, k / 32]` or `[batch, rows, k / 32]`, e8m0; rows contiguous
pub fn quantize_mxfp4(exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>, scales: TensorMut<'_>) -> Result<()> {
    const OP: &str = "quantize_mxfp4";
    check_blocks(OP, MX, 2, ("x", &x), ("out", &out), &scales)?;
    check_type(OP, "scales", scales.dtype(), "e8m0")?;
    check_type(OP, "out", out.dtype(), "e2m1x2")?;
    cpu::quantize::blocks(exec.cpu_only(OP)?, OP, Mxfp4, x, out, scales)
}

/// The numbers that MXFP4 stands for.
///
/// `out[r, i] = x[r, i] * scales[r, i / 32]`
///
/// `x` and `scales` as `out` and `scales` of [`quantize_mxfp4`]; `out`: f32, f16 or bf16.
pub fn dequantize_mxfp4(exec: &Exec, x: TensorRef<'_>, scales: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "dequantize_mxfp4";
    check_blocks(OP, MX, 2, ("out", &out), ("x", &x), &scales)?;
    check_type(OP, "scales", scales.dtype(), "e8m0")?;
    check_type(OP, "x", x.dtype(), "e2m1x2")?;
    cpu::quantize::expand(exec.cpu_only(OP)?, OP, Mxfp4, x, scales, out)
}

/// Rounds to NVFP4: fp4 with an e4m3 scale for each 16 elements of a row, and a scale for all.
///
/// `scales[r, b] = e4m3(max|x| / (6 * scale))` over the block, `out = e2m1(x / (scales[r, b] * scale))`; a block whose
/// scale is 0 is stored as zeros
///
/// * `x`: `[rows, k]` or `[batch, rows, k]`, f32, f16 or bf16; rows contiguous; `k` a multiple of 16
/// * `scale`: finite, above 0; [`nvfp4_scale`] gives the one that just fits
/// * `out`: `[rows, k / 2]` or `[batch, rows, k / 2]`, e2m1x2; rows contiguous
/// * `scales`: `[rows, k / 16]` or `[batch, rows, k / 16]`, e4m3; rows contiguous
pub fn quantize_nvfp4(
    exec: &Exec,
    x: TensorRef<'_>,
    scale: f32,
    out: TensorMut<'_>,
    scales: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "quantize_nvfp4";
    check_blocks(OP, NV, 2, ("x", &x), ("out", &out), &scales)?;
    check_nvfp4(OP, ("out", out.dtype()), scales.dtype(), scale)?;
    cpu::quantize::blocks(exec.cpu_only(OP)?, OP, Nvfp4 { scale }, x, out, scales)
}

/// The numbers that NVFP4 stands for.
///
/// `out[r, i] = x[r, i] * (scales[r, i / 16] * scale)`
///
/// `x`, `scales` and `scale` as `out`, `scales` and `scale` of [`quantize_nvfp4`]; `out`: f32, f16 or bf16.
pub fn dequantize_nvfp4(
    exec: &Exec,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    scale: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "dequantize_nvfp4";
    check_blocks(OP, NV, 2, ("out", &out), ("x", &x), &scales)?;
    check_nvfp4(OP, ("x", x.dtype()), scales.dtype(), scale)?;
    cpu::quantize::expand(exec.cpu_only(OP)?, OP, Nvfp4 { scale }, x, scales, out)
}

/// The scale with which the largest magnitude of `x` is just stored by [`quantize_nvfp4`].
///
/// `max(max|x| / (6 * 448), 2^-126)`; NaN does not count, an infinity counts as the largest f32
///
/// * `x`: up to three axes, f32, f16 or bf16; the last contiguous
pub fn nvfp4_scale(exec: &Exec, x: TensorRef<'_>) -> Result<f32> {
    const OP: &str = "nvfp4_scale";
    check_type(OP, "x", x.dtype(), FLOAT)?;
    x.layout().check_listed(OP, "x")?;
    cpu::quantize::nvfp4_scale(exec.cpu_only(OP)?, OP, x)
}

/// Packs truth values, eight to a byte; the last byte is filled up with zeros.
///
/// bit `i` (little: from the lowest, big: from the highest) of `out[j]` is `x[8 * j + i]`
///
/// * `x`: `[n]`, bool, contiguous
/// * `out`: `[⌈n / 8⌉]`, u8, contiguous
pub fn packbits(exec: &Exec, x: TensorRef<'_>, order: BitOrder, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "packbits";
    let mut dims = Dims::of(OP);
    dims.bind("x", &x, &["n"])?;
    dims.axis("x", "⌈n / 8⌉", dims.get("n").div_ceil(8))?.bind("out", &out, &["⌈n / 8⌉"])?;
    let segments = [(0, dims.get("n"))];
    cpu::quantize::packbits(exec.cpu_only(OP)?, OP, x, &segments, order, out)
}

/// [`packbits`] of every segment on its own, each beginning with a new byte.
///
/// `out[packed[s]..packed[s + 1]] = packbits(x[indptr[s]..indptr[s + 1]])`, `packed` being [`packed_indptr`] of
/// `indptr`
///
/// * `x`: `[indptr.rows()]`, bool, contiguous
/// * `out`: `[packed.rows()]`, u8, contiguous
pub fn segment_packbits(
    exec: &Exec,
    x: TensorRef<'_>,
    indptr: &Ragged,
    order: BitOrder,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "segment_packbits";
    let mut dims = Dims::of(OP);
    dims.axis("indptr", "n", indptr.rows())?.bind("x", &x, &["n"])?;
    dims.axis("indptr", "bytes", packed_indptr(indptr)?.rows())?.bind("out", &out, &["bytes"])?;
    let segments: Vec<_> = indptr.indptr().windows(2).map(|w| (w[0] as usize, w[1] as usize)).collect();
    cpu::quantize::packbits(exec.cpu_only(OP)?, OP, x, &segments, order, out)
}

/// Offsets of the bytes that [`segment_packbits`] writes for segments of bits.
pub fn packed_indptr(indptr: &Ragged) -> Result<Ragged> {
    let lens: Vec<u32> = indptr.lens().iter().map(|n| n.div_ceil(8)).collect();
    Ragged::from_lens(&lens)
}

const FLOAT: &str = "f32, f16 or bf16";
const FP8: &str = "e4m3 or e5m2";
/// Elements of a block of MX formats, and of NVFP4.
const MX: usize = 32;
const NV: usize = 16;

/// Refuses a type whose name is not a word of `want`.
fn check_type(op: &'static str, arg: &'static str, got: DType, want: &str) -> Result<()> {
    if want.split([',', ' ']).any(|name| name == got.name()) {
        return Ok(());
    }
    Err(Error::DType { op, arg, got: got.name(), want: want.into() })
}

fn check_fp8(
    op: &'static str,
    x: &impl Shaped,
    block: Block,
    out: &impl Shaped,
    scales: &(impl Shaped + Typed),
) -> Result<()> {
    let mut dims = Dims::of(op);
    let batched = x.shape().len() == 3;
    let axes: &[_] = if batched { &["batch", "rows", "k"] } else { &["rows", "k"] };
    dims.bind("x", x, axes)?.bind("out", out, axes)?;
    if block.rows == 0 || block.columns == 0 {
        return Err(Error::value(op, "block", format!("{} × {}", block.rows, block.columns), "at least 1 × 1"));
    }
    let [rows, columns] = block.counts(dims.get("rows"), dims.get("k"));
    dims.axis("x", "row blocks", rows)?.axis("x", "column blocks", columns)?;
    let axes: &[_] = if batched { &["batch", "row blocks", "column blocks"] } else { &["row blocks", "column blocks"] };
    dims.bind("scales", scales, axes)?;
    check_type(op, "scales", scales.dtype(), "f32")
}

/// Checks numbers `x` against codes of which `pack` lie in an element, and the scales of blocks.
fn check_blocks(
    op: &'static str,
    block: usize,
    pack: usize,
    (x_arg, x): (&'static str, &(impl Shaped + Typed)),
    (codes_arg, codes): (&'static str, &impl Shaped),
    scales: &impl Shaped,
) -> Result<()> {
    let mut dims = Dims::of(op);
    let batched = x.shape().len() == 3;
    let axes = |last| if batched { vec!["batch", "rows", last] } else { vec!["rows", last] };
    dims.bind(x_arg, x, &axes("k"))?;
    let k = dims.get("k");
    if !k.is_multiple_of(block) {
        return Err(Error::value(op, x_arg, format!("{k} wide"), format!("a multiple of {block}")));
    }
    let (codes_axis, scales_axis) =
        (if pack == 1 { "k" } else { "k / 2" }, if block == MX { "k / 32" } else { "k / 16" });
    dims.axis(x_arg, codes_axis, k / pack)?.axis(x_arg, scales_axis, k / block)?;
    dims.bind(codes_arg, codes, &axes(codes_axis))?.bind("scales", scales, &axes(scales_axis))?;
    check_type(op, x_arg, x.dtype(), FLOAT)
}

fn check_nvfp4(op: &'static str, (arg, codes): (&'static str, DType), scales: DType, scale: f32) -> Result<()> {
    check_type(op, arg, codes, "e2m1x2")?;
    check_type(op, "scales", scales, "e4m3")?;
    if scale > 0.0 && scale.is_finite() {
        return Ok(());
    }
    Err(Error::value(op, "scale", scale, "a finite number above 0"))
}

/// A tensor, read or written.
trait Typed {
    fn dtype(&self) -> DType;
}

impl Typed for TensorRef<'_> {
    fn dtype(&self) -> DType {
        TensorRef::dtype(self)
    }
}

impl Typed for TensorMut<'_> {
    fn dtype(&self) -> DType {
        TensorMut::dtype(self)
    }
}
