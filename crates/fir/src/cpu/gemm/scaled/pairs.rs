//! Products of fp8 through sums of pairs of bf16 (AVX-512 BF16), where there are no tiles: fp8 is bf16 exactly.
//!
//! Lanes are weight rows: a panel of 64 becomes bf16 and is packed as tiles are, a stretch of [`STEPS`] at a time, and meets
//! the rows of `x`, whose pairs are multiplied by a vector each. Scales are as in [`super::tiles`]. The order of sums goes by
//! the depth alone: no other row changes it.
//!
//! For one or two rows nothing is packed: the weights are turned and multiplied in registers, 64 rows at a time, whose sums do not
//! wait for each other. On two cores of Zen 4 one row of 58 MB of weights took 3.4 ms through packed ones, and takes 1.9 (a plain read:
//! 1.8).

use std::cell::Cell;
use std::ops::Range;

use super::exact::{STEP, convert, fp8, segment};
use super::{ScaledProduct, Scales};
use crate::cpu::arch::{Avx512, Chunks, PairKernel, TILE, aligned};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, narrow};
use crate::cpu::vector::{Lane, Vector};
use crate::error::Result;
use crate::tensor::bf16;

const LANES: usize = 16;
/// Vectors of weight rows of a panel.
const WIDE: usize = 4;
/// Weight rows of a panel.
const PANEL: usize = WIDE * LANES;
/// Steps of a stretch: 16 KB of a panel, half of a first-level cache. Of 32 KB 512 rows took 5 % longer.
const STEPS: usize = 4;
/// Rows of `x` whose sums are in registers: 24 vectors of 32.
const ROWS: usize = 6;
/// Rows of `x` per unit: 128 KB of sums.
const BLOCK: usize = 512;

/// A packed step of a panel: for each vector of weight rows 16 pairs of elements.
type Step = [[[f32; LANES]; LANES]; WIDE];

thread_local! {
    /// Rows of a launch in bf16. Kept, as new memory of this size would be mapped and cleared every time.
    static WIDENED: Cell<Vec<bf16>> = const { Cell::new(Vec::new()) };
    /// A stretch of a panel and the sums, kept from unit to unit.
    static SCRATCH: Cell<(Vec<bf16>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

pub(super) fn products<X: Lane, W: Lane, O: Lane>(
    cpu: &Cpu,
    pairs: Avx512<true>,
    op: &'static str,
    list: Vec<ScaledProduct<'_>>,
) -> Result<()> {
    // Below 1M multiplications, a few microseconds, waking the pool is not worth it.
    let alone = ScaledProduct::work(&list) < 1 << 20;
    let size = |p: &ScaledProduct<'_>| p.shape().0 * p.shape().1.next_multiple_of(STEP);
    let mut buffer = WIDENED.take();
    let wide = aligned(&mut buffer, list.iter().map(size).sum());
    let (mut parts, mut rest) = (vec![], &mut *wide);
    for p in &list {
        let x = Rows::<X>::new(op, "x", p.x.data)?;
        let (mine, others) = rest.split_at_mut(size(p));
        rest = others;
        let rows = mine.chunks_mut((BLOCK / 8 * x.row_len().next_multiple_of(STEP)).max(1)).enumerate();
        parts.extend(rows.map(|(i, to)| Widen { x, first: i * BLOCK / 8, to }));
    }
    if alone || parts.len() == 1 {
        parts.into_iter().for_each(|p| pairs.run_pairs(p));
    } else {
        cpu.pool().scatter(parts, |p| pairs.run_pairs(p));
    }

    let panels: usize = list.iter().map(|p| p.w.data.shape()[0].div_ceil(PANEL)).sum();
    let (mut units, mut rest) = (vec![], &*wide);
    for p in list {
        let (mine, others) = rest.split_at(size(&p));
        rest = others;
        let (m, k) = p.shape();
        let (x_scales, w_scales) = (Scales::new(op, "x.scales", &p.x)?, Scales::new(op, "w.scales", &p.w)?);
        let (w, out) = (Rows::<W>::new(op, "w", p.w.data)?, RowsMut::<O>::new(op, "out", p.out)?);
        let segment = segment(&x_scales, &w_scales);
        // Two units per worker; when there are too few panels for that, their rows are cut too, into 48 at the least.
        let cuts = (2 * cpu.workers()).div_ceil(panels.max(1)).min(m / (8 * ROWS)).max(1);
        let each = m.div_ceil(cuts).next_multiple_of(ROWS).min(BLOCK);
        for rows in out.cut((0..m).step_by(each).map(|at| each.min(m - at))) {
            let x = &mine[rows.range().start * k.next_multiple_of(STEP)..];
            let panels = rows.split_columns(PANEL).into_iter().enumerate();
            units.extend(panels.map(|(i, out)| Unit { x, x_scales, w, w_scales, first: i * PANEL, segment, out }));
        }
    }
    if alone {
        units.into_iter().for_each(|u| pairs.run_pairs(u));
    } else {
        cpu.pool().scatter(units, |u| pairs.run_pairs(u));
    }
    WIDENED.set(buffer);
    Ok(())
}

/// Rows of `x` from `first` on as bf16, zeros up to the next step.
struct Widen<'a, X> {
    x: Rows<'a, X>,
    first: usize,
    to: &'a mut [bf16],
}

impl<X: Lane> PairKernel for Widen<'_, X> {
    type Out = ();
    #[inline(always)]
    fn run(self, _: Avx512, pairs: Avx512<true>) {
        let len = self.x.row_len().next_multiple_of(STEP).max(1);
        for (r, to) in self.to.chunks_exact_mut(len).enumerate() {
            convert(pairs, self.x.row(self.first + r), 0, to);
        }
    }
}

