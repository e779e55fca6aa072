//! Numbers in fewer bits: a block's largest magnitude is found, then its elements are scaled and rounded, out of the
//! first-level cache. Where a block spans rows, a first pass over all of them finds the magnitudes.

use std::marker::PhantomData;

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{Rows, parts_for, with_float};
use super::vector::{Kernel, Lane, Vector};
use crate::error::{Error, Result};
use crate::tensor::{Block, Bool, DType, E2m1x2, E4m3, E8m0, Element, Float, TensorMut, TensorRef};

/// The least scale, that of a block of zeros: its inverse is finite.
const LEAST: f32 = f32::MIN_POSITIVE;

/// The largest finite number of an fp8 type.
#[inline(always)]
fn largest_of<O: Lane>() -> f32 {
    O::from_f32(f32::MAX).to_f32()
}

/// The scale that makes `largest` the format's largest number.
#[inline(always)]
fn scale_of(largest: f32, of_format: f32) -> f32 {
    (largest.min(f32::MAX) / of_format).max(LEAST)
}

/// Runs `$body` with `$t` standing for e4m3 or e5m2.
macro_rules! with_fp8 {
    ($op:expr, $arg:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            crate::tensor::DType::E4M3 => {
                type $t = crate::tensor::E4m3;
                $body
            }
            crate::tensor::DType::E5M2 => {
                type $t = crate::tensor::E5m2;
                $body
            }
            other => {
                Err(crate::error::Error::DType { op: $op, arg: $arg, got: other.name(), want: "e4m3 or e5m2".into() })
            }
        }
    };
}
pub(crate) use with_fp8;

pub(crate) fn fp8(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    block: Block,
    mut out: TensorMut<'_>,
    mut scales: TensorMut<'_>,
) -> Result<()> {
    if out.layout().is_empty() {
        let mut scales = RowsMut::<f32>::new(op, "scales", scales)?;
        let rows = if scales.row_len() == 0 { 0..0 } else { scales.range() };
        rows.for_each(|r| scales.row(r).fill(LEAST));
        return Ok(());
    }
    if block.rows > 1 && x.shape().len() == 3 {
        // Blocks do not span entries of the batch.
        for b in 0..x.shape()[0] {
            let (out, scales) = (out.reborrow().select(0, b)?, scales.reborrow().select(0, b)?);
            fp8(cpu, op, x.select(0, b)?, block, out, scales)?;
        }
        return Ok(());
    }
    with_float!(op, "x", x.dtype(), T => with_fp8!(op, "out", out.dtype(), O => {
        if block.rows == 1 {
            let parts = parts_for(cpu, x.layout().len());
            let x = Rows::<T>::new(op, "x", x)?;
            let out = RowsMut::<O>::new(op, "out", out)?.split(parts);
            let scales = RowsMut::<f32>::new(op, "scales", scales)?.split(parts);
            let parts = out.into_iter().zip(scales).collect();
            cpu.pool().scatter(parts, |(out, scales)| cpu.run(Quantize { x, columns: block.columns, out, scales }));
        } else {
            block_scales::<T>(cpu, op, x, block, largest_of::<O>(), scales.reborrow())?;
            apply::<T, O, true>(cpu, op, x, scales.as_ref(), block, out)?;
        }
        Ok(())
    }))
}

/// Scales of blocks that span rows.
fn block_scales<T: Lane>(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    block: Block,
    of_format: f32,
    scales: TensorMut<'_>,
) -> Result<()> {
    let mut scales = RowsMut::<f32>::new(op, "scales", scales)?;
    let (rows, width, elements) = (Rows::<T>::new(op, "x", x)?, scales.row_len(), x.layout().len());
    let mut largest = vec![0f32; rows.len() * width];
    let parts = RowsMut::from_slice(&mut largest, width).split(parts_for(cpu, elements));
    cpu.pool().scatter(parts, |out| cpu.run(Largest { x: rows, columns: block.columns, out }));
    let each = block.rows.min(rows.len());
    for (r, rows) in largest.chunks(each * width).enumerate() {
        let out = scales.row(r);
        out.fill(0.0);
        for row in rows.chunks_exact(width) {
            out.iter_mut().zip(row).for_each(|(out, &x)| *out = out.max(x));
        }
        out.iter_mut().for_each(|out| *out = scale_of(*out, of_format));
    }
    Ok(())
}

