//! Writing tokens into a paged cache: plain, divided by a scale, or as NVFP4; rotated on the way or not.
//!
//! Tokens come sorted by the slot they go to, so a part of them owns a range of slots that no other part writes.

use super::exec::Cpu;
use super::pool::SlotsMut;
use super::rope::{Angles, Turn};
use super::rows::{Rows, parts_for, widen, with_float, with_float8};
use super::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::kv::NVFP4_BLOCK;
use crate::tensor::{E2m1x2, E4m3, Float, TensorMut, TensorRef};

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

/// Writes the rows of `x`, `[nnz, heads, dim]` or `[nnz, dim]`, to `moves`, which are sorted and name no slot twice.
pub(crate) fn append(
    cpu: &Cpu,
    op: &'static str,
    arg: &'static str,
    x: TensorRef<'_>,
    moves: &[Move],
    to: Target<'_>,
) -> Result<()> {
    let heads = heads(&x);
    with_float!(op, arg, x.dtype(), S => {
        let x = Rows::<S>::new(op, arg, x)?;
        write_with(cpu, op, moves, moves.len() * heads * x.row_len(), to, Append { x, heads })
    })
}

/// What [`append_rotated`] writes.
pub(crate) struct Rotated<'a> {
    /// `[nnz, heads, rope_dim]` or `[nnz, rope_dim]`, the head of each row.
    pub(crate) rope: TensorRef<'a>,
    /// `[nnz, heads, nope_dim]` or `[nnz, nope_dim]`, the rest of each row; of the type of `rope`.
    pub(crate) nope: Option<TensorRef<'a>>,
    /// Of each token.
    pub(crate) positions: &'a [i64],
    pub(crate) angles: &'a Angles<'a>,
}

/// As [`append`], with each row put together from a part that is rotated by the token's position and one that is not.
pub(crate) fn append_rotated(
    cpu: &Cpu,
    op: &'static str,
    x: Rotated<'_>,
    moves: &[Move],
    to: Target<'_>,
) -> Result<()> {
    let heads = heads(&x.rope);
    with_float!(op, "k_rope", x.rope.dtype(), S => {
        let rope = Rows::<S>::new(op, "k_rope", x.rope)?;
        let nope = x.nope.map(|n| Rows::<S>::new(op, "k_nope", n)).transpose()?;
        let dim = rope.row_len() + nope.map_or(0, |n| n.row_len());
        let from = AppendRotated { rope, nope, heads, positions: x.positions, angles: x.angles };
        write_with(cpu, op, moves, moves.len() * heads * dim, to, from)
    })
}

fn heads(x: &TensorRef<'_>) -> usize {
    if x.shape().len() == 3 { x.shape()[1] } else { 1 }
}

/// Calls `from` for parts of `moves`, in parallel, with what writes to `to`.
fn write_with(
    cpu: &Cpu,
    op: &'static str,
    moves: &[Move],
    elements: usize,
    to: Target<'_>,
    from: impl Source + Sync,
) -> Result<()> {
    let Target { arg, data, block_scales, scale } = to;
    let each = moves.len().div_ceil(parts_for(cpu, elements)).max(1);
    let moves: Vec<&[Move]> = moves.chunks(each).collect();
    // A part owns the slots from its first to the next part's; the first also those before.
    let starts: Vec<usize> = std::iter::once(0).chain(moves.iter().skip(1).map(|m| m[0].slot)).collect();
    let total = data.shape()[0] * data.shape()[1];
    let lens = || (0..moves.len()).map(|i| starts.get(i + 1).unwrap_or(&total) - starts[i]);
    if let Some(block_scales) = block_scales {
        let data = SlotsMut::<E2m1x2>::new(op, arg, data)?.cut(lens());
        let block_scales = SlotsMut::<E4m3>::new(op, arg, block_scales)?.cut(lens());
        let parts = moves.iter().zip(data).zip(block_scales).collect();
        cpu.pool().scatter(parts, |((moves, data), block_scales)| {
            cpu.run(Write { moves, from: &from, to: Nvfp4 { data, block_scales, scale } });
        });
        return Ok(());
    }
    with_float8!(op, arg, data.dtype(), D => {
        let data = SlotsMut::<D>::new(op, arg, data)?.cut(lens());
        cpu.pool().scatter(moves.iter().zip(data).collect(), |(moves, data)| {
            cpu.run(Write { moves, from: &from, to: Scaled { data, scale } });
        });
        Ok(())
    })
}

