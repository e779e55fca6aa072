//! Products of many rows: both operands are packed, so that a tile of sums stays in registers while one vector of
//! weights and one number of `x` after the other arrive.
//!
//! Lanes of a vector are weight rows here, and positions along `k` in the product of few rows. For the same bits,
//! additions keep the order of the latter: a block of [`depth_of`] is packed lane by lane (all positions of lane 0, and so
//! on), a tile sums up one lane after the other, and adds the lanes' sums as the tree of [`Vector::sum`] does. Lanes come
//! in the order of their reversed bits: then partial sums of the tree are a stack, never deeper than it.
//!
//! A strip of `x` is `R` rows, `[lanes, steps, R]`; a strip of weights `C` vectors of rows, `[lanes, steps, C * LANES]`.
//! At 16 lanes, 9 × 3 vectors of sums, 3 of weights and one number fill 31 of 32 registers. On a core of a Xeon of model
//! 207 that loop alone reached 77 to 81 % of the multiply-adds' own speed beside a busy neighbour, 12 × 2 and 14 × 2 70 to 74 %.

use super::depth_of;
use crate::cpu::arch::prefetch_at;
use crate::cpu::rows::Rows;
use crate::cpu::vector::{Kernel, Lane, Vector};

/// Most rows of a product that reads weights as they lie. For more, packing pays.
pub(super) const FEW: usize = 32;
/// Rows of `x` that are whole strips at any level.
pub(super) const ROWS: usize = 18;
/// Weight rows of a unit, whole strips at any level: 384 KB packed, of the second-level cache.
pub(super) const PANEL: usize = 48;
/// Elements ahead of those being packed that are asked for.
const AHEAD: usize = 128;
/// Steps ahead of the one in use whose weights are asked for, and half of those whose `x` are.
const NEAR: usize = 16;
/// Deepest stack of partial sums: the levels of a tree of 16 lanes.
const LEVELS: usize = 4;

/// Floats of a packed row: any level's whole vectors.
pub(super) fn row_len(k: usize) -> usize {
    k.next_multiple_of(16)
}

/// Whether the level has 32 registers, or 16.
#[inline(always)]
fn is_wide<V: Vector>() -> bool {
    V::LANES == 16
}

/// At which turn a lane comes.
#[inline(always)]
fn turn_of<V: Vector>(lane: usize) -> usize {
    lane.reverse_bits() >> (usize::BITS - V::LANES.ilog2())
}

/// Packs up to [`ROWS`] rows of `x`, from `first` on, zeros after the last.
pub(super) struct PackRows<'a, T> {
    pub x: Rows<'a, T>,
    pub first: usize,
    /// `[ROWS, row_len(k)]`
    pub to: &'a mut [f32],
}

impl<T: Lane> Kernel for PackRows<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        if is_wide::<V>() { self.pack::<V, 9>(v) } else { self.pack::<V, 6>(v) }
    }
}

impl<T: Lane> PackRows<'_, T> {
    #[inline(always)]
    fn pack<V: Vector, const R: usize>(self, v: V) {
        let Self { x, first, to } = self;
        let k = x.row_len();
        for (i, strip) in to.chunks_exact_mut((R * row_len(k)).max(1)).enumerate().take(ROWS / R) {
            let mut rows = [&[][..]; R];
            for (r, row) in rows.iter_mut().enumerate() {
                let r = first + i * R + r;
                *row = if r < x.len() { x.row(r) } else { &[] };
            }
            let mut from = 0;
            while from < k {
                let steps = depth_of::<V>().min(k - from).div_ceil(V::LANES);
                let (to, _) = strip[R * from..][..R * steps * V::LANES].as_chunks_mut::<R>();
                for t in 0..steps {
                    let at = from + t * V::LANES;
                    let mut block = [v.splat(0.0); 16];
                    for (x, row) in block.iter_mut().zip(rows) {
                        *x = load(v, row, at..k.min(at + V::LANES));
                    }
                    for (lane, x) in v.transpose(block).into_iter().enumerate().take(V::LANES) {
                        let mut all = [0f32; 16];
                        v.store(x, &mut all);
                        to[turn_of::<V>(lane) * steps + t].copy_from_slice(&all[..R]);
                    }
                }
                from += depth_of::<V>();
            }
        }
    }
}