/// Rows `out.range()` of a product, at most [`BLOCK`], for the weight rows from `first` on, as many as `out` is wide.
struct Unit<'a, W, O> {
    /// From the unit's first row on.
    x: &'a [bf16],
    x_scales: Scales<'a>,
    w: Rows<'a, W>,
    w_scales: Scales<'a>,
    first: usize,
    segment: Option<usize>,
    out: RowsMut<'a, O>,
}

impl<W: Lane, O: Lane> PairKernel for Unit<'_, W, O> {
    type Out = ();
    #[inline(always)]
    fn run(mut self, v: Avx512, pairs: Avx512<true>) {
        let mut scratch = SCRATCH.take();
        let (range, width) = (self.out.range(), self.out.row_len());
        let steps = self.w.row_len().div_ceil(STEP);
        let panel = aligned(&mut scratch.0, STEPS * WIDE * TILE);
        let sums = aligned(&mut scratch.1, range.len().next_multiple_of(ROWS) * PANEL);
        sums.fill(0.0);
        // Once, as finding a row takes two divisions.
        let (mut weights, mut parts) = ([&[][..]; PANEL], [&[][..]; PANEL]);
        for (r, (weights, parts)) in weights.iter_mut().zip(&mut parts).enumerate() {
            // Past the last it is the last again; nobody reads its sums.
            let r = self.first + r.min(width - 1);
            *weights = bytemuck::cast_slice(self.w.row(r));
            *parts = self.w_scales.parts(r);
        }
        let of = (&weights, &parts);
        let done = match range.len() {
            1 => self.few::<1>(v, pairs, of, (panel, sums)),
            2 => self.few::<2>(v, pairs, of, (panel, sums)),
            _ => 0,
        };
        for from in (done..steps).step_by(STEPS) {
            let stretch = from..steps.min(from + STEPS);
            pack::<W>(v, pairs, &weights, stretch.clone(), panel);
            let scales = self.scales(&parts, stretch.clone());
            let (packed, _) = bytemuck::cast_slice::<bf16, f32>(panel).as_chunks::<LANES>();
            let packed: &[Step] = packed.as_chunks::<LANES>().0.as_chunks::<WIDE>().0;
            for (i, sums) in sums.chunks_exact_mut(ROWS * PANEL).enumerate() {
                let rows = i * ROWS..range.len().min((i + 1) * ROWS);
                match rows.len() {
                    ROWS => self.rows::<ROWS>(v, pairs, rows, stretch.clone(), (packed, &scales), sums),
                    5 => self.rows::<5>(v, pairs, rows, stretch.clone(), (packed, &scales), sums),
                    4 => self.rows::<4>(v, pairs, rows, stretch.clone(), (packed, &scales), sums),
                    3 => self.rows::<3>(v, pairs, rows, stretch.clone(), (packed, &scales), sums),
                    2 => self.rows::<2>(v, pairs, rows, stretch.clone(), (packed, &scales), sums),
                    _ => self.rows::<1>(v, pairs, rows, stretch.clone(), (packed, &scales), sums),
                }
            }
        }
        let mut factors = [1f32; PANEL];
        for (j, factor) in factors[..width].iter_mut().enumerate() {
            *factor = self.w_scales.whole(self.first + j);
        }
        for (r, sums) in range.zip(sums.chunks_exact_mut(PANEL)) {
            let x = v.splat(self.x_scales.whole(r));
            for (sums, w) in sums.chunks_exact_mut(LANES).zip(factors.chunks_exact(LANES)) {
                v.store(v.mul(v.mul(v.load(sums), x), v.load(w)), sums);
            }
            narrow(v, &sums[..width], self.out.row(r));
        }
        SCRATCH.set(scratch);
    }
}

