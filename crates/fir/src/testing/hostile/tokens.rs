//! Sampling, verification of drafts, and the largest of rows.

use super::{Arg, Bytes};
use crate::error::Result;
use crate::exec::Exec;
use crate::filters::{FilterOrder, Filters, PerRow};
use crate::ops::sampling::{self, Draw};
use crate::ops::speculative::{
    ChainArgs, Coins, Tree, TreeArgs, TreeOut, chain_speculative_sample, tree_speculative_sample, verify_tree_greedy,
};
use crate::ops::topk::{self, TopKOrder, TopKPages, TopKRagged};
use crate::philox::RngState;
use crate::tensor::DType;

/// A parameter of rows: mostly one in range for all.
fn per_row<'a, T: Copy>(b: &mut Bytes<'_>, each: &'a [T], one: T) -> PerRow<'a, T> {
    if b.byte() < 128 { PerRow::One(one) } else { PerRow::Each(each) }
}

/// A number in `(0, 1]`, mostly.
fn share(b: &mut Bytes<'_>) -> f32 {
    if b.rarely() { b.f32() } else { f32::from(b.byte()).max(1.0) / 255.0 }
}

/// Values for rows, and one that serves all.
struct Parameters {
    temperatures: Vec<f32>,
    shares: Vec<f32>,
    counts: Vec<u32>,
    states: Vec<RngState>,
}

impl Parameters {
    fn new(b: &mut Bytes<'_>, batch: usize) -> Self {
        let n = batch.min(100) + usize::from(b.rarely());
        Self {
            temperatures: (0..n + 1).map(|_| if b.rarely() { b.f32() } else { share(b) }).collect(),
            shares: (0..n + 1).map(|_| share(b)).collect(),
            counts: (0..n + 1).map(|_| if b.rarely() { b.i32(9) as u32 } else { 1 + u32::from(b.byte()) }).collect(),
            states: (0..n + 1).map(|_| RngState { seed: u64::from(b.byte()), offset: b.size() as u64 }).collect(),
        }
    }

