//! Products of fp8 through AMX tiles: fp8 is bf16 exactly.
//!
//! As in the dense product's tiles, weights are the left operand and sums come out turned. Weights are always copied,
//! a strip of 32 rows at a time, and become bf16 on the way. Scales of whole rows meet the sums as they are written.
//! Where scales are of parts of rows, a *segment* is what has one scale on either side: its product goes to a tile of
//! its own, and from there, scaled, to the sums.
//!
//! Segments are added in order, the steps of one in order, whatever the number of rows: the same bits.

use std::cell::Cell;

use super::exact::{STEP, convert, segment, widen};
use super::{ScaledProduct, Scales};
use crate::cpu::arch::{Aligned, Amx, Avx512, Left, Right, Sums, TILE, TileKernel, Tiles, aligned};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, narrow};
use crate::cpu::vector::{Lane, Vector};
use crate::error::Result;
use crate::tensor::bf16;

/// Weight rows and rows of `x` per product of tiles.
const STRIP: usize = 32;
/// Steps of a strip: with 32 rows 33 KB of the first-level cache's 48.
const STEPS: usize = 16;
/// Elements from row to row of a strip: 16 rows on as many sets of the cache.
const STRIDE: usize = (STEPS + 1) * STEP;
/// Sums of a strip and one of `x`.
const SUMS: usize = STRIP * STRIP;
/// Elements ahead of those in use that few rows ask the memory for: eight lines of each weight row.
const AHEAD: usize = 512;
/// Rows of `x` per block: 512 KB of the second-level cache, a strip deep.
const BLOCK_M: usize = 512;
/// Most weight rows per block: with [`BLOCK_M`], 1 MB of sums.
const BLOCK_N: usize = 512;

