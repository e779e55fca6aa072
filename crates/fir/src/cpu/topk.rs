//! The largest elements of rows and where they are: see [`super::select::top_places`].

use std::sync::atomic::{AtomicUsize, Ordering};

use super::exec::Cpu;
use super::pool::RowsMut;
use super::rows::{parts_for, with_float};
use super::sampling::with_scratch;
use super::select::{FloatRows, Scratch, top_places};
use super::vector::{Kernel, Lane, Vector};
use crate::error::Result;
use crate::tensor::{DType, Element, TensorMut, TensorRef};

/// An integer that stands for a place.
trait Id: Element {
    fn of(i: i64) -> Self;
}

impl Id for i32 {
    fn of(i: i64) -> Self {
        i as Self
    }
}

impl Id for i64 {
    fn of(i: i64) -> Self {
        i
    }
}

pub(crate) fn top_k(
    cpu: &Cpu,
    x: TensorRef<'_>,
    sorted: bool,
    values: TensorMut<'_>,
    indices: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "top_k";
    with_float!(OP, "x", x.dtype(), T => {
        let values = RowsMut::<T>::new(OP, "values", values)?;
        if indices.dtype() == DType::I64 {
            select(cpu, x, sorted, values, RowsMut::<i64>::new(OP, "indices", indices)?)
        } else {
            select(cpu, x, sorted, values, RowsMut::<i32>::new(OP, "indices", indices)?)
        }
    })
}

fn select<T: Lane, I: Id>(
    cpu: &Cpu,
    x: TensorRef<'_>,
    sorted: bool,
    values: RowsMut<'_, T>,
    indices: RowsMut<'_, I>,
) -> Result<()> {
    let rows = FloatRows::new("top_k", "x", x)?;
    let parts = parts_for(cpu, x.layout().len());
    let parts = values.split(parts).into_iter().zip(indices.split(parts)).collect();
    cpu.pool().scatter(parts, |(values, indices)| {
        with_scratch(|scratch| cpu.run(TopK { rows, sorted, values, indices, scratch }));
    });
    Ok(())
}

struct TopK<'a, T, I> {
    rows: FloatRows<'a>,
    sorted: bool,
    values: RowsMut<'a, T>,
    indices: RowsMut<'a, I>,
    scratch: &'a mut Scratch,
}

impl<T: Lane, I: Id> Kernel for TopK<'_, T, I> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let s = self.scratch;
        let mut wide = std::mem::take(&mut s.wide);
        for r in self.values.range() {
            let (values, indices) = (self.values.row(r), self.indices.row(r));
            let x = self.rows.row(v, r, &mut wide);
            top_places(v, x, values.len(), s);
            if self.sorted {
                // Equal elements keep the order of their places; there is no NaN among them.
                s.ids.sort_by(|&a, &b| x[b as usize].partial_cmp(&x[a as usize]).unwrap_or(std::cmp::Ordering::Equal));
            }
            for ((value, index), &i) in values.iter_mut().zip(&mut *indices).zip(&s.ids) {
                (*value, *index) = (T::from_f32(x[i as usize]), I::of(i64::from(i)));
            }
            values[s.ids.len()..].fill(T::from_f32(f32::NEG_INFINITY));
            indices[s.ids.len()..].fill(I::of(-1));
        }
        s.wide = wide;
    }
}

/// A window of a row of scores, and what its places are turned into.
pub(crate) struct Window<'a> {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) to: Places<'a>,
}

/// How a place becomes an output.
#[derive(Clone, Copy)]
pub(crate) enum Places<'a> {
    /// Counted from here.
    From(i64),
    /// `pages[place / page_size] * page_size + place % page_size`
    Paged { pages: &'a [i32], page_size: usize },
}

/// The largest scores of each window, as transformed places in ascending order of the places; `raw` gets the places.
/// Returns the first row in which a page id is negative or its place no i32.
pub(crate) fn top_k_transform(
    cpu: &Cpu,
    op: &'static str,
    scores: TensorRef<'_>,
    windows: &[Window<'_>],
    out: TensorMut<'_>,
    raw: Option<TensorMut<'_>>,
) -> Result<Option<usize>> {
    let rows = FloatRows::new(op, "scores", scores)?;
    let parts = parts_for(cpu, scores.layout().len());
    let out = RowsMut::<i32>::new(op, "out", out)?.split(parts);
    let raw: Vec<Option<RowsMut<'_, i32>>> = match raw {
        Some(raw) => RowsMut::<i32>::new(op, "raw", raw)?.split(parts).into_iter().map(Some).collect(),
        None => out.iter().map(|_| None).collect(),
    };
    let bad = AtomicUsize::new(usize::MAX);
    cpu.pool().scatter(out.into_iter().zip(raw).collect(), |(out, raw)| {
        with_scratch(|scratch| cpu.run(Transform { rows, windows, out, raw, bad: &bad, scratch }));
    });
    Ok(Some(bad.into_inner()).filter(|&r| r != usize::MAX))
}

struct Transform<'a> {
    rows: FloatRows<'a>,
    windows: &'a [Window<'a>],
    out: RowsMut<'a, i32>,
    raw: Option<RowsMut<'a, i32>>,
    bad: &'a AtomicUsize,
    scratch: &'a mut Scratch,
}

impl Kernel for Transform<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let s = self.scratch;
        let mut wide = std::mem::take(&mut s.wide);
        for r in self.out.range() {
            let (out, window) = (self.out.row(r), &self.windows[r]);
            let x = &self.rows.row(v, r, &mut wide)[window.start..][..window.len];
            top_places(v, x, out.len(), s);
            for (out, &i) in out.iter_mut().zip(&s.ids) {
                let place = match window.to {
                    Places::From(first) => Some(first + i64::from(i)),
                    Places::Paged { pages, page_size } => {
                        let page = i64::from(pages[i as usize / page_size]);
                        // Below 2^31 times at most 2^30: no overflow in i64.
                        (page >= 0).then(|| page * page_size as i64 + (i as usize % page_size) as i64)
                    }
                };
                *out = match place.map(i32::try_from) {
                    Some(Ok(place)) => place,
                    _ => {
                        self.bad.fetch_min(r, Ordering::Relaxed);
                        -1
                    }
                };
            }
            out[s.ids.len()..].fill(-1);
            if let Some(raw) = &mut self.raw {
                let raw = raw.row(r);
                for (raw, &i) in raw.iter_mut().zip(&s.ids) {
                    *raw = i as i32;
                }
                raw[s.ids.len()..].fill(-1);
            }
        }
        s.wide = wide;
    }
}
