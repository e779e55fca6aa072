//! Quantization and packing of bits.

use super::Bytes;
use crate::error::Result;
use crate::exec::Exec;
use crate::kv::Ragged;
use crate::ops::quantize::{self, BitOrder, Block};
use crate::tensor::DType;

/// A block, mostly one that is used, at times of any size.
pub(super) fn block(b: &mut Bytes<'_>) -> Block {
    match b.byte() {
        n @ 0..=199 => [Block::TENSOR, Block::ROW, Block::GROUP, Block::TILE][usize::from(n) % 4],
        _ => Block { rows: b.size(), columns: b.size() },
    }
}

pub(super) fn fp8_type(b: &mut Bytes<'_>) -> DType {
    [DType::E4M3, DType::E5M2][b.below(2)]
}

/// `[rows, k]`, or `[batch, rows, k]`.
fn shape(b: &mut Bytes<'_>, k: usize) -> Vec<usize> {
    if b.byte() < 128 { vec![b.size(), k] } else { vec![b.size() % 5, b.size() % 150, k] }
}

/// The shape of one scale per block.
fn scales_of(shape: &[usize], block: Block) -> Vec<usize> {
    let (batch, matrix) = shape.split_at(shape.len() - 2);
    [batch, &block.counts(matrix[0], matrix[1])].concat()
}

pub(super) fn fp8(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, code, k, block) = (b.float(), fp8_type(b), b.size(), block(b));
    let shape = shape(b, k);
    let (mut x, mut codes) = (b.tensor(dtype, &shape), b.tensor(code, &shape));
    let mut scales = b.tensor(DType::F32, &scales_of(&shape, block));
    let result = match b.below(3) {
        0 => quantize::quantize_fp8(exec, x.view()?, block, codes.view_mut()?, scales.view_mut()?),
        1 => quantize::quantize_fp8_with_scales(exec, x.view()?, scales.view()?, block, codes.view_mut()?),
        _ => quantize::dequantize_fp8(exec, codes.view()?, scales.view()?, block, x.view_mut()?),
    };
    for arg in [&x, &codes, &scales] {
        arg.assert_only_elements_written();
    }
    result
}

pub(super) fn blocks(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, which) = (b.float(), b.below(6));
    let (code, pack, scale, each) = match which / 2 {
        0 => (fp8_type(b), 1, DType::E8M0, 32),
        1 => (DType::E2M1x2, 2, DType::E8M0, 32),
        _ => (DType::E2M1x2, 2, DType::E4M3, 16),
    };
    let k = if b.rarely() { b.size() } else { b.below(5) * each };
    let shape = shape(b, k);
    let last = |n: usize| [&shape[..shape.len() - 1], &[n]].concat();
    let mut x = b.tensor(dtype, &shape);
    let (mut codes, mut scales) = (b.tensor(code, &last(k / pack)), b.tensor(scale, &last(k / each)));
    let all = b.f32();
    let result = match which {
        0 => quantize::quantize_mxfp8(exec, x.view()?, codes.view_mut()?, scales.view_mut()?),
        1 => quantize::dequantize_mxfp8(exec, codes.view()?, scales.view()?, x.view_mut()?),
        2 => quantize::quantize_mxfp4(exec, x.view()?, codes.view_mut()?, scales.view_mut()?),
        3 => quantize::dequantize_mxfp4(exec, codes.view()?, scales.view()?, x.view_mut()?),
        4 => {
            let scale = quantize::nvfp4_scale(exec, x.view()?)?;
            let scale = if b.rarely() { all } else { scale };
            quantize::quantize_nvfp4(exec, x.view()?, scale, codes.view_mut()?, scales.view_mut()?)
        }
        _ => quantize::dequantize_nvfp4(exec, codes.view()?, scales.view()?, all, x.view_mut()?),
    };
    for arg in [&x, &codes, &scales] {
        arg.assert_only_elements_written();
    }
    result
}

pub(super) fn packbits(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let order = if b.byte() < 128 { BitOrder::Big } else { BitOrder::Little };
    if b.byte() < 128 {
        let n = b.size();
        let (x, mut out) = (b.tensor(DType::Bool, &[n]), b.tensor(DType::U8, &[n.div_ceil(8)]));
        let result = quantize::packbits(exec, x.view()?, order, out.view_mut()?);
        out.assert_only_elements_written();
        return result;
    }
    let indptr = Ragged::new(&b.indptr(40))?;
    let bytes = quantize::packed_indptr(&indptr)?.rows();
    let (x, mut out) = (b.tensor(DType::Bool, &[indptr.rows()]), b.tensor(DType::U8, &[bytes]));
    let result = quantize::segment_packbits(exec, x.view()?, &indptr, order, out.view_mut()?);
    out.assert_only_elements_written();
    result
}
