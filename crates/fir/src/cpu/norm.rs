//! Row norms, all of them one kernel. A row is read twice (three times to centre it), from cache after the first
//! time, and written once.

use std::borrow::Cow;

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{Rows, parts_for, widened, with_float};
use super::vector::{Kernel, Lane, PastCache, Vector};
use crate::error::Result;
use crate::tensor::{DType, E4m3, E5m2, TensorMut, TensorRef};

/// Bytes of an output above which it is written past the caches, as no cache of usual size would keep it. The loop alone,
/// 16384 rows of 4096 f32 on two cores of a Xeon of model 207, went from 16 to 33 GB/s so; a copy had 35.
const LARGE: usize = 32 << 20;
/// Elements that are computed before they are copied to such an output.
const CHUNK: usize = 512;
/// Rows up to which weights of the rows' own type are read as they lie. A copy in f32 pays off with many rows; for one row of
/// 4096 in cold caches it is two thirds more memory to touch.
const FEW: usize = 4;

/// What a norm does to a row once it is scaled.
#[derive(Clone, Copy)]
pub(crate) struct Params<'a> {
    pub(crate) op: &'static str,
    /// Factor of each column, `[hidden]`, and its name in messages.
    pub(crate) weight: TensorRef<'a>,
    pub(crate) weight_arg: &'static str,
    /// Added to every weight: 1 for Gemma, else 0.
    pub(crate) shift: f32,
    /// Added to each column; its presence makes a layer norm, which subtracts the row's mean first.
    pub(crate) bias: Option<TensorRef<'a>>,
    /// Divides the result when the output is fp8.
    pub(crate) scale: f32,
    pub(crate) eps: f32,
}

impl<'a> Params<'a> {
    /// Those of a plain RMS norm.
    pub(crate) fn rms(op: &'static str, weight: TensorRef<'a>, eps: f32) -> Self {
        Self { op, weight, weight_arg: "weight", shift: 0.0, bias: None, scale: 1.0, eps }
    }
}

/// `out = norm(x)`, or `residual += x; out = norm(residual)` without rounding in between.
pub(crate) fn norm(
    cpu: &Cpu,
    params: Params<'_>,
    x: TensorRef<'_>,
    residual: Option<TensorMut<'_>>,
    out: TensorMut<'_>,
) -> Result<()> {
    let columns = Columns::new(params, x)?;
    with_float!(params.op, "x", x.dtype(), T => match out.dtype() {
        DType::E4M3 => norm_to::<T, E4m3>(cpu, params.op, &columns, x, residual, out),
        DType::E5M2 => norm_to::<T, E5m2>(cpu, params.op, &columns, x, residual, out),
        _ => norm_to::<T, T>(cpu, params.op, &columns, x, residual, out),
    })
}

fn norm_to<T: Lane, O: Lane>(
    cpu: &Cpu,
    op: &'static str,
    columns: &Columns<'_>,
    x: TensorRef<'_>,
    residual: Option<TensorMut<'_>>,
    out: TensorMut<'_>,
) -> Result<()> {
    let (x, out) = (Some(Rows::<T>::new(op, "x", x)?), RowsMut::<O>::new(op, "out", out)?);
    let large = out.range().len().saturating_mul(out.row_len() * size_of::<O>()) > LARGE;
    let residual = residual.map(|r| RowsMut::<T>::new(op, "residual", r)).transpose()?;
    let own = columns.own::<T>(op)?;
    match (residual, &columns.bias[..]) {
        (None, []) => run(cpu, [Norm::<_, _, false, false, false> { x, residual: None, out, columns, own, large }]),
        (None, _) => run(cpu, [Norm::<_, _, true, false, false> { x, residual: None, out, columns, own, large }]),
        (residual, _) => run(cpu, [Norm::<_, _, false, true, false> { x, residual, out, columns, own, large }]),
    }
    Ok(())
}

