//! Verification of drafted tokens: a walk over a few probabilities, then a draw over the vocabulary.

use super::exec::Cpu;
use super::rows::Rows;
use super::sampling::{read_ids, scatter_rows, with_scratch, write_ids, write_valid};
use super::select::{POSITIVE, Scratch, block_sums, pick};
use super::vector::{Kernel, Vector};
use crate::error::Result;
use crate::filters::PerRow;
use crate::philox::RngState;
use crate::tensor::{DType, TensorMut, TensorRef};

/// Inputs of the verification of chains.
pub(crate) struct Chain<'a> {
    pub(crate) draft_probs: TensorRef<'a>,
    /// Drafted tokens, row-major.
    pub(crate) drafts: Vec<usize>,
    pub(crate) target_probs: TensorRef<'a>,
    pub(crate) rng: PerRow<'a, RngState>,
}

/// A verified chain: how many drafts stand, how many pass by themselves, and the token after them.
#[derive(Clone, Copy, Default)]
struct Verdict {
    emitted: usize,
    accepted: usize,
    next: Option<u32>,
}

pub(crate) fn chain(
    cpu: &Cpu,
    chain: Chain<'_>,
    out: TensorMut<'_>,
    accepted: Option<TensorMut<'_>>,
    emitted: Option<TensorMut<'_>>,
    valid: Option<TensorMut<'_>>,
) -> Result<()> {
    const OP: &str = "chain_speculative_sample";
    let Chain { draft_probs, drafts, target_probs, rng } = chain;
    let &[batch, per_row, vocab] = draft_probs.shape() else { return Ok(()) };
    let (p, q) =
        (Rows::<f32>::new(OP, "draft_probs", draft_probs)?, Rows::<f32>::new(OP, "target_probs", target_probs)?);
    let mut verdicts = vec![Verdict::default(); batch];
    scatter_rows(cpu, vocab, &mut verdicts, |first, out| {
        with_scratch(|scratch| {
            cpu.run(ChainRows { p, q, drafts: &drafts, per_row, rng, first, out, scratch });
        });
    });
    if let Some(accepted) = accepted {
        add_counts(OP, "accepted", accepted, verdicts.iter().map(|v| v.accepted as i64))?;
    }
    if let Some(emitted) = emitted {
        add_counts(OP, "emitted", emitted, verdicts.iter().map(|v| v.emitted as i64))?;
    }
    if let Some(valid) = valid {
        write_valid(OP, valid, verdicts.iter().map(|v| v.next.is_some()))?;
    }
    let drafts = &*drafts;
    let tokens = verdicts.iter().enumerate().flat_map(|(b, v)| {
        (0..=per_row).map(move |i| match i.cmp(&v.emitted) {
            std::cmp::Ordering::Less => drafts[b * per_row + i] as i64,
            std::cmp::Ordering::Equal => i64::from(v.next.unwrap_or(0)),
            std::cmp::Ordering::Greater => -1,
        })
    });
    write_ids(OP, "out", out, tokens)
}

/// Adds to the counts of i32 or i64 that `out` holds.
fn add_counts(
    op: &'static str,
    arg: &'static str,
    out: TensorMut<'_>,
    counts: impl Iterator<Item = i64>,
) -> Result<()> {
    let old = read_ids(op, arg, out.as_ref())?;
    write_ids(op, arg, out, old.into_iter().zip(counts).map(|(old, count)| old.wrapping_add(count)))
}

struct ChainRows<'a> {
    p: Rows<'a, f32>,
    q: Rows<'a, f32>,
    drafts: &'a [usize],
    per_row: usize,
    rng: PerRow<'a, RngState>,
    first: usize,
    out: &'a mut [Verdict],
    scratch: &'a mut Scratch,
}

impl Kernel for ChainRows<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { p, q, drafts, per_row, rng, first, out, scratch: s } = self;
        let mut weights = std::mem::take(&mut s.weights);
        for (b, out) in out.iter_mut().enumerate() {
            let b = first + b;
            let mut draws = 0;
            let mut emitted = 0;
            while emitted < per_row && passes(&p, &q, drafts, per_row, b, emitted, rng.uniform(b, draws)) {
                emitted += 1;
                draws += 1;
            }
            // The draw that rejected was used too.
            draws += u32::from(emitted < per_row);
            let mut accepted = emitted;
            for i in emitted..per_row {
                accepted += usize::from(passes(&p, &q, drafts, per_row, b, i, rng.uniform(b, draws)));
                draws += 1;
            }
            let target = q.row(b * (per_row + 1) + emitted);
            let u = rng.uniform(b, draws);
            let next = if emitted < per_row {
                weights.resize(target.len(), 0.0);
                excess(v, target, p.row(b * per_row + emitted), &mut weights);
                draw_from(v, &weights, target, u, s)
            } else {
                draw_from(v, target, target, u, s)
            };
            *out = Verdict { emitted, accepted, next };
        }
        s.weights = weights;
    }
}

