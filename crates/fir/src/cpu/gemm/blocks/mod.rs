//! Products with weights in GGUF's block formats: repacked weights, quantized activations, integer dot products.
//!
//! | file | holds |
//! |---|---|
//! | `pack.rs` | the packed form: panels of 16 weight rows in the order the kernel reads |
//! | `kernel.rs` | the product of a panel and some rows |
//! | `tiles.rs` | the same for many rows, with AMX: formats with integer scales |
//! | `groups.rs` | the same, with AMX: Q8_0, whose scales are f16 |
//!
//! The numbers are defined at [`block_gemm`](crate::gemm::block_gemm). Integer sums are exact and the f32 steps have one
//! order, so neither level, nor batch, nor threads change a bit.

#[cfg(target_arch = "x86_64")]
mod groups;
mod kernel;
mod pack;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::cell::Cell;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
pub(crate) use pack::Packed;
use pack::{GROUP, LANES, SUPER};

use crate::cpu::arch::{Aligned, prefetch_far, prefetch_to_write};
use crate::cpu::exec::Cpu;
use crate::cpu::gemm::Epilogue;
use crate::cpu::integers::PITCH;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, for_parts, narrow, widen, with_float};
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::{Error, Result};
use crate::tensor::{BlockFields, BlockFormat, Place, TensorMut, TensorRef};

/// Rows that vectors take at a time: below, unpacking is hidden by the reading of the weights.
const FEW: usize = 8;
/// Rows that a panel's codes are unpacked anew for, [`FEW`] at a time, where as many have registers: a batch's decode.
/// Weights are read once, in their order, as for few; to unpack them into the cache first, for a number of panels in turn,
/// took twice as long for 16 rows of Q4_1 and Q8_0.
const SEVERAL: usize = 64;
/// Rows from which AMX is faster than vectors: 24, to which more than 16 are made up there and tiles to 32, of 4096 x 4096 were 1.06 (Q4_0) to
/// 1.6 times (Q6_K) as fast through tiles, 16 0.7 to 1.2, those of 1536 x 576 0.8; 32 of 1536 x 576 1.2.
const TILED: usize = 17;
/// The same for Q8_0, whose groups have f16 scales: 32 rows were 0.95 times as fast, 48 1.12 times.
const GROUPED: usize = 41;
/// More rows than several are made up to a multiple of this: two tiles of AMX.
const MANY: usize = 32;
/// Rows per pass over all weights: a unit's sums stay in the second-level cache.
const PASS: usize = 512;
/// Panels per unit of work on many rows: activations, read anew for each unit, then take a quarter of the reads.
const PANELS: usize = 4;
/// The same with AMX: 512 rows' activations come from the last-level cache for every unit, and their sums, 512 KB, stay
/// in the second.
const TILE_PANELS: usize = 16;

/// Most elements of 256 that are multiplied on their own.
const TAKEN: usize = 4;
/// How many times as large as the mean of 16 maxima, of the elements 16 apart, these are.
const LARGE: f32 = 3.0;

/// Bytes of activations that stay in the second-level cache beside the rest. Those of all cells then do, and weights are
/// read in their order.
#[cfg(target_arch = "x86_64")]
const NEAR: usize = 1 << 20;

thread_local! {
    /// Scratch, kept: new memory of this size would be mapped and cleared for every call.
    static ACTIVATIONS: Cell<Vec<Activations>> = const { Cell::new(Vec::new()) };
    static STRIPS: Cell<Vec<Strip>> = const { Cell::new(Vec::new()) };
    static SUMS: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Sums of a row and a panel: a line of the cache, where loads and stores of two would take a tenth of all the time.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

/// Up to 256 elements of a row of `x`, quantized.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Activations {
    /// Four signed bytes each.
    words: [i32; SUPER / 4],
    /// Sums of the format's sub-blocks ([`sub`]): the bits of f32 if it has minima; else i32, times minus the weights' offset. If
    /// tiles meet integer minima, two bf16 that add up to the sum, the larger one above. For minima in steps, the sum in the upper 16
    /// bits and below it the sum times minus the [`centre`], bit 15 changed: so no sum of products borrows from the upper ones.
    sums: [i32; 16],
    scale: f32,
    taken: Taken,
    unused: [u32; 9],
}

