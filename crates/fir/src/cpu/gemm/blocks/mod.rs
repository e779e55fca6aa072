//! Products with weights in GGUF's block formats: repacked weights, quantized activations, integer dot products.
//!
//! | file | holds |
//! |---|---|
//! | `pack.rs` | the packed form: panels of 16 weight rows in the order the kernel reads |
//! | `kernel.rs` | the product of a panel and some rows |
//! | `tiles.rs` | the same for many rows, with AMX |
//!
//! The numbers are defined at [`block_gemm`](crate::gemm::block_gemm). Integer sums are exact and the f32 steps have one
//! order, so neither level, nor batch, nor threads change a bit.

mod kernel;
mod pack;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::cell::Cell;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
pub(crate) use pack::Packed;
use pack::{GROUP, LANES, SUPER};

use crate::cpu::exec::Cpu;
use crate::cpu::integers::PITCH;
use crate::cpu::level::Level;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, for_parts, narrow, widen, with_float};
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::{Error, Result};
use crate::tensor::{BlockFields, BlockFormat, Place, TensorMut, TensorRef};

const OP: &str = "block_gemm";
/// Rows that a panel's codes are unpacked anew for: below, unpacking is hidden by the reading of the weights.
const FEW: usize = 8;
/// Rows from which AMX is faster than vectors: it unpacks a panel into twice the bytes.
const TILED: usize = 65;
/// More rows than few are made up to a multiple of this: two tiles of AMX.
const MANY: usize = 32;
/// Rows per pass over all weights: a unit's sums stay in the second-level cache.
const PASS: usize = 512;
/// Panels per unit of work on many rows: activations, read anew for each unit, then take a quarter of the reads.
const PANELS: usize = 4;
/// The same with AMX: 512 rows' activations come from the last-level cache for every unit, and their sums, 512 KB, stay
/// in the second.
const TILE_PANELS: usize = 16;

thread_local! {
    /// Scratch, kept: new memory of this size would be mapped and cleared for every call.
    static ACTIVATIONS: Cell<Vec<Activations>> = const { Cell::new(Vec::new()) };
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Up to 256 elements of a row of `x`, quantized.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Activations {
    /// Four signed bytes each.
    words: [i32; SUPER / 4],
    /// Sums of the format's sub-blocks: the bits of f32 if it has minima; else i32, times minus the weights' offset. If
    /// tiles meet integer minima, two bf16 that add up to the sum, the larger one above: a row of a tile.
    sums: [i32; 16],
    scale: f32,
    unused: [u32; 15],
}

impl Activations {
    /// Sum of sub-block `j`, for a format with minima.
    #[inline(always)]
    fn sum(&self, j: usize) -> f32 {
        f32::from_bits(self.sums[j] as u32)
    }
}

const _: () = assert!(size_of::<Activations>() == 4 * PITCH);

pub(crate) fn gemm(cpu: &Cpu, x: TensorRef<'_>, w: &Packed, out: TensorMut<'_>) -> Result<()> {
    let m = x.shape()[0];
    if w.place() != Place::Host {
        return Err(Error::place(OP, "w", w.place(), Place::Host));
    }
    with_float!(OP, "x", x.dtype(), X => with_float!(OP, "out", out.dtype(), O => {
        let (x, out) = (Rows::<X>::new(OP, "x", x)?, RowsMut::<O>::new(OP, "out", out)?);
        // `split` gives nothing for an `out` without columns.
        for out in out.split(m.div_ceil(PASS)) {
            pass(cpu, x, w, out);
        }
        Ok(())
    }))
}

/// The product for the rows of `out`.
fn pass<X: Lane, O: Lane>(cpu: &Cpu, x: Rows<'_, X>, w: &Packed, out: RowsMut<'_, O>) {
    let (first, rows) = (out.range().start, out.range().len());
    let (padded, supers) = (kernel::padded(rows), w.k().div_ceil(SUPER));
    let mut acts = ACTIVATIONS.take();
    if acts.len() < padded * supers {
        acts.resize(padded * supers, Activations::zeroed());
    }
    let used = &mut acts[..padded * supers];
    let format = w.format();
    let pairs = kernel::is_tiled(cpu, padded) && format.has_min() && format.elements() > GROUP;
    let quantize = |(s, out)| cpu.run(Quantize { x, rows: first..first + rows, s, format, pairs, out });
    let parts = used.chunks_exact_mut(padded).enumerate();
    // A core quantizes 64k elements in some 10 µs.
    if rows * w.k() < 64 << 10 {
        parts.for_each(quantize);
    } else {
        cpu.pool().scatter(parts.collect(), quantize);
    }
    let used = &acts[..padded * supers];
    let panels = w.n().div_ceil(LANES);
    // Eight units per worker, so that a late one costs an eighth of its share.
    let each = match (rows, cpu.level()) {
        (..=FEW, _) => panels.div_ceil(8 * cpu.workers()),
        (TILED.., Level::Amx) => panels.div_ceil(2 * cpu.workers()).min(TILE_PANELS),
        _ => PANELS,
    };
    let units = out.split_columns(each * LANES).into_iter().enumerate();
    let work = |(unit, out): (usize, RowsMut<'_, O>)| product(cpu, used, w, unit * each, out);
    if rows.saturating_mul(w.n()).saturating_mul(w.k()) < 256 << 10 {
        units.for_each(work);
    } else {
        cpu.pool().scatter(units.collect(), work);
    }
    ACTIVATIONS.set(acts);
}

/// The columns of `out`, which begin with panel `first`.
fn product<O: Lane>(cpu: &Cpu, acts: &[Activations], w: &Packed, first: usize, out: RowsMut<'_, O>) {
    let (padded, panels) = (kernel::padded(out.range().len()), out.row_len().div_ceil(LANES));
    let mut sums = SUMS.take();
    sums.clear();
    sums.resize(panels * padded * LANES, 0.0);
    kernel::run(cpu, acts, w, first, padded, &mut sums);
    cpu.run(Store { sums: &sums, out });
    SUMS.set(sums);
}

/// Writes `[panels, padded rows, 16]` sums as rows.
struct Store<'a, O> {
    sums: &'a [f32],
    out: RowsMut<'a, O>,
}

impl<O: Lane> Kernel for Store<'_, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let (range, padded) = (self.out.range(), kernel::padded(self.out.range().len()));
        // Rows outside: a line of `out` is written once, and whole.
        for (i, r) in range.enumerate() {
            for (p, out) in self.out.row(r).chunks_mut(LANES).enumerate() {
                narrow(v, &self.sums[(p * padded + i) * LANES..][..out.len()], out);
            }
        }
    }
}

