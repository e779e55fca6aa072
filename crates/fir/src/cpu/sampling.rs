//! Sampling from rows of logits or probabilities: a cutoff for the filters, then one draw from what passes.
//!
//! A row takes a pass for its mass, one or two for each filter's cutoff (see [`super::select`]), and one for the mass
//! that passes; logits take one more, to become weights. One thread does a row, so that its sums have one order.

use std::cell::RefCell;

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{Rows, for_parts, parts_for, with_float};
use super::select::{
    FloatRows, Mass, POSITIVE, Scratch, block_sums, first_of, has_nan, kth_largest, mass_cutoff, pick, row_max, weigh,
};
use super::vector::{Kernel, Lane, Vector};
use crate::error::{Error, Result};
use crate::filters::{FilterOrder, Filters, PerRow};
use crate::philox::RngState;
use crate::tensor::{Bool, DType, TensorMut, TensorRef};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Lends this thread's scratch; a fresh one to a call inside a call.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with(|s| match s.try_borrow_mut() {
        Ok(mut s) => work(&mut s),
        Err(_) => work(&mut Scratch::default()),
    })
}

/// Cuts `out`, one entry per row of `row` elements, over the workers; calls `work` with the first row's number.
pub(super) fn scatter_rows<T: Send>(cpu: &Cpu, row: usize, out: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) {
    let each = out.len().div_ceil(parts_for(cpu, out.len().saturating_mul(row))).max(1);
    let parts = out.chunks_mut(each).enumerate().map(|(i, part)| (i * each, part)).collect();
    cpu.pool().scatter(parts, |(first, part)| work(first, part));
}

/// What a row's numbers are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Probs,
    Logits,
}

/// A draw for every row of the output.
pub(crate) struct Sample<'a> {
    pub(crate) op: &'static str,
    pub(crate) kind: Kind,
    /// `[rows, vocab]`
    pub(crate) x: TensorRef<'a>,
    /// Row of `x` for each row of the output.
    pub(crate) indices: Option<Vec<usize>>,
    pub(crate) filters: Filters<'a>,
    pub(crate) rng: PerRow<'a, RngState>,
    pub(crate) out: TensorMut<'a>,
    pub(crate) valid: Option<TensorMut<'a>>,
}

pub(crate) fn sample(cpu: &Cpu, args: Sample<'_>) -> Result<()> {
    let Sample { op, kind, x, indices, filters, rng, out, valid } = args;
    let rows = FloatRows::new(op, if kind == Kind::Logits { "logits" } else { "probs" }, x)?;
    let mut tokens = vec![None; out.shape()[0]];
    scatter_rows(cpu, x.shape()[1], &mut tokens, |first, out| {
        with_scratch(|scratch| {
            cpu.run(SampleRows { rows, kind, indices: indices.as_deref(), filters, rng, first, out, scratch });
        });
    });
    if let Some(valid) = valid {
        write_valid(op, valid, tokens.iter().map(Option::is_some))?;
    }
    write_ids(op, "out", out, tokens.iter().map(|t| i64::from(t.unwrap_or(0))))
}

/// Stores ids, given in row-major order, as i32 or i64.
pub(super) fn write_ids(
    op: &'static str,
    arg: &'static str,
    out: TensorMut<'_>,
    ids: impl Iterator<Item = i64>,
) -> Result<()> {
    let offsets = out.layout().offsets();
    if out.dtype() == DType::I64 {
        let mut out = out.typed::<i64>(op, arg)?;
        offsets.zip(ids).for_each(|(at, id)| out.data()[at] = id);
    } else {
        let mut out = out.typed::<i32>(op, arg)?;
        offsets.zip(ids).for_each(|(at, id)| out.data()[at] = id as i32);
    }
    Ok(())
}

/// Stores truth values.
pub(super) fn write_valid(op: &'static str, out: TensorMut<'_>, valid: impl Iterator<Item = bool>) -> Result<()> {
    let offsets = out.layout().offsets();
    let mut out = out.typed::<Bool>(op, "valid")?;
    offsets.zip(valid).for_each(|(at, valid)| out.data()[at] = Bool(u8::from(valid)));
    Ok(())
}

