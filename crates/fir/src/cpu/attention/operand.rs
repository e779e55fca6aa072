//! Rows of keys, values and queries in any element type, widened to f32 when a tile is loaded.
//!
//! Element types meet the kernels here only. With many query rows to a head a tile is widened once and used by all of
//! them; with few, the products widen rows in registers as they read them, and the cache stays free for what is
//! coming from memory.

use super::direct::{self, Rows, Stretch};
use crate::cpu::rows::{narrow, widen};
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::{Error, Result};
use crate::kv::NVFP4_BLOCK;
use crate::tensor::{DType, E2M1_VALUES, E2m1x2, E4m3, E5m2, Float, TensorRef, bf16, f16};

/// Elements of some type.
#[derive(Clone, Copy)]
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    E4m3(&'a [E4m3]),
    E5m2(&'a [E5m2]),
    /// NVFP4: pairs, their block scales, and the scales' strides.
    Fp4(&'a [E2m1x2], &'a [E4m3], [usize; 3]),
}

/// `[outer, middle, heads, dim]` of some element type: pages, tokens, heads of a cache, or 1, tokens, heads of a query.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    elements: Elements<'a>,
    strides: [usize; 3],
    /// Numbers per row.
    dim: usize,
}

impl<'a> Operand<'a> {
    /// From a tensor of rank 4 (or 3: one outer entry; or `[pages, tokens, dim]` with `heads: false`).
    pub(crate) fn new(op: &'static str, arg: &'static str, t: TensorRef<'a>, has_heads: bool) -> Result<Self> {
        let (shape, s) = (t.shape(), t.strides());
        let (strides, dim) = match (shape.len(), has_heads) {
            (4, true) => ([s[0], s[1], s[2]], 3),
            (3, true) => ([0, s[0], s[1]], 2),
            (3, false) => ([s[0], s[1], 0], 2),
            _ => return Err(Error::Rank { op, arg, got: shape.len(), want: 3, axes: "[tokens, heads, dim]".into() }),
        };
        if shape[dim] > 1 && s[dim] != 1 {
            return Err(Error::layout(op, arg, format!("stride {} of the last axis", s[dim]), "1"));
        }
        let elements = match t.dtype() {
            DType::F32 => Elements::F32(t.typed(op, arg)?.data()),
            DType::F16 => Elements::F16(t.typed(op, arg)?.data()),
            DType::BF16 => Elements::Bf16(t.typed(op, arg)?.data()),
            DType::E4M3 => Elements::E4m3(t.typed(op, arg)?.data()),
            DType::E5M2 => Elements::E5m2(t.typed(op, arg)?.data()),
            other => {
                return Err(Error::DType { op, arg, got: other.name(), want: "f32, f16, bf16, e4m3 or e5m2".into() });
            }
        };
        Ok(Self { elements, strides, dim: shape[dim] })
    }

    /// NVFP4 pairs with their block scales.
    pub(crate) fn nvfp4(op: &'static str, arg: &'static str, t: TensorRef<'a>, scales: TensorRef<'a>) -> Result<Self> {
        let three = |s: &[usize]| [s[0], s[1], s[2]];
        let elements = Elements::Fp4(t.typed(op, arg)?.data(), scales.typed(op, arg)?.data(), three(scales.strides()));
        Ok(Self { elements, strides: three(t.strides()), dim: t.shape()[3] * 2 })
    }

    /// Numbers per row.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Row `(a, b, c)` as f32 in the first `dim` of `out`.
    #[inline(always)]
    pub(crate) fn widen_row<V: Vector>(&self, v: V, row: [usize; 3], out: &mut [f32]) {
        v.call(Widen { operand: self, head: row[2], at: &[[row[0], row[1]]], out, stride: 0 });
    }

    /// Rows `(a, b, head)` for the pairs `(a, b)` of `at` as f32, `stride` floats apart in `out`.
    #[inline(always)]
    pub(super) fn widen_rows<V: Vector>(&self, v: V, head: usize, at: &[[usize; 2]], out: &mut [f32], stride: usize) {
        v.call(Widen { operand: self, head, at, out, stride });
    }

    /// Whether bf16 holds each of its values exactly.
    pub(super) fn fits_bf16(&self) -> bool {
        !matches!(self.elements, Elements::F32(_) | Elements::F16(_))
    }