/// Elements of a row that are too large to be quantized with the others: most of what that would cost comes from these few. Their codes
/// are 0, and kernels add their products with the weights in f32 ([`kernel::add_taken`]).
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Taken {
    count: u32,
    places: [u8; TAKEN],
    values: [f32; TAKEN],
}

impl Taken {
    /// Places in ascending order, and values.
    #[inline(always)]
    fn iter(&self) -> impl Iterator<Item = (usize, f32)> {
        self.places.into_iter().map(usize::from).zip(self.values).take(self.count as usize)
    }
}

/// What is subtracted from codes before their products are added up.
const fn centre(format: BlockFormat) -> i32 {
    let (low, high) = format.bits();
    if format.is_stepped() { 1 << (low + high - 1) } else { format.offset() }
}

/// Elements whose products are added up before they are scaled: with scales in steps as many as 16 bits hold.
const fn sub(format: BlockFormat) -> usize {
    if format.is_stepped() { 1 << (8 - centre(format).ilog2()) } else { format.sub() }
}

impl Activations {
    /// Sum of sub-block `j`, for a format with minima.
    #[inline(always)]
    fn sum(&self, j: usize) -> f32 {
        f32::from_bits(self.sums[j] as u32)
    }
}

const _: () = assert!(size_of::<Activations>() == 4 * PITCH);

/// [`Activations`] of [`MANY`] rows in the order of AMX tiles. From an array of [`Activations`], where a tile's rows lie apart, 512 rows
/// of 4096 x 4096 took 1.00 (Q6_K) to 1.07 times (Q4_K) as long on a core of a Xeon of model 207.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Strip {
    /// For every 64 elements two tiles, of 16 rows each.
    codes: [[[i8; 64]; MANY]; SUPER / 64],
    /// Two tiles.
    sums: [[i32; 16]; MANY],
    scales: [f32; MANY],
    taken: [Taken; MANY],
}

