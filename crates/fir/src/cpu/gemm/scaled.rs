//! Products of fp8 with scales.
//!
//! A scale of a whole row is a factor of its sums, and meets them at the end. Scales of parts of a row are folded into
//! `x`, which is in f32 anyway: its own once, those of the weights again for every panel, which does not cross their
//! blocks. That is a 64th of the multiplications of the panel, and leaves the weights as they are in memory.
//!
//! An output's arithmetic is the same however many rows there are, as in the dense product.
//!
//! At the AMX level, products of types that are exact in bf16 go through tiles: see [`tiles`]. Without it, but with AVX-512 BF16 and
//! VBMI, through sums of pairs: see [`mod@pairs`].

#[cfg(target_arch = "x86_64")]
mod exact;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

use super::{Block as Part, DEPTH, PANEL, SCRATCH, depth_of, multiply};
#[cfg(target_arch = "x86_64")]
use crate::cpu::arch::{Amx, Avx512};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::quantize::with_fp8;
use crate::cpu::rows::{Rows, narrow, widen, with_float, with_float8};
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::tensor::{Block, Scaled, TensorMut};
#[cfg(target_arch = "x86_64")]
use crate::tensor::{DType, bf16};

/// Rows of `x` that are multiplied by the weights' scales at once: 192 KB with [`DEPTH`], of the second-level cache.
const CHUNK: usize = 24;

/// One product of a launch.
pub(crate) struct ScaledProduct<'a> {
    /// `[m, k]`
    pub x: Scaled<'a>,
    /// `[n, k]`
    pub w: Scaled<'a>,
    /// `[m, n]`
    pub out: TensorMut<'a>,
}

impl ScaledProduct<'_> {
    /// `(m, k)`
    fn shape(&self) -> (usize, usize) {
        (self.x.data.shape()[0], self.x.data.shape()[1])
    }

    /// Multiplications of all of them, or as many as a usize holds.
    fn work(list: &[Self]) -> usize {
        let one = |p: &Self| p.shape().0.saturating_mul(p.shape().1).saturating_mul(p.w.data.shape()[0]);
        list.iter().fold(0, |sum, p| sum.saturating_add(one(p)))
    }
}

/// Several products in one launch, shapes checked by the caller; types and blocks are the same in all of them.
pub(crate) fn products(cpu: &Cpu, op: &'static str, mut list: Vec<ScaledProduct<'_>>) -> Result<()> {
    // A side without rows may be longer than memory.
    list.retain(|p| !p.out.layout().is_empty());
    let Some(first) = list.first() else { return Ok(()) };
    let (w, out) = (first.w.data.dtype(), first.out.dtype());
    #[cfg(target_arch = "x86_64")]
    if let (Some(by), true) = (By::of(cpu), exact::takes(first)) {
        return match first.x.data.dtype() {
            DType::BF16 => with_fp8!(op, "w", w, W => with_float!(op, "out", out, O => {
                by.products::<bf16, W, O>(cpu, op, list)
            })),
            x => with_fp8!(op, "x", x, X => with_fp8!(op, "w", w, W => with_float!(op, "out", out, O => {
                by.products::<X, W, O>(cpu, op, list)
            }))),
        };
    }
    let mut wide = Vec::new();
    for p in &list {
        wide.push(with_float8!(op, "x", p.x.data.dtype(), X => fold::<X>(cpu, op, &p.x))?);
    }
    with_fp8!(op, "w", w, W => with_float!(op, "out", out, O => dots_of::<W, O>(cpu, op, list, &wide)))
}

/// What adds up products of bf16.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum By {
    Tiles(Amx),
    Pairs(Avx512<true>),
}

#[cfg(target_arch = "x86_64")]
impl By {
    fn of(cpu: &Cpu) -> Option<Self> {
        cpu.amx().map(Self::Tiles).or_else(|| cpu.pairs().map(Self::Pairs))
    }

    fn products<X: Lane, W: Lane, O: Lane>(
        self,
        cpu: &Cpu,
        op: &'static str,
        list: Vec<ScaledProduct<'_>>,
    ) -> Result<()> {
        match self {
            Self::Tiles(amx) => tiles::products::<X, W, O>(cpu, amx, op, list),
            Self::Pairs(pairs) => pairs::products::<X, W, O>(cpu, pairs, op, list),
        }
    }
}

/// `x` in f32, with those of its scales that are of parts of a row.
fn fold<X: Lane>(cpu: &Cpu, op: &'static str, x: &Scaled<'_>) -> Result<Vec<f32>> {
    let (rows, scales) = (Rows::<X>::new(op, "x", x.data)?, Scales::new(op, "x.scales", x)?);
    let mut out = vec![0.0; rows.len() * rows.row_len()];
    cpu.run(Fold { x: rows, scales, out: &mut out });
    Ok(out)
}

