//! [`Experts`]: a mixture of experts, whose weights are dense tensors or blocks.

use fir::moe::{Dispatch, FfnArgs, Gate, RouteArgs, moe_ffn, route};
use fir::{DType, Exec, Tensor, TensorMut, TensorRef, gemm};
use half::bf16;

use super::linear::{Linear, dense};
use crate::error::{Error, Result};
use crate::models::config::{ModelConfig, MoeConfig};
use crate::runner::activate;
use crate::weights::{Kind, Store, Stored};

/// The experts of one layer.
pub(crate) struct Experts {
    config: MoeConfig,
    /// `[experts, hidden]`, f32: routing is decided in full precision.
    router: Tensor,
    bias: Option<Tensor>,
    weights: Weights,
    /// The expert of all tokens: gate and up, then down.
    shared: Option<(Linear, Linear)>,
}

enum Weights {
    /// `[experts, 2 * inter, hidden]` and `[experts, hidden, inter]`.
    Dense(Tensor, Tensor),
    /// Gate and up, and down, of each expert.
    Blocks(Vec<(Linear, Linear)>),
}

/// What a layer of experts writes on its way; sized once.
pub(crate) struct Buffers {
    logits: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// Rows of one expert, in and out, and between its products.
    rows: Tensor,
    wide: Tensor,
    inner: Tensor,
}

impl Buffers {
    pub(crate) fn new(config: &ModelConfig, tokens: usize, act: DType, mid: DType) -> Result<Option<Self>> {
        let Some(moe) = config.moe else { return Ok(None) };
        let inter = moe.inter.max(moe.shared);
        Ok(Some(Self {
            logits: vec![0.0; tokens * moe.experts],
            ids: vec![0; tokens * moe.top_k],
            weights: vec![0.0; tokens * moe.top_k],
            rows: Tensor::zeros(act, &[tokens, config.hidden])?,
            wide: Tensor::zeros(mid, &[tokens * 2 * inter])?,
            inner: Tensor::zeros(mid, &[tokens * inter])?,
        }))
    }
}

/// The first `[rows, columns]` of a buffer without axes of its own.
pub(crate) fn matrix(t: &mut Tensor, rows: usize, columns: usize) -> Result<TensorMut<'_>> {
    Ok(match t.dtype() {
        DType::BF16 => TensorMut::new(&mut t.as_mut_slice::<bf16>()?[..rows * columns], &[rows, columns])?,
        _ => TensorMut::new(&mut t.as_mut_slice::<f32>()?[..rows * columns], &[rows, columns])?,
    })
}

impl Experts {
    pub(crate) fn load(exec: &Exec, store: &Store, config: &ModelConfig, i: usize, dtype: DType) -> Result<Self> {
        let Some(moe) = config.moe else { return Err(Error::Config("a layer of experts without any".into())) };
        let (hidden, inter) = (config.hidden, moe.inter);
        let router = store.get(Some(i), "ffn_gate_inp.weight")?;
        router.expect(&[moe.experts, hidden])?;
        let router = dense(&[router], &[moe.experts, hidden], DType::F32)?;
        let bias = if store.is_checkpoint() {
            store.find(Some(i), "ffn_gate_inp.e_score_correction_bias")
        } else {
            store.find(Some(i), "exp_probs_b.bias")
        };
        let bias = bias.map(|b| dense(&[b], &[moe.experts], DType::F32)).transpose()?;
        let of = |what: &str| all_of(store, i, what, moe.experts);
        let (gates, ups, downs) = (of("gate")?, of("up")?, of("down")?);
        for (w, shape) in [(&gates, [inter, hidden]), (&ups, [inter, hidden]), (&downs, [hidden, inter])] {
            w.iter().try_for_each(|s| s.expect(&shape))?;
        }
        let weights = if matches!(downs[0].kind, Kind::Dense(_)) && matches!(gates[0].kind, Kind::Dense(_)) {
            let pairs: Vec<Stored<'_>> = gates.into_iter().zip(ups).flat_map(|(g, u)| [g, u]).collect();
            Weights::Dense(
                dense(&pairs, &[moe.experts, 2 * inter, hidden], dtype)?,
                dense(&downs, &[moe.experts, hidden, inter], dtype)?,
            )
        } else {
            let each = gates.into_iter().zip(ups).zip(downs).map(|((gate, up), down)| {
                Ok((Linear::stack(exec, &[gate, up], hidden, dtype)?, Linear::stack(exec, &[down], inter, dtype)?))
            });
            Weights::Blocks(each.collect::<Result<_>>()?)
        };
        let shared = if moe.shared > 0 {
            let get = |part: &str| store.get(Some(i), part);
            let gate_up = [get("ffn_gate_shexp.weight")?, get("ffn_up_shexp.weight")?];
            let down = Linear::stack(exec, &[get("ffn_down_shexp.weight")?], moe.shared, dtype)?;
            Some((Linear::stack(exec, &gate_up, hidden, dtype)?, down))
        } else {
            None
        };
        Ok(Self { config: moe, router, bias, weights, shared })
    }

