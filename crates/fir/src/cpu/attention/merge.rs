//! Merging states: parts of one launch, levels of a cascade, and the public operators.

use super::{Launch, Sink, State, base, finish};
use crate::cpu::exec::Cpu;
use crate::cpu::pool::RowsMut;
use crate::cpu::rows::{Rows, narrow, parts_for, widen, with_float};
use crate::cpu::variant::Registers;
use crate::cpu::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::plan::Merge;
use crate::tensor::{TensorMut, TensorRef};

/// Adds up states (`o`, `m`, `d` in a row) in order, at their common maximum.
#[inline(always)]
fn merge_rows<'a, V: Vector>(v: V, base: f32, parts: impl Iterator<Item = &'a [f32]> + Clone, o: &mut [f32]) -> State {
    let mut m = f32::NEG_INFINITY;
    for p in parts.clone() {
        m = m.max(p[o.len()]);
    }
    let shift = if m == f32::NEG_INFINITY { 0.0 } else { m };
    o.fill(0.0);
    let mut d = 0.0;
    for p in parts {
        let scale = ((p[o.len()] - shift) * base).exp2();
        d += p[o.len() + 1] * scale;
        add_scaled(v, p, scale, o);
    }
    State { m, d }
}

/// `o += scale * x`, over the length of `o`.
#[inline(always)]
fn add_scaled<V: Vector>(v: V, x: &[f32], scale: f32, o: &mut [f32]) {
    let full = o.len() / V::LANES * V::LANES;
    let mut c = 0;
    while c < full {
        v.store(v.fma(v.load(&x[c..]), v.splat(scale), v.load(&o[c..])), &mut o[c..]);
        c += V::LANES;
    }
    for c in full..o.len() {
        o[c] += x[c] * scale;
    }
}

/// Merges of a schedule: heads that were cut.
pub(super) struct Merges<'a> {
    pub launch: &'a Launch<'a>,
    pub merges: &'a [Merge],
    pub partials: &'a [f32],
    pub sink: &'a Sink<'a>,
}

impl Kernel for Merges<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (launch, width) = (self.launch, self.launch.dim_vo + 2);
        let mut regs = Registers::default();
        let mut o = vec![0f32; launch.dim_vo];
        for m in self.merges {
            for row in 0..m.q_len as usize * launch.group {
                let at = |i: u32| (m.first as usize + i as usize * m.stride as usize + row) * width;
                let state = merge_rows(v, base(launch), (0..m.parts).map(|i| &self.partials[at(i)..][..width]), &mut o);
                let token = m.q_start as usize + row / launch.group;
                let qo_head = m.head as usize * launch.group + row % launch.group;
                finish(v, launch, token, qo_head, &mut o, state, self.sink, &mut regs);
            }
        }
    }
}

/// Merges the states of a cascade's levels, `[levels, tokens * heads, dim_vo + 2]`, into `sink`. `launch` is any
/// level's: its rows are all levels' rows.
pub(crate) fn merge_levels(cpu: &Cpu, launch: &Launch<'_>, states: &[f32], levels: usize, sink: &Sink<'_>) {
    let rows = launch.tokens.len() * launch.kv_heads * launch.group;
    let each = rows.div_ceil(parts_for(cpu, rows * launch.dim_vo * levels)).max(1);
    let parts = (0..rows).step_by(each).map(|r| r..rows.min(r + each)).collect();
    cpu.pool().scatter(parts, |rows| cpu.run(Levels { launch, states, levels, rows, sink }));
}

struct Levels<'a> {
    launch: &'a Launch<'a>,
    states: &'a [f32],
    levels: usize,
    rows: std::ops::Range<usize>,
    sink: &'a Sink<'a>,
}

impl Kernel for Levels<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (launch, width) = (self.launch, self.launch.dim_vo + 2);
        let level = self.states.len() / self.levels;
        let heads = launch.kv_heads * launch.group;
        let mut regs = Registers::default();
        let mut o = vec![0f32; launch.dim_vo];
        for row in self.rows {
            let parts = (0..self.levels).map(|l| &self.states[l * level + row * width..][..width]);
            let state = merge_rows(v, base(launch), parts, &mut o);
            finish(v, launch, row / heads, row % heads, &mut o, state, self.sink, &mut regs);
        }
    }
}

pub(crate) fn merge_state(
    cpu: &Cpu,
    a: (TensorRef<'_>, TensorRef<'_>),
    b: (TensorRef<'_>, TensorRef<'_>),
    (out, lse_out): (TensorMut<'_>, TensorMut<'_>),
) -> Result<()> {
    const OP: &str = "merge_state";
    with_float!(OP, "o_a", a.0.dtype(), T => {
        let o = [Rows::<T>::new(OP, "o_a", a.0)?, Rows::<T>::new(OP, "o_b", b.0)?];
        let lse = [lse_rows(OP, "lse_a", a.1)?, lse_rows(OP, "lse_b", b.1)?];
        let out = RowsMut::<T>::new(OP, "out", out)?;
        let lse_out = RowsMut::<f32>::new(OP, "lse_out", lse_out.with_unit_axis()?)?;
        merge_many(cpu, 2, |r, i| (o[i].row(r), lse[i].row(r)[0]), out, lse_out, None);
        Ok(())
    })
}

