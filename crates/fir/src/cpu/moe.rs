//! Mixtures of experts: a token's experts by insertion into a short list, and their layers by grouped products over
//! rows that were sorted by expert.

use super::activation::{ActAndMul, Activation};
use super::exec::Cpu;
use super::gemm::scaled::{ScaledProduct, products as scaled_products};
use super::gemm::{Epilogue, Product, products};
use super::math::{exp, sigmoid};
use super::pool::RowsMut;
use super::rows::{Rows, WideRows, for_parts, parts_for, widen, widened, with_float};
use super::sampling::read_ids;
use super::vector::{Kernel, Lane, Vector};
use crate::args::TableRouteArgs;
use crate::error::{Error, Result};
use crate::routing::{Groups, Routing, Score};
use crate::tensor::{DType, Element, Scaled, TensorMut, TensorRef};

/// A routing of tokens.
pub(crate) struct Route<'a> {
    pub(crate) routing: Routing,
    pub(crate) logits: TensorRef<'a>,
    pub(crate) bias: Option<TensorRef<'a>>,
    pub(crate) ids: TensorMut<'a>,
    pub(crate) weights: TensorMut<'a>,
}

pub(crate) fn route(cpu: &Cpu, op: &'static str, r: Route<'_>) -> Result<()> {
    let bias = r.bias.map(|bias| widened(op, "bias", bias)).transpose()?;
    let bias = bias.as_deref();
    with_float!(op, "logits", r.logits.dtype(), T => {
        let parts = parts_for(cpu, r.ids.shape()[0].saturating_mul(r.logits.shape()[1]));
        let logits = Rows::<T>::new(op, "logits", r.logits)?;
        let ids = RowsMut::<i32>::new(op, "ids", r.ids)?.split(parts);
        let weights = RowsMut::<f32>::new(op, "weights", r.weights)?.split(parts);
        let parts = ids.into_iter().zip(weights).collect();
        cpu.pool().scatter(parts, |(ids, weights)| cpu.run(Choose { routing: r.routing, logits, bias, ids, weights }));
        Ok(())
    })
}

/// Ids by a table, and the weights of their logits.
pub(crate) fn route_by_table(op: &'static str, r: TableRouteArgs<'_>) -> Result<()> {
    let (vocabulary, experts) = (r.table.shape()[0], r.logits.shape()[1]);
    let tokens = read_ids(op, "tokens", r.tokens)?;
    let inside = |id: i64| usize::try_from(id).ok().filter(|&id| id < vocabulary);
    if let Some(i) = tokens.iter().position(|&id| inside(id).is_none()) {
        let want = format!("0 to {vocabulary} - 1, as the table has");
        return Err(Error::value(op, "tokens", format!("{} at {i}", tokens[i]), want));
    }
    let table = Rows::<i32>::new(op, "table", r.table)?;
    let named = |token: i64| table.row(token as usize);
    for &token in &tokens {
        if let Some(id) = named(token).iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= experts)) {
            let want = format!("0 to {experts} - 1, as there are logits");
            return Err(Error::value(op, "table", format!("{id} for token {token}"), want));
        }
    }
    let logits = WideRows::new(op, "logits", r.logits)?;
    let (mut ids, mut weights) =
        (RowsMut::<i32>::new(op, "ids", r.ids)?, RowsMut::<f32>::new(op, "weights", r.weights)?);
    for (t, &token) in tokens.iter().enumerate() {
        let (ids, weights, named) = (ids.row(t), weights.row(t), named(token));
        let mut sum = 0.0;
        for ((id, weight), &expert) in ids.iter_mut().zip(&mut *weights).zip(named) {
            let x = logits.at(t, expert as usize);
            (*id, *weight) = (expert, (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt());
            sum += *weight;
        }
        weights[..named.len()].iter_mut().for_each(|w| *w /= sum);
        if let Some(weight) = r.shared {
            (ids[named.len()], weights[named.len()]) = (experts as i32, weight);
        }
    }
    Ok(())
}

struct Choose<'a, T> {
    routing: Routing,
    logits: Rows<'a, T>,
    bias: Option<&'a [f32]>,
    ids: RowsMut<'a, i32>,
    weights: RowsMut<'a, f32>,
}