    /// `out = Σ weight * expert(x) + shared(x)`; both `[tokens, hidden]`.
    pub(crate) fn run(
        &self,
        exec: &Exec,
        gate: Gate,
        x: TensorRef<'_>,
        b: &mut Buffers,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let (n, hidden) = (x.layout().shape()[0], x.layout().shape()[1]);
        let MoeConfig { experts, top_k, inter, shared, routing, .. } = self.config;
        let logits = &mut b.logits[..n * experts];
        gemm::gemm(exec, x, self.router.view(), TensorMut::new(logits, &[n, experts])?)?;
        let (ids, weights) = (&mut b.ids[..n * top_k], &mut b.weights[..n * top_k]);
        let args = RouteArgs {
            logits: TensorRef::new(logits, &[n, experts])?,
            bias: self.bias.as_ref().map(Tensor::view),
            ids: TensorMut::new(ids, &[n, top_k])?,
            weights: TensorMut::new(weights, &[n, top_k])?,
        };
        route(exec, routing, args)?;
        let (ids, weights) = (TensorRef::new(ids, &[n, top_k])?, TensorRef::new(weights, &[n, top_k])?);
        match &self.weights {
            Weights::Dense(gate_up, down) => {
                let (w_gate_up, w_down) = (gate_up.view().into(), down.view().into());
                moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate, out: out.reborrow() })?;
            }
            Weights::Blocks(list) => {
                let dispatch = Dispatch::new(ids, experts)?;
                zero(out.reborrow())?;
                for (e, (gate_up, down)) in list.iter().enumerate() {
                    let indptr = dispatch.indptr().indptr();
                    let pairs = &dispatch.pairs()[indptr[e] as usize..indptr[e + 1] as usize];
                    if pairs.is_empty() {
                        continue;
                    }
                    let m = pairs.len();
                    gather(x, pairs, top_k, matrix(&mut b.rows, m, hidden)?)?;
                    gate_up.run(exec, matrix(&mut b.rows, m, hidden)?.as_ref(), matrix(&mut b.wide, m, 2 * inter)?)?;
                    activate(exec, gate, matrix(&mut b.wide, m, 2 * inter)?.as_ref(), matrix(&mut b.inner, m, inter)?)?;
                    down.run(exec, matrix(&mut b.inner, m, inter)?.as_ref(), matrix(&mut b.rows, m, hidden)?)?;
                    scatter(matrix(&mut b.rows, m, hidden)?.as_ref(), pairs, top_k, &b.weights, out.reborrow())?;
                }
            }
        }
        if let Some((gate_up, down)) = &self.shared {
            gate_up.run(exec, x, matrix(&mut b.wide, n, 2 * shared)?)?;
            activate(exec, gate, matrix(&mut b.wide, n, 2 * shared)?.as_ref(), matrix(&mut b.inner, n, shared)?)?;
            down.run(exec, matrix(&mut b.inner, n, shared)?.as_ref(), matrix(&mut b.rows, n, hidden)?)?;
            add(matrix(&mut b.rows, n, hidden)?.as_ref(), out)?;
        }
        Ok(())
    }
}

