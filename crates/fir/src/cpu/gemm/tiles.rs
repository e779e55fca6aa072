//! Products of bf16 through AMX tiles.
//!
//! Weights are the left operand, rows as they lie in memory; the rows of `x` are packed as columns of the right one, once
//! for all weights; so sums come out turned, `[n, m]`, and are turned back as they are written.
//!
//! A unit of work is a block of weight rows against a block of `x`. Up to [`FEW`] rows of `x` use a weight once: tiles
//! load it from where it lies, and the memory is the bound. For more, a strip of 32 weight rows is copied, as tiles (rows
//! a power of two apart would fall on few sets of the first-level cache), and meets every row of the block, which stays
//! in the second level beside its sums. Meanwhile the next strip is copied and the one after it asked for, and so is the
//! next stretch of `x`: it comes from the last level, at a fifth of the second's speed. [`Strips`] are copies of before: they
//! are only asked for, and few rows read them as they lie, too.
//!
//! What it costs, in cycles for a strip of 256 elements against 32 rows, on a core of a Xeon of model 207: 512 for 32
//! products of tiles, which hide 256 for their loads from the first level, 290 for 16 KB of `x` from the second and 100 for
//! 4 KB of sums there and back. In turn with each other they would take twice as long.
//!
//! A sum runs over `k` in steps of 32, in order, the last one filled up with zeros: whatever the unit, the same bits.

use std::cell::Cell;

use super::strips::{STEP, STRIP, Strips, copy, lines, strip_len};
use super::{Epilogue, Product};
use crate::cpu::arch::{Ahead, Aligned, Amx, Avx512, Left, Right, Sums, TILE, TileKernel, Tiles, aligned, prefetch_at};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::Rows;
use crate::cpu::vector::{Lane, Vector};
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef, bf16};

/// Most rows of `x` that use weights as they lie in memory: those of one strip.
const FEW: usize = STRIP;
/// Sums of a strip of weights against one of `x`, side by side: 2 KB apart they would fall on four sets of the cache.
const SUMS: usize = STRIP * STRIP;
/// Elements of a line of the cache.
const LINE: usize = 32;
/// Steps ahead of the one that is packed whose rows are asked for.
const PACK_AHEAD: usize = 8;
/// Sizes of the blocks of a launch.
///
/// A strip of the default depth, 256, takes 16 KB of the first-level cache, and so does the one that is being copied. A
/// block of 512 rows of `x` and 256 weight rows has 512 KB of sums, and 256 KB of `x`, twice, of the second level's 2 MB.
#[derive(Clone, Copy)]
struct Sizes {
    /// Elements along `k` of a strip.
    depth: usize,
    /// Rows of `x` per block, and most weight rows.
    block: usize,
}