/// Whether draft `i` of request `b` passes with the uniform `u`; the product is exact in f64.
fn passes(p: &Rows<'_, f32>, q: &Rows<'_, f32>, drafts: &[usize], per_row: usize, b: usize, i: usize, u: f32) -> bool {
    let x = drafts[b * per_row + i];
    let (p, q) = (p.row(b * per_row + i)[x], q.row(b * (per_row + 1) + i)[x]);
    f64::from(u) * f64::from(p) < f64::from(q)
}

/// `out = max(q - p, 0)`; NaN stays.
#[inline(always)]
fn excess<V: Vector>(v: V, q: &[f32], p: &[f32], out: &mut [f32]) {
    let full = out.len() / V::LANES * V::LANES;
    let mut i = 0;
    while i < full {
        v.store(v.max(v.splat(0.0), v.sub(v.load(&q[i..]), v.load(&p[i..]))), &mut out[i..]);
        i += V::LANES;
    }
    for i in full..out.len() {
        let d = q[i] - p[i];
        out[i] = if d < 0.0 { 0.0 } else { d };
    }
}

/// Draws from `weights`, or from `target` where they are all zero; `None` if that is no distribution.
#[inline(always)]
fn draw_from<V: Vector>(v: V, weights: &[f32], target: &[f32], u: f32, s: &mut Scratch) -> Option<u32> {
    let mass = block_sums(v, weights, POSITIVE, &mut s.sums);
    if mass.is_valid() {
        return Some(pick(weights, POSITIVE, &s.sums, mass, u));
    }
    if mass.total != 0.0 {
        return None;
    }
    let mass = block_sums(v, target, POSITIVE, &mut s.sums);
    mass.is_valid().then(|| pick(target, POSITIVE, &s.sums, mass, u))
}

/// Trees of a batch, row-major; links are checked: a walk from the root ends.
pub(crate) struct Forest {
    pub(crate) nodes: usize,
    /// Nodes on a path at most, the root included.
    pub(crate) depth: usize,
    pub(crate) token: Vec<i64>,
    pub(crate) slot: Vec<i64>,
    pub(crate) child: Vec<i64>,
    pub(crate) sibling: Vec<i64>,
}

impl Forest {
    /// Nodes of request `b` that the link of node `i` in `links` leads to, if any.
    fn follow(&self, links: &[i64], b: usize, i: usize) -> Option<usize> {
        usize::try_from(links[b * self.nodes + i]).ok()
    }

    /// The path from the root of request `b` along the first child each that `accept` takes; it is told the last
    /// accepted node and the child.
    fn walk(&self, b: usize, mut accept: impl FnMut(usize, usize) -> bool) -> Vec<usize> {
        let mut path = vec![0];
        let mut last = 0;
        while path.len() < self.depth {
            let mut child = self.follow(&self.child, b, last);
            while let Some(c) = child
                && !accept(last, c)
            {
                child = self.follow(&self.sibling, b, c);
            }
            let Some(c) = child else { break };
            path.push(c);
            last = c;
        }
        path
    }

    /// Writes `[predicts, accept_index, accept_len]` for paths and the tokens after them.
    fn write(&self, op: &'static str, out: [TensorMut<'_>; 3], paths: &[(Vec<usize>, i64)]) -> Result<()> {
        let [predicts, accept_index, accept_len] = out;
        let at = |b: usize, i: usize| b * self.nodes + i;
        let named = paths.iter().enumerate().flat_map(|(b, (path, next))| {
            let after = path.iter().skip(1).map(move |&i| self.token[at(b, i)]).chain([*next]);
            path.iter().map(move |&i| self.slot[at(b, i)] as usize).zip(after)
        });
        let stride = predicts.strides()[0];
        if predicts.dtype() == DType::I64 {
            let mut predicts = predicts.typed::<i64>(op, "predicts")?;
            named.for_each(|(slot, token)| predicts.data()[slot * stride] = token);
        } else {
            let mut predicts = predicts.typed::<i32>(op, "predicts")?;
            named.for_each(|(slot, token)| predicts.data()[slot * stride] = token as i32);
        }
        let index = paths
            .iter()
            .enumerate()
            .flat_map(|(b, (path, _))| (0..self.depth).map(move |j| path.get(j).map_or(-1, |&i| self.slot[at(b, i)])));
        write_ids(op, "accept_index", accept_index, index)?;
        write_ids(op, "accept_len", accept_len, paths.iter().map(|(path, _)| path.len() as i64 - 1))
    }
}