/// Rows of `x`, `[cells, padded rows]`.
#[derive(Clone, Copy)]
enum Acts<'a> {
    Rows(&'a [Activations]),
    /// For tiles alone.
    Strips(&'a [Strip]),
}

/// What quantized rows are stored in.
trait Quantized: Pod + Send {
    const ROWS: usize;
    fn put(&mut self, row: usize, acts: &Activations);
}

impl Quantized for Activations {
    const ROWS: usize = 1;
    #[inline(always)]
    fn put(&mut self, _: usize, acts: &Activations) {
        *self = *acts;
    }
}

impl Quantized for Strip {
    const ROWS: usize = MANY;
    #[inline(always)]
    fn put(&mut self, row: usize, acts: &Activations) {
        let codes: &[i8] = bytemuck::cast_slice(&acts.words);
        for (tiles, codes) in self.codes.iter_mut().zip(codes.as_chunks::<64>().0) {
            tiles[row] = *codes;
        }
        (self.sums[row], self.scales[row], self.taken[row]) = (acts.sums, acts.scale, acts.taken);
    }
}

/// The product, shapes checked by the caller; for an epilogue of two rows per column, these are whole panels.
pub(crate) fn gemm(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    w: &Packed,
    out: TensorMut<'_>,
    then: Epilogue<'_>,
) -> Result<()> {
    let m = x.shape()[0];
    if w.place() != Place::Host {
        return Err(Error::place(op, "w", w.place(), Place::Host));
    }
    with_float!(op, "x", x.dtype(), X => with_float!(op, "out", out.dtype(), O => {
        let (x, out) = (Rows::<X>::new(op, "x", x)?, RowsMut::<O>::new(op, "out", out)?);
        // `split` gives nothing for an `out` without columns.
        for out in out.split(m.div_ceil(PASS)) {
            pass(cpu, x, w, out, then);
        }
        Ok(())
    }))
}

/// The product for the rows of `out`.
fn pass<X: Lane, O: Lane>(cpu: &Cpu, x: Rows<'_, X>, w: &Packed, out: RowsMut<'_, O>, then: Epilogue<'_>) {
    let (rows, panels) = (out.range().len(), out.row_len().div_ceil(LANES));
    let tiled = w.k() > 0 && kernel::is_tiled(cpu, w.format(), rows); // Their sums begin with the first cell.
    let grouped = tiled && w.format().elements() == GROUP;
    let padded = if tiled { rows.next_multiple_of(LANES) } else { kernel::padded(rows) };
    // Eight units per worker, so that a late one costs an eighth of its share.
    let each = match (rows, tiled) {
        _ if grouped => panels.div_ceil(8 * cpu.workers()).next_multiple_of(2).min(TILE_PANELS / then.rows()),
        (..=SEVERAL, _) => panels.div_ceil(8 * cpu.workers()),
        (_, true) => panels.div_ceil(2 * cpu.workers()).min(TILE_PANELS / then.rows()),
        // As few for the thread that has the most (of 36 panels four at a time are 20 of one thread of two and 16 of the other), where a unit's
        // activations count for a quarter of a panel.
        _ => {
            let most = |each: &usize| panels.div_ceil(*each).div_ceil(cpu.workers()) * (4 * each + 1);
            (1..=PANELS).rev().min_by_key(most).unwrap_or(PANELS)
        }
    };
    if tiled {
        let mut strips = STRIPS.take();
        quantize_rows(cpu, x, w, out.range(), padded, !grouped && w.format().has_min(), &mut strips);
        multiply(cpu, Acts::Strips(&strips), w, padded, each, out, then);
        STRIPS.set(strips);
    } else {
        let mut acts = ACTIVATIONS.take();
        quantize_rows(cpu, x, w, out.range(), padded, false, &mut acts);
        multiply(cpu, Acts::Rows(&acts), w, padded, each, out, then);
        ACTIVATIONS.set(acts);
    }
}

/// Quantizes `rows` into `acts`, `[cells, padded rows]`.
fn quantize_rows<X: Lane, T: Quantized>(
    cpu: &Cpu,
    x: Rows<'_, X>,
    w: &Packed,
    rows: Range<usize>,
    padded: usize,
    pairs: bool,
    acts: &mut Vec<T>,
) {
    let (cells, each) = (w.k().div_ceil(SUPER), padded.div_ceil(T::ROWS));
    acts.resize(cells * each, T::zeroed());
    // Rows of few cells have work for all threads, too.
    let part = if padded <= SEVERAL { T::ROWS.max(8) } else { 64 };
    let parts = acts.chunks_exact_mut(each.max(1)).enumerate().flat_map(|(s, cell)| {
        let parts = cell.chunks_mut(part / T::ROWS).enumerate();
        parts.map(move |(i, out)| (s, part * i, out))
    });
    let end = rows.end;
    let quantize = |(s, from, out): (usize, usize, &mut [T])| {
        let rows = (rows.start + from).min(end)..end;
        cpu.run(Quantize { x, rows, s, format: w.format(), pairs, out });
    };
    // A core quantizes 8k elements in 2 µs, and longer where another has written them.
    let few = if cpu.pool().is_awake() { 8 << 10 } else { 64 << 10 };
    if rows.len() * w.k() < few {
        parts.for_each(quantize);
    } else {
        cpu.pool().scatter(parts.collect(), quantize);
    }
}

/// The product with quantized rows, `each` panels of columns to a unit of work.
fn multiply<O: Lane>(
    cpu: &Cpu,
    acts: Acts<'_>,
    w: &Packed,
    padded: usize,
    each: usize,
    out: RowsMut<'_, O>,
    then: Epilogue<'_>,
) {
    let (rows, panels) = (out.range().len(), out.row_len().div_ceil(LANES));
    let units = out.split_columns(each * LANES).into_iter().enumerate();
    let work = |(unit, mut out): (usize, RowsMut<'_, O>)| {
        if rows <= SEVERAL {
            // Other threads have read them.
            out.range().for_each(|r| prefetch_to_write(out.row(r)));
        }
        let mut sums = SUMS.take();
        let half = out.row_len().div_ceil(LANES) * padded;
        // Of fewer units than threads most are as large as the last.
        sums.resize(then.rows() * half, Line([0.0; LANES]));
        for (i, sums) in sums.chunks_exact_mut(half).enumerate() {
            kernel::run(cpu, acts, w, i * panels + unit * each, padded, sums);
        }
        cpu.run(Store { sums: &sums, padded, first: unit * each * LANES, out, then });
        SUMS.set(sums);
    };
    if rows.saturating_mul(w.n()).saturating_mul(w.k()) < 256 << 10 {
        units.for_each(work);
    } else {
        cpu.pool().scatter(units.collect(), work);
    }
}

/// Writes `[panels, padded rows, 16]` sums as rows, those of the second half of the weights behind the first's.
struct Store<'a, O> {
    sums: &'a [Line],
    padded: usize,
    /// Column of the whole product that `out` begins with.
    first: usize,
    out: RowsMut<'a, O>,
    then: Epilogue<'a>,
}

