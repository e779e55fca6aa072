//! Dense matrix product `x · wᵀ`: both operands run along `k`, so an output is a dot product of two rows.
//!
//! A register tile holds `ROWS` × 4 or 3 dot products, `LANES` partial sums each. Work is cut into panels of [`PANEL`]
//! weight rows, the unit of parallelism, and blocks of [`DEPTH`] along `k`, so that a tile's operands stay in the
//! second-level cache. For many rows both operands are packed: see [`packed`].
//!
//! An output's additions always happen in the same order: within a block by lanes, then the lanes' tree, then block by
//! block. Neither the tile that holds it nor the thread that runs it changes that.
//!
//! At the AMX level, products of bf16 go through tiles: see [`tiles`]. Without it, but with AVX-512 BF16 and VBMI, their rows are taken for
//! rows of half as many f32, in whose bits are two numbers, and what multiplies and adds does so with both
//! ([`Avx512`] with `PAIRS`).

mod epilogue;
mod packed;
pub(crate) mod scaled;
mod strips;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub(crate) mod blocks;

use std::cell::Cell;
use std::ops::Range;

pub(crate) use self::epilogue::Epilogue;
pub(crate) use self::strips::Strips;
#[cfg(target_arch = "x86_64")]
use crate::cpu::arch::Avx512;
use crate::cpu::arch::aligned;
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, widen, with_float};
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::{Error, Result};
#[cfg(target_arch = "x86_64")]
use crate::tensor::bf16;
use crate::tensor::{DType, TensorMut, TensorRef};

/// Weight rows per unit of work: 512 KB of f32 with [`DEPTH`], in the second-level cache beside what else is there.
const PANEL: usize = 64;
/// Elements along `k` per block, at most: see [`depth_of`]. Half as many leave a tile's rows in the first-level cache, and make twice as many sums of blocks:
/// products of 512 rows took 4 % longer on Zen 4 and over 10 % on a Xeon of model 207, whose products of 8 rows of f32 alone were 10 %
/// faster so.
const DEPTH: usize = 2048;

/// [`DEPTH`] of a level: half of it with half the lanes, of CPUs whose first- and second-level caches are mostly smaller. On Zen 3 that
/// made products of 512 rows of f32 9 % faster and of bf16 5 % slower, and four rows of `x` fit into 32 KB.
#[inline(always)]
fn depth_of<V: Vector>() -> usize {
    DEPTH / 16 * V::LANES
}

thread_local! {
    /// Rows of a launch, packed or widened. Kept, as new memory of this size would be mapped and cleared every time.
    static COPIES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// Scratch of a unit of work, kept too.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// One product of a launch.
pub(crate) struct Product<'a> {
    /// `[m, k]`
    pub x: TensorRef<'a>,
    /// `[n, k]`, or `[2 * n, k]` if the epilogue takes two rows per column
    pub w: TensorRef<'a>,
    /// `[m, n]`
    pub out: TensorMut<'a>,
    pub then: Epilogue<'a>,
}

impl Product<'_> {
    /// Whether there is nothing to write. A side without elements may be longer than memory.
    fn is_empty(&self) -> bool {
        self.x.shape()[0] == 0 || self.w.shape()[0] == 0
    }
}