struct SampleRows<'a> {
    rows: FloatRows<'a>,
    kind: Kind,
    indices: Option<&'a [usize]>,
    filters: Filters<'a>,
    rng: PerRow<'a, RngState>,
    first: usize,
    out: &'a mut [Option<u32>],
    scratch: &'a mut Scratch,
}

impl Kernel for SampleRows<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { rows, kind, indices, filters, rng, first, out, scratch: s } = self;
        let (mut wide, mut weights) = (std::mem::take(&mut s.wide), std::mem::take(&mut s.weights));
        for (i, out) in out.iter_mut().enumerate() {
            let r = first + i;
            let source = match indices {
                Some(indices) => indices[r],
                None => r,
            };
            let x = rows.row(v, source, &mut wide);
            let row = Row {
                k: filters.top_k.get(r) as usize,
                p: filters.top_p.get(r),
                min_p: filters.min_p.get(r),
                order: filters.order,
                u: rng.uniform(r, 0),
            };
            *out = match kind {
                Kind::Probs => row.token_of_probs(v, x, s),
                Kind::Logits => row.token_of_logits(v, x, filters.temperature.get(r), &mut weights, s),
            };
        }
        (s.wide, s.weights) = (wide, weights);
    }
}

/// One row's parameters.
struct Row {
    k: usize,
    p: f32,
    min_p: f32,
    order: FilterOrder,
    u: f32,
}

impl Row {
    #[inline(always)]
    fn token_of_probs<V: Vector>(&self, v: V, x: &[f32], s: &mut Scratch) -> Option<u32> {
        let mass = block_sums(v, x, POSITIVE, &mut s.sums);
        if !mass.is_valid() {
            return None;
        }
        if self.k >= x.len() {
            return Some(self.draw(v, x, mass, mass.total, s));
        }
        let kept = self.keep_top_k(v, x, s);
        let passed = block_sums(v, &kept, POSITIVE, &mut s.sums);
        let whole = if self.order == FilterOrder::TopKFirst { passed.total } else { mass.total };
        let drawn = self.draw(v, &kept, passed, whole, s);
        s.kept = kept;
        Some(s.ids[drawn as usize])
    }

    #[inline(always)]
    fn token_of_logits<V: Vector>(
        &self,
        v: V,
        x: &[f32],
        temperature: f32,
        weights: &mut Vec<f32>,
        s: &mut Scratch,
    ) -> Option<u32> {
        let (max, scale) = (row_max(v, x), log2_scale(temperature));
        if max == f32::NEG_INFINITY {
            return None;
        }
        if temperature == 0.0 {
            return if has_nan(x) { None } else { Some(first_of(v, x, max) as u32) };
        }
        weights.resize(x.len(), 0.0);
        if self.k >= x.len() {
            weigh(v, x, max, scale, weights);
            let mass = block_sums(v, weights, POSITIVE, &mut s.sums);
            return if mass.is_valid() { Some(self.draw(v, weights, mass, mass.total, s)) } else { None };
        }
        // Only what passes is weighed, but for the whole mass where that is asked for.
        let all = if self.order == FilterOrder::Joint { Some(weigh(v, x, max, scale, weights)) } else { None };
        if has_nan(x) {
            return None;
        }
        let kept = self.keep_top_k(v, x, s);
        weights.truncate(kept.len());
        weigh(v, &kept, max, scale, weights);
        s.kept = kept;
        let mass = block_sums(v, weights, POSITIVE, &mut s.sums);
        let drawn = self.draw(v, weights, mass, all.unwrap_or(mass.total), s);
        Some(s.ids[drawn as usize])
    }

