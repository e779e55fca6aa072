//! [`Runner`]: one forward over many sequences, in buffers that are sized once.

mod attention;
mod input;
mod kv;

use fir::moe::Gate;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef, activation, norm};
use half::bf16;

use self::attention::Attend;
use self::input::Input;
pub(crate) use self::input::piece_of;
pub use self::{
    input::{Batch, Rule, Seq, Shared, Sparse},
    kv::{KvCache, KvType},
};
use crate::error::{Error, Result};
use crate::layers::linear::Linear;
use crate::layers::moe;
use crate::models::{Attention, Ffn, Model};

/// Where every sequence's KV is cut, whatever else is in the batch: results are the same bits alone and with others.
/// Two threads share one sequence's decode from so many tokens on.
const SPLIT: u32 = 256;

/// What a [`Runner`] has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of a step, of all sequences together.
    pub max_tokens: usize,
    /// Sequences of a step.
    pub max_seqs: usize,
    /// Rows of logits of a step.
    pub max_logits: usize,
}

/// Buffers and plans of a step. A sequence's results do not depend on what else is in its steps.
pub struct Runner {
    limits: Limits,
    input: Input,
    attend: Attend,
    /// Residual stream, its norm, and a third of their kind: `[max_tokens, hidden]`.
    h: Tensor,
    x: Tensor,
    tmp: Tensor,
    /// Gate and up, and their product.
    wide: Tensor,
    inner: Tensor,
    moe: Option<moe::Buffers>,
    /// Bytes of embedding rows.
    staging: Vec<u8>,
    logits: Vec<f32>,
    /// Final states in f32, made when first asked for.
    states: Vec<f32>,
}

impl Runner {
    /// Buffers for steps of `model` within `limits`.
    pub fn new(model: &Model, limits: Limits) -> Result<Self> {
        let c = model.config();
        let Limits { max_tokens: n, max_seqs, max_logits } = limits;
        if n == 0 || max_seqs == 0 || n > 1 << 24 {
            return Err(Error::Config(format!("steps of {n} tokens and {max_seqs} sequences: 1 to 2^24 are possible")));
        }
        let act = |columns: usize| Tensor::zeros(model.act, &[n, columns]);
        let mid = |columns: usize| Tensor::zeros(model.mid, &[n, columns]);
        Ok(Self {
            limits,
            input: Input::new(limits),
            attend: Attend::new(model, n)?,
            h: act(c.hidden)?,
            x: act(c.hidden)?,
            tmp: act(c.hidden)?,
            wide: mid(2 * c.inter)?,
            inner: mid(c.inter)?,
            moe: moe::Buffers::new(c, n, model.act, model.mid)?,
            staging: Vec::with_capacity(n * model.embed.row_bytes()),
            logits: vec![0.0; max_logits * c.vocab],
            states: Vec::new(),
        })
    }

    /// What it has room for.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Why sequences of [`Rule::Streaming`] are refused, if they are.
    pub(crate) fn cannot_stream(&self) -> Option<String> {
        self.attend.fused.as_ref().err().cloned()
    }

    /// Bytes of all its buffers.
    pub fn bytes(&self) -> usize {
        let of = |t: &Tensor| t.view().layout().len() * t.dtype().size();
        [&self.h, &self.x, &self.tmp, &self.wide, &self.inner].into_iter().map(of).sum::<usize>()
            + self.attend.bytes()
            + self.logits.len() * 4
            + self.staging.capacity()
    }

    /// Writes the KV of the new tokens; the logits of the wanted rows, `[rows, vocab]`.
    pub fn step(&mut self, exec: &Exec, model: &Model, kv: &mut KvCache, batch: &Batch<'_>) -> Result<&mut [f32]> {
        let c = model.config();
        let rows = self.forward(exec, model, kv, batch, Some(batch.logits))?;
        let logits = &mut self.logits[..rows * c.vocab];
        if rows > 0 {
            model.head.run(exec, first(&self.x, rows)?, TensorMut::new(logits, &[rows, c.vocab])?)?;
            if let Some(cap) = c.final_soft_cap {
                logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
            }
        }
        Ok(logits)
    }

    /// Writes the KV of the new tokens; the final states of all of them, `[tokens, hidden]`, as the head would take them.
    pub fn hidden(&mut self, exec: &Exec, model: &Model, kv: &mut KvCache, batch: &Batch<'_>) -> Result<&[f32]> {
        let rows = self.forward(exec, model, kv, batch, None)?;
        self.states = first(&self.x, rows)?.to_f32_vec()?;
        Ok(&self.states)
    }

