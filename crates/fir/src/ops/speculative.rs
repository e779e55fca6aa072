//! Speculative decoding: which drafted tokens stand, and the token after the last of them.
//!
//! A verified row gives what sampling from the target's distributions would have given: tokens are accepted with the
//! probability that the target has for them, and after the first rejection a token is drawn from what the accepted
//! cases left of the target's distribution. Draws and rows that are no distribution are as in [`super::sampling`]; so are
//! ids in a device's memory, and a link to what is no node there counts as none.

use super::sampling::{PerRow, RngState, check_dtype, check_id_type, check_ids, check_rows, check_vocab};
#[cfg(feature = "cuda")]
use super::sampling::{check_host_ids, on_host};
use crate::cpu;
use crate::cpu::speculative::{Forest, Uniforms};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{DType, Dims, TensorMut, TensorRef};

/// What [`chain_speculative_sample`] reads and writes.
#[derive(Debug)]
pub struct ChainArgs<'a> {
    /// `[batch, drafts, vocab]`, f32: the distributions that the drafts were drawn from; rows contiguous
    pub draft_probs: TensorRef<'a>,
    /// `[batch, drafts]`, i32 or i64
    pub draft_tokens: TensorRef<'a>,
    /// `[batch, drafts + 1, vocab]`, f32: the target's distribution at each draft and after the last; rows contiguous
    pub target_probs: TensorRef<'a>,
    /// The uniforms of a row are its draws 0, 1, …, in the order in which they are used.
    pub rng: PerRow<'a, RngState>,
    /// `[batch, drafts + 1]`, i32 or i64
    pub out: TensorMut<'a>,
    /// `[batch]`, i32 or i64: the number of drafts that pass the test, each taken by itself, is added.
    pub accepted: Option<TensorMut<'a>>,
    /// `[batch]`, i32 or i64: the number of drafts in `out` is added.
    pub emitted: Option<TensorMut<'a>>,
    /// `[batch]`, bool: whether what the last token was drawn from was a distribution; written when given.
    pub valid: Option<TensorMut<'a>>,
}

/// Verifies a chain of drafted tokens for each request and draws the token after the accepted ones.
///
/// With `x = draft_tokens[b, i]`, `p = draft_probs[b, i]`, `q = target_probs[b, i]` and a uniform `u` each:
///
/// 1. For `i = 0, 1, …` draft `i` is accepted if `u · p[x] < q[x]`; the first that is not ends it. Let there be `n`.
/// 2. Drafts `n..drafts` are tested once more with new uniforms, draft `n` included; `accepted` grows by `n` and those
///    that pass, `emitted` by `n`.
/// 3. One token is drawn from `max(q - p, 0)` at `i = n`, or from `q` if all drafts were accepted.
///
/// `out[b]` is the accepted drafts, the drawn token, then -1. Where rounding left nothing of `q - p`, the token is
/// drawn from `q`.
pub fn chain_speculative_sample(exec: &Exec, args: ChainArgs<'_>) -> Result<()> {
    const OP: &str = "chain_speculative_sample";
    let mut dims = Dims::of(OP);
    dims.bind("draft_probs", &args.draft_probs, &["batch", "drafts", "vocab"])?;
    dims.bind("draft_tokens", &args.draft_tokens, &["batch", "drafts"])?;
    dims.axis("draft_probs", "drafts + 1", dims.get("drafts").saturating_add(1))?;
    dims.bind("target_probs", &args.target_probs, &["batch", "drafts + 1", "vocab"])?;
    dims.bind("out", &args.out, &["batch", "drafts + 1"])?;
    check_dtype(OP, "draft_probs", args.draft_probs.dtype(), DType::F32)?;
    check_dtype(OP, "target_probs", args.target_probs.dtype(), DType::F32)?;
    check_id_type(OP, "out", args.out.dtype())?;
    for (arg, count) in [("accepted", &args.accepted), ("emitted", &args.emitted)] {
        if let Some(count) = count {
            dims.bind(arg, count, &["batch"])?;
            check_id_type(OP, arg, count.dtype())?;
        }
    }
    if let Some(valid) = &args.valid {
        dims.bind("valid", valid, &["batch"])?;
        check_dtype(OP, "valid", valid.dtype(), DType::Bool)?;
    }
    check_vocab(OP, dims.get("vocab"))?;
    check_rows(OP, "rng", args.rng, dims.get("batch"), "any", |_| true)?;
    let ChainArgs { draft_probs, draft_tokens, target_probs, rng, out, accepted, emitted, valid } = args;
    match exec {
        Exec::Cpu(cpu) => {
            let drafts = check_ids(OP, "draft_tokens", draft_tokens, dims.get("vocab"))?;
            let chain = cpu::speculative::Chain { draft_probs, drafts, target_probs, rng };
            cpu::speculative::chain(cpu, chain, out, accepted, emitted, valid)
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            check_host_ids(OP, "draft_tokens", draft_tokens, dims.get("vocab"))?;
            let chain = cuda::speculative::Chain {
                draft_probs,
                draft_tokens,
                target_probs,
                rng,
                out,
                accepted,
                emitted,
                valid,
            };
            cuda::speculative::chain(gpu, chain)
        }
    }
}

