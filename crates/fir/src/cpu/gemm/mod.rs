//! Dense matrix product `x · wᵀ`: both operands run along `k`, so an output is a dot product of two rows.
//!
//! A register tile holds `ROWS` × 4 dot products, `LANES` partial sums each. Work is cut into panels of [`PANEL`]
//! weight rows, the unit of parallelism, and blocks of [`DEPTH`] along `k`, so that a tile's operands stay in the
//! first-level cache.
//!
//! An output's additions always happen in the same order: within a block by lanes, then the lanes' tree, then block by
//! block. Neither the tile that holds it nor the thread that runs it changes that.

pub(crate) mod blocks;

use std::cell::Cell;
use std::ops::Range;

use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, narrow, widen, with_float};
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef};

/// Weight rows per unit of work: 256 KB of f32 with [`DEPTH`], in the second-level cache beside what else is there.
const PANEL: usize = 64;
/// Elements along `k` per block: a tile's ten rows of f32 are 40 KB, in the first-level cache.
const DEPTH: usize = 1024;
/// Weight rows per tile: what `sums4` adds up at once.
const COLUMNS: usize = 4;

thread_local! {
    /// Scratch of a unit of work: kept, as new memory of this size would be mapped and cleared for every unit.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

pub(crate) fn gemm(cpu: &Cpu, x: TensorRef<'_>, w: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "gemm";
    let (m, k) = (x.shape()[0], x.shape()[1]);
    if m == 0 || w.shape()[0] == 0 {
        // A side without elements may be longer than memory.
        return Ok(());
    }
    let mut wide = Vec::new();
    let x = if let Ok(x) = Rows::<f32>::new(OP, "x", x) {
        x
    } else {
        with_float!(OP, "x", x.dtype(), X => {
            let x = Rows::<X>::new(OP, "x", x)?;
            wide.resize(m * k, 0.0);
            cpu.run(Widen { x, out: &mut wide });
            Ok(Rows::packed(&wide, k))
        })?
    };
    with_float!(OP, "w", w.dtype(), W => with_float!(OP, "out", out.dtype(), O => {
        let (w, out) = (Rows::<W>::new(OP, "w", w)?, RowsMut::<O>::new(OP, "out", out)?);
        let panels = w.len().div_ceil(PANEL);
        // Two units per worker; when there are too few panels for that, their rows are cut too. Never
        // into fewer than 24: every cut reads all weights.
        let cuts = (2 * cpu.workers()).div_ceil(panels.max(1)).min(m / 24).max(1);
        let units = out.split(cuts).into_iter().flat_map(|rows| rows.split_columns(PANEL).into_iter().enumerate());
        let work = |(panel, out): (usize, RowsMut<'_, O>)| unit(cpu, x, w, k, panel * PANEL, out);
        // Below 64k products, a few microseconds, waking the pool is not worth it.
        if m.saturating_mul(w.len()).saturating_mul(k) < 64 << 10 {
            units.for_each(work);
        } else {
            cpu.pool().scatter(units.collect(), work);
        }
        Ok(())
    }))
}

/// Rows `out.range()` of `x` times weight rows from `first` on, as many as `out` is wide.
fn unit<W: Lane, O: Lane>(
    cpu: &Cpu,
    x: Rows<'_, f32>,
    w: Rows<'_, W>,
    k: usize,
    first: usize,
    mut out: RowsMut<'_, O>,
) {
    let mut scratch = SCRATCH.take();
    let (range, width) = (out.range(), out.row_len());
    scratch.clear();
    scratch.resize(range.len() * width + PANEL * DEPTH.min(k), 0.0);
    let (sums, panel) = scratch.split_at_mut(range.len() * width);
    cpu.run(Product { x, rows: range.clone(), w, first, width, k, sums, panel });
    for (r, sums) in range.zip(sums.chunks_exact(width.max(1))) {
        cpu.run(Narrow { sums, out: out.row(r) });
    }
    SCRATCH.set(scratch);
}

struct Widen<'a, T> {
    x: Rows<'a, T>,
    out: &'a mut [f32],
}

impl<T: Lane> Kernel for Widen<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        if self.out.is_empty() {
            return;
        }
        let k = self.out.len() / self.x.len();
        for (r, out) in self.out.chunks_exact_mut(k).enumerate() {
            widen(v, self.x.row(r), out);
        }
    }
}

struct Narrow<'a, T> {
    sums: &'a [f32],
    out: &'a mut [T],
}

impl<T: Lane> Kernel for Narrow<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        narrow(v, self.sums, self.out);
    }
}

/// Adds the product of some rows and weight rows to `sums`, `[rows, width]`.
struct Product<'a, W> {
    x: Rows<'a, f32>,
    rows: Range<usize>,
    w: Rows<'a, W>,
    first: usize,
    width: usize,
    k: usize,
    sums: &'a mut [f32],
    /// Room for `[PANEL, DEPTH.min(k)]`.
    panel: &'a mut [f32],
}