    fn filters(&self, b: &mut Bytes<'_>) -> Filters<'_> {
        let n = self.shares.len() - 1;
        Filters {
            temperature: per_row(b, &self.temperatures[..n], self.temperatures[n]),
            top_k: per_row(b, &self.counts[..n], self.counts[n]),
            top_p: per_row(b, &self.shares[..n], self.shares[n]),
            min_p: if b.byte() < 128 { PerRow::One(0.0) } else { per_row(b, &self.shares[..n], self.shares[n]) },
            order: if b.byte() < 128 { FilterOrder::TopKFirst } else { FilterOrder::Joint },
        }
    }

    fn rng(&self, b: &mut Bytes<'_>) -> PerRow<'_, RngState> {
        let n = self.states.len() - 1;
        per_row(b, &self.states[..n], self.states[n])
    }
}

pub(super) fn sample(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (rows, vocab, kind) = (b.size() % 9, b.size(), b.below(8));
    let dtype = if matches!(kind, 0 | 1 | 6) { b.float() } else { DType::F32 };
    let x = b.tensor(dtype, &[rows, vocab]);
    let batch = if b.byte() < 128 { rows } else { b.below(12) };
    let id = b.int();
    let indices = (batch != rows || b.byte() < 64).then(|| b.ids(id, &[batch], |b, _| b.below(rows) as i64));
    let mut out = b.tensor(id, &[batch]);
    let mut valid = (b.byte() < 128).then(|| b.tensor(DType::Bool, &[batch]));
    let parameters = Parameters::new(b, batch);
    let (f, rng) = (parameters.filters(b), parameters.rng(b));
    let draw = Draw {
        rng,
        indices: indices.as_ref().map(Arg::view).transpose()?,
        out: out.view_mut()?,
        valid: valid.as_mut().map(Arg::view_mut).transpose()?,
    };
    let x = x.view()?;
    let result = match kind {
        0 => sampling::sample(exec, x, f, draw),
        1 => sampling::sample_from_logits(exec, x, f.temperature, draw),
        2 => sampling::sample_from_probs(exec, x, draw),
        3 => sampling::top_k_sample(exec, x, f.top_k, draw),
        4 => sampling::top_p_sample(exec, x, f.top_p, draw),
        5 => sampling::min_p_sample(exec, x, f.min_p, draw),
        6 => sampling::top_k_top_p_sample_from_logits(exec, x, f.top_k, f.top_p, f.order, draw),
        _ => sampling::top_k_top_p_sample(exec, x, f.top_k, f.top_p, f.order, draw),
    };
    out.assert_only_elements_written();
    if let Some(valid) = valid {
        valid.assert_only_elements_written();
    }
    // A dry run draws nothing.
    #[cfg(feature = "cuda")]
    let drawn = !matches!(exec, Exec::Cuda(gpu) if gpu.stream().is_none());
    #[cfg(not(feature = "cuda"))]
    let drawn = true;
    if drawn
        && result.is_ok()
        && let Ok(tokens) = crate::cpu::sampling::read_ids("hostile", "out", out.view()?)
    {
        // A row that is no distribution gives token 0, also where there is no token.
        let vocab = x.shape()[1].max(1);
        assert!(tokens.iter().all(|&t| t >= 0 && (t as usize) < vocab), "{tokens:?} of {vocab}");
    }
    result
}

pub(super) fn renorm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (batch, vocab, kind) = (b.size() % 9, b.size(), b.below(4));
    let dtype = if kind < 2 { b.float() } else { DType::F32 };
    let x = b.tensor(dtype, &[batch, vocab]);
    let mut out = b.tensor(if kind == 0 { DType::F32 } else { dtype }, &[batch, vocab]);
    let parameters = Parameters::new(b, batch);
    let f = parameters.filters(b);
    let result = match kind {
        0 => sampling::softmax(exec, x.view()?, f.temperature, out.view_mut()?),
        1 => sampling::top_k_mask_logits(exec, x.view()?, f.top_k, out.view_mut()?),
        2 => sampling::top_k_renorm(exec, x.view()?, f.top_k, out.view_mut()?),
        _ => sampling::top_p_renorm(exec, x.view()?, f.top_p, out.view_mut()?),
    };
    out.assert_only_elements_written();
    result
}

pub(super) fn chain(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (batch, drafts, vocab, id) = (b.size() % 7, b.below(5), b.size() % 60, b.int());
    let drafts = if b.rarely() { b.size() } else { drafts };
    let draft_probs = b.tensor(DType::F32, &[batch, drafts, vocab]);
    let draft_tokens = b.ids(id, &[batch, drafts], |b, _| b.below(vocab) as i64);
    let target_probs = b.tensor(DType::F32, &[batch, drafts.saturating_add(1), vocab]);
    let mut out = b.tensor(id, &[batch, drafts.saturating_add(1)]);
    let mut counts = [(); 2].map(|()| (b.byte() < 128).then(|| b.tensor(id, &[batch])));
    let mut valid = (b.byte() < 128).then(|| b.tensor(DType::Bool, &[batch]));
    let parameters = Parameters::new(b, batch);
    let [accepted, emitted] = &mut counts;
    let result = chain_speculative_sample(
        exec,
        ChainArgs {
            draft_probs: draft_probs.view()?,
            draft_tokens: draft_tokens.view()?,
            target_probs: target_probs.view()?,
            rng: parameters.rng(b),
            out: out.view_mut()?,
            accepted: accepted.as_mut().map(Arg::view_mut).transpose()?,
            emitted: emitted.as_mut().map(Arg::view_mut).transpose()?,
            valid: valid.as_mut().map(Arg::view_mut).transpose()?,
        },
    );
    out.assert_only_elements_written();
    counts.iter().flatten().for_each(Arg::assert_only_elements_written);
    result
}

pub(super) fn tree(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (batch, nodes, vocab, id) = (b.size() % 5, b.below(9) + 1, b.size() % 40 + 1, b.int());
    let nodes = if b.rarely() { b.size() } else { nodes };
    let shape = [batch, nodes];
    // Chains by default: node i leads to i + 1, as a child or as a sibling.
    let ways: Vec<bool> = (0..9).map(|_| b.byte() < 128).collect();
    let link = |i: usize, sibling: bool| {
        let (node, last) = (i % nodes.max(1), i % nodes.max(1) + 1 == nodes);
        let taken = (ways[node.min(8)] && node > 0) == sibling;
        if last || !taken { -1 } else { node as i64 + 1 }
    };
    let tokens = b.ids(id, &shape, |b, _| b.below(vocab) as i64);
    let retrieve_index = b.ids(id, &shape, |_, i| i as i64);
    let next_token = b.ids(id, &shape, |_, i| link(i, false));
    let next_sibling = b.ids(id, &shape, |_, i| link(i, true));
    let tree = Tree {
        tokens: tokens.view()?,
        retrieve_index: retrieve_index.view()?,
        next_token: next_token.view()?,
        next_sibling: next_sibling.view()?,
    };
    let depth = b.below(6) + 1;
    let mut outs = [
        b.tensor(id, &[batch.saturating_mul(nodes).min(1 << 40)]),
        b.tensor(id, &[batch, depth]),
        b.tensor(id, &[batch]),
    ];
    let [predicts, accept_index, accept_len] = &mut outs;
    let out = TreeOut {
        predicts: predicts.view_mut()?,
        accept_index: accept_index.view_mut()?,
        accept_len: accept_len.view_mut()?,
    };
    let result = if b.byte() < 100 {
        let target = b.ids(id, &shape, |b, _| b.below(vocab) as i64);
        verify_tree_greedy(exec, tree, target.view()?, out)
    } else {
        let target_probs = b.tensor(DType::F32, &[batch, nodes, vocab]);
        let parameters = Parameters::new(b, batch);
        let coins = (b.tensor(DType::F32, &shape), b.tensor(DType::F32, &[batch]));
        let coins = if b.byte() < 200 {
            Coins::Rng(parameters.rng(b))
        } else {
            Coins::Given { nodes: coins.0.view()?, last: coins.1.view()? }
        };
        let (threshold_single, threshold_acc, target_probs) = (share(b), share(b), target_probs.view()?);
        let args = TreeArgs { tree, target_probs, threshold_single, threshold_acc, coins, out, valid: None };
        tree_speculative_sample(exec, args)
    };
    outs.iter().for_each(Arg::assert_only_elements_written);
    result
}

pub(super) fn top_k(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, rows, n, k, id) = (b.float(), b.size() % 12, b.size(), b.size(), b.int());
    let rows = if b.rarely() { b.size() } else { rows };
    let x = b.tensor(dtype, &[rows, n]);
    let (mut values, mut indices) = (b.tensor(dtype, &[rows, k]), b.tensor(id, &[rows, k]));
    let order = [TopKOrder::Place, TopKOrder::Value][b.below(2)];
    let result = topk::top_k(exec, x.view()?, order, values.view_mut()?, indices.view_mut()?);
    values.assert_only_elements_written();
    indices.assert_only_elements_written();
    result
}