/// The scales of one side.
#[derive(Clone, Copy)]
struct Scales<'a> {
    rows: Option<Rows<'a, f32>>,
    block: Block,
    /// Of parts of a row.
    partial: bool,
}

impl<'a> Scales<'a> {
    fn new(op: &'static str, arg: &'static str, x: &Scaled<'a>) -> Result<Self> {
        let rows = x.scales.map(|s| Rows::<f32>::new(op, arg, s)).transpose()?;
        // Blocks of no scales are whatever they are, of no columns too.
        let block = if rows.is_some() { x.block } else { Block::TENSOR };
        Ok(Self { rows, block, partial: rows.is_some_and(|s| s.row_len() != 1) })
    }

    /// Those of the parts of row `r`; none if they are of whole rows.
    #[inline(always)]
    fn parts(&self, r: usize) -> &'a [f32] {
        match &self.rows {
            Some(rows) if self.partial => rows.row(r / self.block.rows),
            _ => &[],
        }
    }

    /// The factor of all of row `r`.
    #[inline(always)]
    fn whole(&self, r: usize) -> f32 {
        match &self.rows {
            Some(rows) if !self.partial => rows.row(r / self.block.rows)[0],
            _ => 1.0,
        }
    }
}

struct Fold<'a, T> {
    x: Rows<'a, T>,
    scales: Scales<'a>,
    out: &'a mut [f32],
}

impl<T: Lane> Kernel for Fold<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let k = self.x.row_len();
        for (r, out) in self.out.chunks_exact_mut(k.max(1)).enumerate() {
            widen(v, self.x.row(r), out);
            scale_parts(v, self.scales.parts(r), self.scales.block.columns, 0, out);
        }
    }
}

/// Multiplies elements of a row, from column `from` on, by the scales of the parts that they are in.
#[inline(always)]
fn scale_parts<V: Vector>(v: V, scales: &[f32], columns: usize, from: usize, x: &mut [f32]) {
    let mut at = 0;
    while at < x.len() && !scales.is_empty() {
        let part = (from + at) / columns;
        let end = x.len().min((part + 1) * columns - from);
        let scale = v.splat(scales[part]);
        let x = &mut x[at..end];
        let mut i = 0;
        while i + V::LANES <= x.len() {
            v.store(v.mul(v.load(&x[i..]), scale), &mut x[i..]);
            i += V::LANES;
        }
        for x in &mut x[i..] {
            *x *= scales[part];
        }
        at = end;
    }
}

fn dots_of<W: Lane, O: Lane>(
    cpu: &Cpu,
    op: &'static str,
    list: Vec<ScaledProduct<'_>>,
    wide: &[Vec<f32>],
) -> Result<()> {
    // Below 64k products, a few microseconds, waking the pool is not worth it.
    let alone = ScaledProduct::work(&list) < 64 << 10;
    let panels: usize = list.iter().map(|p| p.w.data.shape()[0].div_ceil(PANEL)).sum();
    let mut units = Vec::new();
    for (p, wide) in list.into_iter().zip(wide) {
        let (m, k) = p.shape();
        let (x_scales, w_scales) = (Scales::new(op, "x.scales", &p.x)?, Scales::new(op, "w.scales", &p.w)?);
        let (x, w) = (Rows::packed_as(wide, m, k), Rows::<W>::new(op, "w", p.w.data)?);
        // A panel has one row of scales.
        let one = |width: &usize| !w_scales.partial || w_scales.block.rows.is_multiple_of(*width);
        let width = (1..=PANEL).rev().find(one).unwrap_or(1);
        // As in the dense product.
        let cuts = (2 * cpu.workers()).div_ceil(panels.max(1)).min(m / 24).max(1);
        for rows in RowsMut::<O>::new(op, "out", p.out)?.split(cuts) {
            let columns = rows.split_columns(width).into_iter().enumerate();
            units.extend(columns.map(|(i, out)| Unit { x, x_scales, w, w_scales, first: i * width, k, out }));
        }
    }
    if alone {
        units.into_iter().for_each(|unit| unit.run(cpu));
    } else {
        cpu.pool().scatter(units, |unit| unit.run(cpu));
    }
    Ok(())
}