/// Trees of drafted tokens, one per request, each node with its first child and its next sibling.
///
/// All four are `[batch, nodes]`, i32 or i64. Node 0 is the root: the last token that stands already. No node may be
/// reached by two links, and the root by none. Nodes that no link reaches are not looked at.
#[derive(Clone, Copy, Debug)]
pub struct Tree<'a> {
    /// Token of each node.
    pub tokens: TensorRef<'a>,
    /// Entry of the flat outputs for each node.
    pub retrieve_index: TensorRef<'a>,
    /// First child of each node, -1 for none.
    pub next_token: TensorRef<'a>,
    /// Next sibling of each node, -1 for none.
    pub next_sibling: TensorRef<'a>,
}

/// What the verification of trees writes, all i32 or i64.
#[derive(Debug)]
pub struct TreeOut<'a> {
    /// `[total]`: `predicts[retrieve_index[b, i]]` becomes the token after node `i`, for each node on the accepted
    /// path; other entries stay as they are.
    pub predicts: TensorMut<'a>,
    /// `[batch, depth]`: `retrieve_index` of the nodes on the accepted path, the root first, then -1. At most
    /// `depth - 1` drafts are accepted.
    pub accept_index: TensorMut<'a>,
    /// `[batch]`: number of accepted drafts.
    pub accept_len: TensorMut<'a>,
}

/// Where the uniforms of a tree's verification come from.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "one per call, on the stack")]
pub enum Coins<'a> {
    /// Node `i`'s coin is draw `i` of the request, the last one is draw `nodes`.
    Rng(PerRow<'a, RngState>),
    /// Given, f32 in `[0, 1]`.
    Given {
        /// `[batch, nodes]`
        nodes: TensorRef<'a>,
        /// `[batch]`: for the token after the accepted path
        last: TensorRef<'a>,
    },
}

/// What [`tree_speculative_sample`] reads and writes.
#[derive(Debug)]
pub struct TreeArgs<'a> {
    /// The drafts.
    pub tree: Tree<'a>,
    /// `[batch, nodes, vocab]`, f32: the target's distribution after each node, summing to 1; rows contiguous
    pub target_probs: TensorRef<'a>,
    /// A draft at least this probable is accepted whatever the coin, in `[0, 1]`; 1 leaves the target's distribution
    /// as it is.
    pub threshold_single: f32,
    /// The sums of probabilities are divided by this, in `[0, 1]` (below 1e-9 taken as that); 1 leaves the target's
    /// distribution as it is.
    pub threshold_acc: f32,
    /// Uniform numbers.
    pub coins: Coins<'a>,
    /// The verdict.
    pub out: TreeOut<'a>,
    /// `[batch]`, bool: whether what the last token was drawn from was a distribution; written when given.
    pub valid: Option<TensorMut<'a>>,
}

