//! [`Attend`]: attention of one layer, over pages, in its two forms: heads of keys and values, and latent vectors.

use fir::attention::{
    BatchArgs, BatchPlan, CascadeArgs, CascadePlan, MlaArgs, MlaPlan, MlaProblem, Problem, Scratch, Split,
};
use fir::kv::{Kv, PageTable, Ragged};
use fir::page::Slots;
use fir::rope::{self, Positions, Roped, RopedKv, RopedMla};
use fir::variant::{self, Params, Variant, kv_pos, logits, mask, q_pos, score};
use fir::{DType, Exec, Tensor, TensorRef, gemm, norm};
use half::bf16;

use super::input::{Input, Levels};
use super::{KvCache, first, first_mut};
use crate::error::{Error, Result};
use crate::layers::linear::Linear;
use crate::layers::moe::matrix;
use crate::models::{KvLayout, Mla, Model, ModelConfig, rope::Angles};

/// Where every sequence's KV is cut, whatever else is in the batch: results are the same bits alone and with others.
/// Two threads share one sequence's decode from 256 tokens on.
const SPLIT: Split = Split::Fixed(256);

/// Added to mean squares by the norms inside latent attention, whatever the model's others add.
const LATENT_EPS: f32 = 1e-6;

/// Buffers, angles and plans of attention.
pub(super) struct Attend {
    variant: Variant,
    plan: Plan,
    kv_dtype: DType,
    global: Angles,
    local: Option<Angles>,
    /// 0, 1, 2, …: rows of the angles' tables.
    rows: Vec<i32>,
    /// Tokens of the step.
    n: usize,
    /// Projections, and the heads' norms of them.
    qkv: Tensor,
    q_normed: Option<Tensor>,
    k_normed: Option<Tensor>,
    /// Rotated queries.
    q: Tensor,
    latent: Option<Latent>,
    /// `[tokens, heads * v]`
    pub(super) out: Tensor,
}

/// Buffers of latent attention.
struct Latent {
    q_a: Tensor,
    q_a_normed: Tensor,
    q: Tensor,
    kv_a: Tensor,
    ckv: Tensor,
    /// Queries times the key projection, `[heads, tokens, kv_rank]`.
    q_nope: Tensor,
    /// `[tokens, heads, kv_rank]`
    o: Tensor,
    /// `[heads, tokens, v]`
    v: Tensor,
}

enum Plan {
    None,
    /// With the partial rows that the scratch has room for.
    Flat(Box<BatchPlan>, Scratch, usize),
    Cascade(CascadePlan, Vec<Scratch>),
    Latent(Box<MlaPlan>, Scratch),
}

/// Where a step's tokens are.
pub(super) struct Tables<'a> {
    pub(super) table: &'a PageTable<'a>,
    pub(super) shared: Option<&'a Levels>,
    pub(super) slots: &'a [i32],
}