/// Rows `out.range()` of `x` times weight rows from `first` on, as many as `out` is wide.
struct Unit<'a, W, O> {
    /// With the scales of parts of its rows.
    x: Rows<'a, f32>,
    x_scales: Scales<'a>,
    w: Rows<'a, W>,
    w_scales: Scales<'a>,
    first: usize,
    k: usize,
    out: RowsMut<'a, O>,
}

impl<W: Lane, O: Lane> Unit<'_, W, O> {
    fn run(mut self, cpu: &Cpu) {
        let mut scratch = SCRATCH.take();
        let (range, width, depth) = (self.out.range(), self.out.row_len(), DEPTH.min(self.k));
        scratch.clear();
        scratch.resize(range.len() * width + (PANEL + CHUNK) * depth, 0.0);
        let (sums, rest) = scratch.split_at_mut(range.len() * width);
        let (panel, chunk) = rest.split_at_mut(PANEL * depth);
        cpu.run(Panel {
            x: self.x,
            rows: range.clone(),
            w: self.w,
            first: self.first,
            width,
            scales: self.w_scales.parts(self.first),
            columns: self.w_scales.block.columns,
            sums,
            panel,
            chunk,
        });
        let mut factors = [0f32; PANEL];
        for (j, factor) in factors[..width].iter_mut().enumerate() {
            *factor = self.w_scales.whole(self.first + j);
        }
        for (r, sums) in range.zip(sums.chunks_exact_mut(width)) {
            cpu.run(Write { sums, x: self.x_scales.whole(r), w: &factors, out: self.out.row(r) });
        }
        SCRATCH.set(scratch);
    }
}

/// `out = sums * x * w`.
struct Write<'a, O> {
    sums: &'a mut [f32],
    x: f32,
    w: &'a [f32; PANEL],
    out: &'a mut [O],
}

impl<O: Lane> Kernel for Write<'_, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        for (sum, w) in self.sums.iter_mut().zip(self.w) {
            *sum = *sum * self.x * w;
        }
        narrow(v, self.sums, self.out);
    }
}

/// Adds the product of some rows and weight rows to `sums`, `[rows, width]`. Not generic over the output: its tiles are
/// most of what is compiled here.
struct Panel<'a, W> {
    x: Rows<'a, f32>,
    rows: Range<usize>,
    w: Rows<'a, W>,
    first: usize,
    width: usize,
    /// Of the parts of all these weight rows, or none; and columns of a part.
    scales: &'a [f32],
    columns: usize,
    sums: &'a mut [f32],
    /// Room for `[PANEL, DEPTH.min(k)]`.
    panel: &'a mut [f32],
    /// Room for `[CHUNK, DEPTH.min(k)]`.
    chunk: &'a mut [f32],
}

impl<W: Lane> Kernel for Panel<'_, W> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let k = self.w.row_len();
        let mut from = 0;
        while from < k {
            let columns = from..k.min(from + depth_of::<V>());
            let w = Part { rows: self.w, first: self.first, count: self.width, columns };
            // As in the dense product: few rows read weights as they are.
            if self.rows.len() <= 12 {
                self.meet(v, from, &w);
            } else {
                let (depth, panel) = (w.columns.len(), std::mem::take(&mut self.panel));
                for (j, copy) in panel.chunks_exact_mut(depth).take(self.width).enumerate() {
                    widen(v, w.row(j), copy);
                }
                let rows = Rows::packed(&panel[..self.width * depth], depth);
                self.meet(v, from, &Part { rows, first: 0, count: self.width, columns: 0..depth });
                self.panel = panel;
            }
            from += depth_of::<V>();
        }
    }
}

impl<W: Lane> Panel<'_, W> {
    /// Adds the products of all rows with `w`, whose columns begin at column `from` of `x`.
    #[inline(always)]
    fn meet<V: Vector, T: Lane>(&mut self, v: V, from: usize, w: &Part<'_, T>) {
        let (depth, rows) = (w.columns.len(), self.rows.clone());
        let mut done = 0;
        while done < rows.len() {
            let (mut n, mut x, mut first, mut columns) = (rows.len(), self.x, rows.start, from..from + depth);
            if !self.scales.is_empty() {
                n = CHUNK.min(rows.len() - done);
                for (r, copy) in self.chunk.chunks_exact_mut(depth).take(n).enumerate() {
                    copy.copy_from_slice(&self.x.row(rows.start + done + r)[columns.clone()]);
                    scale_parts(v, self.scales, self.columns, from, copy);
                }
                (x, first, columns) = (Rows::packed(&self.chunk[..n * depth], depth), 0, 0..depth);
            }
            let x = Part { rows: x, first, count: n, columns };
            multiply(v, &x, w, &mut self.sums[done * self.width..]);
            done += n;
        }
    }
}