thread_local! {
    /// Packed rows of a launch. Kept, as new memory of this size would be mapped and cleared every time.
    static PACKED: Cell<Vec<bf16>> = const { Cell::new(Vec::new()) };
    /// A unit's strip and sums, kept too.
    static SCRATCH: Cell<(Vec<bf16>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Weights of a product.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    Rows(Rows<'a, bf16>),
    Strips(&'a Strips),
}

/// One product of a launch.
pub(super) struct Sides<'a> {
    pub(super) x: TensorRef<'a>,
    pub(super) w: Weights<'a>,
    pub(super) out: TensorMut<'a>,
    pub(super) then: Epilogue<'a>,
}

impl<'a> Sides<'a> {
    pub(super) fn new(op: &'static str, p: Product<'a>) -> Result<Self> {
        Ok(Self { x: p.x, w: Weights::Rows(Rows::new(op, "w", p.w)?), out: p.out, then: p.then })
    }

    /// Weight rows.
    fn rows(&self) -> usize {
        match self.w {
            Weights::Rows(w) => w.len(),
            Weights::Strips(w) => w.shape()[0],
        }
    }

    /// Multiplications, or as many as a usize holds.
    fn work(&self) -> usize {
        self.x.shape().iter().fold(self.rows(), |n, &m| n.saturating_mul(m))
    }
}

pub(super) fn products<O: Lane>(cpu: &Cpu, amx: Amx, op: &'static str, list: Vec<Sides<'_>>) -> Result<()> {
    // Below 4M multiplications, a few microseconds, waking the pool is not worth it.
    let alone = list.iter().fold(0usize, |sum, p| sum.saturating_add(p.work())) < 4 << 20;
    let tuning = cpu.tuning();
    let sizes = Sizes { depth: tuning.gemm_depth, block: tuning.gemm_block };
    let packed_len = |p: &Sides<'_>| tile_rows(p.x.shape()[0]) * p.x.shape()[1].div_ceil(STEP) * TILE;
    let mut buffer = PACKED.take();
    let packed = aligned(&mut buffer, list.iter().map(packed_len).sum());
    let (mut packs, mut rest) = (vec![], &mut *packed);
    for p in &list {
        let x = Rows::<bf16>::new(op, "x", p.x)?;
        let (mine, others) = rest.split_at_mut(packed_len(p));
        rest = others;
        let (m, steps) = (x.len(), x.row_len().div_ceil(STEP));
        if m <= FEW {
            // Sixteen rows each, all steps.
            let parts = mine.chunks_mut((steps * TILE).max(1)).enumerate();
            packs.extend(parts.map(|(i, to)| Pack { x, first: 16 * i, from: 0, side: 1, to }));
            continue;
        }
        // Blocks, stretches of a strip's depth, strips, steps: what a product reads lies side by side.
        let (mut mine, depth) = (mine, sizes.depth / STEP);
        for first in (0..m).step_by(sizes.block) {
            for from in (0..steps).step_by(depth) {
                for strip in (first..m.min(first + sizes.block)).step_by(STRIP) {
                    let (to, others) = mine.split_at_mut(2 * depth.min(steps - from) * TILE);
                    mine = others;
                    packs.push(Pack { x, first: strip, from, side: 2, to });
                }
            }
        }
    }
    if alone || packs.len() == 1 {
        packs.into_iter().for_each(|p| amx.run(p));
    } else {
        cpu.pool().scatter(packs, |p| amx.run(p));
    }

    let (mut units, mut rest) = (vec![], &*packed);
    let blocks: usize = list.iter().map(|p| p.x.shape()[0].div_ceil(sizes.block)).sum();
    for p in list {
        let (mine, others) = rest.split_at(packed_len(&p));
        rest = others;
        let (m, k, n) = (p.x.shape()[0], p.x.shape()[1], p.out.shape()[1]);
        let (all, w, out) = (p.rows(), p.w, RowsMut::<O>::new(op, "out", p.out)?);
        // Units over all products for each worker, for one that is slow for a while: of many rows fewer, as each reads them all.
        let each = if m <= FEW { 8 } else { 4 };
        let width = (all * blocks / (each * cpu.workers())).next_multiple_of(STRIP).clamp(STRIP, sizes.block);
        let steps = k.div_ceil(STEP);
        for (b, rows) in out.cut(lens(m, sizes.block)).into_iter().enumerate() {
            let x = &mine[b * sizes.block / 16 * steps * TILE..];
            let columns = rows.split_columns(width).into_iter().enumerate();
            units.extend(columns.map(|(i, out)| Unit {
                sizes,
                few: m <= FEW,
                x,
                w,
                k,
                n,
                first: i * width,
                out,
                then: p.then,
            }));
        }
    }
    if alone {
        units.into_iter().for_each(|u| amx.run(u));
    } else {
        cpu.pool().scatter(units, |u| amx.run(u));
    }
    PACKED.set(buffer);
    Ok(())
}

/// Lengths of the blocks that `m` rows are cut into.
fn lens(m: usize, block: usize) -> impl Iterator<Item = usize> {
    (0..m).step_by(block).map(move |at| block.min(m - at))
}

/// Tiles side by side that hold `m` rows of `x`: more than few are whole strips.
fn tile_rows(m: usize) -> usize {
    if m <= FEW { m.div_ceil(16) } else { m.div_ceil(STRIP) * (STRIP / 16) }
}

/// Packs steps of rows of `x`, `16 * side` of them from `first` on, the tiles of a step side by side; zeros after the last
/// row and after the end of each.
struct Pack<'a> {
    x: Rows<'a, bf16>,
    first: usize,
    /// The first step.
    from: usize,
    side: usize,
    to: &'a mut [bf16],
}

impl TileKernel for Pack<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, _: Tiles) {
        let Self { x, first, from, side, to } = self;
        let k = x.row_len();
        let row = |r: usize| if r < x.len() { x.row(r) } else { &[] };
        let rows: [[&[bf16]; 16]; 2] = std::array::from_fn(|s| std::array::from_fn(|r| row(first + 16 * s + r)));
        for (at, tile) in to.chunks_exact_mut(TILE).enumerate() {
            let columns = (from + at / side) * STEP..k.min((from + at / side + 1) * STEP);
            let mut ends = [[bf16::ZERO; STEP]; 16];
            let mut lines: [&[bf16]; 16] = [&[bf16::ZERO; STEP]; 16];
            for ((line, end), row) in lines.iter_mut().zip(&mut ends).zip(&rows[at % side]) {
                // Sixteen rows, KiB apart, are more streams than the caches' own prefetchers follow.
                prefetch_at(row.as_ptr().wrapping_add(columns.start + PACK_AHEAD * STEP), STEP);
                match row.get(columns.clone()) {
                    Some(row) if row.len() == STEP => *line = row,
                    Some(row) => {
                        end[..row.len()].copy_from_slice(row);
                        *line = end;
                    }
                    None => {}
                }
            }
            v.pack_rows(&lines, 0, tile);
        }
    }
}