/// The matrices of all experts: a stack of them in one tensor, or one tensor each.
fn all_of<'a>(store: &'a Store, i: usize, what: &str, experts: usize) -> Result<Vec<Stored<'a>>> {
    if let Some(stack) = store.find(Some(i), &format!("ffn_{what}_exps.weight")) {
        if stack.shape.len() != 3 || stack.shape[0] != experts {
            return Err(stack.wrong(&format!("has shape {:?}, expected a stack of {experts}", stack.shape)));
        }
        return Ok((0..experts).map(|e| stack.select(e)).collect());
    }
    let router = store.get(Some(i), "ffn_gate_inp.weight")?.name;
    let stem = router.strip_suffix("gate.weight").unwrap_or(&router);
    (0..experts)
        .map(|e| {
            let name = format!("{stem}experts.{e}.{what}_proj.weight");
            store.named(&name).ok_or_else(|| Error::Model { path: name, why: "there is no such tensor".into() })
        })
        .collect()
}

fn zero(out: TensorMut<'_>) -> Result<()> {
    match out.dtype() {
        DType::BF16 => out.typed::<bf16>("experts", "out")?.data().fill(bf16::ZERO),
        _ => out.typed::<f32>("experts", "out")?.data().fill(0.0),
    }
    Ok(())
}

/// The rows of the pairs' tokens.
fn gather(x: TensorRef<'_>, pairs: &[u32], top_k: usize, out: TensorMut<'_>) -> Result<()> {
    fn copy<T: Copy>(x: &[T], out: &mut [T], pairs: &[u32], top_k: usize) {
        let hidden = out.len() / pairs.len().max(1);
        for (&pair, out) in pairs.iter().zip(out.chunks_exact_mut(hidden.max(1))) {
            out.copy_from_slice(&x[pair as usize / top_k * hidden..][..hidden]);
        }
    }
    match x.dtype() {
        DType::BF16 => {
            let x = x.typed::<bf16>("experts", "x")?;
            copy(x.data(), out.typed::<bf16>("experts", "out")?.data(), pairs, top_k);
        }
        _ => copy(x.typed::<f32>("experts", "x")?.data(), out.typed::<f32>("experts", "out")?.data(), pairs, top_k),
    }
    Ok(())
}

/// `out[token] += weight * y`, expert by expert: the order is the token's own, whoever else is in the batch. In f32:
/// layers of blocks have such a residual.
fn scatter(y: TensorRef<'_>, pairs: &[u32], top_k: usize, weights: &[f32], out: TensorMut<'_>) -> Result<()> {
    let hidden = y.layout().shape()[1];
    let y = y.typed::<f32>("experts", "y")?;
    let (out, _) = out.typed::<f32>("experts", "out")?.into_parts();
    for (&pair, y) in pairs.iter().zip(y.data().chunks_exact(hidden.max(1))) {
        let (token, weight) = (pair as usize / top_k, weights[pair as usize]);
        for (o, y) in out[token * hidden..][..hidden].iter_mut().zip(y) {
            *o += weight * y;
        }
    }
    Ok(())
}

fn add(x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    match out.dtype() {
        DType::BF16 => {
            let x = x.typed::<bf16>("experts", "x")?;
            let (out, _) = out.typed::<bf16>("experts", "out")?.into_parts();
            out.iter_mut().zip(x.data()).for_each(|(o, x)| *o = bf16::from_f32(o.to_f32() + x.to_f32()));
        }
        _ => {
            let x = x.typed::<f32>("experts", "x")?;
            let (out, _) = out.typed::<f32>("experts", "out")?.into_parts();
            out.iter_mut().zip(x.data()).for_each(|(o, x)| *o += x);
        }
    }
    Ok(())
}