pub(crate) fn fp8_with_scales(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    block: Block,
    out: TensorMut<'_>,
) -> Result<()> {
    with_float!(op, "x", x.dtype(), T => with_fp8!(op, "out", out.dtype(), O => {
        each_matrix::<T, O, true>(cpu, op, x, scales, block, out)
    }))
}

pub(crate) fn dequantize_fp8(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    block: Block,
    out: TensorMut<'_>,
) -> Result<()> {
    with_fp8!(op, "x", x.dtype(), X => with_float!(op, "out", out.dtype(), O => {
        each_matrix::<X, O, false>(cpu, op, x, scales, block, out)
    }))
}

/// [`apply`], matrix by matrix where blocks span rows of a batch.
fn each_matrix<X: Lane, O: Lane, const INVERT: bool>(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    block: Block,
    mut out: TensorMut<'_>,
) -> Result<()> {
    if out.layout().is_empty() {
        return Ok(());
    }
    if block.rows > 1 && x.shape().len() == 3 {
        for b in 0..x.shape()[0] {
            let out = out.reborrow().select(0, b)?;
            apply::<X, O, INVERT>(cpu, op, x.select(0, b)?, scales.select(0, b)?, block, out)?;
        }
        return Ok(());
    }
    apply::<X, O, INVERT>(cpu, op, x, scales, block, out)
}

/// `out = x * scale`, or `x * (1 / scale)` if `INVERT`, by blocks.
fn apply<X: Lane, O: Lane, const INVERT: bool>(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    block: Block,
    out: TensorMut<'_>,
) -> Result<()> {
    let parts = parts_for(cpu, x.layout().len());
    let (x, scales) = (Rows::<X>::new(op, "x", x)?, Rows::<f32>::new(op, "scales", scales)?);
    let parts = RowsMut::<O>::new(op, "out", out)?.split(parts);
    cpu.pool().scatter(parts, |out| cpu.run(Apply::<X, O, INVERT> { x, scales, block, out }));
    Ok(())
}

/// Rows in blocks of `columns`, each with a scale of its own.
struct Quantize<'a, T, O> {
    x: Rows<'a, T>,
    columns: usize,
    out: RowsMut<'a, O>,
    scales: RowsMut<'a, f32>,
}

impl<T: Lane, O: Lane> Kernel for Quantize<'_, T, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let of_format = largest_of::<O>();
        for r in self.out.range() {
            let (x, out) = (self.x.row(r), self.out.row(r));
            let mut from = 0usize;
            for scale in self.scales.row(r) {
                let to = x.len().min(from.saturating_add(self.columns));
                *scale = scale_of(largest(v, &x[from..to]), of_format);
                scaled(v, &x[from..to], 1.0 / *scale, &mut out[from..to]);
                from = to;
            }
        }
    }
}

/// The largest magnitude of every block of `columns` of a row; NaN does not count.
struct Largest<'a, T> {
    x: Rows<'a, T>,
    columns: usize,
    out: RowsMut<'a, f32>,
}

impl<T: Lane> Kernel for Largest<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let x = self.x.row(r);
            let mut from = 0usize;
            for out in self.out.row(r) {
                let to = x.len().min(from.saturating_add(self.columns));
                *out = largest(v, &x[from..to]);
                from = to;
            }
        }
    }
}

struct Apply<'a, X, O, const INVERT: bool> {
    x: Rows<'a, X>,
    scales: Rows<'a, f32>,
    block: Block,
    out: RowsMut<'a, O>,
}

