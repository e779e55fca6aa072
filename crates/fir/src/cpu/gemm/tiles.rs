//! Products of bf16 through AMX tiles.
//!
//! Weights are the left operand, rows as they lie in memory; the rows of `x` are packed as columns of the right one, once
//! for all weights; so sums come out turned, `[n, m]`, and are turned back as they are written.
//!
//! A unit of work is a block of weight rows against a block of `x`. Up to [`FEW`] rows of `x` use a weight once: tiles
//! load it from where it lies, and the memory is the bound. For more, a strip of 32 weight rows is copied, as tiles (rows
//! a power of two apart would fall on few sets of the first-level cache), and meets every row of the block, which stays
//! in the second level beside its sums. Meanwhile the next strip is asked for.
//!
//! A sum runs over `k` in steps of 32, in order, the last one filled up with zeros: whatever the unit, the same bits.

use std::cell::Cell;

use super::{Epilogue, Product};
use crate::cpu::arch::{Amx, Avx512, Left, Right, Sums, TILE, TileKernel, Tiles, aligned};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::Rows;
use crate::cpu::vector::{Lane, Vector};
use crate::error::Result;
use crate::tensor::bf16;

/// Elements along `k` of one step of a tile.
const STEP: usize = 32;
/// Weight rows and rows of `x` per product of tiles.
const STRIP: usize = 32;
/// Most rows of `x` that use weights as they lie in memory: those of one strip.
const FEW: usize = STRIP;
/// Sums of a strip of weights against one of `x`, side by side: 2 KB apart they would fall on four sets of the cache.
const SUMS: usize = STRIP * STRIP;
/// Sizes of the blocks of a launch.
///
/// A strip of the default depth, 256, takes 16 KB. Beside it 16 KB of `x` stream through the first-level cache per
/// product; twice as deep they would push the strip out, and the second level gives no more than 50 bytes a cycle of the
/// 64 that the tiles take. A block of 512 rows of `x` and as many weight rows has 1 MB of sums, and 256 KB of `x`.
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

pub(super) fn products<O: Lane>(cpu: &Cpu, amx: Amx, op: &'static str, list: Vec<Product<'_>>) -> Result<()> {
    // Below 4M multiplications, a few microseconds, waking the pool is not worth it.
    let alone = list.iter().fold(0usize, |sum, p| sum.saturating_add(p.work())) < 4 << 20;
    let tuning = cpu.tuning();
    let sizes = Sizes { depth: tuning.gemm_depth, block: tuning.gemm_block };
    let packed_len = |p: &Product<'_>| p.x.shape()[0].div_ceil(16) * p.x.shape()[1].div_ceil(STEP) * TILE;
    let mut buffer = PACKED.take();
    let packed = aligned(&mut buffer, list.iter().map(packed_len).sum());
    let (mut packs, mut rest) = (vec![], &mut *packed);
    for p in &list {
        let x = Rows::<bf16>::new(op, "x", p.x)?;
        let (mine, others) = rest.split_at_mut(packed_len(p));
        rest = others;
        // Sixteen rows each.
        let tile_rows = mine.chunks_mut((x.row_len().div_ceil(STEP) * TILE).max(1));
        packs.extend(tile_rows.enumerate().map(|(i, to)| Pack { x, first: 16 * i, to }));
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
        let (w, out) = (Rows::<bf16>::new(op, "w", p.w)?, RowsMut::<O>::new(op, "out", p.out)?);
        // About eight units per worker over all products, for a worker that is slow for a while.
        let width = (w.len() * blocks / (8 * cpu.workers())).next_multiple_of(STRIP).clamp(STRIP, sizes.block);
        let steps = k.div_ceil(STEP);
        for (b, rows) in out.cut(lens(m, sizes.block)).into_iter().enumerate() {
            let x = &mine[b * sizes.block / 16 * steps * TILE..];
            let columns = rows.split_columns(width).into_iter().enumerate();
            units.extend(columns.map(|(i, out)| Unit { sizes, x, w, k, n, first: i * width, out, then: p.then }));
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

/// Packs up to 16 rows of `x`, from `first` on, zeros after the last and after the end of each.
struct Pack<'a> {
    x: Rows<'a, bf16>,
    first: usize,
    to: &'a mut [bf16],
}

impl TileKernel for Pack<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, tiles: Tiles) {
        let Self { x, first, to } = self;
        let (rows, k) = (16.min(x.len() - first), x.row_len());
        let mut ends = [[bf16::ZERO; STEP]; 16];
        for (step, tile) in to.chunks_exact_mut(TILE).enumerate() {
            let columns = step * STEP..k.min((step + 1) * STEP);
            let mut lines: [&[bf16]; 16] = [&[bf16::ZERO; STEP]; 16];
            for (r, end) in ends.iter_mut().take(rows).enumerate() {
                let row = &x.row(first + r)[columns.clone()];
                lines[r] = if row.len() == STEP {
                    row
                } else {
                    end[..row.len()].copy_from_slice(row);
                    end
                };
            }
            tiles.pack_rows(&lines, 0, tile);
        }
    }
}