/// Several products in one launch, shapes checked by the caller; each side has one type in all of them.
pub(crate) fn products(cpu: &Cpu, op: &'static str, mut list: Vec<Product<'_>>) -> Result<()> {
    list.retain(|p| !p.is_empty());
    let Some(first) = list.first() else { return Ok(()) };
    for p in &list {
        // Copied, widened or packed: a stride of 0 could claim more rows than memory holds.
        p.x.layout().check_listed(op, "x")?;
    }
    let (x, w, out) = (first.x.dtype(), first.w.dtype(), first.out.dtype());
    #[cfg(target_arch = "x86_64")]
    if let (Some(amx), (DType::BF16, DType::BF16)) = (cpu.amx(), (x, w)) {
        let list = list.into_iter().map(|p| tiles::Sides::new(op, p)).collect::<Result<_>>()?;
        return with_float!(op, "out", out, O => tiles::products::<O>(cpu, amx, op, list));
    }
    #[cfg(target_arch = "x86_64")]
    if let (Some(pairs), (DType::BF16, DType::BF16)) = (cpu.pairs(), (x, w)) {
        return with_float!(op, "out", out, O => {
            // Product by product: what lies beside one changes none of its bits.
            let (mut sides, mut others) = (vec![], vec![]);
            for p in list {
                match pairs_of(&p) {
                    Some((x, w)) => sides.push(Sides { x, w, out: RowsMut::<O>::new(op, "out", p.out)?, then: p.then }),
                    None => others.push(p),
                }
            }
            dots_of(cpu, &pairs, sides);
            by_level::<bf16, bf16, O>(cpu, op, others)
        });
    }
    with_float!(op, "x", x, X => with_float!(op, "w", w, W => with_float!(op, "out", out, O => {
        by_level::<X, W, O>(cpu, op, list)
    })))
}

/// A product with packed weights, shapes checked by the caller.
pub(crate) fn packed_product<'a>(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'a>,
    w: &'a Strips,
    out: TensorMut<'a>,
    then: Epilogue<'a>,
) -> Result<()> {
    x.layout().check_listed(op, "x")?;
    if x.dtype() != DType::BF16 {
        let want = "bf16, as `w` is packed".into();
        return Err(Error::DType { op, arg: "x", got: x.dtype().name(), want });
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = cpu.amx() {
        let dtype = out.dtype();
        if x.shape()[0] == 0 || w.shape()[0] == 0 {
            return Ok(());
        }
        let list = vec![tiles::Sides { x, w: tiles::Weights::Strips(w), out, then }];
        return with_float!(op, "out", dtype, O => tiles::products::<O>(cpu, amx, op, list));
    }
    let _ = (out, then, w);
    Err(Error::value(op, "w", format!("packed for level amx, on an executor of level {}", cpu.level()), "rows"))
}

/// Both sides of a product of bf16 as rows of pairs, if they are even.
#[cfg(target_arch = "x86_64")]
fn pairs_of<'a>(p: &Product<'a>) -> Option<(Rows<'a, f32>, Rows<'a, f32>)> {
    let rows = |x: TensorRef<'a>| Rows::<bf16>::new("gemm", "x", x).ok()?.pairs();
    Some((rows(p.x)?, rows(p.w)?))
}

/// One product of a launch, as rows.
struct Sides<'a, X, W, O> {
    x: Rows<'a, X>,
    w: Rows<'a, W>,
    out: RowsMut<'a, O>,
    then: Epilogue<'a>,
}

impl<X: Lane, W: Lane, O> Sides<'_, X, W, O> {
    /// Multiplications, or as many as a usize holds.
    fn work(&self) -> usize {
        self.x.len().saturating_mul(self.x.row_len()).saturating_mul(self.w.len())
    }
}

/// What runs the kernels that multiply and add.
trait Runs: Sync {
    fn run<K: Kernel>(&self, kernel: K) -> K::Out;
}

impl Runs for Cpu {
    fn run<K: Kernel>(&self, kernel: K) -> K::Out {
        Cpu::run(self, kernel)
    }
}

/// Rows of pairs, as if they were of f32.
#[cfg(target_arch = "x86_64")]
impl Runs for Avx512<true> {
    fn run<K: Kernel>(&self, kernel: K) -> K::Out {
        Avx512::run(*self, kernel)
    }
}

fn by_level<X: Lane, W: Lane, O: Lane>(cpu: &Cpu, op: &'static str, list: Vec<Product<'_>>) -> Result<()> {
    let sides = list.into_iter().map(|p| {
        let (x, w) = (Rows::<X>::new(op, "x", p.x)?, Rows::<W>::new(op, "w", p.w)?);
        Ok(Sides { x, w, out: RowsMut::<O>::new(op, "out", p.out)?, then: p.then })
    });
    dots_of(cpu, cpu, sides.collect::<Result<_>>()?);
    Ok(())
}