    /// All layers. With `keep`, the last one ends with these rows alone. How many rows `x` has in the end.
    fn forward(
        &mut self,
        exec: &Exec,
        model: &Model,
        kv: &mut KvCache,
        batch: &Batch<'_>,
        keep: Option<&[u32]>,
    ) -> Result<usize> {
        let c = model.config();
        self.input.fill(c, kv, batch, self.limits)?;
        let mut n = batch.tokens.len();
        if n == 0 {
            return Ok(0);
        }
        self.attend.plan(exec, model, kv, &self.input)?;
        let tables = attention::Tables::new(&self.input, kv)?;
        model.embed.look_up(exec, batch.tokens, &mut self.staging, first_mut(&mut self.h, n)?)?;
        let weight = model.layers[0].attn_norm.view();
        norm::rms_norm(exec, first(&self.h, n)?, weight, c.eps, first_mut(&mut self.x, n)?)?;
        for (i, layer) in model.layers.iter().enumerate() {
            let x = first(&self.x, n)?;
            match &layer.attn {
                Attention::Full(full) => self.attend.full(exec, model, kv, i, full, x, &tables)?,
                Attention::Mla(mla) => self.attend.latent(exec, model, kv, i, mla, x, &tables)?,
            }
            if let (Some(keep), true) = (keep, i + 1 == model.layers.len()) {
                keep_rows(&mut self.attend.out, keep)?;
                keep_rows(&mut self.h, keep)?;
                n = keep.len();
                if n == 0 {
                    return Ok(0);
                }
            }
            let out = first(&self.attend.out, n)?;
            let streams = [&mut self.h, &mut self.x, &mut self.tmp];
            add(exec, &layer.out, out, streams, n, layer.post_attn.as_ref(), &layer.ffn_norm, c.eps)?;

            let next = model.layers.get(i + 1).map_or(&model.norm, |l| &l.attn_norm);
            match &layer.ffn {
                Ffn::Dense { gate_up, down } => {
                    let (x, inner) = (first(&self.x, n)?, first_mut(&mut self.inner, n)?);
                    let fused = c.gate == Gate::Silu && gate_up.silu_mul(exec, x, inner)?;
                    if !fused {
                        gate_up.run(exec, x, first_mut(&mut self.wide, n)?)?;
                        activate(exec, c.gate, first(&self.wide, n)?, first_mut(&mut self.inner, n)?)?;
                    }
                    let streams = [&mut self.h, &mut self.x, &mut self.tmp];
                    add(exec, down, first(&self.inner, n)?, streams, n, layer.post_ffn.as_ref(), next, c.eps)?;
                }
                Ffn::Experts(experts) => {
                    let Some(buffers) = &mut self.moe else {
                        return Err(Error::Config("experts without buffers".into()));
                    };
                    experts.run(exec, c.gate, first(&self.x, n)?, buffers, first_mut(&mut self.tmp, n)?)?;
                    if let Some(post) = &layer.post_ffn {
                        norm::rms_norm(exec, first(&self.tmp, n)?, post.view(), c.eps, first_mut(&mut self.x, n)?)?;
                    } else {
                        std::mem::swap(&mut self.x, &mut self.tmp);
                    }
                    let (x, h) = (first_mut(&mut self.x, n)?, first_mut(&mut self.h, n)?);
                    norm::fused_add_rms_norm(exec, x, h, next.view(), c.eps)?;
                }
            }
        }
        Ok(n)
    }
}

/// Adds a sublayer's output, `input` times `linear`, to the residual, and leaves the next norm of the sum in the second
/// stream.
#[expect(clippy::too_many_arguments, reason = "three streams, a product and two norms")]
fn add(
    exec: &Exec,
    linear: &Linear,
    input: TensorRef<'_>,
    [h, x, tmp]: [&mut Tensor; 3],
    n: usize,
    post: Option<&Tensor>,
    next: &Tensor,
    eps: f32,
) -> Result<()> {
    let Some(post) = post else {
        return linear.add_norm(exec, input, first_mut(h, n)?, next.view(), eps, first_mut(x, n)?);
    };
    linear.run(exec, input, first_mut(tmp, n)?)?;
    norm::rms_norm(exec, first(tmp, n)?, post.view(), eps, first_mut(x, n)?)?;
    norm::fused_add_rms_norm(exec, first_mut(x, n)?, first_mut(h, n)?, next.view(), eps)?;
    Ok(())
}

/// `out = gate(x[..d]) * x[d..]`
pub(crate) fn activate(exec: &Exec, gate: Gate, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    Ok(match gate {
        Gate::Silu => activation::silu_and_mul(exec, x, out),
        Gate::Gelu => activation::gelu_and_mul(exec, x, out),
        Gate::GeluTanh => activation::gelu_tanh_and_mul(exec, x, out),
    }?)
}

/// The first `n` rows.
fn first(t: &Tensor, n: usize) -> Result<TensorRef<'_>> {
    Ok(t.view().slice(0, 0..n)?)
}

fn first_mut(t: &mut Tensor, n: usize) -> Result<TensorMut<'_>> {
    Ok(t.view_mut().slice(0, 0..n)?)
}

/// Moves rows, named in ascending order, to the front.
fn keep_rows(t: &mut Tensor, rows: &[u32]) -> Result<()> {
    fn keep<T: Copy>(data: &mut [T], width: usize, rows: &[u32]) {
        for (to, &from) in rows.iter().enumerate() {
            data.copy_within(from as usize * width..(from as usize + 1) * width, to * width);
        }
    }
    let width = t.view().layout().shape()[1];
    match t.dtype() {
        DType::BF16 => keep(t.as_mut_slice::<bf16>()?, width, rows),
        _ => keep(t.as_mut_slice::<f32>()?, width, rows),
    }
    Ok(())
}