impl<T: Lane> Kernel for Choose<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let experts = self.logits.row_len();
        let padded = experts.next_multiple_of(V::LANES);
        let (mut logits, mut scores, mut keys) = (vec![0.0; padded], vec![0.0; padded], vec![0.0; padded]);
        let mut best = Best { list: vec![(0, 0); self.ids.row_len()], len: 0 };
        let groups = self.routing.groups.unwrap_or(Groups { count: 1, chosen: 1 });
        let mut best_groups = Best { list: vec![(0, 0); groups.chosen], len: 0 };
        for r in self.ids.range() {
            widen(v, self.logits.row(r), &mut logits);
            logits[experts..].fill(f32::NEG_INFINITY);
            match self.routing.score {
                Score::Softmax => softmax(v, &logits, &mut scores),
                Score::Sigmoid => sigmoids(v, &logits, &mut scores),
            }
            if let Some(bias) = self.bias {
                for ((key, score), bias) in keys.iter_mut().zip(&scores).zip(bias) {
                    *key = score + bias;
                }
            }
            // Without a bias the order of the scores is that of the logits, and those are not rounded.
            let (by, sums) = if self.bias.is_some() { (&keys, &keys) } else { (&logits, &scores) };
            best.len = 0;
            if groups.chosen == groups.count {
                best.offer(&by[..experts], 0);
            } else {
                let size = experts / groups.count;
                best_groups.len = 0;
                for (g, group) in sums[..experts].chunks_exact(size.max(1)).enumerate() {
                    best_groups.offer(&[two_largest(group)], g);
                }
                // In ascending order, so that of equal experts the first is chosen.
                best_groups.list[..best_groups.len].sort_unstable_by_key(|&(_, g)| g);
                for &(_, g) in &best_groups.list[..best_groups.len] {
                    best.offer(&by[g as usize * size..][..size], g as usize * size);
                }
            }
            let (ids, weights) = (self.ids.row(r), self.weights.row(r));
            let mut sum = 0.0;
            for ((id, weight), &(_, expert)) in ids.iter_mut().zip(&mut *weights).zip(&best.list) {
                (*id, *weight) = (expert as i32, scores[expert as usize]);
                sum += *weight;
            }
            let divisor = if self.routing.renormalize { sum + 1e-20 } else { 1.0 };
            for weight in weights {
                *weight = *weight / divisor * self.routing.scale;
            }
        }
    }
}

/// `e^x / Σ e^x`; NaN stays and does not count. Both slices are whole vectors.
#[inline(always)]
fn softmax<V: Vector>(v: V, x: &[f32], out: &mut [f32]) {
    let mut most = v.splat(f32::NEG_INFINITY);
    let mut i = 0;
    while i < x.len() {
        most = v.max(v.load(&x[i..]), most);
        i += V::LANES;
    }
    let most = v.splat(v.max_lane(most));
    let mut sum = v.splat(0.0);
    let mut i = 0;
    while i < x.len() {
        let e = exp(v, v.sub(v.load(&x[i..]), most));
        // The second operand when the first is NaN.
        sum = v.add(sum, v.max(e, v.splat(0.0)));
        v.store(e, &mut out[i..]);
        i += V::LANES;
    }
    let sum = v.splat(v.sum(sum));
    let mut i = 0;
    while i < x.len() {
        v.store(v.div(v.load(&out[i..]), sum), &mut out[i..]);
        i += V::LANES;
    }
}

#[inline(always)]
fn sigmoids<V: Vector>(v: V, x: &[f32], out: &mut [f32]) {
    let mut i = 0;
    while i < x.len() {
        v.store(sigmoid(v, v.load(&x[i..])), &mut out[i..]);
        i += V::LANES;
    }
}

/// The sum of the two largest, or the only one; NaN counts as -inf.
#[inline(always)]
fn two_largest(x: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &x in x {
        if x > first {
            (first, second) = (x, first);
        } else if x > second {
            second = x;
        }
    }
    if x.len() == 1 { first } else { first + second }
}

/// The largest of what was offered, the largest first, and of equal ones the first offered.
struct Best {
    /// Order and place.
    list: Vec<(u32, u32)>,
    len: usize,
}

impl Best {
    /// Offers values whose places begin with `first`.
    #[inline(always)]
    fn offer(&mut self, values: &[f32], first: usize) {
        let most = self.list.len();
        for (i, &x) in values.iter().enumerate() {
            let order = order(x);
            if self.len == most && (most == 0 || order <= self.list[most - 1].0) {
                continue;
            }
            let mut at = self.len.min(most - 1);
            while at > 0 && self.list[at - 1].0 < order {
                self.list[at] = self.list[at - 1];
                at -= 1;
            }
            self.list[at] = (order, (first + i) as u32);
            self.len = most.min(self.len + 1);
        }
    }
}

/// Integers in the order of the numbers, both zeros alike, NaN below all.
#[inline(always)]
fn order(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    match () {
        () if x.is_nan() => 0,
        () if bits >> 31 == 1 => !bits,
        () => bits | 1 << 31,
    }
}

