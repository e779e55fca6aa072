//! A layer norm of a gated sum, scaled and shifted element by element. A row's numbers are f32 in the cache between the passes.

use std::borrow::Cow;

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{Rows, narrow, parts_for, widen, widened, with_float};
use super::vector::{Kernel, Lane, Vector};
use crate::args::{ModulatedArgs, Modulation};
use crate::error::Result;
use crate::tensor::Element;

pub(crate) fn modulate(cpu: &Cpu, op: &'static str, m: ModulatedArgs<'_>) -> Result<()> {
    with_float!(op, "x", m.x.dtype(), T => {
        let x = Rows::<T>::new(op, "x", m.x)?;
        let x_scale = m.x_scale.map(|s| widened(op, "x_scale", s)).transpose()?.map_or(1.0, |s| s[0]);
        let residual = m.residual.map(|r| Rows::<T>::new(op, "residual", r)).transpose()?;
        let [gate, scale, shift] = m.terms().map(|term| Term::new(op, term));
        let (gate, scale, shift) = (gate?, scale?, shift?);
        let (sum, out) = (RowsMut::<T>::new(op, "residual_out", m.residual_out)?, RowsMut::<T>::new(op, "out", m.out)?);
        let elements = out.range().len() * out.row_len();
        if elements == 0 {
            return Ok(());
        }
        let parts = parts_for(cpu, elements);
        let parts = sum.split(parts).into_iter().zip(out.split(parts)).collect();
        cpu.pool().scatter(parts, |(sum, out)| {
            cpu.run(Part { x, x_scale, residual, gate: &gate, scale: &scale, shift: &shift, eps: m.eps, sum, out });
        });
        Ok(())
    })
}

/// A [`Modulation`], its columns in f32.
struct Term<'a, T> {
    rows: Option<Rows<'a, T>>,
    columns: Cow<'a, [f32]>,
    plus: f32,
}

impl<'a, T: Element> Term<'a, T> {
    fn new(op: &'static str, (m, rows, columns): (Modulation<'a>, &'static str, &'static str)) -> Result<Self> {
        let columns = m.columns.map(|c| widened(op, columns, c)).transpose()?.unwrap_or_default();
        let rows = m.rows.map(|r| Rows::new(op, rows, r)).transpose()?;
        Ok(Self { rows, columns, plus: m.plus })
    }
}

impl<T: Lane> Term<'_, T> {
    /// The numbers of row `r`, into a slice of that length.
    #[inline(always)]
    fn row<V: Vector>(&self, v: V, r: usize, out: &mut [f32]) {
        match &self.rows {
            Some(rows) => widen(v, rows.row(r), out),
            None => out.fill(0.0),
        }
        for (out, column) in out.iter_mut().zip(&*self.columns) {
            *out += column;
        }
        for out in out {
            *out += self.plus;
        }
    }
}

struct Part<'a, T> {
    x: Rows<'a, T>,
    x_scale: f32,
    residual: Option<Rows<'a, T>>,
    gate: &'a Term<'a, T>,
    scale: &'a Term<'a, T>,
    shift: &'a Term<'a, T>,
    eps: f32,
    sum: RowsMut<'a, T>,
    out: RowsMut<'a, T>,
}

impl<T: Lane> Kernel for Part<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let n = self.out.row_len();
        let [mut s, mut a, mut b] = [(); 3].map(|()| vec![0.0f32; n]);
        for r in self.out.range() {
            widen(v, self.x.row(r), &mut s);
            self.gate.row(v, r, &mut a);
            match &self.residual {
                Some(residual) => widen(v, residual.row(r), &mut b),
                None => b.fill(0.0),
            }
            for ((s, a), b) in s.iter_mut().zip(&a).zip(&b) {
                *s = *s * (a * self.x_scale) + b;
            }
            narrow(v, &s, self.sum.row(r));
            let mean = total(v, &s, |_, x| x, 0.0) / n as f32;
            let variance = total(v, &s, |v, x| v.mul(x, x), mean) / n as f32;
            let scale = 1.0 / (variance + self.eps).sqrt();
            self.scale.row(v, r, &mut a);
            self.shift.row(v, r, &mut b);
            for ((s, a), b) in s.iter_mut().zip(&a).zip(&b) {
                *s = (*s - mean) * scale * a + b;
            }
            narrow(v, &s, self.out.row(r));
        }
    }
}

/// `Σ f(x - mean)`, in four chains so that the adds' latency hides.
#[inline(always)]
fn total<V: Vector>(v: V, x: &[f32], f: impl Fn(V, V::F) -> V::F, mean: f32) -> f32 {
    let (mut acc, means) = ([v.splat(0.0); 4], v.splat(mean));
    let mut chunks = x.chunks_exact(4 * V::LANES);
    for chunk in &mut chunks {
        for (c, acc) in acc.iter_mut().enumerate() {
            *acc = v.add(*acc, f(v, v.sub(v.load(&chunk[c * V::LANES..]), means)));
        }
    }
    // Lanes past the end are `mean` itself, which counts for nothing.
    for rest in chunks.remainder().chunks(V::LANES) {
        let mut lanes = [mean; 16];
        lanes[..rest.len()].copy_from_slice(rest);
        acc[0] = v.add(acc[0], f(v, v.sub(v.load(&lanes), means)));
    }
    v.sum(v.add(v.add(acc[0], acc[1]), v.add(acc[2], acc[3])))
}
