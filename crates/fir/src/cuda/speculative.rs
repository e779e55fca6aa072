//! Speculative decoding: which instantiation of `kernels/speculative.cuh`.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::params::{Address, params};
use super::rows::Rows;
use super::sampling::{RngParams, Team, is_wide, write_vector};
use crate::error::{Error, Result};
use crate::filters::PerRow;
use crate::philox::RngState;
use crate::tensor::{DType, TensorMut, TensorRef};

params! {
    struct ChainParams = "fir::ChainParams" {
        draft_probs: Address,
        target_probs: Address,
        draft_tokens: Address,
        out: Address,
        accepted: Address,
        emitted: Address,
        valid: Address,
        p_stride: [u64; 2],
        q_stride: [u64; 2],
        token_stride: [u64; 2],
        out_stride: [u64; 2],
        accepted_stride: u64,
        emitted_stride: u64,
        valid_stride: u64,
        n: u32,
        drafts: u32,
        wide_tokens: u32,
        wide_out: u32,
        wide_accepted: u32,
        wide_emitted: u32,
        rng: RngParams,
    }
}

params! {
    struct TreeParams = "fir::TreeParams" {
        tokens: Address,
        slots: Address,
        child: Address,
        sibling: Address,
        target_probs: Address,
        target_tokens: Address,
        coins: Address,
        last_coin: Address,
        predicts: Address,
        accept_index: Address,
        accept_len: Address,
        valid: Address,
        /// Of tokens, slots, child, sibling and target_tokens: two each.
        stride: [u64; 10],
        q_stride: [u64; 2],
        coin_stride: [u64; 2],
        last_coin_stride: u64,
        predicts_stride: u64,
        index_stride: [u64; 2],
        len_stride: u64,
        valid_stride: u64,
        total: u64,
        n: u32,
        nodes: u32,
        depth: u32,
        batch: u32,
        wide: [u32; 5],
        wide_predicts: u32,
        wide_index: u32,
        wide_len: u32,
        single: f32,
        acc: f32,
        rng: RngParams,
    }
}

fn chain_source(resident: bool) -> Source {
    Source::new::<ChainParams>("speculative.cuh", format!("fir::chain<{resident}>"))
}

fn tree_source(resident: bool) -> Source {
    Source::new::<TreeParams>("speculative.cuh", format!("fir::tree<{resident}>"))
}

fn greedy_source() -> Source {
    Source::new::<TreeParams>("speculative.cuh", "fir::tree_greedy".into())
}

/// Every instantiation that the operators may choose.
pub(super) fn kernels() -> Vec<Source> {
    let both = [false, true];
    [greedy_source()].into_iter().chain(both.map(chain_source)).chain(both.map(tree_source)).collect()
}

/// Strides of the first two axes.
fn strides(strides: &[usize]) -> [u64; 2] {
    [strides[0] as u64, strides[1] as u64]
}

/// A size that kernels count in 32 bits.
fn count(op: &'static str, arg: &'static str, n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) if n <= i32::MAX as u32 => Ok(n),
        _ => Err(Error::value(op, arg, n, format!("at most {} on CUDA", i32::MAX))),
    }
}

/// Chains of drafts, and where the verdict goes.
pub(crate) struct Chain<'a> {
    pub(crate) draft_probs: TensorRef<'a>,
    pub(crate) draft_tokens: TensorRef<'a>,
    pub(crate) target_probs: TensorRef<'a>,
    pub(crate) rng: PerRow<'a, RngState>,
    pub(crate) out: TensorMut<'a>,
    pub(crate) accepted: Option<TensorMut<'a>>,
    pub(crate) emitted: Option<TensorMut<'a>>,
    pub(crate) valid: Option<TensorMut<'a>>,
}