impl<O: Lane> Kernel for Store<'_, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let range = self.out.range();
        let (sums, second) = self.sums.split_at(self.sums.len() / self.then.rows());
        // Rows outside: a line of `out` is written once, and whole.
        for (i, r) in range.enumerate() {
            for (p, out) in self.out.row(r).chunks_mut(LANES).enumerate() {
                let at = p * self.padded + i;
                let sums = &sums[at].0[..out.len()];
                if matches!(self.then, Epilogue::None) {
                    narrow(v, sums, out);
                    continue;
                }
                let second = second.get(at).map_or(&[][..], |line| &line.0[..out.len()]);
                self.then.write(v, self.first + p * LANES, sums, second, out);
            }
        }
    }
}

/// Quantizes elements `256 * s..` of some rows; zeros for what `out` has beyond them.
struct Quantize<'a, X, T> {
    x: Rows<'a, X>,
    rows: Range<usize>,
    s: usize,
    format: BlockFormat,
    /// Whether sums, those of a format with minima, become two bf16.
    pairs: bool,
    out: &'a mut [T],
}

impl<X: Lane, T: Quantized> Kernel for Quantize<'_, X, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let (mut wide, mut acts) = (Aligned([0f32; SUPER]), Activations::zeroed());
        for i in 0..self.out.len() * T::ROWS {
            if T::ROWS == 1
                && let Some(next) = self.out.get_mut(i + 1)
            {
                prefetch_to_write(std::slice::from_mut(next)); // As all threads have read what was there.
            }
            let to = &mut self.out[i / T::ROWS];
            let Some(r) = self.rows.next() else {
                to.put(i % T::ROWS, &Activations::zeroed());
                continue;
            };
            // What comes lies a row apart, where no prefetcher looks for it.
            if let Some(next) = self.rows.clone().nth(1) {
                let ahead = &self.x.row(next)[self.s * SUPER..];
                prefetch_far(&ahead[..ahead.len().min(SUPER)]);
            }
            let row = &self.x.row(r)[self.s * SUPER..];
            widen(v, &row[..row.len().min(SUPER)], &mut wide.0);
            quantize(v, &mut wide.0, self.format, &mut acts);
            for sum in acts.sums.iter_mut().take(if self.pairs { 16 } else { 0 }) {
                // Up to 12 bits: the first eight, and the rest.
                let (whole, upper) = (f32::from_bits(*sum as u32), *sum as u32 & 0xffff_0000);
                *sum = (upper | (whole - f32::from_bits(upper)).to_bits() >> 16) as i32;
            }
            to.put(i % T::ROWS, &acts);
        }
    }
}