    /// The elements that pass `k`, in order, with their places in `s.ids`. To be put back into `s.kept`.
    #[inline(always)]
    fn keep_top_k<V: Vector>(&self, v: V, x: &[f32], s: &mut Scratch) -> Vec<f32> {
        let cutoff = kth_largest(v, x, self.k, s);
        let mut kept = std::mem::take(&mut s.kept);
        kept.clear();
        s.ids.retain(|&i| x[i as usize] >= cutoff);
        kept.extend(s.ids.iter().map(|&i| x[i as usize]));
        kept
    }

    /// Draws from the elements of `x` that pass the filters by mass. `mass`, a valid one, is that of all positive
    /// elements, which `s.sums` was filled for last, and `whole` is what `p` is a share of.
    #[inline(always)]
    fn draw<V: Vector>(&self, v: V, x: &[f32], mass: Mass, whole: f64, s: &mut Scratch) -> u32 {
        let mut cutoff = POSITIVE;
        if self.p < 1.0 {
            cutoff = mass_cutoff(v, x, mass, f64::from(self.p) * whole, s);
        }
        cutoff = cutoff.max(fraction(mass.max, self.min_p));
        let mass = if cutoff > POSITIVE { block_sums(v, x, cutoff, &mut s.sums) } else { mass };
        pick(x, cutoff, &s.sums, mass, self.u)
    }
}

/// The least f32 that is not below `max · p` (a product that f64 holds exactly).
fn fraction(max: f32, p: f32) -> f32 {
    let exact = f64::from(max) * f64::from(p);
    let rounded = exact as f32;
    if f64::from(rounded) < exact { rounded.next_up() } else { rounded }
}

/// `log2(e) / temperature`, finite also for the smallest temperature.
fn log2_scale(temperature: f32) -> f32 {
    (std::f64::consts::LOG2_E / f64::from(temperature)).min(f64::from(f32::MAX)) as f32
}

pub(crate) fn softmax(
    cpu: &Cpu,
    logits: TensorRef<'_>,
    temperature: PerRow<'_, f32>,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "softmax";
    let (rows, out) = (FloatRows::new(OP, "logits", logits)?, RowsMut::<f32>::new(OP, "out", out)?);
    for_parts(cpu, out, |out| {
        with_scratch(|s| cpu.run(Softmax { rows, temperature, out, wide: &mut s.wide }));
    });
    Ok(())
}

struct Softmax<'a> {
    rows: FloatRows<'a>,
    temperature: PerRow<'a, f32>,
    out: RowsMut<'a, f32>,
    wide: &'a mut Vec<f32>,
}

impl Kernel for Softmax<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        for r in self.out.range() {
            let (x, temperature) = (self.rows.row(v, r, self.wide), self.temperature.get(r));
            let out = self.out.row(r);
            let max = row_max(v, x);
            if max == f32::NEG_INFINITY || (temperature == 0.0 && has_nan(x)) {
                out.fill(f32::NAN);
            } else if temperature == 0.0 {
                out.fill(0.0);
                out[first_of(v, x, max)] = 1.0;
            } else {
                let total = weigh(v, x, max, log2_scale(temperature), out);
                // The largest weight is 1, so the total is 1 or more; NaN makes every element NaN.
                let inverse = v.splat((1.0 / total) as f32);
                let full = out.len() / V::LANES * V::LANES;
                let mut i = 0;
                while i < full {
                    v.store(v.mul(v.load(&out[i..]), inverse), &mut out[i..]);
                    i += V::LANES;
                }
                for y in &mut out[full..] {
                    *y *= (1.0 / total) as f32;
                }
            }
        }
    }
}

/// Which filter a renormalisation applies.
#[derive(Clone, Copy)]
pub(crate) enum Keep<'a> {
    TopK(PerRow<'a, u32>),
    TopP(PerRow<'a, f32>),
}

pub(crate) fn renorm(
    cpu: &Cpu,
    op: &'static str,
    probs: TensorRef<'_>,
    keep: Keep<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    let (rows, out) = (Rows::<f32>::new(op, "probs", probs)?, RowsMut::<f32>::new(op, "out", out)?);
    for_parts(cpu, out, |out| with_scratch(|scratch| cpu.run(Renorm { rows, keep, out, scratch })));
    Ok(())
}

struct Renorm<'a> {
    rows: Rows<'a, f32>,
    keep: Keep<'a>,
    out: RowsMut<'a, f32>,
    scratch: &'a mut Scratch,
}