pub(super) fn transform(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, rows, max_len, k) = (b.float(), b.size() % 8, b.size() % 70 + 1, b.size() % 30);
    let rows = if b.rarely() { b.size() } else { rows };
    let scores = b.tensor(dtype, &[rows, max_len]);
    let lens = b.ids(DType::I32, &[rows], |b, _| b.below(max_len + 1) as i64);
    let starts = (b.byte() < 64).then(|| b.ids(DType::I32, &[rows], |_, _| 0));
    let mut out = b.tensor(DType::I32, &[rows, k]);
    let starts = starts.as_ref().map(Arg::view).transpose()?;
    if b.byte() < 100 {
        let offsets = b.ids(DType::I32, &[rows], |b, _| i64::from(b.byte()) * 1000);
        let (scores, lens, offsets) = (scores.view()?, lens.view()?, offsets.view()?);
        let args = TopKRagged { scores, lens, starts, offsets, out: out.view_mut()? };
        let result = topk::top_k_ragged_transform(exec, args);
        out.assert_only_elements_written();
        return result;
    }
    let page_size = if b.rarely() { b.size() } else { 1 << b.below(5) };
    let requests = (b.byte() < 128).then(|| b.ids(DType::I32, &[rows], |b, _| b.below(rows) as i64));
    let page_starts = (starts.is_some() || b.byte() < 64).then(|| b.ids(DType::I32, &[rows], |_, _| 0));
    let page_table = b.ids(DType::I32, &[rows, max_len], |b, _| i64::from(b.byte()));
    let mut raw = (b.byte() < 128).then(|| b.tensor(DType::I32, &[rows, k]));
    let args = TopKPages {
        scores: scores.view()?,
        lens: lens.view()?,
        starts,
        page_table: page_table.view()?,
        requests: requests.as_ref().map(Arg::view).transpose()?,
        page_starts: page_starts.as_ref().map(Arg::view).transpose()?,
        page_size,
        out: out.view_mut()?,
        raw: raw.as_mut().map(Arg::view_mut).transpose()?,
    };
    let result = topk::top_k_page_table_transform(exec, args);
    out.assert_only_elements_written();
    result
}