impl<W: Lane, O: Lane> Unit<'_, W, O> {
    /// Adds the products of some rows with a stretch of the panel.
    #[inline(always)]
    fn rows<const R: usize>(
        &self,
        v: Avx512,
        pairs: Avx512<true>,
        rows: Range<usize>,
        stretch: Range<usize>,
        (panel, scales): (&[Step], &[[f32; PANEL]; STEPS]),
        sums: &mut [f32],
    ) {
        let len = self.w.row_len().next_multiple_of(STEP);
        let mut x = [&[][..]; R];
        for (i, x) in x.iter_mut().enumerate() {
            let row = &self.x[(rows.start + i) * len..][stretch.start * STEP..stretch.end * STEP];
            *x = bytemuck::cast_slice::<bf16, f32>(row).as_chunks::<LANES>().0;
        }
        let Some(segment) = self.segment else {
            let mut acc = [[v.splat(0.0); WIDE]; R];
            for (acc, sums) in acc.iter_mut().zip(sums.chunks_exact(PANEL)) {
                for (acc, sums) in acc.iter_mut().zip(sums.chunks_exact(LANES)) {
                    *acc = v.load(sums);
                }
            }
            let acc = add(pairs, x, &panel[..stretch.len()], acc);
            for (acc, sums) in acc.iter().zip(sums.chunks_exact_mut(PANEL)) {
                for (acc, sums) in acc.iter().zip(sums.chunks_exact_mut(LANES)) {
                    v.store(*acc, sums);
                }
            }
            return;
        };
        let mut at = stretch.start;
        while at < stretch.end {
            let s = at / segment;
            let end = stretch.end.min((s + 1) * segment);
            let part = at - stretch.start..end - stretch.start;
            let mut piece = [&[][..]; R];
            for (piece, x) in piece.iter_mut().zip(x) {
                *piece = &x[part.clone()];
            }
            let acc = add(pairs, piece, &panel[part.clone()], [[v.splat(0.0); WIDE]; R]);
            for ((i, acc), sums) in acc.iter().enumerate().zip(sums.chunks_exact_mut(PANEL)) {
                let x = v.splat(self.x_scale(rows.start + i, s * segment));
                for ((acc, sums), w) in
                    acc.iter().zip(sums.chunks_exact_mut(LANES)).zip(scales[part.start].chunks_exact(LANES))
                {
                    v.store(v.fma(v.mul(*acc, x), v.load(w), v.load(sums)), sums);
                }
            }
            at = end;
        }
    }

    /// Puts to `sums` the products of all rows, which are few, with the weights of whole stretches as they are, and says how many
    /// steps these are.
    #[inline(always)]
    fn few<const R: usize>(
        &self,
        v: Avx512,
        pairs: Avx512<true>,
        (weights, parts): (&[&[u8]; PANEL], &[&[f32]; PANEL]),
        (space, sums): (&mut [bf16], &mut [f32]),
    ) -> usize {
        let table = fp8::<W>().expect("weights are of fp8");
        let (k, len) = (self.w.row_len(), self.w.row_len().next_multiple_of(STEP));
        let steps = k / STEP / STEPS * STEPS;
        // 64 numbers, two steps, fill a vector; and sums of parts end where those of packed stretches do.
        let part = match self.segment {
            None => steps,
            Some(2) => 2,
            Some(s) if s.is_multiple_of(STEPS) => STEPS,
            Some(_) => return 0,
        };
        let mut x = [&[][..]; R];
        for (i, x) in x.iter_mut().enumerate() {
            let row = &self.x[i * len..][..steps * STEP];
            *x = bytemuck::cast_slice::<bf16, f32>(row).as_chunks::<STEP>().0;
        }
        let rows = Chunks::new(weights);
        let mut total = [[v.splat(0.0); WIDE]; R];
        for from in (0..steps).step_by(part.max(1)) {
            let chunks = from / 2..(from + part) / 2;
            let acc = pairs.add_fp8(table, &rows, x, chunks, space, [[v.splat(0.0); WIDE]; R]);
            let Some(segment) = self.segment else {
                total = acc;
                continue;
            };
            let scales = self.scales_of(parts, from);
            for (i, (total, acc)) in total.iter_mut().zip(acc).enumerate() {
                let x = v.splat(self.x_scale(i, from / segment * segment));
                for ((total, acc), w) in total.iter_mut().zip(acc).zip(scales.chunks_exact(LANES)) {
                    *total = v.fma(v.mul(acc, x), v.load(w), *total);
                }
            }
        }
        for (total, sums) in total.iter().zip(sums.chunks_exact_mut(PANEL)) {
            for (total, sums) in total.iter().zip(sums.chunks_exact_mut(LANES)) {
                v.store(*total, sums);
            }
        }
        steps
    }

    /// The scale of row `i` of the unit in the part that step `s` is in.
    #[inline(always)]
    fn x_scale(&self, i: usize, s: usize) -> f32 {
        let of_x = self.x_scales.parts(self.out.range().start + i);
        of_x.get(s * STEP / self.x_scales.block.columns).copied().unwrap_or(1.0)
    }

    /// The scales of a panel's rows, of whose parts they are `parts`, at the steps of a stretch where segments begin.
    #[inline(always)]
    fn scales(&self, parts: &[&[f32]; PANEL], stretch: Range<usize>) -> [[f32; PANEL]; STEPS] {
        let mut scales = [[1f32; PANEL]; STEPS];
        let Some(segment) = self.segment else { return scales };
        for (s, scales) in stretch.clone().zip(&mut scales) {
            if s == stretch.start || s.is_multiple_of(segment) {
                *scales = self.scales_of(parts, s);
            }
        }
        scales
    }

    /// The scales of a panel's rows at a step: one, if blocks have as many.
    #[inline(always)]
    fn scales_of(&self, parts: &[&[f32]; PANEL], step: usize) -> [f32; PANEL] {
        let (mut scales, column) = ([1f32; PANEL], step * STEP / self.w_scales.block.columns);
        if self.w_scales.block.rows.is_multiple_of(PANEL) {
            return [parts[0].get(column).copied().unwrap_or(1.0); PANEL];
        }
        for (scale, parts) in scales.iter_mut().zip(parts) {
            *scale = parts.get(column).copied().unwrap_or(1.0);
        }
        scales
    }
}