pub(crate) fn merge_states(
    cpu: &Cpu,
    (o, lse): (TensorRef<'_>, TensorRef<'_>),
    (out, lse_out): (TensorMut<'_>, TensorMut<'_>),
) -> Result<()> {
    const OP: &str = "merge_states";
    let states = o.shape()[1];
    with_float!(OP, "o", o.dtype(), T => {
        let o = (0..states).map(|i| Rows::<T>::new(OP, "o", o.select(1, i)?)).collect::<Result<Vec<_>>>()?;
        let lse = (0..states).map(|i| lse_rows(OP, "lse", lse.select(1, i)?)).collect::<Result<Vec<_>>>()?;
        let out = RowsMut::<T>::new(OP, "out", out)?;
        let lse_out = RowsMut::<f32>::new(OP, "lse_out", lse_out.with_unit_axis()?)?;
        merge_many(cpu, states, |r, i| (o[i].row(r), lse[i].row(r)[0]), out, lse_out, None);
        Ok(())
    })
}

pub(crate) fn merge_state_in_place(
    cpu: &Cpu,
    (o, lse): (TensorMut<'_>, TensorMut<'_>),
    other: (TensorRef<'_>, TensorRef<'_>),
    mask: Option<&[bool]>,
) -> Result<()> {
    const OP: &str = "merge_state_in_place";
    let heads = o.shape()[1].max(1);
    with_float!(OP, "o", o.dtype(), T => {
        let (other_o, other_lse) = (Rows::<T>::new(OP, "o_other", other.0)?, lse_rows(OP, "lse_other", other.1)?);
        let out = RowsMut::<T>::new(OP, "o", o)?;
        let lse = RowsMut::<f32>::new(OP, "lse", lse.with_unit_axis()?)?;
        merge_many(cpu, 1, |r, _| (other_o.row(r), other_lse.row(r)[0]), out, lse, Some((mask, heads)));
        Ok(())
    })
}

fn lse_rows<'a>(op: &'static str, arg: &'static str, lse: TensorRef<'a>) -> Result<Rows<'a, f32>> {
    Rows::new(op, arg, lse.with_unit_axis()?)
}

/// Merges `states` states per row, given by `state(row, i)`, and the row itself first when `in_place` (with a mask of
/// tokens and the number of heads per token).
fn merge_many<'a, T: Lane>(
    cpu: &Cpu,
    states: usize,
    state: impl Fn(usize, usize) -> (&'a [T], f32) + Sync,
    out: RowsMut<'_, T>,
    lse: RowsMut<'_, f32>,
    in_place: Option<(Option<&[bool]>, usize)>,
) {
    let parts = parts_for(cpu, out.range().len() * out.row_len() * states);
    let parts = out.split(parts).into_iter().zip(lse.split(parts)).collect();
    let state = &state;
    cpu.pool().scatter(parts, |(out, lse)| cpu.run(MergeMany { states, state, out, lse, in_place }));
}

struct MergeMany<'a, 'b, T, S> {
    states: usize,
    state: &'b S,
    out: RowsMut<'a, T>,
    lse: RowsMut<'a, f32>,
    in_place: Option<(Option<&'b [bool]>, usize)>,
}

impl<'c, T: Lane, S: Fn(usize, usize) -> (&'c [T], f32)> Kernel for MergeMany<'_, '_, T, S> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let dim = self.out.row_len();
        let (mut acc, mut x) = (vec![0f32; dim], vec![0f32; dim]);
        for r in self.out.range() {
            let (out, lse) = (self.out.row(r), &mut self.lse.row(r)[0]);
            if let Some((Some(mask), heads)) = self.in_place
                && !mask[r / heads]
            {
                continue;
            }
            let mut m = if self.in_place.is_some() { *lse } else { f32::NEG_INFINITY };
            for i in 0..self.states {
                m = m.max((self.state)(r, i).1);
            }
            let shift = if m == f32::NEG_INFINITY { 0.0 } else { m };
            acc.fill(0.0);
            let mut d = 0.0;
            if self.in_place.is_some() {
                let w = (*lse - shift).exp2();
                d += w;
                widen(v, out, &mut x);
                add_weighted(v, &x, w, &mut acc);
            }
            for i in 0..self.states {
                let (o, lse) = (self.state)(r, i);
                let w = (lse - shift).exp2();
                d += w;
                widen(v, o, &mut x);
                add_weighted(v, &x, w, &mut acc);
            }
            let inv = if d == 0.0 { 0.0 } else { 1.0 / d };
            for a in &mut acc {
                *a *= inv;
            }
            narrow(v, &acc, out);
            *lse = m + d.log2();
        }
    }
}

/// [`add_scaled`], leaving out a state of weight 0, whatever its output holds.
#[inline(always)]
fn add_weighted<V: Vector>(v: V, x: &[f32], weight: f32, o: &mut [f32]) {
    if weight != 0.0 {
        add_scaled(v, x, weight, o);
    }
}