/// Rows `out.range()` of a product, for the weight rows from `first` on, as many as `out` is wide.
struct Unit<'a, O> {
    sizes: Sizes,
    /// Whether the whole product has few rows, by which they are packed.
    few: bool,
    /// Packed, from the unit's first row on.
    x: &'a [bf16],
    w: Weights<'a>,
    k: usize,
    /// Columns of the whole product.
    n: usize,
    first: usize,
    out: RowsMut<'a, O>,
    then: Epilogue<'a>,
}

impl<O: Lane> TileKernel for Unit<'_, O> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, tiles: Tiles) {
        let (mut strip, mut sums) = SCRATCH.take();
        let m = self.out.range().len();
        let (strips, widths) = (m.div_ceil(STRIP), self.out.row_len().div_ceil(STRIP));
        {
            // Two, of many rows.
            let strip = aligned(&mut strip, 2 * STRIP * self.sizes.depth);
            let size = widths * strips * SUMS;
            let sums = aligned(&mut sums, self.then.rows() * size);
            for (half, sums) in sums.chunks_exact_mut(size).enumerate() {
                let first = half * self.n + self.first;
                let few = self.few;
                match self.w {
                    _ if self.k == 0 => sums.fill(0.0),
                    Weights::Rows(w) if few => self.few(tiles, w, first, strip, sums),
                    Weights::Rows(w) => self.many(v, tiles, w, first, strip, sums),
                    Weights::Strips(w) if few => self.few_packed(tiles, w, first, sums),
                    Weights::Strips(w) => self.many_packed(v, tiles, w, first, sums),
                }
            }
            self.write(v, tiles, sums, size);
        }
        SCRATCH.set((strip, sums));
    }
}