/// `residual += x; x = norm(residual)`, without rounding in between.
pub(crate) fn fused_add(cpu: &Cpu, params: Params<'_>, x: TensorMut<'_>, residual: TensorMut<'_>) -> Result<()> {
    let columns = &Columns::new(params, x.as_ref())?;
    with_float!(params.op, "x", x.dtype(), T => {
        let out = RowsMut::<T>::new(params.op, "x", x)?;
        let residual = Some(RowsMut::<T>::new(params.op, "residual", residual)?);
        let own = columns.own::<T>(params.op)?;
        run(cpu, [Norm::<T, T, false, true, true> { x: None, residual, out, columns, own, large: false }]);
        Ok(())
    })
}

/// `x = norm(x)` for two tensors of one type, at once.
pub(crate) fn pair_in_place(
    cpu: &Cpu,
    params: [Params<'_>; 2],
    names: [&'static str; 2],
    x: [TensorMut<'_>; 2],
) -> Result<()> {
    let [x, y] = x;
    let (a, b) = (Columns::new(params[0], x.as_ref())?, Columns::new(params[1], y.as_ref())?);
    with_float!(params[0].op, names[0], x.dtype(), T => {
        let (x, y) = (RowsMut::<T>::new(params[0].op, names[0], x)?, RowsMut::<T>::new(params[1].op, names[1], y)?);
        let (v, w) = (a.own::<T>(params[0].op)?, b.own::<T>(params[1].op)?);
        run(cpu, [(x, &a, v), (y, &b, w)].map(|(out, columns, own)| {
            Norm::<T, T, false, false, true> { x: None, residual: None, out, columns, own, large: false }
        }));
        Ok(())
    })
}

/// The parameters in f32.
struct Columns<'a> {
    /// Empty if `own` is there.
    weight: Cow<'a, [f32]>,
    /// The weights as they lie: for [`FEW`] rows of their type.
    own: Option<TensorRef<'a>>,
    /// As long as `weight`, or empty.
    bias: Cow<'a, [f32]>,
    inverse_scale: f32,
    eps: f32,
}

impl<'a> Columns<'a> {
    /// Those of a norm of `x`.
    fn new(p: Params<'a>, x: TensorRef<'_>) -> Result<Self> {
        let rows: usize = x.shape().iter().rev().skip(1).product();
        let alike = p.weight.dtype() == x.dtype() && x.dtype() != DType::F32 && p.weight.layout().is_contiguous();
        let own = (rows <= FEW && alike && p.shift == 0.0).then_some(p.weight);
        let mut weight = if own.is_some() { Cow::default() } else { widened(p.op, p.weight_arg, p.weight)? };
        if p.shift != 0.0 {
            weight.to_mut().iter_mut().for_each(|w| *w += p.shift);
        }
        let bias = p.bias.map_or(Ok(Default::default()), |b| widened(p.op, "beta", b))?;
        Ok(Self { weight, own, bias, inverse_scale: 1.0 / p.scale, eps: p.eps })
    }

    /// The weights as they lie, of type `T`; none where there are wide ones.
    fn own<T: Lane>(&self, op: &'static str) -> Result<&'a [T]> {
        self.own.map_or(Ok(&[]), |w| w.typed::<T>(op, "weight").map(|w| w.data()))
    }
}

/// Runs the norms together, cut into parts.
fn run<T: Lane, O: Lane, const N: usize, const CENTER: bool, const ADD: bool, const IN_PLACE: bool>(
    cpu: &Cpu,
    norms: [Norm<'_, T, O, CENTER, ADD, IN_PLACE>; N],
) {
    let elements = norms.iter().map(|n| n.out.range().len() * n.out.row_len()).sum();
    // Rows without elements may be more than can be counted through.
    if elements == 0 {
        return;
    }
    let parts = parts_for(cpu, elements);
    cpu.pool().scatter(norms.into_iter().flat_map(|n| n.split(parts)).collect(), |part| cpu.run(part));
}

/// A norm of some rows. `CENTER`: a layer norm. `ADD`: of `x + residual`. `IN_PLACE`: `x` is `out`.
struct Norm<'a, T, O, const CENTER: bool, const ADD: bool, const IN_PLACE: bool> {
    x: Option<Rows<'a, T>>,
    residual: Option<RowsMut<'a, T>>,
    out: RowsMut<'a, O>,
    columns: &'a Columns<'a>,
    /// See [`Columns::own`].
    own: &'a [T],
    /// Whether the whole output is above [`LARGE`].
    large: bool,
}

impl<T: Lane, O: Lane, const CENTER: bool, const ADD: bool, const IN_PLACE: bool>
    Norm<'_, T, O, CENTER, ADD, IN_PLACE>
{
    /// `residual` has the rows of `out`, so both are cut alike.
    fn split(self, parts: usize) -> impl Iterator<Item = Self> {
        let mut residuals = self.residual.map(|r| r.split(parts).into_iter());
        self.out.split(parts).into_iter().map(move |out| Self {
            residual: residuals.as_mut().and_then(Iterator::next),
            out,
            ..self
        })
    }
}

impl<T: Lane, O: Lane, const CENTER: bool, const ADD: bool, const IN_PLACE: bool> Kernel
    for Norm<'_, T, O, CENTER, ADD, IN_PLACE>
{
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let (past, large) = (PastCache(v), self.large);
        for r in self.out.range() {
            let x = if let Some(x) = &self.x { x.row(r) } else { &[] };
            let residual = if let Some(residual) = &mut self.residual { residual.row(r) } else { &mut [] };
            let ahead = match &self.x {
                Some(x) if r + 1 < x.len() => x.row(r + 1),
                _ => &[],
            };
            let mut row =
                Row::<T, O, CENTER, ADD, IN_PLACE> { x, residual, out: self.out.row(r), ahead, own: self.own };
            let n = row.out.len() as f32;
            let mean = if CENTER { row.moment::<V, false>(v, 0.0) / n } else { 0.0 };
            let scale = 1.0 / (row.moment::<V, true>(v, mean) / n + self.columns.eps).sqrt();
            if large && !IN_PLACE && !ADD {
                row.stream(v, mean, scale, self.columns, &past);
            } else {
                row.write(v, mean, scale, self.columns, 0);
            }
        }
    }
}

/// A row of [`Norm`]; the slices that it does not use are empty.
struct Row<'a, T, O, const CENTER: bool, const ADD: bool, const IN_PLACE: bool> {
    x: &'a [T],
    residual: &'a mut [T],
    out: &'a mut [O],
    /// The next row of `x`: asked for while this one is written, so that the memory never waits.
    ahead: &'a [T],
    own: &'a [T],
}

impl<T: Lane, O: Lane, const CENTER: bool, const ADD: bool, const IN_PLACE: bool> Row<'_, T, O, CENTER, ADD, IN_PLACE> {
    /// The elements from `i` on that are normed; at the end of the row, zeros follow.
    #[inline(always)]
    fn load<V: Vector, const TAIL: bool>(&self, v: V, i: usize) -> V::F {
        let x = if IN_PLACE { load::<V, O, TAIL>(v, &self.out[i..]) } else { load::<V, T, TAIL>(v, &self.x[i..]) };
        if ADD { v.add(x, load::<V, T, TAIL>(v, &self.residual[i..])) } else { x }
    }

    /// `Σ x`, or `Σ (x - mean)²`; in four chains so that the adds' latency hides.
    #[inline(always)]
    fn moment<V: Vector, const SQUARE: bool>(&self, v: V, mean: f32) -> f32 {
        let mean = v.splat(mean);
        let mut acc = [v.splat(0.0); 4];
        let (len, step) = (self.out.len(), 4 * V::LANES);
        let mut i = 0;
        while i + step <= len {
            for (c, acc) in acc.iter_mut().enumerate() {
                let x = self.load::<V, false>(v, i + c * V::LANES);
                *acc = accumulate::<V, SQUARE>(v, if CENTER && SQUARE { v.sub(x, mean) } else { x }, *acc);
            }
            i += step;
        }
        while i < len {
            let n = V::LANES.min(len - i);
            let mut x = self.load::<V, true>(v, i);
            if CENTER && SQUARE {
                let mut lanes = [0.0; 16];
                v.store(v.sub(x, mean), &mut lanes);
                lanes[n..].fill(0.0);
                x = v.load(&lanes);
            }
            acc[0] = accumulate::<V, SQUARE>(v, x, acc[0]);
            i += n;
        }
        v.sum(v.add(v.add(acc[0], acc[1]), v.add(acc[2], acc[3])))
    }

    /// Writes the row past the cache, from a chunk at a time that is in it.
    #[inline(always)]
    fn stream<V: Vector>(&mut self, v: V, mean: f32, scale: f32, c: &Columns<'_>, past: &PastCache<V>) {
        let mut chunk = [O::from_f32(0.0); CHUNK];
        let mut from = 0;
        while from < self.out.len() {
            let n = CHUNK.min(self.out.len() - from);
            let (x, ahead) = (&self.x[from..][..n], self.ahead.get(from..).unwrap_or_default());
            let out = &mut chunk[..n];
            let own = self.own.get(from..).unwrap_or_default();
            Row::<T, O, CENTER, ADD, IN_PLACE> { x, residual: &mut [], out, ahead, own }.write(v, mean, scale, c, from);
            past.copy(&chunk[..n], &mut self.out[from..][..n]);
            from += n;
        }
    }

    /// Writes the row, whose first column is `from` of `c`.
    #[inline(always)]
    fn write<V: Vector>(&mut self, v: V, mean: f32, scale: f32, c: &Columns<'_>, from: usize) {
        let (mean, scale) = (v.splat(mean), v.splat(scale));
        let [weight, bias] = [&c.weight, &c.bias].map(|c| c.get(from..).unwrap_or_default());
        let len = self.out.len();
        let mut i = 0;
        while i + V::LANES <= len {
            if !IN_PLACE && (i * size_of::<T>()).is_multiple_of(64) {
                v.prefetch_far(self.ahead, i);
            }
            self.write_vector::<V, false>(v, i, mean, scale, [weight, bias], c.inverse_scale);
            i += V::LANES;
        }
        if i < len {
            self.write_vector::<V, true>(v, i, mean, scale, [weight, bias], c.inverse_scale);
        }
    }

    #[inline(always)]
    fn write_vector<V: Vector, const TAIL: bool>(
        &mut self,
        v: V,
        i: usize,
        mean: V::F,
        scale: V::F,
        [weight, bias]: [&[f32]; 2],
        inverse_scale: f32,
    ) {
        let x = self.load::<V, TAIL>(v, i);
        if ADD {
            store::<V, T, TAIL>(v, x, &mut self.residual[i..]);
        }
        let x = if CENTER { v.sub(x, mean) } else { x };
        let weight = match self.own {
            [] => load::<V, f32, TAIL>(v, &weight[i..]),
            own => load::<V, T, TAIL>(v, &own[i..]),
        };
        let mut y = v.mul(v.mul(x, scale), weight);
        if CENTER {
            y = v.add(y, load::<V, f32, TAIL>(v, &bias[i..]));
        }
        if O::DTYPE.size() == 1 {
            // Saturates infinities too, which a conversion to e5m2 would keep; NaN passes.
            let largest = O::from_f32(f32::MAX).to_f32();
            let q = v.mul(y, v.splat(inverse_scale));
            y = v.max(v.splat(-largest), v.min(v.splat(largest), q));
        }
        store::<V, O, TAIL>(v, y, &mut self.out[i..]);
    }
}

#[inline(always)]
fn accumulate<V: Vector, const SQUARE: bool>(v: V, x: V::F, acc: V::F) -> V::F {
    if SQUARE { v.fma(x, x, acc) } else { v.add(x, acc) }
}

/// A vector from the start of `x`, which holds fewer elements when `TAIL`.
#[inline(always)]
fn load<V: Vector, T: Lane, const TAIL: bool>(v: V, x: &[T]) -> V::F {
    if TAIL { T::load_tail(v, &x[..V::LANES.min(x.len())]) } else { T::load(v, x) }
}

/// Rounds into the start of `out`, which holds fewer elements when `TAIL`.
#[inline(always)]
fn store<V: Vector, T: Lane, const TAIL: bool>(v: V, x: V::F, out: &mut [T]) {
    if TAIL { T::store_tail(v, x, out) } else { T::store(v, x, out) }
}