fn dots_of<X: Lane, W: Lane, O: Lane>(cpu: &Cpu, by: &impl Runs, list: Vec<Sides<'_, X, W, O>>) {
    // Below 64k products, a few microseconds, waking the pool is not worth it.
    let alone = list.iter().fold(0usize, |sum, p| sum.saturating_add(p.work())) < 64 << 10;
    let is_packed = |p: &Sides<'_, X, W, O>| p.x.len() > packed::FEW;
    let copy_len = |p: &Sides<'_, X, W, O>| match (p.x.len(), p.x.row_len()) {
        (m, k) if is_packed(p) => m.next_multiple_of(packed::ROWS) * packed::row_len(k),
        (m, k) if X::DTYPE != DType::F32 => m * k,
        _ => 0,
    };
    let mut buffer = COPIES.take();
    let copies = aligned(&mut buffer, list.iter().map(copy_len).sum());
    let (mut packs, mut rest) = (vec![], &mut *copies);
    for p in &list {
        let x = p.x;
        let (mine, others) = rest.split_at_mut(copy_len(p));
        rest = others;
        if is_packed(p) {
            let parts = mine.chunks_mut((packed::ROWS * packed::row_len(x.row_len())).max(1)).enumerate();
            packs.extend(parts.map(|(i, to)| packed::PackRows { x, first: i * packed::ROWS, to }));
        } else {
            cpu.run(Widen { x, out: mine });
        }
    }
    if alone {
        packs.into_iter().for_each(|pack| cpu.run(pack));
    } else {
        cpu.pool().scatter(packs, |pack| cpu.run(pack));
    }

    let panel = |p: &Sides<'_, X, W, O>| if is_packed(p) { packed::PANEL } else { PANEL };
    let panels: usize = list.iter().map(|p| p.w.len().div_ceil(panel(p))).sum();
    let (mut units, mut rest) = (vec![], &*copies);
    for p in list {
        let (mine, others) = rest.split_at(copy_len(&p));
        rest = others;
        let (m, k, n, panel) = (p.x.len(), p.x.row_len(), p.out.row_len(), panel(&p));
        // Two units per worker; when there are too few panels for that, their rows are cut too. Never into fewer than
        // 54: every cut packs all weights.
        let cuts = (2 * cpu.workers()).div_ceil(panels.max(1)).min(m / (3 * packed::ROWS)).max(1);
        let each = m.div_ceil(cuts).next_multiple_of(packed::ROWS);
        let whole =
            if is_packed(&p) { None } else { Some(p.x.as_f32().unwrap_or_else(|| Rows::packed_as(mine, m, k))) };
        let Sides { w, out, then, .. } = p;
        for rows in out.cut((0..m).step_by(each).map(|at| each.min(m - at))) {
            let x = match whole {
                Some(rows) => Operand::Rows(rows),
                None => Operand::Packed(&mine[rows.range().start * packed::row_len(k)..]),
            };
            let columns = rows.split_columns(panel).into_iter().enumerate();
            units.extend(columns.map(|(i, out)| Unit { x, w, k, n, first: i * panel, out, then }));
        }
    }
    if alone {
        units.into_iter().for_each(|u| u.run(cpu, by));
    } else {
        cpu.pool().scatter(units, |u| u.run(cpu, by));
    }
    COPIES.set(buffer);
}

/// The left side of a unit.
#[derive(Clone, Copy)]
enum Operand<'a> {
    /// All rows of a product of few.
    Rows(Rows<'a, f32>),
    /// Packed, from the unit's first row on.
    Packed(&'a [f32]),
}

/// Rows `out.range()` of a product, for the columns from `first` on, as many as `out` is wide.
struct Unit<'a, W, O> {
    x: Operand<'a>,
    w: Rows<'a, W>,
    k: usize,
    /// Columns of the whole product.
    n: usize,
    first: usize,
    out: RowsMut<'a, O>,
    then: Epilogue<'a>,
}