impl Attend {
    pub(super) fn new(model: &Model, tokens: usize) -> Result<Self> {
        let c = model.config();
        let mid = |columns: usize| Tensor::zeros(model.mid, &[tokens, columns]);
        let normed = model
            .layers
            .iter()
            .any(|l| matches!(&l.attn, crate::models::Attention::Full { norms, .. } if norms.is_some()));
        let latent = c.mla.map(|m| -> Result<Latent> {
            Ok(Latent {
                q_a: mid(m.q_rank)?,
                q_a_normed: mid(m.q_rank)?,
                q: mid(c.heads * c.head_dim)?,
                kv_a: mid(m.kv_rank + m.rope)?,
                ckv: mid(m.kv_rank)?,
                q_nope: mid(c.heads * m.kv_rank)?,
                o: mid(c.heads * m.kv_rank)?,
                v: mid(c.heads * m.v)?,
            })
        });
        let full = c.mla.is_none();
        Ok(Self {
            variant: variant_of(c)?,
            plan: Plan::None,
            kv_dtype: DType::BF16,
            global: Angles::new(&c.rope, tokens),
            local: c.rope_local.as_ref().map(|r| Angles::new(r, tokens)),
            rows: (0..tokens as i32).collect(),
            n: 0,
            qkv: mid(if full { c.qkv() } else { 0 })?,
            q_normed: if normed { Some(mid(c.heads * c.head_dim)?) } else { None },
            k_normed: if normed { Some(mid(c.kv_heads * c.head_dim)?) } else { None },
            q: mid(c.heads * c.mla.map_or(c.head_dim, |m| m.rope))?,
            latent: latent.transpose()?,
            out: mid(c.heads * c.mla.map_or(c.head_dim, |m| m.v))?,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let of = |t: &Tensor| t.view().layout().len() * t.dtype().size();
        let latent =
            self.latent.iter().flat_map(|l| [&l.q_a, &l.q_a_normed, &l.q, &l.kv_a, &l.ckv, &l.q_nope, &l.o, &l.v]);
        let own = [Some(&self.qkv), Some(&self.q), Some(&self.out), self.q_normed.as_ref(), self.k_normed.as_ref()];
        own.into_iter().flatten().chain(latent).map(of).sum()
    }

    /// Plans a step, for all layers.
    pub(super) fn plan(&mut self, exec: &Exec, model: &Model, kv: &KvCache, input: &Input) -> Result<()> {
        let c = model.config();
        if kv.layout() != model.kv_layout() || kv.layers() != c.layers {
            return Err(Error::Config(format!("{kv:?} is not a cache for {}", c.name)));
        }
        let dtype = kv.kv_type().dtype();
        self.n = input.positions.len();
        self.global.fill(input.positions.iter().copied());
        if let Some(local) = &mut self.local {
            local.fill(input.positions.iter().copied());
        }
        let qo = Ragged::from_lens(&input.q_lens)?;
        if let KvLayout::Latent { ckv, kpe } = kv.layout() {
            let problem = MlaProblem {
                heads: c.heads,
                head_dim_ckv: ckv,
                head_dim_kpe: kpe,
                q_dtype: model.mid,
                kv_dtype: dtype,
                out_dtype: model.mid,
                causal: true,
            };
            let plan = MlaPlan::new(exec, problem, &qo, &input.kv_lens, SPLIT)?;
            let scratch = plan.scratch();
            self.plan = Plan::Latent(Box::new(plan), scratch);
            return Ok(());
        }
        let problem = || Problem {
            kv_dtype: dtype,
            ..Problem::new(c.heads, c.kv_heads, c.head_dim, model.mid, self.variant.clone())
        };
        if let Some(levels) = input.cascade(kv)? {
            let levels = [levels.shared.as_level(), levels.own.as_level()];
            let plan = CascadePlan::new(exec, problem(), &levels, SPLIT)?;
            let scratch = plan.scratch();
            self.plan = Plan::Cascade(plan, scratch);
            return Ok(());
        }
        match &mut self.plan {
            // In the memory of the step before.
            Plan::Flat(plan, scratch, room) if self.kv_dtype == dtype => {
                plan.refill(&qo, &input.kv_lens)?;
                let rows = plan.schedule().partial_rows();
                if rows > *room {
                    (*scratch, *room) = (plan.scratch(), rows);
                }
            }
            _ => {
                let plan = BatchPlan::new(exec, problem(), &qo, &input.kv_lens, SPLIT)?;
                let (scratch, rows) = (plan.scratch(), plan.schedule().partial_rows());
                self.plan = Plan::Flat(Box::new(plan), scratch, rows);
                self.kv_dtype = dtype;
            }
        }
        Ok(())
    }

    /// Projects, rotates and stores the tokens of `x`, and attends, into [`Self::out`].
    #[expect(clippy::too_many_arguments, reason = "a layer's weights, its input and its cache")]
    pub(super) fn full(
        &mut self,
        exec: &Exec,
        model: &Model,
        kv: &mut KvCache,
        layer: usize,
        (qkv, norms): (&Linear, Option<&(Tensor, Tensor)>),
        x: TensorRef<'_>,
        tables: Tables<'_>,
    ) -> Result<()> {
        let c = model.config();
        let (n, dim) = (self.n, c.head_dim);
        qkv.run(exec, x, first_mut(&mut self.qkv, n)?)?;
        let heads = first(&self.qkv, n)?.reshape(&[n, c.heads + 2 * c.kv_heads, dim])?;
        let (mut q, mut k) = (heads.slice(1, 0..c.heads)?, heads.slice(1, c.heads..c.heads + c.kv_heads)?);
        let v = heads.slice(1, c.heads + c.kv_heads..c.heads + 2 * c.kv_heads)?;
        if let (Some((q_weight, k_weight)), Some(q_to), Some(k_to)) = (norms, &mut self.q_normed, &mut self.k_normed) {
            norm::rms_norm(exec, q, q_weight.view(), c.eps, heads_mut(q_to, n, c.heads)?)?;
            norm::rms_norm(exec, k, k_weight.view(), c.eps, heads_mut(k_to, n, c.kv_heads)?)?;
            q = first(q_to, n)?.reshape(&[n, c.heads, dim])?;
            k = first(k_to, n)?.reshape(&[n, c.kv_heads, dim])?;
        }
        let window = c.windows[layer];
        let angles = match (&self.local, window) {
            (Some(local), Some(_)) => local,
            _ => &self.global,
        };
        rope::rope_quantize_append_paged_kv(
            exec,
            Roped { rope: q, rope_out: heads_mut(&mut self.q, n, c.heads)?, nope: None, scale: 1.0 },
            RopedKv { rope: k, nope: None, v, slots: slots(tables.slots)?, cache: kv.heads_mut(layer)? },
            Positions::Ids(TensorRef::new(&self.rows[..n], &[n])?),
            table_of(angles, n, c.rope.rotary)?,
        )?;
        let params = params_of(c, window);
        let q = first(&self.q, n)?.reshape(&[n, c.heads, dim])?;
        let out = heads_mut(&mut self.out, n, c.heads)?;
        let pool = kv.heads(layer)?;
        let sm_scale = Some(c.sm_scale);
        match (&mut self.plan, tables.shared) {
            (Plan::Flat(plan, scratch, _), None) => {
                let kv = Kv::Paged(pool, tables.table);
                plan.run(exec, BatchArgs { q, kv, params: &params, sm_scale, scratch, out, lse: None })?;
            }
            (Plan::Cascade(plan, scratch), Some(levels)) => {
                let kv = &[Kv::Paged(pool, &levels.shared.table), Kv::Paged(pool, &levels.own.table)];
                plan.run(exec, CascadeArgs { q, kv, params: &params, sm_scale, scratch, out, lse: None })?;
            }
            _ => return Err(Error::Config("attention before its plan".into())),
        }
        Ok(())
    }

    /// As [`Self::full`], for latent attention: scores and sums are taken in the compressed space.
    #[expect(clippy::too_many_arguments, reason = "as `full`")]
    pub(super) fn latent(
        &mut self,
        exec: &Exec,
        model: &Model,
        kv: &mut KvCache,
        layer: usize,
        w: &Mla,
        x: TensorRef<'_>,
        tables: Tables<'_>,
    ) -> Result<()> {
        let (c, n) = (model.config(), self.n);
        let (Some(m), Some(b), Plan::Latent(plan, scratch)) = (c.mla, &mut self.latent, &mut self.plan) else {
            return Err(Error::Config("latent attention before its plan".into()));
        };
        match &w.q_a {
            Some((q_a, weight)) => {
                q_a.run(exec, x, first_mut(&mut b.q_a, n)?)?;
                norm::rms_norm(exec, first(&b.q_a, n)?, weight.view(), LATENT_EPS, first_mut(&mut b.q_a_normed, n)?)?;
                w.q_b.run(exec, first(&b.q_a_normed, n)?, first_mut(&mut b.q, n)?)?;
            }
            None => w.q_b.run(exec, x, first_mut(&mut b.q, n)?)?,
        }
        w.kv_a.run(exec, x, first_mut(&mut b.kv_a, n)?)?;
        let kv_a = first(&b.kv_a, n)?;
        norm::rms_norm(exec, kv_a.slice(1, 0..m.kv_rank)?, w.kv_norm.view(), LATENT_EPS, first_mut(&mut b.ckv, n)?)?;

        let q = first(&b.q, n)?.reshape(&[n, c.heads, c.head_dim])?;
        let nope = q.slice(2, 0..m.nope)?.transpose(0, 1)?;
        let absorbed = matrix(&mut b.q_nope, c.heads, n * m.kv_rank)?;
        gemm::batched_gemm(exec, nope.into(), w.k_b.view().into(), stack(absorbed, c.heads, n, m.kv_rank)?)?;
        rope::rope_quantize_append_paged_mla(
            exec,
            Roped {
                rope: q.slice(2, m.nope..c.head_dim)?,
                rope_out: heads_mut(&mut self.q, n, c.heads)?,
                nope: None,
                scale: 1.0,
            },
            RopedMla {
                kpe: kv_a.slice(1, m.kv_rank..m.kv_rank + m.rope)?,
                ckv: first(&b.ckv, n)?,
                slots: slots(tables.slots)?,
                cache: kv.latent_mut(layer)?,
            },
            Positions::Ids(TensorRef::new(&self.rows[..n], &[n])?),
            table_of(&self.global, n, m.rope)?,
        )?;
        let q_nope = matrix(&mut b.q_nope, c.heads, n * m.kv_rank)?;
        plan.run(
            exec,
            MlaArgs {
                q_nope: q_nope.as_ref().reshape(&[c.heads, n, m.kv_rank])?.transpose(0, 1)?,
                q_pe: first(&self.q, n)?.reshape(&[n, c.heads, m.rope])?,
                kv: kv.latent(layer)?,
                table: tables.table,
                sm_scale: c.sm_scale,
                scratch,
                out: heads_mut(&mut b.o, n, c.heads)?,
                lse: None,
            },
        )?;
        let o = first(&b.o, n)?.reshape(&[n, c.heads, m.kv_rank])?.transpose(0, 1)?;
        let v = matrix(&mut b.v, c.heads, n * m.v)?;
        gemm::batched_gemm(exec, o.into(), w.v_b.view().into(), stack(v, c.heads, n, m.v)?)?;
        match self.out.dtype() {
            DType::BF16 => heads_last(b.v.as_slice::<bf16>()?, self.out.as_mut_slice::<bf16>()?, n, c.heads, m.v),
            _ => heads_last(b.v.as_slice::<f32>()?, self.out.as_mut_slice::<f32>()?, n, c.heads, m.v),
        }
        Ok(())
    }
}

/// `[heads, n, v]` to `[n, heads, v]`.
fn heads_last<T: Copy>(from: &[T], to: &mut [T], n: usize, heads: usize, v: usize) {
    for h in 0..heads {
        for t in 0..n {
            to[(t * heads + h) * v..][..v].copy_from_slice(&from[(h * n + t) * v..][..v]);
        }
    }
}

/// A contiguous `[batch, n * k]` as `[batch, n, k]`.
fn stack(t: fir::TensorMut<'_>, batch: usize, n: usize, k: usize) -> Result<fir::TensorMut<'_>> {
    const OP: &str = "latent attention";
    let shape = [batch, n, k];
    Ok(match t.dtype() {
        DType::BF16 => fir::TensorMut::new(t.typed::<bf16>(OP, "out")?.into_parts().0, &shape)?,
        _ => fir::TensorMut::new(t.typed::<f32>(OP, "out")?.into_parts().0, &shape)?,
    })
}

/// The first `n` rows of a buffer by heads.
fn heads_mut(t: &mut Tensor, n: usize, heads: usize) -> Result<fir::TensorMut<'_>> {
    let dim = t.view().layout().shape()[1] / heads;
    stack(matrix(t, n, heads * dim)?, n, heads, dim)
}

fn slots(list: &[i32]) -> Result<Slots<'_>> {
    Ok(Slots::Mapping(TensorRef::new(list, &[list.len()])?))
}

fn table_of(angles: &Angles, n: usize, rotary: usize) -> Result<rope::Angles<'_>> {
    let table = TensorRef::new(&angles.table[..n * rotary], &[n, rotary])?;
    Ok(rope::Angles::Cache { table, interleave: angles.interleave })
}

/// Causal attention, within a window and with bounded scores where the model has them.
fn variant_of(c: &ModelConfig) -> Result<Variant> {
    let windowed = c.windows.iter().any(Option::is_some);
    if !windowed && c.attn_soft_cap.is_none() {
        return Ok(variant::causal());
    }
    Ok(variant::variant("Model", |p| {
        let left = p.i32("window_left");
        let seen = kv_pos().le(q_pos()) & (left.clone().lt(0) | kv_pos().ge(q_pos() - left));
        match c.attn_soft_cap {
            None => mask(seen),
            Some(_) => {
                let cap = p.f32("soft_cap");
                logits(cap.clone() * (score() / cap).tanh()).mask(seen)
            }
        }
    })?)
}

fn params_of(c: &ModelConfig, window: Option<usize>) -> Params<'static> {
    let mut params = Params::new();
    if c.windows.iter().any(Option::is_some) || c.attn_soft_cap.is_some() {
        params = params.i32("window_left", window.map_or(-1, |w| (w - 1).min(i32::MAX as usize) as i32));
    }
    if let Some(cap) = c.attn_soft_cap {
        params = params.f32("soft_cap", cap);
    }
    params
}