#[inline(always)]
fn quantize<V: Vector>(v: V, x: &mut [f32; SUPER], format: BlockFormat, out: &mut Activations) {
    // Four of either: a maximum and a fused step take four cycles each, and there are up to two in every one.
    let (mut most, mut zeros) = ([v.splat(0.0); 4], [v.splat(0.0); 4]);
    let mut i = 0;
    while i < SUPER {
        for j in 0..4 {
            let a = v.abs(v.load(&x[i + j * V::LANES..]));
            most[j] = v.max(a, most[j]);
            // 0, unless it is infinite or no number.
            zeros[j] = v.fma(a, v.splat(0.0), zeros[j]);
        }
        i += 4 * V::LANES;
    }
    // Of the elements `c`, `c + 16`, …
    let (mut lanes, mut maxima) = ([0f32; 64], [0f32; 16]);
    for (most, lanes) in most.into_iter().zip(lanes.chunks_exact_mut(V::LANES)) {
        v.store(most, lanes);
    }
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    for lanes in lanes.as_chunks::<16>().0 {
        maxima = std::array::from_fn(|i| larger(maxima[i], lanes[i]));
    }
    let mut most = halve(maxima, larger);
    let bound = LARGE / 16.0 * halve(maxima, |a, b| a + b);
    let zeros = v.add(v.add(zeros[0], zeros[1]), v.add(zeros[2], zeros[3]));
    let finite = v.bits(v.lt(zeros, v.splat(1.0))) == (1 << V::LANES) - 1;
    let mut taken = Taken::zeroed();
    if most > bound && finite {
        (taken, most) = take_out(v, x, bound, most);
    }
    let scale = most / 127.0;
    *out = Activations { scale, taken, ..Zeroable::zeroed() };
    if !finite {
        // All outputs of the row become NaN: 0 * NaN is.
        out.scale = f32::NAN;
    } else if scale > 0.0 {
        let codes: &mut [i8] = bytemuck::cast_slice_mut(&mut out.words);
        let bound = v.splat(127.0);
        // Sixteen lanes are those of AVX-512, whose products are fused; residuals of smaller scales would be subnormal.
        let by = Divisor::new(v, scale, V::LANES == 16 && scale > 1e-27);
        let mut sums = [0f32; 16];
        for (four, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate().take(SUPER / sub(format) / 4) {
            let mut parts = [v.splat(0.0); 4];
            for (j, part) in parts.iter_mut().enumerate() {
                let mut i = (4 * four + j) * sub(format);
                let end = i + sub(format);
                while i < end {
                    // A subnormal scale may be rounded down by as much as a third: hence the bounds.
                    let q = v.round(by.divide(v, v.load(&x[i..])));
                    let q = v.max(v.sub(v.splat(0.0), bound), v.min(bound, q));
                    v.store_i8(q, &mut codes[i..]);
                    // Exact: integers below 2^24, whatever the order.
                    *part = v.add(*part, q);
                    i += V::LANES;
                }
            }
            *sums = v.sums4(parts);
        }
        // Below 2^22: with 2^23 and half of it added the lower bits of an f32 are the integer. As a cast, which looks for
        // what does not fit, it took a fifth of the quantization.
        const LARGE: f32 = (3 << 22) as f32;
        let integer = |x: f32| (LARGE + x).to_bits() as i32 - LARGE.to_bits() as i32;
        let (centre, sums) = (centre(format), out.sums.iter_mut().zip(sums));
        if format.is_stepped() && format.has_min() {
            sums.for_each(|(out, sum)| *out = integer(sum) * ((1 << 16) - centre) + 0x8000);
        } else if format.has_min() {
            sums.for_each(|(out, sum)| *out = sum.to_bits() as i32);
        } else {
            sums.for_each(|(out, sum)| *out = integer(-(centre as f32) * sum));
        }
    }
}

/// Sixteen numbers made one: first those 8 apart, then 4, 2 and 1.
#[inline(always)]
fn halve(x: [f32; 16], of: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| of(x[i], x[i + 8]));
    let four: [f32; 4] = std::array::from_fn(|i| of(eight[i], eight[i + 4]));
    of(of(four[0], four[2]), of(four[1], four[3]))
}