impl<W: Lane, O: Lane> Unit<'_, W, O> {
    fn run(self, cpu: &Cpu, by: &impl Runs) {
        let Self { x, w, k, n, first, mut out, then } = self;
        let mut scratch = SCRATCH.take();
        let (rows, width) = (out.range().len(), out.row_len());
        let size = rows * width;
        let room = match x {
            Operand::Rows(_) => 0,
            Operand::Packed(_) => packed::PANEL * DEPTH.min(packed::row_len(k)),
        };
        let (panel, sums) = aligned(&mut scratch, room + then.rows() * size).split_at_mut(room);
        sums.fill(0.0);
        for half in 0..then.rows() {
            let (first, sums) = (half * n + first, &mut sums[half * size..][..size]);
            match x {
                Operand::Rows(x) => by.run(Panel { x, w, first, width, sums }),
                Operand::Packed(x) => by.run(packed::Panel { x, rows, w, first, width, sums, panel }),
            }
        }
        cpu.run(Write { sums, first, out: &mut out, then });
        SCRATCH.set(scratch);
    }
}

/// Writes the sums of a unit, those of all its columns and then those of the second half of the weights.
struct Write<'a, 'b, O> {
    sums: &'b [f32],
    first: usize,
    out: &'b mut RowsMut<'a, O>,
    then: Epilogue<'b>,
}

impl<O: Lane> Kernel for Write<'_, '_, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let width = self.out.row_len();
        let range = self.out.range();
        let (sums, second) = self.sums.split_at(range.len() * width);
        for (i, r) in range.enumerate() {
            let columns = i * width..(i + 1) * width;
            let second = second.get(columns.clone()).unwrap_or_default();
            self.then.write(v, self.first, &sums[columns], second, self.out.row(r));
        }
    }
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
        let k = self.x.row_len();
        for (r, out) in self.out.chunks_exact_mut(k).enumerate() {
            widen(v, self.x.row(r), out);
        }
    }
}

/// Adds the product of all rows and some weight rows to `sums`, `[rows, width]`.
struct Panel<'a, W> {
    x: Rows<'a, f32>,
    w: Rows<'a, W>,
    first: usize,
    width: usize,
    sums: &'a mut [f32],
}

impl<W: Lane> Kernel for Panel<'_, W> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { x, w, first, width, sums } = self;
        let k = w.row_len();
        let mut from = 0;
        while from < k {
            let x = Block { rows: x, first: 0, count: x.len(), columns: from..k.min(from + depth_of::<V>()) };
            let w = Block { rows: w, first, count: width, columns: x.columns.clone() };
            multiply(v, &x, &w, sums);
            from += depth_of::<V>();
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
    // 8 × 3 or 6 × 4 sums, the vectors of w and one of x are in the 32 registers of AVX-512. In the 16 of AVX2, 3 × 4
    // would fit but the compiler spills one, and the loop waits for that store: hence 4 × 2, or 2 × 4 for two rows. So it does
    // of 24 sums where weights become f32 on the way: with 6 or 8 rows of f16 that took twice as long as with 7.
    let converts = W::DTYPE != DType::F32;
    let most = match V::LANES {
        16 if converts => 7,
        16 => 8,
        _ => 4,
    };
    let mut i = 0;
    while i < x.count {
        let left = x.count - i;
        let rows = left.div_ceil(left.div_ceil(most));
        match rows {
            1 => strip::<V, W, 1, 4>(v, x, i, w, sums),
            2 => strip::<V, W, 2, 4>(v, x, i, w, sums),
            3 if V::LANES == 8 => strip::<V, W, 3, 2>(v, x, i, w, sums),
            4 if V::LANES == 8 => strip::<V, W, 4, 2>(v, x, i, w, sums),
            3 => strip::<V, W, 3, 4>(v, x, i, w, sums),
            4 => strip::<V, W, 4, 4>(v, x, i, w, sums),
            5 => strip::<V, W, 5, 4>(v, x, i, w, sums),
            6 if converts => strip::<V, W, 6, 3>(v, x, i, w, sums),
            6 => strip::<V, W, 6, 4>(v, x, i, w, sums),
            7 => strip::<V, W, 7, 3>(v, x, i, w, sums),
            _ => strip::<V, W, 8, 3>(v, x, i, w, sums),
        }
        i += rows;
    }
}