impl Kernel for Renorm<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let s = self.scratch;
        for r in self.out.range() {
            let (x, out) = (self.rows.row(r), self.out.row(r));
            let mass = block_sums(v, x, POSITIVE, &mut s.sums);
            if !mass.is_valid() {
                out.fill(f32::NAN);
                continue;
            }
            let cutoff = match self.keep {
                Keep::TopK(k) => kth_largest(v, x, k.get(r) as usize, s).max(POSITIVE),
                Keep::TopP(p) if p.get(r) < 1.0 => mass_cutoff(v, x, mass, f64::from(p.get(r)) * mass.total, s),
                Keep::TopP(_) => POSITIVE,
            };
            let total = block_sums(v, x, cutoff, &mut s.sums).total;
            let inverse = (1.0 / total) as f32;
            // The inverse of a mass below 2^-126 is no f32; such rows go element by element in f64.
            let full = if inverse < f32::INFINITY { x.len() / V::LANES * V::LANES } else { 0 };
            let mut i = 0;
            while i < full {
                let y = v.load(&x[i..]);
                let passed = v.select(v.lt(y, v.splat(cutoff)), v.splat(0.0), y);
                v.store(v.mul(passed, v.splat(inverse)), &mut out[i..]);
                i += V::LANES;
            }
            for (out, &y) in out[full..].iter_mut().zip(&x[full..]) {
                *out = if y < cutoff { 0.0 } else { (f64::from(y) / total) as f32 };
            }
        }
    }
}

pub(crate) fn top_k_mask_logits(
    cpu: &Cpu,
    logits: TensorRef<'_>,
    top_k: PerRow<'_, u32>,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "top_k_mask_logits";
    let rows = FloatRows::new(OP, "logits", logits)?;
    with_float!(OP, "logits", logits.dtype(), T => {
        let out = RowsMut::<T>::new(OP, "out", out)?;
        for_parts(cpu, out, |out| with_scratch(|scratch| cpu.run(Mask { rows, top_k, out, scratch })));
        Ok(())
    })
}

struct Mask<'a, T> {
    rows: FloatRows<'a>,
    top_k: PerRow<'a, u32>,
    out: RowsMut<'a, T>,
    scratch: &'a mut Scratch,
}

impl<T: Lane> Kernel for Mask<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let s = self.scratch;
        let mut wide = std::mem::take(&mut s.wide);
        for r in self.out.range() {
            let (x, out) = (self.rows.row(v, r, &mut wide), self.out.row(r));
            let cutoff = kth_largest(v, x, self.top_k.get(r) as usize, s);
            let full = x.len() / V::LANES * V::LANES;
            let mut i = 0;
            while i < full {
                let y = v.load(&x[i..]);
                T::store(v, v.select(v.lt(y, v.splat(cutoff)), v.splat(f32::NEG_INFINITY), y), &mut out[i..]);
                i += V::LANES;
            }
            for (out, &y) in out[full..].iter_mut().zip(&x[full..]) {
                *out = T::from_f32(if y < cutoff { f32::NEG_INFINITY } else { y });
            }
        }
        s.wide = wide;
    }
}

/// The ids of a tensor of i32 or i64, in row-major order.
pub(crate) fn read_ids(op: &'static str, arg: &'static str, x: TensorRef<'_>) -> Result<Vec<i64>> {
    x.layout().check_listed(op, arg)?;
    match x.dtype() {
        DType::I32 => {
            let x = x.typed::<i32>(op, arg)?;
            Ok(x.layout().offsets().map(|at| i64::from(x.data()[at])).collect())
        }
        DType::I64 => {
            let x = x.typed::<i64>(op, arg)?;
            Ok(x.layout().offsets().map(|at| x.data()[at]).collect())
        }
        other => Err(Error::DType { op, arg, got: other.name(), want: "i32 or i64".into() }),
    }
}