    /// All elements, if they are bf16.
    #[inline(always)]
    pub(super) fn bf16_data(&self) -> Option<&'a [bf16]> {
        match self.elements {
            Elements::Bf16(x) => Some(x),
            _ => None,
        }
    }

    /// Row `(a, b, c)` where it lies, if it is bf16.
    #[inline(always)]
    pub(super) fn bf16_row(&self, row: [usize; 3]) -> Option<&'a [bf16]> {
        let [s, t, u] = self.strides;
        match self.elements {
            Elements::Bf16(x) => Some(&x[row[0] * s + row[1] * t + row[2] * u..][..self.dim]),
            _ => None,
        }
    }

    /// Row `(a, b, c)` as bf16, exact where [`Self::fits_bf16`]; `wide` is scratch of a row.
    #[inline(always)]
    pub(super) fn copy_bf16<V: Vector>(&self, v: V, row: [usize; 3], wide: &mut [f32], out: &mut [bf16]) {
        if let Some(row) = self.bf16_row(row) {
            return out.copy_from_slice(row);
        }
        self.widen_row(v, row, &mut wide[..self.dim]);
        narrow(v, &wide[..self.dim], out);
    }

    /// Whether the products can read its rows as they lie: whole vectors of plain numbers.
    pub(super) fn is_direct(&self) -> bool {
        self.dim > 0 && self.dim.is_multiple_of(16) && !matches!(self.elements, Elements::Fp4(..))
    }

    pub(super) fn strides(&self) -> [usize; 3] {
        self.strides
    }

    /// [`direct::Scores`] with keys as they lie in the cache; see [`Self::is_direct`].
    #[inline(always)]
    pub(super) fn scores<V: Vector>(&self, v: V, tile: Stretch<'_>, q: &[f32], s: &mut [f32]) {
        match self.elements {
            Elements::F32(k) => v.call(direct::Scores { q, k: Rows::new(self, k, tile), s }),
            Elements::F16(k) => v.call(direct::Scores { q, k: Rows::new(self, k, tile), s }),
            Elements::Bf16(k) => v.call(direct::Scores { q, k: Rows::new(self, k, tile), s }),
            Elements::E4m3(k) => v.call(direct::Scores { q, k: Rows::new(self, k, tile), s }),
            Elements::E5m2(k) => v.call(direct::Scores { q, k: Rows::new(self, k, tile), s }),
            Elements::Fp4(..) => unreachable!("not direct"),
        }
    }

    /// [`direct::Accumulate`] with values as they lie in the cache; see [`Self::is_direct`].
    #[inline(always)]
    pub(super) fn accumulate<V: Vector>(&self, v: V, tile: Stretch<'_>, p: &[f32], o: &mut [f32]) {
        match self.elements {
            Elements::F32(x) => v.call(direct::Accumulate { p, x: Rows::new(self, x, tile), o }),
            Elements::F16(x) => v.call(direct::Accumulate { p, x: Rows::new(self, x, tile), o }),
            Elements::Bf16(x) => v.call(direct::Accumulate { p, x: Rows::new(self, x, tile), o }),
            Elements::E4m3(x) => v.call(direct::Accumulate { p, x: Rows::new(self, x, tile), o }),
            Elements::E5m2(x) => v.call(direct::Accumulate { p, x: Rows::new(self, x, tile), o }),
            Elements::Fp4(..) => unreachable!("not direct"),
        }
    }

    /// Asks for the cache lines of row `(a, b, c)`.
    #[inline(always)]
    fn prefetch_row<V: Vector>(&self, v: V, [a, b, c]: [usize; 3]) {
        let [s, t, u] = self.strides;
        let at = a * s + b * t + c * u;
        if self.dim == 0 {
            return;
        }
        match self.elements {
            Elements::F32(x) => v.prefetch(&x[at..][..self.dim]),
            Elements::F16(x) => v.prefetch(&x[at..][..self.dim]),
            Elements::Bf16(x) => v.prefetch(&x[at..][..self.dim]),
            Elements::E4m3(x) => v.prefetch(&x[at..][..self.dim]),
            Elements::E5m2(x) => v.prefetch(&x[at..][..self.dim]),
            Elements::Fp4(x, ..) => v.prefetch(&x[at..][..self.dim / 2]),
        }
    }
}