impl<O: Lane> Unit<'_, O> {
    #[inline(always)]
    fn few(&self, tiles: Tiles, w: Rows<'_, bf16>, first: usize, strip: &mut [bf16], sums: &mut [f32]) {
        let width = self.out.row_len();
        let (whole, steps) = (self.k / STEP, self.k.div_ceil(STEP));
        for (j, sums) in sums.as_chunks_mut::<SUMS>().0.iter_mut().enumerate() {
            let mut done = 0;
            if (j + 1) * STRIP <= width
                && let Some((data, stride)) = w.stretch(first + j * STRIP, STRIP)
            {
                let (left, right) = (Left { data, stride }, self.right(0));
                let sums = Sums { data: sums, stride: STRIP };
                if self.out.range().len() > 16 {
                    tiles.product_bf16::<2, 2>(left, right, whole, sums, false);
                } else {
                    tiles.product_bf16::<2, 1>(left, right, whole, sums, false);
                }
                done = whole;
            }
            while done < steps {
                let (n, depth) = ((self.sizes.depth / STEP).min(steps - done), self.sizes.depth);
                for (r, to) in strip.chunks_exact_mut(depth).enumerate().take(STRIP) {
                    let row = if j * STRIP + r < width { w.row(first + j * STRIP + r) } else { &[] };
                    let row = row.get(done * STEP..).unwrap_or_default();
                    copy(row, to[..n * STEP].chunks_exact_mut(STEP));
                }
                let (left, right) = (Left { data: &*strip, stride: depth }, self.right(done));
                tiles.product_bf16::<2, 2>(left, right, n, Sums { data: sums, stride: STRIP }, done > 0);
                done += n;
            }
        }
    }

    #[inline(always)]
    fn many(&self, v: Avx512, tiles: Tiles, w: Rows<'_, bf16>, first: usize, strip: &mut [bf16], sums: &mut [f32]) {
        let (steps, depth) = (self.k.div_ceil(STEP), self.sizes.depth / STEP);
        let (strips, width) = (self.out.range().len().div_ceil(STRIP), self.out.row_len());
        let (widths, sums) = (width.div_ceil(STRIP), sums.as_chunks_mut::<SUMS>().0);
        // Weight rows to copy, and to ask for, per product, so that they are there when their strip comes.
        let each = STRIP.div_ceil(strips);
        let (mut strip, mut other) = strip.split_at_mut(2 * depth * TILE);
        let mut unused = [0f32; SUMS];
        for r in 0..STRIP {
            copy(self.stretch(w, first, 0, r), lines(strip, r).take(depth));
        }
        for turn in 0..steps.div_ceil(depth) * widths {
            let (from, j) = (turn / widths * depth, turn % widths);
            let n = depth.min(steps - from);
            for i in 0..strips {
                let rows = i * each..STRIP.min((i + 1) * each);
                for r in rows.clone() {
                    copy(self.stretch(w, first, turn + 1, r), lines(other, r).take(depth));
                    // The first two are asked for by the product.
                    let row = if r < rows.start + 2 { &[] } else { self.stretch(w, first, turn + 2, r) };
                    for at in (0..row.len()).step_by(STEP) {
                        v.prefetch_far(row, at);
                    }
                }
                let at = j * strips + i;
                let (before, rest) = sums.split_at_mut(at);
                let x = &self.x[(from * strips + i * n) * 2 * TILE..];
                let later = |r: usize| self.stretch(w, first, turn + 2, r);
                let ahead = Ahead {
                    sums: rest.get(1).map_or(&[], |sums| sums),
                    rows: [later(rows.start), later(rows.start + 1)],
                    x: self.next_x(from + n, at, n, 8).unwrap_or(x),
                    twice: true,
                };
                let last = before.last_mut().unwrap_or(&mut unused);
                tiles.begin_bf16(strip, x, n, (from > 0).then_some(&rest[0]), last, &ahead);
            }
            if j + 1 == widths {
                tiles.end(&mut sums[turn % widths * strips + strips - 1]);
            }
            std::mem::swap(&mut strip, &mut other);
        }
    }

    #[inline(always)]
    fn few_packed(&self, tiles: Tiles, w: &Strips, first: usize, sums: &mut [f32]) {
        let (strips, steps) = (&w.data()[first / STRIP * strip_len(self.k)..], self.k.div_ceil(STEP));
        let strips = strips.chunks_exact(strip_len(self.k));
        for (strip, sums) in strips.zip(sums.as_chunks_mut::<SUMS>().0) {
            if self.out.range().len() > 16 {
                tiles.product_strip::<2>(strip, self.right(0), steps, sums);
            } else {
                tiles.product_strip::<1>(strip, self.right(0), steps, sums);
            }
        }
    }

    /// As [`Self::many`], without copies.
    #[inline(always)]
    fn many_packed(&self, v: Avx512, tiles: Tiles, w: &Strips, first: usize, sums: &mut [f32]) {
        let (steps, depth) = (self.k.div_ceil(STEP), self.sizes.depth / STEP);
        let (strips, sums) = (self.out.range().len().div_ceil(STRIP), sums.as_chunks_mut::<SUMS>().0);
        let (all, widths) = (&w.data()[first / STRIP * strip_len(self.k)..], self.out.row_len().div_ceil(STRIP));
        // What a turn takes of its strip; nothing after the last.
        let stretch = |turn: usize| {
            let (from, j) = (turn / widths * depth, turn % widths);
            let end = steps.min(from + depth);
            if from < steps { &all[2 * TILE * (j * steps + from)..2 * TILE * (j * steps + end)] } else { &[] }
        };
        let mut unused = [0f32; SUMS];
        // Two lines of weights and two of `x` a step, for four products, are for nothing, four more cost a third.
        let over = if widths < 16 { 8 } else { 16 };
        for turn in 0..steps.div_ceil(depth) * widths {
            let (from, j) = (turn / widths * depth, turn % widths);
            let (strip, later) = (stretch(turn), stretch(turn + 2));
            let n = depth.min(steps - from);
            // Of the strip to come a share per product, two lines at each of its steps.
            let each = later.len().div_ceil(strips).next_multiple_of(LINE);
            for i in 0..strips {
                let share = &later[later.len().min(i * each)..later.len().min((i + 1) * each)];
                for at in (2 * n * LINE..share.len()).step_by(LINE) {
                    v.prefetch_far(share, at);
                }
                let at = j * strips + i;
                let (before, rest) = sums.split_at_mut(at);
                let x = &self.x[(from * strips + i * n) * 2 * TILE..];
                let ahead = Ahead {
                    sums: rest.get(1).map_or(&[], |sums| sums),
                    rows: [share, share.get(n * LINE..).unwrap_or_default()],
                    x: self.next_x(from + n, at, n, over).unwrap_or(x),
                    twice: over == 8,
                };
                let last = before.last_mut().unwrap_or(&mut unused);
                tiles.begin_bf16(strip, x, n, (from > 0).then_some(&rest[0]), last, &ahead);
            }
            if j + 1 == widths {
                tiles.end(&mut sums[j * strips + strips - 1]);
            }
        }
    }

    /// What product `at` of a stretch, `n` steps, is to ask for of the stretch of `x` that begins at step `from`, if anything: all of it
    /// beside the first `over` strips of weights, of eight or sixteen.
    #[inline(always)]
    fn next_x(&self, from: usize, at: usize, n: usize, over: usize) -> Option<&[bf16]> {
        let strips = self.out.range().len().div_ceil(STRIP);
        let next = from * strips * 2 * TILE + at * n * (2 * TILE / over);
        self.x.get(next..).filter(|_| at < over * strips)
    }

    /// Strip of few rows of `x`, from step `from` on. Of 16 rows or fewer its second tile is the first again, for sums
    /// that nobody reads.
    #[inline(always)]
    fn right(&self, from: usize) -> Right<'_, bf16> {
        let stride = if self.out.range().len() > 16 { self.k.div_ceil(STEP) * TILE } else { 0 };
        Right { data: &self.x[from * TILE..], stride }
    }

    /// Of row `r` of a strip of the weights from row `first` on, what the strip's turn takes: all strips take a stretch of
    /// their rows, then all take the next one. Nothing if there is no such row.
    #[inline(always)]
    fn stretch<'w>(&self, w: Rows<'w, bf16>, first: usize, turn: usize, r: usize) -> &'w [bf16] {
        let (width, depth) = (self.out.row_len(), self.sizes.depth);
        let widths = width.div_ceil(STRIP);
        let (row, from) = (turn % widths * STRIP + r, turn / widths * depth);
        if r >= STRIP || row >= width || from >= self.k {
            return &[];
        }
        &w.row(first + row)[from..self.k.min(from + depth)]
    }

    /// Turns the sums, `size` of them per weight row of a column, and writes them: whole lines of rows, which often lie a power of two
    /// apart and so on the same few lines of the first-level cache.
    #[inline(always)]
    fn write(mut self, v: Avx512, tiles: Tiles, sums: &[f32], size: usize) {
        let (range, width) = (self.out.range(), self.out.row_len());
        let strips = range.len().div_ceil(STRIP);
        let mut turned = Aligned([[[[0f32; 16]; 16]; 2]; 2]);
        for i in (0..range.len()).step_by(16) {
            let rows = range.start + i..range.end.min(range.start + i + 16);
            for j in (0..width).step_by(STRIP) {
                let block = (j / STRIP * strips + i / STRIP) * SUMS + i % STRIP;
                for (sums, turned) in sums.chunks_exact(size).zip(&mut turned.0) {
                    // The next block of these rows.
                    let next = sums.get(block + strips * SUMS..).unwrap_or_default();
                    for row in next.chunks(STRIP).take(STRIP) {
                        prefetch_at(row.as_ptr(), 16);
                    }
                    for (c, turned) in turned.iter_mut().enumerate() {
                        tiles.turn(&sums[block + 16 * STRIP * c..], STRIP, turned);
                    }
                }
                let columns = j..width.min(j + STRIP);
                let mut out = self.out.some(rows.clone());
                for r in 0..rows.len() {
                    let out = &mut out.next().expect("as many rows")[columns.clone()];
                    for (c, out) in out.chunks_mut(16).enumerate() {
                        let (sums, second) = (&turned.0[0][c][r][..out.len()], &turned.0[1][c][r][..out.len()]);
                        self.then.write(v, self.first + j + 16 * c, sums, second, out);
                    }
                }
            }
        }
    }
}