/// `ROWS` rows of `x`, from `i` on, with all of `w`, `COLUMNS` rows at a time.
#[inline(always)]
fn strip<V: Vector, W: Lane, const ROWS: usize, const COLUMNS: usize>(
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
        let (mut ws, mut ahead) = ([&[][..]; COLUMNS], [&[][..]; COLUMNS]);
        for c in 0..COLUMNS {
            ws[c] = w.row(j + c.min(columns - 1));
            ahead[c] = w.row((j + COLUMNS + c).min(w.count - 1));
        }
        let tile = dots::<V, W, ROWS, COLUMNS>(v, xs, ws, ahead);
        for (r, tile) in tile.iter().enumerate() {
            for (sum, dot) in sums[(i + r) * w.count + j..][..columns].iter_mut().zip(tile) {
                *sum += dot;
            }
        }
        j += columns;
    }
}

/// The dot products of every row of `x` with every row of `w`, all of one length. Asks for the rows that come next.
#[inline(always)]
fn dots<V: Vector, W: Lane, const ROWS: usize, const COLUMNS: usize>(
    v: V,
    x: [&[f32]; ROWS],
    w: [&[W]; COLUMNS],
    ahead: [&[W]; COLUMNS],
) -> [[f32; 4]; ROWS] {
    let k = w[0].len();
    assert!(x.iter().all(|x| x.len() == k) && w.iter().all(|w| w.len() == k));
    let mut acc = [[v.splat(0.0); COLUMNS]; ROWS];
    // With sixteen lanes more rows leave no registers for their places: six to eight of f32 took up to 1.1 times as long.
    let mut at = match V::LANES {
        8 => whole::<V, W, ROWS, COLUMNS, 8>(v, x, w, ahead, &mut acc),
        _ if ROWS <= 2 => whole::<V, W, ROWS, COLUMNS, 16>(v, x, w, ahead, &mut acc),
        _ => 0,
    };
    while at + V::LANES <= k {
        if (at * size_of::<W>()).is_multiple_of(64) {
            for ahead in ahead {
                v.prefetch_far(ahead, at);
            }
        }
        let mut ws = [v.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            ws[c] = W::load(v, &w[c][at..]);
        }
        for r in 0..ROWS {
            let x = v.load(&x[r][at..]);
            for c in 0..COLUMNS {
                acc[r][c] = v.fma(x, ws[c], acc[r][c]);
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
    let mut sums = [[0.0; 4]; ROWS];
    for r in 0..ROWS {
        let mut four = [v.splat(0.0); 4];
        four[..COLUMNS].copy_from_slice(&acc[r]);
        sums[r] = v.sums4(four);
    }
    sums
}

/// The part of [`dots`] that is whole vectors, of `LANES`, and how long it is. Slices of as many arrays, so that the loop has no checks:
/// with eight lanes they take longer than what is left, with sixteen a tenth to a quarter of a row's time.
#[inline(always)]
fn whole<V: Vector, W: Lane, const ROWS: usize, const COLUMNS: usize, const LANES: usize>(
    v: V,
    x: [&[f32]; ROWS],
    w: [&[W]; COLUMNS],
    ahead: [&[W]; COLUMNS],
    acc: &mut [[V::F; COLUMNS]; ROWS],
) -> usize {
    let steps = w[0].len() / LANES;
    let (xs, ws) = (x.map(|x| &x.as_chunks::<LANES>().0[..steps]), w.map(|w| &w.as_chunks::<LANES>().0[..steps]));
    for step in 0..steps {
        if (step * LANES * size_of::<W>()).is_multiple_of(64) {
            for ahead in ahead {
                v.prefetch_far(ahead, step * LANES);
            }
        }
        let mut wv = [v.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            wv[c] = W::load(v, &ws[c][step]);
        }
        for r in 0..ROWS {
            let x = v.load(&xs[r][step]);
            for c in 0..COLUMNS {
                acc[r][c] = v.fma(x, wv[c], acc[r][c]);
            }
        }
    }
    steps * LANES
}