impl<W: Lane> Kernel for Product<'_, W> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { x, rows, w, first, width, k, sums, panel } = self;
        let mut from = 0;
        while from < k {
            let x = Block { rows: x, first: rows.start, count: rows.len(), columns: from..k.min(from + DEPTH) };
            let w = Block { rows: w, first, count: width, columns: x.columns.clone() };
            // Few rows use a weight once or twice and read it as it is; many read a copy, in f32 and side by side.
            if rows.len() <= 12 {
                multiply(v, &x, &w, sums);
            } else {
                let depth = x.columns.len();
                for (j, copy) in panel.chunks_exact_mut(depth).take(width).enumerate() {
                    widen(v, w.row(j), copy);
                }
                let rows = Rows::packed(&panel[..width * depth], depth);
                multiply(v, &x, &Block { rows, first: 0, count: width, columns: 0..depth }, sums);
            }
            from += DEPTH;
        }
    }
}

/// Some rows and columns of an operand.
struct Block<'a, T> {
    rows: Rows<'a, T>,
    first: usize,
    count: usize,
    columns: Range<usize>,
}

impl<'a, T: Lane> Block<'a, T> {
    #[inline(always)]
    fn row(&self, i: usize) -> &'a [T] {
        &self.rows.row(self.first + i)[self.columns.start..self.columns.end]
    }
}

/// `sums[i, j] += x[i] · w[j]`
#[inline(always)]
fn multiply<V: Vector, W: Lane>(v: V, x: &Block<'_, f32>, w: &Block<'_, W>, sums: &mut [f32]) {
    // 6 × 4 sums, 6 vectors of x and one of w fill the 32 registers of AVX-512. In the 16 of AVX2, 3 × 4 would fit but
    // the compiler spills one, and the loop waits for that store: hence 2 × 4.
    let most = if V::LANES == 16 { 6 } else { 2 };
    let mut i = 0;
    while i < x.count {
        let rows = most.min(x.count - i);
        match rows {
            1 => strip::<V, W, 1>(v, x, i, w, sums),
            2 => strip::<V, W, 2>(v, x, i, w, sums),
            3 => strip::<V, W, 3>(v, x, i, w, sums),
            4 => strip::<V, W, 4>(v, x, i, w, sums),
            5 => strip::<V, W, 5>(v, x, i, w, sums),
            _ => strip::<V, W, 6>(v, x, i, w, sums),
        }
        i += rows;
    }
}

/// `ROWS` rows of `x`, from `i` on, with all of `w`.
#[inline(always)]
fn strip<V: Vector, W: Lane, const ROWS: usize>(
    v: V,
    x: &Block<'_, f32>,
    i: usize,
    w: &Block<'_, W>,
    sums: &mut [f32],
) {
    let mut xs = [&[][..]; ROWS];
    for (r, xs) in xs.iter_mut().enumerate() {
        *xs = x.row(i + r);
    }
    let mut j = 0;
    while j < w.count {
        let columns = COLUMNS.min(w.count - j);
        // Past the last weight row, that row again: its sums are dropped below.
        let mut ws = [&[][..]; COLUMNS];
        for (c, ws) in ws.iter_mut().enumerate() {
            *ws = w.row(j + c.min(columns - 1));
        }
        let tile = dots::<V, W, ROWS>(v, xs, ws);
        for (r, tile) in tile.iter().enumerate() {
            for (sum, dot) in sums[(i + r) * w.count + j..][..columns].iter_mut().zip(tile) {
                *sum += dot;
            }
        }
        j += columns;
    }
}

/// The dot products of every row of `x` with every row of `w`, all of one length.
#[inline(always)]
fn dots<V: Vector, W: Lane, const ROWS: usize>(v: V, x: [&[f32]; ROWS], w: [&[W]; COLUMNS]) -> [[f32; COLUMNS]; ROWS] {
    let k = w[0].len();
    assert!(x.iter().all(|x| x.len() == k) && w.iter().all(|w| w.len() == k));
    let mut acc = [[v.splat(0.0); COLUMNS]; ROWS];
    let mut at = 0;
    while at + V::LANES <= k {
        let mut xs = [v.splat(0.0); ROWS];
        for r in 0..ROWS {
            xs[r] = v.load(&x[r][at..]);
        }
        for c in 0..COLUMNS {
            let w = W::load(v, &w[c][at..]);
            for r in 0..ROWS {
                acc[r][c] = v.fma(xs[r], w, acc[r][c]);
            }
        }
        at += V::LANES;
    }
    if at < k {
        for c in 0..COLUMNS {
            let w = W::load_tail(v, &w[c][at..]);
            for r in 0..ROWS {
                acc[r][c] = v.fma(f32::load_tail(v, &x[r][at..]), w, acc[r][c]);
            }
        }
    }
    let mut sums = [[0.0; COLUMNS]; ROWS];
    for r in 0..ROWS {
        sums[r] = v.sums4(acc[r]);
    }
    sums
}