thread_local! {
    /// Packed rows of a launch. Kept, as new memory of this size would be mapped and cleared every time.
    static PACKED: Cell<Vec<bf16>> = const { Cell::new(Vec::new()) };
    /// A strip and the sums, kept from unit to unit.
    static SCRATCH: Cell<(Vec<bf16>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

pub(super) fn products<X: Lane, W: Lane, O: Lane>(
    cpu: &Cpu,
    amx: Amx,
    op: &'static str,
    list: Vec<ScaledProduct<'_>>,
) -> Result<()> {
    // Below 4M multiplications, a few microseconds, waking the pool is not worth it.
    let alone = ScaledProduct::work(&list) < 4 << 20;
    let size = |p: &ScaledProduct<'_>| p.shape().0.div_ceil(16) * p.shape().1.div_ceil(STEP) * TILE;
    let mut buffer = PACKED.take();
    let packed = aligned(&mut buffer, list.iter().map(size).sum());
    let (mut packs, mut factors, mut rest) = (vec![], vec![], &mut *packed);
    for p in &list {
        let x = Rows::<X>::new(op, "x", p.x.data)?;
        let (mine, others) = rest.split_at_mut(size(p));
        rest = others;
        let tile_rows = mine.chunks_mut((x.row_len().div_ceil(STEP) * TILE).max(1));
        packs.extend(tile_rows.enumerate().map(|(i, to)| Pack { x, first: 16 * i, to }));
        factors.push(turned_scales(op, p)?);
    }
    if alone || packs.len() == 1 {
        packs.into_iter().for_each(|p| amx.run(p));
    } else {
        cpu.pool().scatter(packs, |p| amx.run(p));
    }

    let (mut units, mut rest) = (vec![], &*packed);
    let blocks: usize = list.iter().map(|p| p.shape().0.div_ceil(BLOCK_M)).sum();
    for (p, factors) in list.into_iter().zip(&factors) {
        let (mine, others) = rest.split_at(size(&p));
        rest = others;
        let (m, k) = p.shape();
        let (x_scales, w_scales) = (Scales::new(op, "x.scales", &p.x)?, Scales::new(op, "w.scales", &p.w)?);
        let (w, out) = (Rows::<W>::new(op, "w", p.w.data)?, RowsMut::<O>::new(op, "out", p.out)?);
        // About eight units per worker over all products, for a worker that is slow for a while.
        let width = (w.len() * blocks / (8 * cpu.workers())).next_multiple_of(STRIP).clamp(STRIP, BLOCK_N);
        let segment = segment(&x_scales, &w_scales);
        let lens = (0..m).step_by(BLOCK_M).map(|at| BLOCK_M.min(m - at));
        for (b, rows) in out.cut(lens).into_iter().enumerate() {
            let x = &mine[b * BLOCK_M / 16 * k.div_ceil(STEP) * TILE..];
            let factors = Factors { data: factors, stride: m.next_multiple_of(STRIP), first: b * BLOCK_M };
            let columns = rows.split_columns(width).into_iter().enumerate();
            units.extend(columns.map(|(i, out)| Unit {
                x,
                x_scales,
                factors,
                w,
                w_scales,
                first: i * width,
                segment,
                out,
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

/// Scales of `x` by segment and then by row, rows filled up to whole strips; empty without segments.
fn turned_scales(op: &'static str, p: &ScaledProduct<'_>) -> Result<Vec<f32>> {
    let (x, w) = (Scales::new(op, "x.scales", &p.x)?, Scales::new(op, "w.scales", &p.w)?);
    let Some(segment) = segment(&x, &w) else { return Ok(Vec::new()) };
    let (m, k) = p.shape();
    let (segments, stride) = (k.div_ceil(segment * STEP), m.next_multiple_of(STRIP));
    let mut out = vec![1f32; segments * stride];
    for r in 0..if x.partial { m } else { 0 } {
        let scales = x.parts(r);
        for s in 0..segments {
            out[s * stride + r] = scales[s * segment * STEP / x.block.columns];
        }
    }
    Ok(out)
}

/// Scales of the rows of a unit, by segment.
#[derive(Clone, Copy)]
struct Factors<'a> {
    data: &'a [f32],
    stride: usize,
    /// Of the unit, among the product's rows.
    first: usize,
}

/// Packs up to 16 rows of `x`, from `first` on, zeros after the last and after the end of each.
struct Pack<'a, X> {
    x: Rows<'a, X>,
    first: usize,
    to: &'a mut [bf16],
}

impl<X: Lane> TileKernel for Pack<'_, X> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, tiles: Tiles) {
        let Self { x, first, to } = self;
        let rows = 16.min(x.len() - first);
        let mut block = [[bf16::ZERO; STEP]; 16];
        for (step, tile) in to.chunks_exact_mut(TILE).enumerate() {
            for (r, to) in block.iter_mut().take(rows).enumerate() {
                convert(tiles.bf16_pairs(), x.row(first + r), step * STEP, to);
            }
            let mut lines: [&[bf16]; 16] = [&[]; 16];
            for (line, row) in lines.iter_mut().zip(&block) {
                *line = row;
            }
            v.pack_rows(&lines, 0, tile);
        }
    }
}

/// Rows `out.range()` of a product, at most [`BLOCK_M`], for the weight rows from `first` on, as many as `out` is wide.
struct Unit<'a, W, O> {
    /// Packed, from the unit's first row on.
    x: &'a [bf16],
    x_scales: Scales<'a>,
    factors: Factors<'a>,
    w: Rows<'a, W>,
    w_scales: Scales<'a>,
    first: usize,
    segment: Option<usize>,
    out: RowsMut<'a, O>,
}

impl<W: Lane, O: Lane> TileKernel for Unit<'_, W, O> {
    type Out = ();
    #[inline(always)]
    fn run(self, v: Avx512, tiles: Tiles) {
        let mut scratch = SCRATCH.take();
        let (m, width) = (self.out.range().len(), self.out.row_len());
        let (steps, stride) = (self.w.row_len().div_ceil(STEP), m.next_multiple_of(STRIP));
        let strip = aligned(&mut scratch.0, STRIP * STRIDE);
        let sums = aligned(&mut scratch.1, width.next_multiple_of(STRIP) * stride);
        if steps == 0 || self.segment.is_some() {
            sums.fill(0.0);
        }
        // Few rows use a weight once: weights are read to the end of their rows, as memory likes it.
        if m <= STRIP && steps > 0 && self.segment.is_none_or(|s| s.is_multiple_of(2)) {
            for j in (0..width).step_by(STRIP) {
                let sums = sums[j * STRIP..].first_chunk_mut().expect("a strip of sums");
                self.few(v, tiles, j, strip, sums);
            }
            self.write(v, tiles, sums, stride);
            return SCRATCH.set(scratch);
        }
        // Many rows of `x` stay in the second-level cache, a strip deep, until all weights have met them.
        let (depths, strips) = (steps.div_ceil(STEPS), width.div_ceil(STRIP));
        let mut scales = [&[][..]; STRIP];
        for turn in 0..depths * strips {
            let (j, done) = (turn % strips * STRIP, turn / strips * STEPS);
            let n = STEPS.min(steps - done);
            let next = ((turn + 1) % strips * STRIP, (turn + 1) / strips * STEPS);
            self.copy(v, tiles, (j, done), n, next, strip);
            if self.segment.is_some() && self.w_scales.partial {
                for (r, scales) in scales.iter_mut().enumerate().take(width - j) {
                    *scales = self.w_scales.parts(self.first + j + r);
                }
            }
            for i in (0..m).step_by(STRIP) {
                let sums = Sums { data: &mut sums[j * stride + i..], stride };
                match self.segment {
                    Some(segment) => self.segments(v, tiles, i, segment, (strip, &scales), done..done + n, sums),
                    None => self.product(tiles, i, strip, done, n, sums, done > 0),
                }
            }
        }
        self.write(v, tiles, sums, stride);
        SCRATCH.set(scratch);
    }
}

impl<W: Lane, O: Lane> Unit<'_, W, O> {
    /// Copies 32 weight rows from the unit's row `j` on, `n` steps from step `from` on, as bf16; zeros beyond the weights.
    /// Asks for those that come `next`.
    #[inline(always)]
    fn copy(
        &self,
        v: Avx512,
        tiles: Tiles,
        (j, from): (usize, usize),
        n: usize,
        next: (usize, usize),
        strip: &mut [bf16],
    ) {
        for (r, to) in strip.chunks_exact_mut(STRIDE).enumerate() {
            if next.0 + r < self.out.row_len() {
                let row = self.w.row(self.first + next.0 + r);
                for step in (next.1..next.1 + STEPS).step_by(64 / STEP) {
                    v.prefetch_far(row, step * STEP);
                }
            }
            let to = &mut to[..n * STEP];
            if j + r < self.out.row_len() {
                convert(tiles.bf16_pairs(), self.w.row(self.first + j + r), from * STEP, to);
            } else {
                to.fill(bf16::ZERO);
            }
        }
    }

    /// All rows of `x`, which are few, against 32 weight rows from the unit's row `j` on: two steps of the weights become bf16 beside
    /// the products of the two before. On two cores of a Xeon of model 207 one row of 58 MB took 3.6 ms when a strip became
    /// bf16 before its products, and takes 2.5 (a plain read: 1.9).
    #[inline(always)]
    fn few(&self, v: Avx512, tiles: Tiles, j: usize, space: &mut [bf16], sums: &mut [f32; SUMS]) {
        let (width, steps) = (self.out.row_len(), self.w.row_len().div_ceil(STEP));
        let (mut rows, mut next, mut scales) = ([&[][..]; STRIP], [&[][..]; STRIP], [&[][..]; STRIP]);
        for r in 0..STRIP.min(width - j) {
            let at = self.first + j + r;
            rows[r] = self.w.row(at);
            if j + r + STRIP < width {
                next[r] = self.w.row(at + STRIP);
            }
            if self.segment.is_some() && self.w_scales.partial {
                scales[r] = self.w_scales.parts(at);
            }
        }
        let one = self.out.range().len() <= 16;
        let mut part = Aligned([0.0; SUMS]);
        // The first step of the product under way, and of the one whose sums are to be added.
        let (mut begun, mut done) = (None, None);
        let (spaces, _) = space.as_chunks_mut::<{ 4 * TILE }>();
        for turn in 0..=steps.div_ceil(2) {
            if turn < steps.div_ceil(2) {
                let (at, lines) = (2 * turn * STEP, spaces[turn % 2].as_chunks_mut::<STEP>().0);
                let (low, high) = lines.split_at_mut(2 * 16);
                for (r, (row, next)) in rows.iter().zip(&next).enumerate() {
                    match (at + AHEAD).checked_sub(row.len()) {
                        Some(beyond) => v.prefetch_far(next, beyond),
                        None => v.prefetch_far(row, at + AHEAD),
                    }
                    let (first, second) = if r < 16 { low.split_at_mut(16) } else { high.split_at_mut(16) };
                    widen(tiles.bf16_pairs(), row, at, [&mut first[r % 16], &mut second[r % 16]]);
                }
            }
            if let (Some(at), Some(segment)) = (done.take(), self.segment) {
                self.add(v, 0, at / segment, segment, &scales, &part, Sums { data: sums, stride: STRIP });
            }
            let Some(from) = turn.checked_sub(1).map(|turn| 2 * turn) else { continue };
            let left = Right { data: &spaces[(turn - 1) % 2][..], stride: 2 * TILE };
            let right = Right { data: &self.x[from * TILE..], stride: steps * TILE };
            if begun.is_none() || self.segment.is_some_and(|s| from.is_multiple_of(s) || from.is_multiple_of(STEPS)) {
                if one {
                    tiles.begin_one(left, right.data, &mut part.0)
                } else {
                    tiles.begin::<false>(left, right, &mut part.0, None, 0)
                }
                done = begun.replace(from);
            } else if one {
                tiles.step_one(left, right.data, 0);
            } else {
                tiles.step::<false>(left, right, 0);
            }
            if from + 1 < steps {
                if one { tiles.step_one(left, right.data, 1) } else { tiles.step::<false>(left, right, 1) }
            }
        }
        let Some(segment) = self.segment else { return tiles.end(sums) };
        for at in done.into_iter().chain(begun) {
            if Some(at) == begun {
                tiles.end(&mut part.0);
            }
            self.add(v, 0, at / segment, segment, &scales, &part, Sums { data: sums, stride: STRIP });
        }
    }

    /// The strip, from its step 0 on, against the rows of `x` from `i` on: `n` steps from step `from` of `x` on.
    #[expect(clippy::too_many_arguments, reason = "what a product of tiles takes")]
    #[inline(always)]
    fn product(&self, tiles: Tiles, i: usize, strip: &[bf16], from: usize, n: usize, sums: Sums<'_, f32>, keep: bool) {
        let steps = self.w.row_len().div_ceil(STEP);
        let left = Left { data: strip, stride: STRIDE };
        let right = Right { data: &self.x[(i / 16 * steps + from) * TILE..], stride: steps * TILE };
        if self.out.range().len() - i > 16 {
            tiles.product_bf16::<2, 2>(left, right, n, sums, keep);
        } else {
            tiles.product_bf16::<2, 1>(left, right, n, sums, keep);
        }
    }

    /// Adds the product of a strip, whose steps are `range` of the whole depth, segment by segment. `scales`: those of the
    /// parts of its rows; none if they are of whole rows.
    #[expect(clippy::too_many_arguments, reason = "what a product of tiles takes")]
    #[inline(always)]
    fn segments(
        &self,
        v: Avx512,
        tiles: Tiles,
        i: usize,
        segment: usize,
        (strip, scales): (&[bf16], &[&[f32]; STRIP]),
        range: std::ops::Range<usize>,
        sums: Sums<'_, f32>,
    ) {
        let mut part = Aligned([0.0; SUMS]);
        let mut at = range.start;
        while at < range.end {
            let s = at / segment;
            let end = range.end.min((s + 1) * segment);
            let to = Sums { data: &mut part.0, stride: STRIP };
            self.product(tiles, i, &strip[(at - range.start) * STEP..], at, end - at, to, false);
            self.add(v, i, s, segment, scales, &part, Sums { data: &mut *sums.data, stride: sums.stride });
            at = end;
        }
    }

    /// Adds the sums of segment `s`, scaled, for the rows of `x` from `i` on.
    #[expect(clippy::too_many_arguments, reason = "a segment's scales and sums")]
    #[inline(always)]
    fn add(
        &self,
        v: Avx512,
        i: usize,
        s: usize,
        segment: usize,
        scales: &[&[f32]; STRIP],
        part: &Aligned<[f32; SUMS]>,
        sums: Sums<'_, f32>,
    ) {
        let two = self.out.range().len() - i > 16;
        let x = &self.factors.data[s * self.factors.stride + self.factors.first + i..][..STRIP];
        let (low, high) = (v.load(x), v.load(&x[16..]));
        // One division for all rows: two for each took as long as the products of few rows.
        let column = s * segment * STEP / self.w_scales.block.columns;
        let rows = part.0.as_chunks::<STRIP>().0.iter().zip(sums.data.chunks_mut(sums.stride));
        for ((from, to), scales) in rows.zip(scales) {
            let scale = v.splat(scales.get(column).copied().unwrap_or(1.0));
            v.store(v.fma(v.mul(v.load(from), low), scale, v.load(to)), to);
            if two {
                v.store(v.fma(v.mul(v.load(&from[16..]), high), scale, v.load(&to[16..])), &mut to[16..]);
            }
        }
    }

    /// Turns `sums`, `stride` floats per weight row, applies the scales of whole rows, and rounds to the output.
    #[inline(always)]
    fn write(mut self, v: Avx512, tiles: Tiles, sums: &[f32], stride: usize) {
        let (range, width) = (self.out.range(), self.out.row_len());
        let mut factors = [1f32; BLOCK_N];
        for (j, factor) in factors[..width].iter_mut().enumerate() {
            *factor = self.w_scales.whole(self.first + j);
        }
        let mut turned = Aligned([[0f32; 16]; 16]);
        for i in (0..range.len()).step_by(16) {
            for j in (0..width).step_by(16) {
                tiles.turn(&sums[j * stride + i..], stride, &mut turned.0);
                let (columns, w) = (j..width.min(j + 16), v.load(&factors[j..]));
                for (r, row) in turned.0.iter_mut().enumerate().take(range.len() - i) {
                    let x = v.splat(self.x_scales.whole(range.start + i + r));
                    v.store(v.mul(v.mul(v.load(row), x), w), row);
                    narrow(v, &row[..columns.len()], &mut self.out.row(range.start + i + r)[columns.clone()]);
                }
            }
        }
    }
}