impl<X: Lane, O: Lane, const INVERT: bool> Kernel for Apply<'_, X, O, INVERT> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let (x, out) = (self.x.row(r), self.out.row(r));
            let mut from = 0usize;
            for &scale in self.scales.row(r / self.block.rows) {
                let to = x.len().min(from.saturating_add(self.block.columns));
                scaled(v, &x[from..to], if INVERT { 1.0 / scale } else { scale }, &mut out[from..to]);
                from = to;
            }
        }
    }
}

/// The largest magnitude; NaN does not count. In four chains, so that the latency of the maximum hides.
#[inline(always)]
fn largest<V: Vector, T: Lane>(v: V, x: &[T]) -> f32 {
    let mut acc = [v.splat(0.0); 4];
    let mut i = 0;
    while i + 4 * V::LANES <= x.len() {
        for (c, acc) in acc.iter_mut().enumerate() {
            *acc = v.max(v.abs(T::load(v, &x[i + c * V::LANES..])), *acc);
        }
        i += 4 * V::LANES;
    }
    while i < x.len() {
        let n = V::LANES.min(x.len() - i);
        acc[0] = v.max(v.abs(T::load_tail(v, &x[i..i + n])), acc[0]);
        i += n;
    }
    v.max_lane(v.max(v.max(acc[0], acc[1]), v.max(acc[2], acc[3])))
}

/// `out = x * factor`, rounded to the type of `out`; fp8 saturates.
#[inline(always)]
fn scaled<V: Vector, X: Lane, O: Lane>(v: V, x: &[X], factor: f32, out: &mut [O]) {
    let factor = v.splat(factor);
    let mut i = 0;
    while i + V::LANES <= x.len() {
        O::store(v, saturate::<V, O>(v, v.mul(X::load(v, &x[i..]), factor)), &mut out[i..]);
        i += V::LANES;
    }
    if i < x.len() {
        O::store_tail(v, saturate::<V, O>(v, v.mul(X::load_tail(v, &x[i..]), factor)), &mut out[i..]);
    }
}

/// Infinities become the largest number of e5m2, which could hold them; e4m3 has none.
#[inline(always)]
fn saturate<V: Vector, O: Lane>(v: V, x: V::F) -> V::F {
    if O::DTYPE != DType::E5M2 {
        return x;
    }
    let most = largest_of::<O>();
    v.max(v.splat(-most), v.min(v.splat(most), x))
}

/// Blocks whose scales are found together: as many as the widest vector has lanes.
const BLOCKS: usize = 16;

/// A format of codes with a scale per block of a row.
pub(crate) trait Format: Copy + Send + Sync {
    /// What is stored, [`Self::PACK`] elements in each.
    type Code: Element;
    /// A block's scale.
    type Scale: Element;
    /// Elements of a block.
    const BLOCK: usize;
    const PACK: usize;
    /// Whether a code can be NaN; else the scale is, for a block with one.
    const NAN: bool;

    /// The scales for the blocks' largest magnitudes, in place of which it leaves what to give [`Self::store`]. The first
    /// `scales.len()` count, of [`BLOCKS`].
    fn scales<V: Vector>(self, v: V, largest: &mut [f32; BLOCKS], scales: &mut [Self::Scale]);
    /// What a code of 1 stands for.
    fn unit(self, scale: Self::Scale) -> f32;
    fn store<V: Vector>(v: V, x: V::F, divisor: V::F, out: &mut [Self::Code]);
    fn load<V: Vector>(v: V, codes: &[Self::Code]) -> V::F;
}

/// Powers of two for blocks whose largest code is `of_format`, and their inverses, which are exact.
#[inline(always)]
fn powers(of_format: f32, largest: &mut [f32; BLOCKS], scales: &mut [E8m0]) {
    for (largest, scale) in largest.iter_mut().zip(scales) {
        *scale = E8m0::at_least(*largest / of_format);
        *largest = if scale.0 == 0xff { f32::NAN } else { E8m0(254 - scale.0).to_f32() };
    }
}