pub(crate) fn chain<'a>(gpu: &'a Gpu, args: Chain<'a>) -> Result<()> {
    const OP: &str = "chain_speculative_sample";
    let Chain { draft_probs: p, draft_tokens, target_probs: q, rng, out, accepted, emitted, valid } = args;
    Rows::new(OP, "draft_probs", p.layout(), DType::F32)?;
    Rows::new(OP, "target_probs", q.layout(), DType::F32)?;
    let (batch, drafts, vocab) = (p.shape()[0], p.shape()[1], p.shape()[2]);
    if vocab == 0 && drafts > 0 && batch > 0 {
        return Err(Error::value(OP, "vocab", 0, "1 or more, for the drafts"));
    }
    let [wide_accepted, wide_emitted] = [&accepted, &emitted].map(|x| x.as_ref().map_or(0, |x| is_wide(x.dtype())));
    let (wide_tokens, wide_out) = (is_wide(draft_tokens.dtype()), is_wide(out.dtype()));
    let (p_stride, q_stride) = (strides(p.strides()), strides(q.strides()));
    let (token_stride, out_stride) = (strides(draft_tokens.strides()), strides(out.strides()));
    let mut call = Call::new(gpu, OP);
    let (draft_probs, target_probs) = (call.read("draft_probs", p)?, call.read("target_probs", q)?);
    let (draft_tokens, out) = (call.read("draft_tokens", draft_tokens)?, call.write("out", out)?);
    let (accepted, accepted_stride) = write_vector(&mut call, "accepted", accepted)?;
    let (emitted, emitted_stride) = write_vector(&mut call, "emitted", emitted)?;
    let (valid, valid_stride) = write_vector(&mut call, "valid", valid)?;
    if batch == 0 {
        return call.finish();
    }
    let team = Team::new(gpu, vocab, 0);
    let params = ChainParams {
        draft_probs,
        target_probs,
        draft_tokens,
        out,
        accepted,
        emitted,
        valid,
        p_stride,
        q_stride,
        token_stride,
        out_stride,
        accepted_stride,
        emitted_stride,
        valid_stride,
        n: vocab as u32,
        drafts: count(OP, "drafts", drafts)?,
        wide_tokens,
        wide_out,
        wide_accepted,
        wide_emitted,
        rng: RngParams::new(&mut call, "rng", rng)?,
    };
    call.launch(&*gpu.kernel(chain_source(team.resident))?, team.grid(OP, batch)?, &params)?;
    call.finish()
}

/// Trees of drafts, `[batch, nodes]` each.
#[derive(Clone, Copy)]
pub(crate) struct Tree<'a> {
    pub(crate) tokens: TensorRef<'a>,
    pub(crate) slots: TensorRef<'a>,
    pub(crate) child: TensorRef<'a>,
    pub(crate) sibling: TensorRef<'a>,
}

/// Where the verdict on trees goes.
pub(crate) struct TreeOut<'a> {
    pub(crate) predicts: TensorMut<'a>,
    pub(crate) accept_index: TensorMut<'a>,
    pub(crate) accept_len: TensorMut<'a>,
}

/// Uniforms of the verification of trees.
#[expect(clippy::large_enum_variant, reason = "one per call, on the stack")]
pub(crate) enum Uniforms<'a> {
    Rng(PerRow<'a, RngState>),
    Given { nodes: TensorRef<'a>, last: TensorRef<'a> },
}

/// What the verification of trees by probabilities takes.
pub(crate) struct TreeSample<'a> {
    pub(crate) target_probs: TensorRef<'a>,
    pub(crate) threshold_single: f32,
    pub(crate) threshold_acc: f32,
    pub(crate) coins: Uniforms<'a>,
    pub(crate) valid: Option<TensorMut<'a>>,
}