/// Where tokens come from.
trait Source {
    /// Writes `moves` to `to`.
    fn write<V: Vector>(&self, v: V, moves: &[Move], to: impl Sink);
}

/// What a row becomes in the cache.
trait Sink {
    fn write<V: Vector, S: Lane>(&mut self, v: V, slot: usize, head: usize, x: &[S]);
}

struct Write<'a, F, T> {
    moves: &'a [Move],
    from: &'a F,
    to: T,
}

impl<F: Source, T: Sink> Kernel for Write<'_, F, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        self.from.write(v, self.moves, self.to);
    }
}

struct Append<'a, S> {
    x: Rows<'a, S>,
    heads: usize,
}

impl<S: Lane> Source for Append<'_, S> {
    #[inline(always)]
    fn write<V: Vector>(&self, v: V, moves: &[Move], mut to: impl Sink) {
        for m in moves {
            for h in 0..self.heads {
                to.write(v, m.slot, h, self.x.row(m.token * self.heads + h));
            }
        }
    }
}

struct AppendRotated<'a, S> {
    rope: Rows<'a, S>,
    nope: Option<Rows<'a, S>>,
    heads: usize,
    positions: &'a [i64],
    angles: &'a Angles<'a>,
}

impl<S: Lane> Source for AppendRotated<'_, S> {
    #[inline(always)]
    fn write<V: Vector>(&self, v: V, moves: &[Move], mut to: impl Sink) {
        let split = self.rope.row_len();
        let mut row = vec![0f32; split + self.nope.map_or(0, |n| n.row_len())];
        let mut turn = Turn::new(self.angles);
        for m in moves {
            turn.to(self.angles, self.positions[m.token]);
            for h in 0..self.heads {
                let r = m.token * self.heads + h;
                widen(v, self.rope.row(r), &mut row[..split]);
                turn.rotate(v, &mut row[..split]);
                if let Some(nope) = &self.nope {
                    widen(v, nope.row(r), &mut row[split..]);
                }
                to.write(v, m.slot, h, &row);
            }
        }
    }
}

/// `stored = x / scale`, rounded to the cache's type.
struct Scaled<'a, D> {
    data: SlotsMut<'a, D>,
    scale: f32,
}

impl<D: Lane> Sink for Scaled<'_, D> {
    #[inline(always)]
    fn write<V: Vector, S: Lane>(&mut self, v: V, slot: usize, head: usize, x: &[S]) {
        divide(v, x, self.scale, self.data.row(slot, head));
    }
}

/// `out = x / scale`, rounded to the type of `out`; the bits of `x` when nothing changes.
#[inline(always)]
pub(super) fn divide<V: Vector, S: Lane, D: Lane>(v: V, x: &[S], scale: f32, out: &mut [D]) {
    assert_eq!(x.len(), out.len());
    if scale == 1.0 && S::DTYPE == D::DTYPE {
        out.copy_from_slice(bytemuck::cast_slice(x));
        return;
    }
    let full = x.len() / V::LANES * V::LANES;
    let mut i = 0;
    while i < full {
        D::store(v, v.div(S::load(v, &x[i..]), v.splat(scale)), &mut out[i..]);
        i += V::LANES;
    }
    for i in full..x.len() {
        out[i] = D::from_f32(x[i].to_f32() / scale);
    }
}

/// Two e2m1 codes to a byte, an e4m3 scale for each 16 of them, a scale for all: `x ≈ e2m1 * block_scale * scale`.
struct Nvfp4<'a> {
    data: SlotsMut<'a, E2m1x2>,
    block_scales: SlotsMut<'a, E4m3>,
    scale: f32,
}

impl Sink for Nvfp4<'_> {
    #[inline(always)]
    fn write<V: Vector, S: Lane>(&mut self, v: V, slot: usize, head: usize, x: &[S]) {
        let (data, scales) = (self.data.row(slot, head), self.block_scales.row(slot, head));
        let blocks = x.chunks_exact(NVFP4_BLOCK).zip(data.chunks_exact_mut(NVFP4_BLOCK / 2)).zip(scales);
        for ((x, codes), block_scale) in blocks {
            let mut wide = [0f32; NVFP4_BLOCK];
            widen(v, x, &mut wide);
            let mut largest = 0f32;
            let mut nan = false;
            for x in wide {
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
            for (code, x) in codes.iter_mut().zip(wide.chunks_exact(2)) {
                *code = E2m1x2::from_f32([x[0] / unit, x[1] / unit]);
            }
        }
    }
}