/// fp8 with an e8m0 scale per 32.
#[derive(Clone, Copy)]
pub(crate) struct Mxfp8<O>(PhantomData<O>);

impl<O> Mxfp8<O> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<O: Lane> Format for Mxfp8<O> {
    type Code = O;
    type Scale = E8m0;
    const BLOCK: usize = 32;
    const PACK: usize = 1;
    const NAN: bool = true;

    #[inline(always)]
    fn scales<V: Vector>(self, _: V, largest: &mut [f32; BLOCKS], scales: &mut [E8m0]) {
        powers(largest_of::<O>(), largest, scales);
    }
    #[inline(always)]
    fn unit(self, scale: E8m0) -> f32 {
        scale.to_f32()
    }
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F, inverse: V::F, out: &mut [O]) {
        O::store(v, saturate::<V, O>(v, v.mul(x, inverse)), out);
    }
    #[inline(always)]
    fn load<V: Vector>(v: V, codes: &[O]) -> V::F {
        O::load(v, codes)
    }
}

/// e2m1 with an e8m0 scale per 32.
#[derive(Clone, Copy)]
pub(crate) struct Mxfp4;

impl Format for Mxfp4 {
    type Code = E2m1x2;
    type Scale = E8m0;
    const BLOCK: usize = 32;
    const PACK: usize = 2;
    const NAN: bool = false;

    #[inline(always)]
    fn scales<V: Vector>(self, _: V, largest: &mut [f32; BLOCKS], scales: &mut [E8m0]) {
        powers(6.0, largest, scales);
    }
    #[inline(always)]
    fn unit(self, scale: E8m0) -> f32 {
        scale.to_f32()
    }
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F, inverse: V::F, out: &mut [E2m1x2]) {
        v.store_e2m1(v.mul(x, inverse), out);
    }
    #[inline(always)]
    fn load<V: Vector>(v: V, codes: &[E2m1x2]) -> V::F {
        v.load_e2m1(codes)
    }
}

/// e2m1 with an e4m3 scale per 16, and `scale` for all: bit for bit what an NVFP4 cache is filled with.
#[derive(Clone, Copy)]
pub(crate) struct Nvfp4 {
    pub(crate) scale: f32,
}

impl Format for Nvfp4 {
    type Code = E2m1x2;
    type Scale = E4m3;
    const BLOCK: usize = 16;
    const PACK: usize = 2;
    const NAN: bool = false;

    #[inline(always)]
    fn scales<V: Vector>(self, v: V, largest: &mut [f32; BLOCKS], scales: &mut [E4m3]) {
        let (most, scale) = (v.splat(6.0 * self.scale), v.splat(self.scale));
        let mut rounded = [E4m3(0); BLOCKS];
        let mut i = 0;
        while i < BLOCKS {
            v.store_e4m3(v.div(v.load(&largest[i..]), most), &mut rounded[i..]);
            let unit = v.mul(v.load_e4m3(&rounded[i..]), scale);
            // A block too small for any scale is zero. Units are positive, or NaN, which is no less.
            let divisor = v.select(v.lt(unit, v.splat(f32::from_bits(1))), v.splat(f32::INFINITY), unit);
            v.store(divisor, &mut largest[i..]);
            i += V::LANES;
        }
        scales.copy_from_slice(&rounded[..scales.len()]);
    }
    #[inline(always)]
    fn unit(self, scale: E4m3) -> f32 {
        scale.to_f32() * self.scale
    }
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F, divisor: V::F, out: &mut [E2m1x2]) {
        v.store_e2m1(v.div(x, divisor), out);
    }
    #[inline(always)]
    fn load<V: Vector>(v: V, codes: &[E2m1x2]) -> V::F {
        v.load_e2m1(codes)
    }
}

