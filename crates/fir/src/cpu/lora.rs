//! Low-rank adapters of experts: rows of `out` are cut over the pool, and each goes through its pairs in order.

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{Rows, narrow, parts_for, widen, widened, with_float};
use super::sampling::read_ids;
use super::vector::{Kernel, Lane, Vector};
use crate::args::{AdaptArgs, RowOf};
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorRef};

/// A pair that is not left out.
#[derive(Clone, Copy)]
struct Pair {
    x: usize,
    out: usize,
    adapter: usize,
    expert: usize,
    factor: f32,
}

pub(crate) fn adapt(cpu: &Cpu, op: &'static str, a: AdaptArgs<'_>) -> Result<()> {
    let pairs = pairs(op, &a)?;
    let (outputs, inputs) = (a.weights.shape()[2], a.weights.shape()[3]);
    let parts = parts_for(cpu, pairs.len().saturating_mul(outputs).saturating_mul(inputs));
    let add = a.add || a.out_of == RowOf::Token;
    with_float!(op, "x", a.x.dtype(), T => {
        let x = Rows::<T>::new(op, "x", a.x)?;
        let (matrices, pairs) = (&Matrices::<T>::new(op, a.weights)?, &pairs[..]);
        if a.out.dtype() == DType::F32 {
            let out = RowsMut::<f32>::new(op, "out", a.out)?.split(parts);
            cpu.pool().scatter(out, |out| cpu.run(Part { x, matrices, pairs, add, out }));
        } else {
            let out = RowsMut::<T>::new(op, "out", a.out)?.split(parts);
            cpu.pool().scatter(out, |out| cpu.run(Part { x, matrices, pairs, add, out }));
        }
        Ok(())
    })
}

/// The pairs in order of their rows of `out`, those of one row as they were given.
fn pairs(op: &'static str, a: &AdaptArgs<'_>) -> Result<Vec<Pair>> {
    let (tokens, experts) = (read_ids(op, "tokens", a.tokens)?, read_ids(op, "experts", a.experts)?);
    let adapters = read_ids(op, "adapters", a.adapters)?;
    let factors = a.factors.map(|f| widened(op, "factors", f)).transpose()?;
    let [most_adapters, most_experts] = [a.weights.shape()[0], a.weights.shape()[1]];
    let mut all = Vec::with_capacity(tokens.len());
    for (p, (&token, &expert)) in tokens.iter().zip(&experts).enumerate() {
        let Some((token, &adapter)) = usize::try_from(token).ok().and_then(|t| Some((t, adapters.get(t)?))) else {
            continue;
        };
        let Ok(adapter) = usize::try_from(adapter) else { continue };
        if adapter >= most_adapters {
            return Err(Error::value(
                op,
                "adapters",
                format!("{adapter} at {token}"),
                format!("less than {most_adapters}"),
            ));
        }
        let Some(expert) = usize::try_from(expert).ok().filter(|&e| e < most_experts) else {
            return Err(Error::value(op, "experts", format!("{expert} at {p}"), format!("0 to {most_experts} - 1")));
        };
        let row = |of| if of == RowOf::Pair { p } else { token };
        let factor = factors.as_ref().map_or(1.0, |f| f[p]);
        all.push(Pair { x: row(a.x_of), out: row(a.out_of), adapter, expert, factor });
    }
    all.sort_by_key(|pair| pair.out);
    Ok(all)
}

/// The weights as matrices of adapters and experts.
struct Matrices<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
    shape: [usize; 2],
}

impl<'a, T: Lane> Matrices<'a, T> {
    fn new(op: &'static str, weights: TensorRef<'a>) -> Result<Self> {
        let view = weights.typed::<T>(op, "weights")?;
        let (shape, strides) = (view.shape(), view.strides());
        if strides[3] != 1 && shape[3] > 1 {
            return Err(Error::layout(op, "weights", format!("stride {} of the last axis", strides[3]), "1"));
        }
        Ok(Self { data: view.data(), strides: [strides[0], strides[1], strides[2]], shape: [shape[2], shape[3]] })
    }

    /// Row `j` of a pair's matrix.
    #[inline(always)]
    fn row(&self, pair: &Pair, j: usize) -> &'a [T] {
        let at = pair.adapter * self.strides[0] + pair.expert * self.strides[1] + j * self.strides[2];
        if self.shape[1] == 0 { &[] } else { &self.data[at..][..self.shape[1]] }
    }
}

struct Part<'a, T, O> {
    x: Rows<'a, T>,
    matrices: &'a Matrices<'a, T>,
    /// All pairs, by row of `out`.
    pairs: &'a [Pair],
    add: bool,
    out: RowsMut<'a, O>,
}

impl<T: Lane, O: Lane> Kernel for Part<'_, T, O> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let [outputs, inputs] = self.matrices.shape;
        let padded = inputs.next_multiple_of(V::LANES);
        let (mut x, mut w, mut sums) = (vec![0.0f32; padded], vec![0.0f32; padded], vec![0.0f32; outputs]);
        let rows = self.out.range();
        let first = self.pairs.partition_point(|p| p.out < rows.start);
        for pair in self.pairs[first..].iter().take_while(|p| p.out < rows.end) {
            widen(v, self.x.row(pair.x), &mut x);
            for (j, sum) in sums.iter_mut().enumerate() {
                widen(v, self.matrices.row(pair, j), &mut w);
                let mut acc = v.splat(0.0);
                for (w, x) in w.chunks_exact(V::LANES).zip(x.chunks_exact(V::LANES)) {
                    acc = v.fma(v.load(w), v.load(x), acc);
                }
                *sum = v.sum(acc) * pair.factor;
            }
            let out = self.out.row(pair.out);
            if self.add {
                for (sum, out) in sums.iter_mut().zip(&*out) {
                    *sum += out.to_f32();
                }
            }
            narrow(v, &sums, out);
        }
    }
}