/// Feed-forward layers of experts, for some tokens.
pub(crate) struct Ffn<'a> {
    pub(crate) x: TensorRef<'a>,
    pub(crate) weights: TensorRef<'a>,
    /// `token * top_k + choice`, sorted by expert.
    pub(crate) pairs: &'a [u32],
    pub(crate) indptr: &'a [i32],
    pub(crate) w_gate_up: Scaled<'a>,
    pub(crate) w_down: Scaled<'a>,
    pub(crate) out: TensorMut<'a>,
}

pub(crate) fn ffn(cpu: &Cpu, op: &'static str, act: impl Activation, f: Ffn<'_>) -> Result<()> {
    with_float!(op, "x", f.x.dtype(), T => ffn_of::<T>(cpu, op, act, f))
}

fn ffn_of<T: Lane>(cpu: &Cpu, op: &'static str, act: impl Activation, f: Ffn<'_>) -> Result<()> {
    let (hidden, inter, top_k) = (f.x.shape()[1], f.w_down.data.shape()[2], f.weights.shape()[1]);
    let (x, weights) = (Rows::<T>::new(op, "x", f.x)?, Rows::<f32>::new(op, "weights", f.weights)?);
    let (zero, n) = (T::from_f32(0.0), f.pairs.len());
    let mut rows = vec![zero; n * hidden];
    for_parts(cpu, RowsMut::from_slice(&mut rows, hidden), |mut out| {
        for r in out.range() {
            out.row(r).copy_from_slice(x.row(f.pairs[r] as usize / top_k));
        }
    });
    let mut gate_up = vec![0f32; n * 2 * inter];
    experts(cpu, op, &rows, f.indptr, f.w_gate_up, &mut gate_up)?;
    let mut middle = vec![zero; n * inter];
    let gate_up = Rows::packed_as(&gate_up, n, 2 * inter);
    for_parts(cpu, RowsMut::from_slice(&mut middle, inter), |out| cpu.run(ActAndMul { act, x: gate_up, out }));
    let mut results = vec![0f32; n * hidden];
    experts(cpu, op, &middle, f.indptr, f.w_down, &mut results)?;
    // Where each choice of each token went.
    let mut places = vec![None; f.x.shape()[0] * top_k];
    f.pairs.iter().enumerate().for_each(|(r, &pair)| places[pair as usize] = Some(r));
    let (results, places) = (Rows::packed_as(&results, n, hidden), &places[..]);
    for_parts(cpu, RowsMut::<T>::new(op, "out", f.out)?, |out| cpu.run(Combine { results, places, weights, out }));
    Ok(())
}

/// The rows of each expert times its weights.
fn experts<T: Element>(
    cpu: &Cpu,
    op: &'static str,
    x: &[T],
    indptr: &[i32],
    w: Scaled<'_>,
    out: &mut [f32],
) -> Result<()> {
    let (n, k) = (w.data.shape()[1], w.data.shape()[2]);
    let (mut list, mut rest) = (Vec::new(), out);
    for (e, rows) in indptr.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
        let (from, m) = (rows[0] as usize, (rows[1] - rows[0]) as usize);
        let (mine, others) = rest.split_at_mut(m * n);
        rest = others;
        let x = TensorRef::new(&x[from * k..][..m * k], &[m, k])?;
        list.push(ScaledProduct { x: x.into(), w: w.select(e)?, out: TensorMut::new(mine, &[m, n])? });
    }
    if matches!(w.data.dtype(), DType::E4M3 | DType::E5M2) {
        return scaled_products(cpu, op, list);
    }
    products(
        cpu,
        op,
        list.into_iter().map(|p| Product { x: p.x.data, w: p.w.data, out: p.out, then: Epilogue::None }).collect(),
    )
}

/// `out[t] = Σ_j weights[t, j] * results[places[t, j]]`, in order of `j`.
struct Combine<'a, T> {
    results: Rows<'a, f32>,
    places: &'a [Option<usize>],
    weights: Rows<'a, f32>,
    out: RowsMut<'a, T>,
}

impl<T: Lane> Kernel for Combine<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let top_k = self.weights.row_len();
        for t in self.out.range() {
            let (out, weights) = (self.out.row(t), self.weights.row(t));
            let places = &self.places[t * top_k..][..top_k];
            let mut i = 0;
            while i < out.len() {
                let n = V::LANES.min(out.len() - i);
                let mut sum = v.splat(0.0);
                for (place, &weight) in places.iter().zip(weights) {
                    if let Some(r) = place {
                        let row = &self.results.row(*r)[i..];
                        let y = if n == V::LANES { v.load(row) } else { f32::load_tail(v, row) };
                        sum = v.fma(v.splat(weight), y, sum);
                    }
                }
                if n == V::LANES {
                    T::store(v, sum, &mut out[i..]);
                } else {
                    T::store_tail(v, sum, &mut out[i..]);
                }
                i += n;
            }
        }
    }
}
