//! Products of bf16 through AMX tiles.
//!
//! Weights are the left operand, rows as they lie in memory; the rows of `x` are packed as columns of the right one, once
//! for all weights; so sums come out turned, `[n, m]`, and are turned back as they are written.
//!
//! A unit of work is a block of weight rows against a block of `x`. Up to [`FEW`] rows of `x` use a weight once: tiles
//! load it from where it lies, and the memory is the bound. For more, a strip of 32 weight rows, [`DEPTH`] deep, is
//! copied to the first-level cache (rows a power of two apart would fall on few of its sets) and meets every row of the
//! block, which stays in the second level beside its sums.
//!
//! A sum runs over `k` in steps of 32, in order, the last one filled up with zeros: whatever the unit, the same bits.

use std::cell::Cell;

use super::Product;
use crate::cpu::arch::{Amx, Avx512, Left, Right, Sums, TILE, TileKernel, Tiles};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, narrow};
use crate::cpu::vector::Lane;
use crate::error::Result;
use crate::tensor::bf16;

/// Elements along `k` of one step of a tile.
const STEP: usize = 32;
/// Weight rows and rows of `x` per product of tiles.
const STRIP: usize = 32;
/// Most rows of `x` that use weights as they lie in memory: those of one strip.
const FEW: usize = STRIP;
/// Elements along `k` of a strip: with 32 rows 33 KB of the first-level cache's 48.
const DEPTH: usize = 512;
/// Elements from row to row of a copied strip: 16 rows on as many sets.
const STRIDE: usize = DEPTH + STEP;
/// Rows of `x` per block: 512 KB of the second-level cache, [`DEPTH`] deep.
const BLOCK_M: usize = 512;
/// Most weight rows per block: with [`BLOCK_M`], 1 MB of sums.
const BLOCK_N: usize = 512;

thread_local! {
    /// Scratch of a unit: a strip and the sums. Kept, as new memory of this size would be mapped and cleared every time.
    static SCRATCH: Cell<(Vec<bf16>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

pub(super) fn products<O: Lane>(cpu: &Cpu, amx: Amx, op: &'static str, list: Vec<Product<'_>>) -> Result<()> {
    // Below 4M multiplications, a few microseconds, waking the pool is not worth it.
    let alone = list.iter().fold(0usize, |sum, p| sum.saturating_add(p.work())) < 4 << 20;
    let sizes = |p: &Product<'_>| p.x.shape()[0].div_ceil(16) * p.x.shape()[1].div_ceil(STEP) * TILE;
    let mut packed = vec![bf16::ZERO; list.iter().map(sizes).sum()];
    let (mut packs, mut rest) = (vec![], &mut packed[..]);
    for p in &list {
        let x = Rows::<bf16>::new(op, "x", p.x)?;
        let (mine, others) = rest.split_at_mut(sizes(p));
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

    let (mut units, mut rest) = (vec![], &packed[..]);
    let blocks: usize = list.iter().map(|p| p.x.shape()[0].div_ceil(BLOCK_M)).sum();
    for p in list {
        let (mine, others) = rest.split_at(sizes(&p));
        rest = others;
        let (m, k) = (p.x.shape()[0], p.x.shape()[1]);
        let (w, out) = (Rows::<bf16>::new(op, "w", p.w)?, RowsMut::<O>::new(op, "out", p.out)?);
        // About eight units per worker over all products, for a worker that is slow for a while.
        let width = (w.len() * blocks / (8 * cpu.workers())).next_multiple_of(STRIP).clamp(STRIP, BLOCK_N);
        let steps = k.div_ceil(STEP);
        for (b, rows) in out.cut(block_lens(m)).into_iter().enumerate() {
            let x = &mine[b * BLOCK_M / 16 * steps * TILE..];
            let columns = rows.split_columns(width).into_iter().enumerate();
            units.extend(columns.map(|(i, out)| Unit { x, w, first: i * width, k, out }));
        }
    }
    if alone {
        units.into_iter().for_each(|u| amx.run(u));
    } else {
        cpu.pool().scatter(units, |u| amx.run(u));
    }
    Ok(())
}

/// Lengths of the blocks that `m` rows are cut into.
fn block_lens(m: usize) -> impl Iterator<Item = usize> {
    (0..m).step_by(BLOCK_M).map(move |at| BLOCK_M.min(m - at))
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
        let mut block = [bf16::ZERO; 16 * STEP];
        for (step, tile) in to.chunks_exact_mut(TILE).enumerate() {
            let columns = step * STEP..k.min((step + 1) * STEP);
            if columns.len() < STEP {
                block.fill(bf16::ZERO);
            }
            for (r, to) in block.chunks_exact_mut(STEP).take(rows).enumerate() {
                to[..columns.len()].copy_from_slice(&x.row(first + r)[columns.clone()]);
            }
            tiles.pack_rows(&block, STEP, tile);
        }
    }
}

/// Rows `out.range()` of a product, at most [`BLOCK_M`], for the weight rows from `first` on, as many as `out` is wide.
struct Unit<'a, O> {
    /// Packed, from the unit's first row on.
    x: &'a [bf16],
    w: Rows<'a, bf16>,
    first: usize,
    k: usize,
    out: RowsMut<'a, O>,
}

impl<O: Lane> TileKernel for Unit<'_, O> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, tiles: Tiles) {
        let (mut strip, mut sums) = SCRATCH.take();
        let m = self.out.range().len();
        let stride = m.next_multiple_of(STRIP);
        let width = self.out.row_len().next_multiple_of(STRIP);
        strip.resize(STRIP * STRIDE, bf16::ZERO);
        sums.resize(sums.len().max(width * stride), 0.0);
        if m <= FEW {
            self.few(tiles, &mut strip, &mut sums);
        } else {
            self.many(tiles, &mut strip, &mut sums);
        }
        self.write(v, tiles, &sums, stride);
        SCRATCH.set((strip, sums));
    }
}