/// Takes out the elements over `bound`, unless they are too many; and the largest of the others.
#[inline(always)]
fn take_out<V: Vector>(v: V, x: &mut [f32; SUPER], bound: f32, most: f32) -> (Taken, f32) {
    let (mut taken, mut rest) = (Taken::zeroed(), v.splat(0.0));
    for (i, x) in x.chunks_exact(V::LANES).enumerate() {
        let a = v.abs(v.load(x));
        let mut large = v.bits(v.lt(v.splat(bound), a));
        while large != 0 {
            let at = large.trailing_zeros() as usize;
            if taken.count as usize == TAKEN {
                return (Taken::zeroed(), most);
            }
            let to = taken.count as usize;
            (taken.places[to], taken.values[to]) = ((i * V::LANES + at) as u8, x[at]);
            taken.count += 1;
            large &= large - 1;
        }
        rest = v.max(rest, v.select(v.lt(v.splat(bound), a), v.splat(0.0), a));
    }
    for (at, _) in taken.iter() {
        x[at] = 0.0;
    }
    (taken, v.max_lane(rest))
}

/// Divides by one number, rounding as a division does. Of sixteen lanes that takes 16 cycles on a Xeon of model 207, and
/// as five products and fused steps 2.5.
#[derive(Clone, Copy)]
struct Divisor<V: Vector> {
    by: V::F,
    minus: V::F,
    /// `1 / by`, if quotients are made of it.
    over: Option<V::F>,
}

impl<V: Vector> Divisor<V> {
    #[inline(always)]
    fn new(v: V, by: f32, fused: bool) -> Self {
        Self { by: v.splat(by), minus: v.splat(-by), over: fused.then(|| v.splat(1.0 / by)) }
    }

    #[inline(always)]
    fn divide(self, v: V, x: V::F) -> V::F {
        let Some(over) = self.over else { return v.div(x, self.by) };
        // Within two units in the last place; then one; then, as `over` is rounded to nearest, the nearest number: Markstein's
        // theorem. Quotients of less than a half, whose residuals may be subnormal, are rounded to 0 anyway.
        let q = v.mul(x, over);
        let q = v.fma(v.fma(q, self.minus, x), over, q);
        v.fma(v.fma(q, self.minus, x), over, q)
    }
}

/// Dequantizes rows of blocks.
pub(crate) fn dequantize(
    cpu: &Cpu,
    op: &'static str,
    format: BlockFormat,
    data: &[u8],
    out: TensorMut<'_>,
) -> Result<()> {
    let row_bytes = format.row_bytes(op, out.shape()[1])?;
    with_float!(op, "out", out.dtype(), O => {
        for_parts(cpu, RowsMut::<O>::new(op, "out", out)?, |mut out| {
            for r in out.range() {
                cpu.run(Dequantize { format, row: &data[r * row_bytes..][..row_bytes], out: out.row(r) });
            }
        });
        Ok(())
    })
}

struct Dequantize<'a, O> {
    format: BlockFormat,
    row: &'a [u8],
    out: &'a mut [O],
}

impl<O: Lane> Kernel for Dequantize<'_, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { format, row, out } = self;
        let (mut block, mut values) = (BlockFields::ZERO, [0f32; SUPER]);
        for (bytes, out) in row.chunks_exact(format.bytes()).zip(out.chunks_exact_mut(format.elements())) {
            block.read(format, bytes);
            let (d, m) = (block.d.to_f32(), block.m.to_f32());
            let mut j = 0;
            while j * format.sub() < format.elements() {
                // The products are exact: 11 bits of `d`, and scale and code together 13.
                let d = d * f32::from(block.scales[j]);
                let sub = j * format.sub()..(j + 1) * format.sub();
                for (value, &code) in values[sub.clone()].iter_mut().zip(&block.codes[sub]) {
                    let x = d * format.level(code) as f32;
                    *value = match (format.has_min(), format.elements() == GROUP) {
                        (false, _) => x,
                        (true, true) => x + m,
                        (true, false) => x - m * f32::from(block.mins[j]),
                    };
                }
                j += 1;
            }
            narrow(v, &values[..out.len()], out);
        }
    }
}