/// Rounds `x` to a format of blocks.
pub(crate) fn blocks<F: Format>(
    cpu: &Cpu,
    op: &'static str,
    format: F,
    x: TensorRef<'_>,
    out: TensorMut<'_>,
    scales: TensorMut<'_>,
) -> Result<()> {
    with_float!(op, "x", x.dtype(), T => {
        let parts = parts_for(cpu, x.layout().len());
        let x = Rows::<T>::new(op, "x", x)?;
        let out = RowsMut::<F::Code>::new(op, "out", out)?.split(parts);
        let scales = RowsMut::<F::Scale>::new(op, "scales", scales)?.split(parts);
        let parts = out.into_iter().zip(scales).collect();
        cpu.pool().scatter(parts, |(out, scales)| cpu.run(Blocks { format, x, out, scales }));
        Ok(())
    })
}

struct Blocks<'a, F: Format, T> {
    format: F,
    x: Rows<'a, T>,
    out: RowsMut<'a, F::Code>,
    scales: RowsMut<'a, F::Scale>,
}

impl<F: Format, T: Lane> Kernel for Blocks<'_, F, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let (x, out) = (self.x.row(r), self.out.row(r));
            let scales = self.scales.row(r).chunks_mut(BLOCKS);
            let chunks = x.chunks(F::BLOCK * BLOCKS).zip(out.chunks_mut(F::BLOCK * BLOCKS / F::PACK));
            for ((x, out), scales) in chunks.zip(scales) {
                let mut largest = [0f32; BLOCKS];
                for (largest, x) in largest.iter_mut().zip(x.chunks_exact(F::BLOCK)) {
                    *largest = block_largest::<V, F, T>(v, x);
                }
                self.format.scales(v, &mut largest, scales);
                let blocks = x.chunks_exact(F::BLOCK).zip(out.chunks_exact_mut(F::BLOCK / F::PACK));
                for ((x, out), &divisor) in blocks.zip(&largest) {
                    let divisor = v.splat(divisor);
                    let mut i = 0;
                    while i < F::BLOCK {
                        F::store(v, T::load(v, &x[i..]), divisor, &mut out[i / F::PACK..]);
                        i += V::LANES;
                    }
                }
            }
        }
    }
}

/// The largest magnitude of a block; NaN for one with a NaN, unless codes can be NaN.
#[inline(always)]
fn block_largest<V: Vector, F: Format, T: Lane>(v: V, x: &[T]) -> f32 {
    let (mut most, mut numbers) = (v.splat(0.0), (1u32 << V::LANES) - 1);
    let mut i = 0;
    while i < F::BLOCK {
        let magnitude = v.abs(T::load(v, &x[i..]));
        most = v.max(magnitude, most);
        numbers &= v.bits(v.lt(v.splat(-1.0), magnitude));
        i += V::LANES;
    }
    if !F::NAN && numbers != (1u32 << V::LANES) - 1 { f32::NAN } else { v.max_lane(most) }
}

/// The numbers of a format of blocks.
pub(crate) fn expand<F: Format>(
    cpu: &Cpu,
    op: &'static str,
    format: F,
    x: TensorRef<'_>,
    scales: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    with_float!(op, "out", out.dtype(), O => {
        let parts = parts_for(cpu, out.layout().len());
        let (x, scales) = (Rows::<F::Code>::new(op, "x", x)?, Rows::<F::Scale>::new(op, "scales", scales)?);
        let parts = RowsMut::<O>::new(op, "out", out)?.split(parts);
        cpu.pool().scatter(parts, |out| cpu.run(Expand { format, x, scales, out }));
        Ok(())
    })
}

struct Expand<'a, F: Format, O> {
    format: F,
    x: Rows<'a, F::Code>,
    scales: Rows<'a, F::Scale>,
    out: RowsMut<'a, O>,
}