/// Verifies a tree of drafted tokens for each request against the target's distributions alone, and draws the token
/// after the accepted path.
///
/// At the last accepted node `i` (the root at first), with `q = target_probs[b, i]` and `c` the coin of `i`:
///
/// 1. The children of `i` are tried in order; `s` is the sum of `q` at the tokens tried so far, this one included. Child
///    `j` of token `x` is accepted if `c < s / threshold_acc` or `q[x] >= threshold_single`, and is then the last
///    accepted node.
/// 2. When none is, or `depth - 1` drafts are accepted, a token is drawn, by the last coin, from `q` without the tokens
///    tried at `i` in vain; from all of `q` where nothing else is left of it.
///
/// With both thresholds 1 the tokens are distributed as the target's.
pub fn tree_speculative_sample(exec: &Exec, args: TreeArgs<'_>) -> Result<()> {
    const OP: &str = "tree_speculative_sample";
    let TreeArgs { tree, target_probs, threshold_single, threshold_acc, coins, out, valid } = args;
    let mut dims = Dims::of(OP);
    dims.bind("target_probs", &target_probs, &["batch", "nodes", "vocab"])?;
    check_dtype(OP, "target_probs", target_probs.dtype(), DType::F32)?;
    let vocab = dims.get("vocab");
    check_vocab(OP, vocab)?;
    check_tree(OP, &mut dims, tree, &out)?;
    let want = "a number in [0, 1]";
    for (arg, x) in [("threshold_single", threshold_single), ("threshold_acc", threshold_acc)] {
        check_rows(OP, arg, PerRow::One(x), 1, want, |x| (0.0..=1.0).contains(x))?;
    }
    if let Some(valid) = &valid {
        dims.bind("valid", valid, &["batch"])?;
        check_dtype(OP, "valid", valid.dtype(), DType::Bool)?;
    }
    match coins {
        Coins::Rng(rng) => check_rows(OP, "coins", rng, dims.get("batch"), "any", |_| true)?,
        Coins::Given { nodes, last } => {
            dims.bind("coins.nodes", &nodes, &["batch", "nodes"])?.bind("coins.last", &last, &["batch"])?;
            check_dtype(OP, "coins.nodes", nodes.dtype(), DType::F32)?;
            check_dtype(OP, "coins.last", last.dtype(), DType::F32)?;
        }
    }
    match exec {
        Exec::Cpu(cpu) => {
            let forest = read_tree(OP, &dims, tree, vocab)?;
            let coins = match coins {
                Coins::Rng(rng) => Uniforms::Rng(rng),
                Coins::Given { nodes, last } => Uniforms::Given {
                    nodes: read_coins(OP, "coins.nodes", nodes)?,
                    last: read_coins(OP, "coins.last", last)?,
                },
            };
            let sample = cpu::speculative::TreeSample { forest, target_probs, threshold_single, threshold_acc, coins };
            let TreeOut { predicts, accept_index, accept_len } = out;
            cpu::speculative::tree(cpu, sample, [predicts, accept_index, accept_len], valid)
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let tree = tree_on_cuda(OP, &dims, tree, vocab)?;
            let coins = match coins {
                Coins::Rng(rng) => cuda::speculative::Uniforms::Rng(rng),
                Coins::Given { nodes, last } => {
                    for (arg, coins) in [("coins.nodes", nodes), ("coins.last", last)] {
                        if on_host(&[Some(coins)]) {
                            read_coins(OP, arg, coins)?;
                        }
                    }
                    cuda::speculative::Uniforms::Given { nodes, last }
                }
            };
            let sample = cuda::speculative::TreeSample { target_probs, threshold_single, threshold_acc, coins, valid };
            cuda::speculative::tree(gpu, tree, sample, out_on_cuda(out))
        }
    }
}

/// Coins, each in `[0, 1]`.
fn read_coins(op: &'static str, arg: &'static str, coins: TensorRef<'_>) -> Result<Vec<f32>> {
    let coins = coins.to_f32_vec()?;
    check_rows(op, arg, PerRow::Each(&coins), coins.len(), "a number in [0, 1]", |c| (0.0..=1.0).contains(c))?;
    Ok(coins)
}

/// Verifies a tree of drafted tokens for each request against the target's most probable tokens.
///
/// From the root on, the first child whose token is `target_tokens[b, i]`, `i` being the last accepted node, is accepted;
/// the token after the path is `target_tokens[b, i]` of its last node.
///
/// * `target_tokens`: `[batch, nodes]`, i32 or i64
pub fn verify_tree_greedy(exec: &Exec, tree: Tree<'_>, target_tokens: TensorRef<'_>, out: TreeOut<'_>) -> Result<()> {
    const OP: &str = "verify_tree_greedy";
    let mut dims = Dims::of(OP);
    check_tree(OP, &mut dims, tree, &out)?;
    dims.bind("target_tokens", &target_tokens, &["batch", "nodes"])?;
    check_id_type(OP, "target_tokens", target_tokens.dtype())?;
    match exec {
        Exec::Cpu(_) => {
            let forest = read_tree(OP, &dims, tree, i32::MAX as usize)?;
            let TreeOut { predicts, accept_index, accept_len } = out;
            cpu::speculative::greedy(forest, target_tokens, [predicts, accept_index, accept_len])
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let tree = tree_on_cuda(OP, &dims, tree, i32::MAX as usize)?;
            cuda::speculative::greedy(gpu, tree, target_tokens, out_on_cuda(out))
        }
    }
}