/// The parameters that both verifications have.
fn tree_params<'a>(call: &mut Call<'a>, tree: Tree<'a>, out: TreeOut<'a>) -> Result<TreeParams> {
    let op = call.op();
    let Tree { tokens, slots, child, sibling } = tree;
    let TreeOut { predicts, accept_index, accept_len } = out;
    let (batch, nodes, total) = (tokens.shape()[0], tokens.shape()[1], predicts.shape()[0]);
    if total == 0 && batch > 0 {
        return Err(Error::value(op, "predicts", "0 entries", "one for each node of a path"));
    }
    let mut params = TreeParams {
        predicts_stride: predicts.strides()[0] as u64,
        index_stride: strides(accept_index.strides()),
        len_stride: accept_len.strides()[0] as u64,
        total: total as u64,
        nodes: count(op, "nodes", nodes)?,
        depth: count(op, "depth", accept_index.shape()[1])?,
        batch: count(op, "batch", batch)?,
        wide_predicts: is_wide(predicts.dtype()),
        wide_index: is_wide(accept_index.dtype()),
        wide_len: is_wide(accept_len.dtype()),
        ..bytemuck::Zeroable::zeroed()
    };
    for (i, x) in [tokens, slots, child, sibling].into_iter().enumerate() {
        params.stride[2 * i..][..2].copy_from_slice(&strides(x.strides()));
        params.wide[i] = is_wide(x.dtype());
    }
    params.tokens = call.read("tokens", tokens)?;
    params.slots = call.read("retrieve_index", slots)?;
    params.child = call.read("next_token", child)?;
    params.sibling = call.read("next_sibling", sibling)?;
    params.predicts = call.write("predicts", predicts)?;
    params.accept_index = call.write("accept_index", accept_index)?;
    params.accept_len = call.write("accept_len", accept_len)?;
    Ok(params)
}

pub(crate) fn tree<'a>(gpu: &'a Gpu, tree: Tree<'a>, sample: TreeSample<'a>, out: TreeOut<'a>) -> Result<()> {
    const OP: &str = "tree_speculative_sample";
    let TreeSample { target_probs: q, threshold_single, threshold_acc, coins, valid } = sample;
    Rows::new(OP, "target_probs", q.layout(), DType::F32)?;
    let (batch, nodes, vocab) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    let mut call = Call::new(gpu, OP);
    let mut params = tree_params(&mut call, tree, out)?;
    (params.single, params.acc, params.n) = (threshold_single, threshold_acc, vocab as u32);
    params.q_stride = strides(q.strides());
    params.target_probs = call.read("target_probs", q)?;
    (params.valid, params.valid_stride) = write_vector(&mut call, "valid", valid)?;
    match coins {
        Uniforms::Rng(rng) => params.rng = RngParams::new(&mut call, "coins", rng)?,
        Uniforms::Given { nodes, last } => {
            (params.coin_stride, params.last_coin_stride) = (strides(nodes.strides()), last.strides()[0] as u64);
            params.coins = call.read("coins.nodes", nodes)?;
            params.last_coin = call.read("coins.last", last)?;
        }
    }
    if batch == 0 {
        return call.finish();
    }
    // Rejected tokens stand before the row.
    let most = gpu.properties().shared_per_block as usize / 8;
    if nodes > most {
        return Err(Error::value(OP, "nodes", nodes, format!("at most {most} on this device")));
    }
    let team = Team::new(gpu, vocab, (4 * nodes).next_multiple_of(16));
    call.launch(&*gpu.kernel(tree_source(team.resident))?, team.grid(OP, batch)?, &params)?;
    call.finish()
}

pub(crate) fn greedy<'a>(gpu: &'a Gpu, tree: Tree<'a>, target_tokens: TensorRef<'a>, out: TreeOut<'a>) -> Result<()> {
    const THREADS: u32 = 64;
    let mut call = Call::new(gpu, "verify_tree_greedy");
    let mut params = tree_params(&mut call, tree, out)?;
    params.stride[8..].copy_from_slice(&strides(target_tokens.strides()));
    params.wide[4] = is_wide(target_tokens.dtype());
    params.target_tokens = call.read("target_tokens", target_tokens)?;
    if params.batch > 0 {
        let grid = Grid::new(params.batch.div_ceil(THREADS), THREADS);
        call.launch(&*gpu.kernel(greedy_source())?, grid, &params)?;
    }
    call.finish()
}