impl<F: Format, O: Lane> Kernel for Expand<'_, F, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let (x, out) = (self.x.row(r), self.out.row(r));
            let blocks = x.chunks_exact(F::BLOCK / F::PACK).zip(out.chunks_exact_mut(F::BLOCK));
            for ((x, out), &scale) in blocks.zip(self.scales.row(r)) {
                let unit = v.splat(self.format.unit(scale));
                let mut i = 0;
                while i < F::BLOCK {
                    O::store(v, v.mul(F::load(v, &x[i / F::PACK..]), unit), &mut out[i..]);
                    i += V::LANES;
                }
            }
        }
    }
}

pub(crate) fn nvfp4_scale(cpu: &Cpu, op: &'static str, x: TensorRef<'_>) -> Result<f32> {
    if x.layout().is_empty() {
        return Ok(LEAST);
    }
    with_float!(op, "x", x.dtype(), T => {
        let (rows, elements) = (Rows::<T>::new(op, "x", x)?, x.layout().len());
        let mut largest = vec![0f32; rows.len()];
        let parts = RowsMut::from_slice(&mut largest, 1).split(parts_for(cpu, elements));
        cpu.pool().scatter(parts, |out| cpu.run(Largest { x: rows, columns: Block::ALL, out }));
        Ok(scale_of(largest.into_iter().fold(0.0, f32::max), 6.0 * 448.0))
    })
}

/// Which bit of a byte is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum BitOrder {
    /// The highest.
    #[default]
    Big,
    /// The lowest, as masks of attention have it.
    Little,
}

/// Packs `segments` (first and past the last element of `x`), one after another; each begins with a new byte.
pub(crate) fn packbits(
    cpu: &Cpu,
    op: &'static str,
    x: TensorRef<'_>,
    segments: &[(usize, usize)],
    order: BitOrder,
    out: TensorMut<'_>,
) -> Result<()> {
    /// Bytes per part: 256 KB of truth values, tens of microseconds.
    const PART: usize = 32 << 10;
    let contiguous = |arg, ok: bool, stride: usize| {
        if ok { Ok(()) } else { Err(Error::layout(op, arg, format!("stride {stride}"), "1")) }
    };
    contiguous("x", x.layout().is_contiguous(), x.strides()[0])?;
    contiguous("out", out.layout().is_contiguous(), out.strides()[0])?;
    let (x, (mut rest, _)) = (x.typed::<Bool>(op, "x")?.data(), out.typed::<u8>(op, "out")?.into_parts());
    let mut parts = Vec::new();
    for &(from, to) in segments {
        for x in x[from..to].chunks(8 * PART) {
            let (out, after) = rest.split_at_mut(x.len().div_ceil(8));
            rest = after;
            parts.push((x, out));
        }
    }
    if x.len() <= 8 * PART {
        parts.into_iter().for_each(|(x, out)| pack(x, order, out));
    } else {
        cpu.pool().scatter(parts, |(x, out)| pack(x, order, out));
    }
    Ok(())
}

/// Eight truth values at a time, as the bytes of a word: plain integers, which the compiler turns into vectors.
fn pack(x: &[Bool], order: BitOrder, out: &mut [u8]) {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // The product moves bit 0 of byte i to bit 56 + i, or to bit 63 - i, and no two bits to one place.
    let gather: u64 = match order {
        BitOrder::Little => 0x0102_0408_1020_4080,
        BitOrder::Big => 0x8040_2010_0804_0201,
    };
    let byte = |bytes: [u8; 8]| {
        let x = u64::from_le_bytes(bytes);
        // The highest bit of every byte that is not 0, then moved to its lowest.
        let ones = ((x | ((x & LOW) + LOW)) & !LOW) >> 7;
        (ones.wrapping_mul(gather) >> 56) as u8
    };
    let (words, rest) = x.as_chunks::<8>();
    for (out, word) in out.iter_mut().zip(words) {
        *out = byte(word.map(|x| x.0));
    }
    if let (Some(out), false) = (out.get_mut(words.len()), rest.is_empty()) {
        let mut word = [0; 8];
        word.iter_mut().zip(rest).for_each(|(w, x)| *w = x.0);
        *out = byte(word);
    }
}