/// A vector of a row, or zeros where there is no row.
#[inline(always)]
fn load<V: Vector, T: Lane>(v: V, row: &[T], columns: std::ops::Range<usize>) -> V::F {
    if row.is_empty() {
        v.splat(0.0)
    } else if columns.len() == V::LANES {
        T::load(v, &row[columns])
    } else {
        T::load_tail(v, &row[columns])
    }
}

/// Adds the product of packed rows and some weight rows to `sums`, `[rows, width]`.
pub(super) struct Panel<'a, W> {
    /// From the first row on.
    pub x: &'a [f32],
    pub rows: usize,
    pub w: Rows<'a, W>,
    pub first: usize,
    pub width: usize,
    pub sums: &'a mut [f32],
    /// Room for `[PANEL, DEPTH.min(row_len(k))]`.
    pub panel: &'a mut [f32],
}

impl<W: Lane> Kernel for Panel<'_, W> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        if is_wide::<V>() { self.multiply::<V, 9, 3>(v) } else { self.multiply::<V, 6, 2>(v) }
    }
}

impl<W: Lane> Panel<'_, W> {
    #[inline(always)]
    fn multiply<V: Vector, const R: usize, const C: usize>(self, v: V) {
        let Self { x, rows, w, first, width, sums, panel } = self;
        let (k, strip) = (w.row_len(), C * V::LANES);
        let mut from = 0;
        while from < k {
            let depth = depth_of::<V>().min(k - from);
            let steps = depth.div_ceil(V::LANES);
            let size = steps * V::LANES * strip;
            for (s, to) in panel.chunks_exact_mut(size).enumerate().take(width.div_ceil(strip)) {
                pack_weights::<V, W, C>(v, &w, first + s * strip..first + width.min((s + 1) * strip), from, steps, to);
            }
            // Meanwhile the next block of these weight rows is asked for, a part with every tile: to wait for it would
            // take a tenth of the time.
            let mut next = Ask { w: &w, rows: first..first + width, from: from + depth_of::<V>(), rest: &[] };
            let tiles = rows.div_ceil(R) * width.div_ceil(strip);
            // Whole rows or equal parts of one, so that a tile asks for lines of a single row.
            let row_lines = (depth_of::<V>() * size_of::<W>()).div_ceil(64);
            let parts = (tiles / width).clamp(1, row_lines);
            for i in (0..rows).step_by(R) {
                let x = &x[i * row_len(k) + R * from..][..R * steps * V::LANES];
                for (s, w) in panel.chunks_exact(size).enumerate().take(width.div_ceil(strip)) {
                    let sums = &mut sums[i * width + s * strip..];
                    let (rows, columns) = (R.min(rows - i), strip.min(width - s * strip));
                    for _ in 0..width.div_ceil(tiles) {
                        next.ask(v, row_lines.div_ceil(parts));
                    }
                    v.call(Tile::<R, C> { x, w, steps, sums, stride: width, rows, columns });
                }
            }
            from += depth_of::<V>();
        }
    }
}

/// What of a block of weights was not asked for yet.
struct Ask<'a, W> {
    w: &'a Rows<'a, W>,
    rows: std::ops::Range<usize>,
    /// First column of the block.
    from: usize,
    /// What is left of a row's part in the block.
    rest: &'a [W],
}

impl<W: Lane> Ask<'_, W> {
    /// Asks for so many lines more, or for the rest of a row, into the second-level cache.
    #[inline(always)]
    fn ask<V: Vector>(&mut self, v: V, lines: usize) {
        let line = 64 / size_of::<W>();
        if self.rest.is_empty()
            && self.from < self.w.row_len()
            && let Some(r) = self.rows.next()
        {
            self.rest = &self.w.row(r)[self.from..self.w.row_len().min(self.from + depth_of::<V>())];
        }
        let (now, rest) = self.rest.split_at(self.rest.len().min(lines * line));
        self.rest = rest;
        for at in (0..now.len()).step_by(line) {
            v.prefetch_far(now, at);
        }
    }
}