/// Rows that the next tile will need: asked for while this tile's products run, so that the memory never waits.
///
/// The tile's rows of all heads of a pass are asked for in the order they lie in, a share with every head, as one
/// stream.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub operands: &'a [Operand<'a>],
    /// The head whose products run.
    pub head: usize,
    /// First head and number of heads of the pass.
    pub heads: (usize, usize),
    pub at: &'a [[usize; 2]],
}

impl Ahead<'_> {
    /// Asks for the part of this head's share of rows that goes with query rows `rows` of `all`.
    #[inline(always)]
    pub(super) fn share<V: Vector>(&self, v: V, rows: std::ops::Range<usize>, all: usize) {
        let n = self.at.len();
        self.prefetch(v, rows.start * n / all, rows.end * n / all);
    }

    /// Asks for this head's share of rows, `from..to` of as many as there are tokens.
    #[inline(always)]
    fn prefetch<V: Vector>(&self, v: V, from: usize, to: usize) {
        let n = self.at.len();
        let (first, count) = self.heads;
        for operand in self.operands {
            let by_token = operand.strides[2] < operand.strides[1];
            let mut j = from;
            while j < to.min(n) {
                let (token, head) = if by_token {
                    let i = (self.head - first) * n + j;
                    (i / count, first + i % count)
                } else {
                    (j, self.head)
                };
                let [a, b] = self.at[token];
                operand.prefetch_row(v, [a, b, head]);
                j += 1;
            }
        }
    }
}

struct Widen<'a, 'b> {
    operand: &'b Operand<'a>,
    head: usize,
    at: &'b [[usize; 2]],
    out: &'b mut [f32],
    stride: usize,
}

impl Kernel for Widen<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Operand { elements, strides: [s, t, u], dim } = *self.operand;
        if dim == 0 {
            return; // There is no memory behind rows of no elements.
        }
        let head = self.head * u;
        match elements {
            Elements::F32(x) => widen_all(v, x, [s, t], head, dim, self),
            Elements::F16(x) => widen_all(v, x, [s, t], head, dim, self),
            Elements::Bf16(x) => widen_all(v, x, [s, t], head, dim, self),
            Elements::E4m3(x) => widen_all(v, x, [s, t], head, dim, self),
            Elements::E5m2(x) => widen_all(v, x, [s, t], head, dim, self),
            Elements::Fp4(x, scales, ss) => {
                for (j, &[a, b]) in self.at.iter().enumerate() {
                    let x = &x[a * s + b * t + head..][..dim / 2];
                    let scales = &scales[a * ss[0] + b * ss[1] + self.head * ss[2]..][..dim / NVFP4_BLOCK];
                    widen_fp4(x, scales, &mut self.out[j * self.stride..][..dim]);
                }
            }
        }
    }
}

#[inline(always)]
fn widen_all<V: Vector, T: Lane>(v: V, x: &[T], [s, t]: [usize; 2], head: usize, dim: usize, rows: Widen<'_, '_>) {
    for (j, &[a, b]) in rows.at.iter().enumerate() {
        widen(v, &x[a * s + b * t + head..][..dim], &mut rows.out[j * rows.stride..][..dim]);
    }
}

/// Values of the sixteen e2m1 codes.
const FP4: [f32; 16] = {
    let mut all = [0.0; 16];
    let mut i = 0;
    while i < 8 {
        all[i] = E2M1_VALUES[i];
        all[i + 8] = -E2M1_VALUES[i];
        i += 1;
    }
    all
};

#[inline(always)]
fn widen_fp4(x: &[E2m1x2], scales: &[E4m3], out: &mut [f32]) {
    let (blocks, _) = out.as_chunks_mut::<NVFP4_BLOCK>();
    for ((out, x), s) in blocks.iter_mut().zip(x.as_chunks::<{ NVFP4_BLOCK / 2 }>().0).zip(scales) {
        let s = s.to_f32();
        for i in 0..NVFP4_BLOCK / 2 {
            out[2 * i] = FP4[(x[i].0 & 15) as usize] * s;
            out[2 * i + 1] = FP4[(x[i].0 >> 4) as usize] * s;
        }
    }
}