/// The trees for a kernel, checked as far as the host can see them.
#[cfg(feature = "cuda")]
fn tree_on_cuda<'a>(
    op: &'static str,
    dims: &Dims,
    tree: Tree<'a>,
    vocab: usize,
) -> Result<cuda::speculative::Tree<'a>> {
    let Tree { tokens, retrieve_index: slots, next_token: child, next_sibling: sibling } = tree;
    if on_host(&[tokens, slots, child, sibling].map(Some)) {
        read_tree(op, dims, tree, vocab)?;
    }
    Ok(cuda::speculative::Tree { tokens, slots, child, sibling })
}

#[cfg(feature = "cuda")]
fn out_on_cuda(out: TreeOut<'_>) -> cuda::speculative::TreeOut<'_> {
    let TreeOut { predicts, accept_index, accept_len } = out;
    cuda::speculative::TreeOut { predicts, accept_index, accept_len }
}

/// Checks shapes and types of trees and of the verdict on them.
fn check_tree(op: &'static str, dims: &mut Dims, tree: Tree<'_>, out: &TreeOut<'_>) -> Result<()> {
    let axes = ["batch", "nodes"];
    let Tree { tokens, retrieve_index, next_token, next_sibling } = tree;
    dims.bind("tokens", &tokens, &axes)?.bind("retrieve_index", &retrieve_index, &axes)?;
    dims.bind("next_token", &next_token, &axes)?.bind("next_sibling", &next_sibling, &axes)?;
    dims.bind("predicts", &out.predicts, &["total"])?.bind("accept_index", &out.accept_index, &["batch", "depth"])?;
    dims.bind("accept_len", &out.accept_len, &["batch"])?;
    check_id_type(op, "predicts", out.predicts.dtype())?;
    check_id_type(op, "accept_index", out.accept_index.dtype())?;
    check_id_type(op, "accept_len", out.accept_len.dtype())?;
    for (arg, ids) in [
        ("tokens", tokens),
        ("retrieve_index", retrieve_index),
        ("next_token", next_token),
        ("next_sibling", next_sibling),
    ] {
        check_id_type(op, arg, ids.dtype())?;
    }
    for arg in ["nodes", "depth"] {
        if dims.get(arg) == 0 && dims.get("batch") > 0 {
            return Err(Error::value(op, arg, 0, "1 or more"));
        }
    }
    Ok(())
}

/// The trees, which are trees whose ids can be followed.
fn read_tree(op: &'static str, dims: &Dims, tree: Tree<'_>, vocab: usize) -> Result<Forest> {
    let Tree { tokens, retrieve_index, next_token, next_sibling } = tree;
    let (batch, nodes, depth, total) = (dims.get("batch"), dims.get("nodes"), dims.get("depth"), dims.get("total"));
    let ids = |arg, x| cpu::sampling::read_ids(op, arg, x);
    let forest = Forest {
        nodes,
        depth,
        token: ids("tokens", tokens)?,
        slot: ids("retrieve_index", retrieve_index)?,
        child: ids("next_token", next_token)?,
        sibling: ids("next_sibling", next_sibling)?,
    };
    let bad = |arg, got: i64, b: usize, i: usize, want: String| {
        Err(Error::value(op, arg, format!("{got} at [{b}, {i}]"), want))
    };
    // Trees of no request may claim nodes without end.
    let mut reached = vec![false; if batch == 0 { 0 } else { nodes }];
    for b in 0..batch {
        reached.fill(false);
        reached[0] = true;
        for i in 0..nodes {
            for (arg, links) in [("next_token", &forest.child), ("next_sibling", &forest.sibling)] {
                match links[b * nodes + i] {
                    -1 => {}
                    to if !(0..nodes as i64).contains(&to) => {
                        return bad(arg, to, b, i, format!("-1 to {}", nodes - 1));
                    }
                    // Two links to one node, or one to the root, could make a walk endless.
                    to if reached[to as usize] => {
                        return bad(arg, to, b, i, "a node that no other link reaches".into());
                    }
                    to => reached[to as usize] = true,
                }
            }
        }
        for i in (0..nodes).filter(|&i| reached[i]) {
            let (token, slot) = (forest.token[b * nodes + i], forest.slot[b * nodes + i]);
            if i > 0 && !(0..vocab as i64).contains(&token) {
                return bad("tokens", token, b, i, format!("0 or more and less than {vocab}"));
            }
            if !(0..total as i64).contains(&slot) {
                return bad("retrieve_index", slot, b, i, format!("0 or more and less than {total}"));
            }
        }
    }
    Ok(forest)
}