/// Packs `steps` vectors of each weight row of `rows`, from column `from` on; zeros for rows that a strip lacks.
#[inline(always)]
fn pack_weights<V: Vector, W: Lane, const C: usize>(
    v: V,
    w: &Rows<'_, W>,
    rows: std::ops::Range<usize>,
    from: usize,
    steps: usize,
    to: &mut [f32],
) {
    let k = w.row_len();
    for c in 0..C {
        let mut lines = [&[][..]; 16];
        for (i, line) in lines.iter_mut().enumerate().take(V::LANES) {
            let r = rows.start + c * V::LANES + i;
            *line = if r < rows.end { w.row(r) } else { &[] };
        }
        for t in 0..steps {
            let at = from + t * V::LANES;
            let mut block = [v.splat(0.0); 16];
            for (x, line) in block.iter_mut().zip(lines) {
                // Sixteen rows at a time are more than the caches' own prefetchers follow: half the time without this. Into the
                // second-level cache, as rows of whole pages push each other out of the first.
                v.prefetch_far(line, at + AHEAD);
                *x = load(v, line, at..k.min(at + V::LANES));
            }
            for (lane, x) in v.transpose(block).into_iter().enumerate().take(V::LANES) {
                v.store(x, &mut to[((turn_of::<V>(lane) * steps + t) * C + c) * V::LANES..]);
            }
        }
    }
}

/// Adds the product of a strip of `x` and one of weights to `sums`, those of `rows` and `columns`.
struct Tile<'a, const R: usize, const C: usize> {
    x: &'a [f32],
    w: &'a [f32],
    steps: usize,
    sums: &'a mut [f32],
    stride: usize,
    rows: usize,
    columns: usize,
}

impl<const R: usize, const C: usize> Kernel for Tile<'_, R, C> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { x, w, steps, sums, stride, rows, columns } = self;
        let (xs, ws) = (x.chunks_exact(steps * R), w.chunks_exact(steps * C * V::LANES));
        let mut stack = [[[v.splat(0.0); C]; R]; LEVELS];
        for (turn, (x, w)) in xs.zip(ws).enumerate() {
            let mut acc: [[V::F; C]; R] = lane_sums(v, x, w);
            // A subtree is complete for every one at the end of `turn`, in binary.
            let mut depth = turn.count_ones() as usize;
            for _ in 0..turn.trailing_ones() {
                depth -= 1;
                let left = &stack[depth];
                for r in 0..R {
                    for c in 0..C {
                        acc[r][c] = v.add(left[r][c], acc[r][c]);
                    }
                }
            }
            let to = &mut stack[depth];
            for r in 0..R {
                for c in 0..C {
                    to[r][c] = acc[r][c];
                }
            }
        }
        for (acc, sums) in stack[0].iter().zip(sums.chunks_mut(stride)).take(rows) {
            for (c, acc) in acc.iter().enumerate() {
                if columns >= (c + 1) * V::LANES {
                    let sums = &mut sums[c * V::LANES..];
                    v.store(v.add(v.load(sums), *acc), sums);
                } else if columns > c * V::LANES {
                    let mut lanes = [0f32; 16];
                    v.store(*acc, &mut lanes);
                    for (sum, x) in sums[c * V::LANES..columns].iter_mut().zip(lanes) {
                        *sum += x;
                    }
                }
            }
        }
    }
}

/// The sums of one lane.
#[inline(always)]
fn lane_sums<V: Vector, const R: usize, const C: usize>(v: V, x: &[f32], w: &[f32]) -> [[V::F; C]; R] {
    let mut acc = [[v.splat(0.0); C]; R];
    for (x, w) in x.as_chunks::<R>().0.iter().zip(w.chunks_exact(C * V::LANES)) {
        // Both come from the second-level cache: on a Xeon of model 207 512 and 2048 rows take 4 to 7 % less so.
        prefetch_at(w.as_ptr().wrapping_add(NEAR * C * V::LANES), C * V::LANES);
        prefetch_at(x.as_ptr().wrapping_add(2 * NEAR * R), 1);
        let mut ws = [v.splat(0.0); C];
        for c in 0..C {
            ws[c] = v.load(&w[c * V::LANES..]);
        }
        for r in 0..R {
            let x = v.splat(x[r]);
            for c in 0..C {
                acc[r][c] = v.fma(x, ws[c], acc[r][c]);
            }
        }
    }
    acc
}