/// Packs a stretch of a panel's rows, zeros beyond their end, and asks for the next one.
#[inline(always)]
fn pack<W: Lane>(v: Avx512, pairs: Avx512<true>, rows: &[&[u8]; PANEL], stretch: Range<usize>, panel: &mut [bf16]) {
    let table = fp8::<W>().expect("weights are of fp8");
    for (g, rows) in rows.as_chunks::<LANES>().0.iter().enumerate() {
        for s in stretch.clone().step_by(2) {
            let mut ends = [[0u8; 2 * STEP]; LANES];
            let mut lines = [&[0u8; 2 * STEP]; LANES];
            for ((row, line), end) in rows.iter().zip(&mut lines).zip(&mut ends) {
                v.prefetch_far(row, (s + STEPS) * STEP);
                let rest = row.get(s * STEP..).unwrap_or_default();
                if let Some(whole) = rest.first_chunk() {
                    *line = whole;
                } else {
                    end[..rest.len()].copy_from_slice(rest);
                    *line = end;
                }
            }
            let at = (s - stretch.start) * WIDE + g;
            pairs.pack_fp8(table, &lines, &mut panel[at * TILE..], WIDE * TILE);
        }
    }
}

/// Adds the products of rows of pairs with packed steps.
#[inline(always)]
fn add<const R: usize>(
    pairs: Avx512<true>,
    x: [&[[f32; LANES]]; R],
    panel: &[Step],
    mut acc: [[<Avx512<true> as Vector>::F; WIDE]; R],
) -> [[<Avx512<true> as Vector>::F; WIDE]; R] {
    for (s, step) in panel.iter().enumerate() {
        let mut of = [&[0f32; LANES]; R];
        for (of, x) in of.iter_mut().zip(x) {
            *of = &x[s];
        }
        for p in 0..LANES {
            let mut w = [pairs.splat(0.0); WIDE];
            for (w, lines) in w.iter_mut().zip(step) {
                *w = pairs.load(&lines[p]);
            }
            for (acc, x) in acc.iter_mut().zip(of) {
                let x = pairs.splat(x[p]);
                for (acc, w) in acc.iter_mut().zip(w) {
                    *acc = pairs.fma(x, w, *acc);
                }
            }
        }
    }
    acc
}
