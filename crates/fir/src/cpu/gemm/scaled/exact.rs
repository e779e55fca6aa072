//! What products of fp8 through tiles and through pairs share: fp8 becomes bf16, exactly, by steps of [`STEP`] elements.

use super::{ScaledProduct, Scales};
use crate::cpu::arch::{Avx512, Fp8};
use crate::cpu::vector::Lane;
use crate::tensor::{Block, DType, bf16};

/// Elements along `k` of one step.
pub(super) const STEP: usize = 32;

/// Whether tiles, or pairs, take such a product: its types are exact in bf16, and scales change between steps. Sizes do not matter,
/// or a row's result would depend on them.
pub(super) fn takes(p: &ScaledProduct<'_>) -> bool {
    let even = |columns: usize| columns.is_multiple_of(STEP) || columns == Block::ALL;
    matches!(p.x.data.dtype(), DType::BF16 | DType::E4M3 | DType::E5M2)
        && [&p.x, &p.w].iter().all(|side| side.scales.is_none() || even(side.block.columns))
}

/// Steps that have one scale on either side; `None` if that is all.
pub(super) fn segment(x: &Scales<'_>, w: &Scales<'_>) -> Option<usize> {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    match (x.partial, w.partial) {
        (true, true) => Some(gcd(x.block.columns, w.block.columns) / STEP),
        (true, false) => Some(x.block.columns / STEP),
        (false, true) => Some(w.block.columns / STEP),
        (false, false) => None,
    }
}

/// The table of a type of fp8.
#[inline(always)]
pub(super) fn fp8<T: Lane>() -> Option<&'static Fp8> {
    match T::DTYPE {
        DType::E4M3 => Some(&const { Fp8::E4M3 }),
        DType::E5M2 => Some(&const { Fp8::E5M2 }),
        _ => None,
    }
}

/// Fills `to`, whole steps, with the elements of a row from `from` on, zeros after its end. Exact for fp8 and bf16.
#[inline(always)]
pub(super) fn convert<T: Lane>(pairs: Avx512<true>, row: &[T], from: usize, to: &mut [bf16]) {
    if fp8::<T>().is_none() {
        let row = &row[from..row.len().min(from + to.len())];
        to[..row.len()].copy_from_slice(bytemuck::cast_slice(row));
        to[row.len()..].fill(bf16::ZERO);
        return;
    }
    let (chunks, end) = to.as_chunks_mut::<{ 2 * STEP }>();
    let tail = from + chunks.as_flattened().len();
    for (to, from) in chunks.iter_mut().zip((from..).step_by(2 * STEP)) {
        widen(pairs, row, from, bytemuck::cast_mut::<_, [[bf16; STEP]; 2]>(to).each_mut());
    }
    if !end.is_empty() {
        let mut wide = [[bf16::ZERO; STEP]; 2];
        widen(pairs, row, tail, wide.each_mut());
        end.copy_from_slice(&wide[0]);
    }
}

/// Two steps of a row of fp8 from `from` on, zeros after its end.
#[inline(always)]
pub(super) fn widen<T: Lane>(pairs: Avx512<true>, row: &[T], from: usize, to: [&mut [bf16; STEP]; 2]) {
    let table = fp8::<T>().expect("a type of fp8");
    let rest = bytemuck::cast_slice::<T, u8>(row).get(from..).unwrap_or_default();
    if let Some(whole) = rest.first_chunk() {
        pairs.widen_fp8(table, whole, to);
    } else {
        let mut bytes = [0; 64];
        bytes[..rest.len()].copy_from_slice(rest);
        pairs.widen_fp8(table, &bytes, to);
    }
}