impl<O: Lane> Unit<'_, O> {
    #[inline(always)]
    fn few(&self, tiles: Tiles, strip: &mut [bf16], sums: &mut [f32]) {
        let (m, width) = (self.out.range().len(), self.out.row_len());
        let (whole, steps) = (self.k / STEP, self.k.div_ceil(STEP));
        for j in (0..width).step_by(STRIP) {
            let rows = STRIP.min(width - j);
            let sums = &mut sums[j * STRIP..];
            let mut done = 0;
            if rows == STRIP
                && let Some((data, stride)) = self.w.stretch(self.first + j, STRIP)
            {
                self.product(tiles, m, Left { data, stride }, 0, whole, sums, STRIP, false);
                done = whole;
            }
            while done < steps {
                let n = (DEPTH / STEP).min(steps - done);
                self.copy(j, done, n, strip);
                self.product(tiles, m, Left { data: strip, stride: STRIDE }, done, n, sums, STRIP, done > 0);
                done += n;
            }
            if steps == 0 {
                sums[..STRIP * STRIP].fill(0.0);
            }
        }
    }

    #[inline(always)]
    fn many(&self, tiles: Tiles, strip: &mut [bf16], sums: &mut [f32]) {
        let (m, width) = (self.out.range().len(), self.out.row_len());
        let (steps, stride) = (self.k.div_ceil(STEP), m.next_multiple_of(STRIP));
        if steps == 0 {
            sums.fill(0.0);
        }
        let mut done = 0;
        while done < steps {
            let n = (DEPTH / STEP).min(steps - done);
            for j in (0..width).step_by(STRIP) {
                self.copy(j, done, n, strip);
                for i in (0..m).step_by(STRIP) {
                    let x = &self.x[i / 16 * steps * TILE..];
                    let (left, sums) = (Left { data: &*strip, stride: STRIDE }, &mut sums[j * stride + i..]);
                    Self::product_at(tiles, (m - i).min(STRIP), x, steps, left, done, n, sums, stride, done > 0);
                }
            }
            done += n;
        }
    }

    #[expect(clippy::too_many_arguments, reason = "what a product of tiles takes")]
    #[inline(always)]
    fn product(
        &self,
        tiles: Tiles,
        m: usize,
        left: Left<'_, bf16>,
        from: usize,
        n: usize,
        sums: &mut [f32],
        stride: usize,
        keep: bool,
    ) {
        Self::product_at(tiles, m, self.x, self.k.div_ceil(STEP), left, from, n, sums, stride, keep);
    }

    /// 32 weight rows against up to 32 rows of `x`, `n` steps from step `from` on.
    #[expect(clippy::too_many_arguments, reason = "what a product of tiles takes")]
    #[inline(always)]
    fn product_at(
        tiles: Tiles,
        m: usize,
        x: &[bf16],
        steps: usize,
        left: Left<'_, bf16>,
        from: usize,
        n: usize,
        sums: &mut [f32],
        stride: usize,
        keep: bool,
    ) {
        let right = Right { data: &x[from * TILE..], stride: steps * TILE };
        let sums = Sums { data: sums, stride };
        if m > 16 {
            tiles.product_bf16::<2, 2>(left, right, n, sums, keep);
        } else {
            tiles.product_bf16::<2, 1>(left, right, n, sums, keep);
        }
    }

    /// Copies 32 weight rows from the unit's row `j` on, `n` steps from step `from` on, zeros beyond the weights.
    #[inline(always)]
    fn copy(&self, j: usize, from: usize, n: usize, strip: &mut [bf16]) {
        let rows = STRIP.min(self.out.row_len() - j);
        let columns = from * STEP..self.k.min((from + n) * STEP);
        for (r, to) in strip.chunks_exact_mut(STRIDE).enumerate() {
            let to = &mut to[..n * STEP];
            if r < rows {
                let row = &self.w.row(self.first + j + r)[columns.clone()];
                to[..row.len()].copy_from_slice(row);
                to[row.len()..].fill(bf16::ZERO);
            } else {
                to.fill(bf16::ZERO);
            }
        }
    }

    /// Turns and rounds `sums`, `stride` floats per weight row, to the output.
    #[inline(always)]
    fn write(mut self, v: Avx512, tiles: Tiles, sums: &[f32], stride: usize) {
        let (range, width) = (self.out.range(), self.out.row_len());
        let mut turned = [[0f32; 16]; 16];
        let mut line = [0f32; BLOCK_N];
        if range.len() == 1 {
            for (j, x) in line[..width].iter_mut().enumerate() {
                *x = sums[j * stride];
            }
            narrow(v, &line[..width], self.out.row(range.start));
            return;
        }
        for i in (0..range.len()).step_by(16) {
            for j in (0..width).step_by(16) {
                tiles.turn(&sums[j * stride + i..], stride, &mut turned);
                let columns = j..width.min(j + 16);
                for (r, row) in turned.iter().enumerate().take(range.len() - i) {
                    narrow(v, &row[..columns.len()], &mut self.out.row(range.start + i + r)[columns.clone()]);
                }
            }
        }
    }
}