/// Uniforms of the verification of trees.
pub(crate) enum Uniforms<'a> {
    Rng(PerRow<'a, RngState>),
    Given { nodes: Vec<f32>, last: Vec<f32> },
}

/// Inputs of the verification of trees.
pub(crate) struct TreeSample<'a> {
    pub(crate) forest: Forest,
    pub(crate) target_probs: TensorRef<'a>,
    pub(crate) threshold_single: f32,
    pub(crate) threshold_acc: f32,
    pub(crate) coins: Uniforms<'a>,
}

pub(crate) fn tree(
    cpu: &Cpu,
    sample: TreeSample<'_>,
    out: [TensorMut<'_>; 3],
    valid: Option<TensorMut<'_>>,
) -> Result<()> {
    const OP: &str = "tree_speculative_sample";
    let &[batch, _, vocab] = sample.target_probs.shape() else { return Ok(()) };
    let q = Rows::<f32>::new(OP, "target_probs", sample.target_probs)?;
    let mut verdicts = vec![(Vec::new(), None); batch];
    scatter_rows(cpu, vocab, &mut verdicts, |first, out| {
        with_scratch(|scratch| cpu.run(TreeRows { sample: &sample, q, first, out, scratch }));
    });
    if let Some(valid) = valid {
        write_valid(OP, valid, verdicts.iter().map(|(_, next)| next.is_some()))?;
    }
    let paths: Vec<_> = verdicts.into_iter().map(|(path, next)| (path, i64::from(next.unwrap_or(0)))).collect();
    sample.forest.write(OP, out, &paths)
}

struct TreeRows<'a> {
    sample: &'a TreeSample<'a>,
    q: Rows<'a, f32>,
    first: usize,
    out: &'a mut [(Vec<usize>, Option<u32>)],
    scratch: &'a mut Scratch,
}

impl Kernel for TreeRows<'_> {
    type Out = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { sample, q, first, out, scratch: s } = self;
        let TreeSample { forest, threshold_single, threshold_acc, coins, .. } = sample;
        let mut weights = std::mem::take(&mut s.weights);
        let mut rejected = Vec::new();
        for (b, out) in out.iter_mut().enumerate() {
            let b = first + b;
            let coin = |i: usize| match coins {
                Uniforms::Rng(rng) => rng.uniform(b, i as u32),
                Uniforms::Given { nodes, .. } => nodes[b * forest.nodes + i],
            };
            let mut sum = 0.0;
            rejected.clear();
            let path = forest.walk(b, |last, child| {
                let token = forest.token[b * forest.nodes + child] as usize;
                let prob = q.row(b * forest.nodes + last)[token];
                sum += f64::from(prob);
                let accepted =
                    f64::from(coin(last)) < sum / f64::from(threshold_acc.max(1e-9)) || prob >= *threshold_single;
                if accepted {
                    sum = 0.0;
                    rejected.clear();
                } else {
                    rejected.push(token);
                }
                accepted
            });
            let target = q.row(b * forest.nodes + path.last().copied().unwrap_or(0));
            let u = match coins {
                Uniforms::Rng(rng) => rng.uniform(b, forest.nodes as u32),
                Uniforms::Given { last, .. } => last[b],
            };
            let next = if rejected.is_empty() {
                draw_from(v, target, target, u, s)
            } else {
                weights.clear();
                weights.extend_from_slice(target);
                for &token in &rejected {
                    weights[token] = 0.0;
                }
                draw_from(v, &weights, target, u, s)
            };
            *out = (path, next);
        }
        s.weights = weights;
    }
}

pub(crate) fn greedy(forest: Forest, target_tokens: TensorRef<'_>, out: [TensorMut<'_>; 3]) -> Result<()> {
    const OP: &str = "verify_tree_greedy";
    let target = read_ids(OP, "target_tokens", target_tokens)?;
    let paths: Vec<_> = (0..target_tokens.shape()[0])
        .map(|b| {
            let at = |i: usize| b * forest.nodes + i;
            let path = forest.walk(b, |last, child| forest.token[at(child)] == target[at(last)]);
            let next = target[at(path.last().copied().unwrap_or(0))];
            (path, next)
        })
        .collect();
    forest.write(OP, out, &paths)
}