/// Quantizes elements `256 * s..` of some rows; zeros for what `out` has beyond them.
struct Quantize<'a, X> {
    x: Rows<'a, X>,
    rows: Range<usize>,
    s: usize,
    format: BlockFormat,
    /// Whether sums become two bf16.
    pairs: bool,
    out: &'a mut [Activations],
}

impl<X: Lane> Kernel for Quantize<'_, X> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let mut wide = [0f32; SUPER];
        let (out, rest) = self.out.split_at_mut(self.rows.len());
        rest.fill(Activations::zeroed());
        for (r, out) in self.rows.zip(out) {
            let row = &self.x.row(r)[self.s * SUPER..];
            widen(v, &row[..row.len().min(SUPER)], &mut wide);
            quantize(v, &wide, self.format, self.pairs, out);
        }
    }
}

#[inline(always)]
fn quantize<V: Vector>(v: V, x: &[f32; SUPER], format: BlockFormat, pairs: bool, out: &mut Activations) {
    let (mut most, mut finite, infinity) = (v.splat(0.0), true, v.splat(f32::INFINITY));
    let mut i = 0;
    while i < SUPER {
        let a = v.abs(v.load(&x[i..]));
        finite &= v.bits(v.lt(a, infinity)) == (1 << V::LANES) - 1;
        most = v.max(a, most);
        i += V::LANES;
    }
    let scale = v.max_lane(most) / 127.0;
    *out = Activations { scale, ..Zeroable::zeroed() };
    if !finite {
        // All outputs of the row become NaN: 0 * NaN is.
        out.scale = f32::NAN;
    } else if scale > 0.0 {
        let codes: &mut [i8] = bytemuck::cast_slice_mut(&mut out.words);
        let (by, bound) = (v.splat(scale), v.splat(127.0));
        let mut sums = [0f32; 16];
        let mut i = 0;
        while i < SUPER {
            let mut q = [by; 4];
            for q in &mut q {
                // A subnormal scale may be rounded down by as much as a third: hence the bounds.
                let x = v.round(v.div(v.load(&x[i..]), by));
                *q = v.max(v.sub(v.splat(0.0), bound), v.min(bound, x));
                v.store_i8(*q, &mut codes[i..]);
                i += V::LANES;
            }
            // Exact: integers below 2^24, whatever the order.
            for (j, sum) in v.sums4(q).into_iter().enumerate() {
                sums[(i - (4 - j) * V::LANES) / format.sub()] += sum;
            }
        }
        for (out, sum) in out.sums.iter_mut().zip(sums) {
            *out = if pairs {
                // Up to 12 bits: the first eight, and the rest.
                let upper = sum.to_bits() & 0xffff_0000;
                (upper | (sum - f32::from_bits(upper)).to_bits() >> 16) as i32
            } else if format.has_min() {
                sum.to_bits() as i32
            } else {
                -format.offset() * sum as i32
            };
        }
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
