//! Writing tokens into a paged cache: plain, divided by a scale, or as NVFP4; rotated on the way or not.
//!
//! Tokens come sorted by the slot they go to, so a part of them owns a range of slots that no other part writes.

use super::arch::prefetch_to_write;
use super::exec::Cpu;
use super::pool::SlotsMut;
use super::rope::{Tokens, Work, divide};
use super::rows::with_float8;
use super::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::kv::NVFP4_BLOCK;
use crate::tensor::{E2m1x2, E4m3, Float, TensorMut};

/// A token and the slot (`page * page_size + offset`) it goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Move {
    pub(crate) slot: usize,
    pub(crate) token: usize,
}

/// One tensor of a cache: `[pages, page_size, heads, dim]` or `[pages, page_size, dim]`.
pub(crate) struct Target<'a> {
    pub(crate) arg: &'static str,
    pub(crate) data: TensorMut<'a>,
    /// NVFP4's.
    pub(crate) block_scales: Option<TensorMut<'a>>,
    pub(crate) scale: f32,
}

/// Writes tokens to `moves`, which are sorted and name no slot twice.
pub(crate) fn append<'a>(
    work: &mut Work<'a>,
    op: &'static str,
    tokens: Tokens<'a>,
    moves: &'a [Move],
    to: Target<'a>,
) -> Result<()> {
    let (Target { arg, data, block_scales, scale }, cpu) = (to, work.cpu);
    let moves: Vec<&[Move]> = moves.chunks(work.each(moves.len())).collect();
    // A part owns the slots from its first to the next part's; the first also those before.
    let starts: Vec<usize> = std::iter::once(0).chain(moves.iter().skip(1).map(|m| m[0].slot)).collect();
    let total = data.shape()[0] * data.shape()[1];
    let lens = || (0..moves.len()).map(|i| starts.get(i + 1).unwrap_or(&total) - starts[i]);
    if let Some(block_scales) = block_scales {
        let data = SlotsMut::<E2m1x2>::new(op, arg, data)?.cut(lens());
        let block_scales = SlotsMut::<E4m3>::new(op, arg, block_scales)?.cut(lens());
        for (i, ((moves, data), block_scales)) in moves.into_iter().zip(data).zip(block_scales).enumerate() {
            work.add(i, move || write(cpu, tokens, moves, Nvfp4 { data, block_scales, scale }));
        }
        return Ok(());
    }
    with_float8!(op, arg, data.dtype(), D => {
        let data = SlotsMut::<D>::new(op, arg, data)?.cut(lens());
        for (i, (moves, data)) in moves.into_iter().zip(data).enumerate() {
            work.add(i, move || write(cpu, tokens, moves, Scaled { data, scale }));
        }
        Ok(())
    })
}

/// Writes `moves` to a part of the cache.
fn write(cpu: &Cpu, tokens: Tokens<'_>, moves: &[Move], mut to: impl Sink) {
    let mut reader = tokens.reader();
    let ask = |m: &Move, to: &mut _| {
        tokens.ask(m.token);
        (0..tokens.heads()).for_each(|head| Sink::ask(to, m.slot, head));
    };
    let ahead = tokens.ahead();
    moves.iter().take(ahead).for_each(|m| ask(m, &mut to));
    for (i, m) in moves.iter().enumerate() {
        if let Some(next) = moves.get(i + ahead).filter(|_| ahead > 0) {
            ask(next, &mut to);
        }
        let x = reader.read(cpu, m.token);
        cpu.run(Write { x, heads: tokens.heads(), len: tokens.row_len(), slot: m.slot, to: &mut to });
    }
}

struct Write<'r, T> {
    /// The token's rows, `heads` of `len`.
    x: &'r [f32],
    heads: usize,
    len: usize,
    slot: usize,
    to: &'r mut T,
}

impl<T: Sink> Kernel for Write<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        for head in 0..self.heads {
            self.to.write(v, self.slot, head, &self.x[head * self.len..][..self.len]);
        }
    }
}

/// What a row becomes in the cache.
trait Sink {
    /// Asks for the memory of a row.
    fn ask(&mut self, slot: usize, head: usize);
    fn write<V: Vector>(&mut self, v: V, slot: usize, head: usize, x: &[f32]);
}

/// `stored = x / scale`, rounded to the cache's type.
struct Scaled<'a, D> {
    data: SlotsMut<'a, D>,
    scale: f32,
}

impl<D: Lane> Sink for Scaled<'_, D> {
    fn ask(&mut self, slot: usize, head: usize) {
        prefetch_to_write(self.data.row(slot, head));
    }

    #[inline(always)]
    fn write<V: Vector>(&mut self, v: V, slot: usize, head: usize, x: &[f32]) {
        divide(v, x, self.scale, self.data.row(slot, head));
    }
}

/// Two e2m1 codes to a byte, an e4m3 scale for each 16 of them, a scale for all: `x ≈ e2m1 * block_scale * scale`.
struct Nvfp4<'a> {
    data: SlotsMut<'a, E2m1x2>,
    block_scales: SlotsMut<'a, E4m3>,
    scale: f32,
}

impl Sink for Nvfp4<'_> {
    fn ask(&mut self, slot: usize, head: usize) {
        prefetch_to_write(self.data.row(slot, head));
        prefetch_to_write(self.block_scales.row(slot, head));
    }

    #[inline(always)]
    fn write<V: Vector>(&mut self, _: V, slot: usize, head: usize, x: &[f32]) {
        let (data, scales) = (self.data.row(slot, head), self.block_scales.row(slot, head));
        let blocks = x.chunks_exact(NVFP4_BLOCK).zip(data.chunks_exact_mut(NVFP4_BLOCK / 2)).zip(scales);
        for ((x, codes), block_scale) in blocks {
            let mut largest = 0f32;
            let mut nan = false;
            for x in x {
                largest = largest.max(x.abs());
                nan |= x.is_nan();
            }
            // A NaN makes the block's scale NaN: a fault that shows.
            let largest = if nan { f32::NAN } else { largest };
            // 6 is the largest e2m1: it takes the block's largest value.
            *block_scale = E4m3::from_f32(largest / (6.0 * self.scale));
            let unit = block_scale.to_f32() * self.scale;
            // A block too small for any scale is zero.
            let unit = if unit == 0.0 { f32::INFINITY } else { unit };
            for (code, x) in codes.iter_mut().zip(x.chunks_exact(2)) {
                *code = E2m1x2::from_f32([x[0] / unit, x[1] / unit]);
            }
        }
    }
}