/// Rows `out.range()` of a product, for the weight rows from `first` on, as many as `out` is wide.
struct Unit<'a, O> {
    sizes: Sizes,
    /// Packed, from the unit's first row on.
    x: &'a [bf16],
    w: Rows<'a, bf16>,
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
            let strip = aligned(&mut strip, STRIP * self.sizes.depth);
            let size = widths * strips * SUMS;
            let sums = aligned(&mut sums, self.then.rows() * size);
            for (half, sums) in sums.chunks_exact_mut(size).enumerate() {
                let first = half * self.n + self.first;
                if self.k == 0 {
                    sums.fill(0.0);
                } else if m <= FEW {
                    self.few(tiles, first, strip, sums);
                } else {
                    self.many(v, tiles, first, strip, sums);
                }
            }
            self.write(v, tiles, sums, size);
        }
        SCRATCH.set((strip, sums));
    }
}

impl<O: Lane> Unit<'_, O> {
    #[inline(always)]
    fn few(&self, tiles: Tiles, first: usize, strip: &mut [bf16], sums: &mut [f32]) {
        let width = self.out.row_len();
        let (whole, steps) = (self.k / STEP, self.k.div_ceil(STEP));
        for (j, sums) in sums.as_chunks_mut::<SUMS>().0.iter_mut().enumerate() {
            let mut done = 0;
            if (j + 1) * STRIP <= width
                && let Some((data, stride)) = self.w.stretch(first + j * STRIP, STRIP)
            {
                let (left, right) = (Left { data, stride }, self.right(0, 0));
                let sums = Sums { data: sums, stride: STRIP };
                if self.out.range().len() > 16 {
                    tiles.product_bf16::<2, 2>(left, right, whole, sums, false);
                } else {
                    tiles.product_bf16::<2, 1>(left, right, whole, sums, false);
                }
                done = whole;
            }
            while done < steps {
                let n = (self.sizes.depth / STEP).min(steps - done);
                self.copy(first, j, done, n, strip);
                tiles.product_packed(strip, self.right(0, done), n, sums, done > 0);
                done += n;
            }
        }
    }

    #[inline(always)]
    fn many(&self, v: Avx512, tiles: Tiles, first: usize, strip: &mut [bf16], sums: &mut [f32]) {
        let (steps, strips) = (self.k.div_ceil(STEP), self.out.range().len().div_ceil(STRIP));
        // Weight rows to ask for per product, so that those of the next strip are there when it comes.
        let ahead = STRIP.div_ceil(strips);
        let mut done = 0;
        while done < steps {
            let n = (self.sizes.depth / STEP).min(steps - done);
            let sums = sums.as_chunks_mut::<SUMS>().0;
            for (j, sums) in sums.chunks_exact_mut(strips).enumerate() {
                self.copy(first, j, done, n, strip);
                let next = if (j + 1) * STRIP < self.out.row_len() { (j + 1, done) } else { (0, done + n) };
                for i in 0..strips {
                    for r in i * ahead..STRIP.min((i + 1) * ahead) {
                        self.ask(v, first, next, r, n);
                    }
                    if done > 0 && i + 1 < strips {
                        v.prefetch(&sums[i + 1]);
                    }
                    tiles.product_packed(strip, self.right(i, done), n, &mut sums[i], done > 0);
                }
            }
            done += n;
        }
    }

    /// Strip `i` of the unit's rows of `x`, from step `from` on. Of 16 rows or fewer its second tile is the first again,
    /// for sums that nobody reads.
    #[inline(always)]
    fn right(&self, i: usize, from: usize) -> Right<'_, bf16> {
        let steps = self.k.div_ceil(STEP);
        let stride = if self.out.range().len() - i * STRIP > 16 { steps * TILE } else { 0 };
        Right { data: &self.x[(i * (STRIP / 16) * steps + from) * TILE..], stride }
    }

    /// Copies strip `j` of the weights from row `first` on, `n` steps from step `from` on, as tiles: those of 16 rows and
    /// then those of the others. Zeros beyond the weights.
    #[inline(always)]
    fn copy(&self, first: usize, j: usize, from: usize, n: usize, strip: &mut [bf16]) {
        let rows = STRIP.min(self.out.row_len() - j * STRIP);
        let columns = from * STEP..self.k.min((from + n) * STEP);
        for r in 0..STRIP {
            let row = if r < rows { &self.w.row(first + j * STRIP + r)[columns.clone()] } else { &[] };
            let (whole, rest) = row.as_chunks::<STEP>();
            let lines = strip[r / 16 * n * TILE + r % 16 * STEP..].chunks_mut(TILE).take(n);
            for (i, line) in lines.enumerate() {
                let line = line.first_chunk_mut::<STEP>().expect("a line of a tile");
                if let Some(from) = whole.get(i) {
                    *line = *from;
                } else {
                    *line = [bf16::ZERO; STEP];
                    if i == whole.len() {
                        line[..rest.len()].copy_from_slice(rest);
                    }
                }
            }
        }
    }

    /// Asks for row `r` of strip `j` of the weights, `n` steps from step `from` on, where there is one.
    #[inline(always)]
    fn ask(&self, v: Avx512, first: usize, (j, from): (usize, usize), r: usize, n: usize) {
        if j * STRIP + r < self.out.row_len() {
            let row = self.w.row(first + j * STRIP + r);
            for step in from..from + n {
                v.prefetch_far(row, step * STEP);
            }
        }
    }

    /// Turns the sums, `size` of them per weight row of a column, and writes them.
    #[inline(always)]
    fn write(mut self, v: Avx512, tiles: Tiles, sums: &[f32], size: usize) {
        let (range, width) = (self.out.range(), self.out.row_len());
        let strips = range.len().div_ceil(STRIP);
        let mut turned = [[[0f32; 16]; 16]; 2];
        for i in (0..range.len()).step_by(16) {
            for j in (0..width).step_by(16) {
                let block = (j / STRIP * strips + i / STRIP) * SUMS + j % STRIP * STRIP + i % STRIP;
                for (sums, turned) in sums.chunks_exact(size).zip(&mut turned) {
                    tiles.turn(&sums[block..], STRIP, turned);
                }
                let columns = j..width.min(j + 16);
                let [first, second] = &turned;
                for (r, (sums, second)) in first.iter().zip(second).enumerate().take(range.len() - i) {
                    let (sums, second) = (&sums[..columns.len()], &second[..columns.len()]);
                    let out = &mut self.out.row(range.start + i + r)[columns.clone()];
                    self.then.write(v, self.first + j, sums, second, out);
                }
            }
        }
    }
}
