//! [`Attend`]: attention of one layer, over pages, in its two forms: heads of keys and values, and latent vectors.

use fir::attention::{
    BatchArgs, BatchPlan, CascadeArgs, CascadePlan, MlaArgs, MlaPlan, MlaProblem, Problem, Scratch, Split,
    merge_state_in_place,
};
use fir::kv::{Kv, PageTable};
use fir::page::Slots;
use fir::rope::{self, Positions, Roped, RopedKv, RopedMla};
use fir::variant::{self, Llama31, Params, Rope, Variant, kv_pos, logits, mask, q_pos, query, score};
use fir::{DType, Exec, Tensor, TensorMut, TensorRef, gemm, norm};
use half::bf16;

use super::input::{Input, Rows};
use super::{KvCache, first, first_mut};
use crate::error::{Error, Result};
use crate::layers::moe::matrix;
use crate::models::{Attention, Full, KvLayout, Mla, Model, ModelConfig, RopeConfig, Scaling, rope::Angles};

const SPLIT: Split = Split::Fixed(super::SPLIT);

/// Added to mean squares by the norms inside latent attention, whatever the model's others add.
const LATENT_EPS: f32 = 1e-6;

/// Buffers, angles and plans of attention.
pub(super) struct Attend {
    variant: Variant,
    /// Of sequences whose keys are rotated as they are read; or why there is none.
    pub(super) fused: Result<Variant, String>,
    plain: Option<Flat>,
    streaming: Option<Flat>,
    shared: Option<(CascadePlan, Vec<Scratch>)>,
    mla: Option<MlaPlans>,
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
    /// Outputs in f32 of latent attention of sequences that share pages.
    wide: Vec<f32>,
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

/// A plan that is filled anew for every step, with the partial rows that its scratch has room for.
struct Flat {
    plan: BatchPlan,
    scratch: Scratch,
    room: usize,
}

impl Flat {
    /// The plan of `rows` in the memory of the step before.
    fn fill(slot: &mut Option<Self>, exec: &Exec, problem: Problem, rows: &Rows) -> Result<()> {
        let qo = rows.qo()?;
        match slot {
            Some(Self { plan, scratch, room }) if plan.problem().kv_dtype == problem.kv_dtype => {
                plan.refill(&qo, &rows.kv_lens)?;
                let need = plan.schedule().partial_rows();
                if need > *room {
                    (*scratch, *room) = (plan.scratch(), need);
                }
            }
            _ => {
                let plan = BatchPlan::new(exec, problem, &qo, &rows.kv_lens, SPLIT)?;
                let (scratch, room) = (plan.scratch(), plan.schedule().partial_rows());
                *slot = Some(Self { plan, scratch, room });
            }
        }
        Ok(())
    }
}

/// Plans of latent attention: of what is shared and what is not, and of sequences that share nothing.
struct MlaPlans {
    levels: Option<[(MlaPlan, Scratch); 2]>,
    plain: Option<(MlaPlan, Scratch)>,
}

/// Where a step's tokens are.
pub(super) struct Tables<'a> {
    levels: Vec<PageTable<'a>>,
    shared: usize,
    plain: Option<PageTable<'a>>,
    streaming: Option<PageTable<'a>>,
    slots: &'a [i32],
}

impl<'a> Tables<'a> {
    pub(super) fn new(input: &'a Input, kv: &KvCache) -> Result<Self> {
        let some = |rows: &'a Rows| (rows.tokens > 0).then(|| rows.table(kv)).transpose();
        Ok(Self {
            levels: input.levels().iter().map(|l| l.table(kv)).collect::<Result<_>>()?,
            shared: input.levels().first().map_or(0, |l| l.tokens),
            plain: some(&input.plain)?,
            streaming: some(&input.streaming)?,
            slots: &input.slots,
        })
    }
}

impl Attend {
    pub(super) fn new(model: &Model, tokens: usize) -> Result<Self> {
        let c = model.config();
        let mid = |columns: usize| Tensor::zeros(model.mid, &[tokens, columns]);
        let normed = model.layers.iter().any(|l| matches!(&l.attn, Attention::Full(full) if full.norms.is_some()));
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
            fused: fused_of(c),
            plain: None,
            streaming: None,
            shared: None,
            mla: None,
            wide: Vec::new(),
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
        if let KvLayout::Latent { ckv, kpe } = kv.layout() {
            return self.plan_latent(exec, model, (ckv, kpe, dtype), input);
        }
        let problem = |variant: &Variant| Problem {
            kv_dtype: dtype,
            ..Problem::new(c.heads, c.kv_heads, c.head_dim, model.mid, variant.clone())
        };
        self.shared = None;
        if !input.levels().is_empty() {
            let qo = input.levels().iter().map(Rows::qo).collect::<Result<Vec<_>>>()?;
            let levels: Vec<_> = input.levels().iter().zip(&qo).map(|(l, qo)| l.level(qo)).collect();
            let plan = CascadePlan::new(exec, problem(&self.variant), &levels, SPLIT)?;
            let scratch = plan.scratch();
            self.shared = Some((plan, scratch));
        }
        if input.plain.tokens > 0 {
            Flat::fill(&mut self.plain, exec, problem(&self.variant), &input.plain)?;
        }
        if input.streaming.tokens > 0 {
            let variant = self.fused.as_ref().map_err(|why| Error::Request { field: "seqs", why: why.clone() })?;
            Flat::fill(&mut self.streaming, exec, problem(variant), &input.streaming)?;
        }
        Ok(())
    }

    fn plan_latent(
        &mut self,
        exec: &Exec,
        model: &Model,
        (ckv, kpe, dtype): (usize, usize, DType),
        input: &Input,
    ) -> Result<()> {
        let heads = model.config().heads;
        let make = |rows: &Rows, out_dtype: DType, causal: bool| -> Result<_> {
            let problem = MlaProblem {
                heads,
                head_dim_ckv: ckv,
                head_dim_kpe: kpe,
                q_dtype: model.mid,
                kv_dtype: dtype,
                out_dtype,
                causal,
            };
            let plan = MlaPlan::new(exec, problem, &rows.qo()?, &rows.kv_lens, SPLIT)?;
            let scratch = plan.scratch();
            Ok((plan, scratch))
        };
        let levels = match input.levels() {
            [shared, own] => {
                self.wide.resize(self.wide.len().max(2 * shared.tokens * heads * (ckv + 1)), 0.0);
                Some([make(shared, DType::F32, false)?, make(own, DType::F32, true)?])
            }
            _ => None,
        };
        let plain = (input.plain.tokens > 0).then(|| make(&input.plain, model.mid, true)).transpose()?;
        self.mla = Some(MlaPlans { levels, plain });
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
        w: &Full,
        x: TensorRef<'_>,
        tables: &Tables<'_>,
    ) -> Result<()> {
        let c = model.config();
        let (n, dim) = (self.n, c.head_dim);
        w.qkv.run(exec, x, first_mut(&mut self.qkv, n)?)?;
        let heads = first(&self.qkv, n)?.reshape(&[n, c.heads + 2 * c.kv_heads, dim])?;
        let (mut q, mut k) = (heads.slice(1, 0..c.heads)?, heads.slice(1, c.heads..c.heads + c.kv_heads)?);
        let v = heads.slice(1, c.heads + c.kv_heads..c.heads + 2 * c.kv_heads)?;
        if let (Some((q_weight, k_weight)), Some(q_to), Some(k_to)) = (&w.norms, &mut self.q_normed, &mut self.k_normed)
        {
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
        let pool = kv.heads(layer)?;
        let sm_scale = Some(c.sm_scale);
        let shared = tables.shared;
        if let Some((plan, scratch)) = &mut self.shared {
            let kv: Vec<_> = tables.levels.iter().map(|t| Kv::Paged(pool, t)).collect();
            let (q, out) = (q.slice(0, 0..shared)?, heads_mut(&mut self.out, shared, c.heads)?);
            plan.run(exec, CascadeArgs { q, kv: &kv, params: &params, sm_scale, scratch, out, lse: None })?;
        }
        let mut out = heads_mut(&mut self.out, n, c.heads)?;
        let mut flat = |part: &mut Option<Flat>, table: Option<&PageTable<'_>>, from: usize, params: &Params<'_>| {
            let (Some(Flat { plan, scratch, .. }), Some(table)) = (part, table) else { return Ok(from) };
            let rows = from..from + plan.tokens();
            let (q, out) = (q.slice(0, rows.clone())?, out.reborrow().slice(0, rows.clone())?);
            let kv = Kv::Paged(pool, table);
            plan.run(exec, BatchArgs { q, kv, params, sm_scale, scratch, out, lse: None })?;
            Ok::<_, Error>(rows.end)
        };
        let next = flat(&mut self.plain, tables.plain.as_ref(), shared, &params)?;
        flat(&mut self.streaming, tables.streaming.as_ref(), next, &Params::new())?;
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
        tables: &Tables<'_>,
    ) -> Result<()> {
        let (c, n) = (model.config(), self.n);
        let (Some(m), Some(b), Some(plans)) = (c.mla, &mut self.latent, &mut self.mla) else {
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
        let q_nope = q_nope.as_ref().reshape(&[c.heads, n, m.kv_rank])?.transpose(0, 1)?;
        let q_pe = first(&self.q, n)?.reshape(&[n, c.heads, m.rope])?;
        let (kv, sm_scale, shared) = (kv.latent(layer)?, c.sm_scale, tables.shared);
        if let Some([(common, common_scratch), (own, own_scratch)]) = &mut plans.levels {
            let rows = shared * c.heads;
            let (outs, lses) = self.wide[..2 * rows * (m.kv_rank + 1)].split_at_mut(2 * rows * m.kv_rank);
            let (a, b_out) = outs.split_at_mut(rows * m.kv_rank);
            let (lse_a, lse_b) = lses.split_at_mut(rows);
            let shape = [shared, c.heads, m.kv_rank];
            let [q_nope, q_pe] = [q_nope.slice(0, 0..shared)?, q_pe.slice(0, 0..shared)?];
            for (plan, scratch, table, out, lse) in [
                (common, common_scratch, &tables.levels[0], &mut *a, &mut *lse_a),
                (own, own_scratch, &tables.levels[1], &mut *b_out, &mut *lse_b),
            ] {
                let out = TensorMut::new(out, &shape)?;
                let lse = Some(TensorMut::new(lse, &shape[..2])?);
                plan.run(exec, MlaArgs { q_nope, q_pe, kv, table, sm_scale, scratch, out, lse })?;
            }
            let into = (TensorMut::new(a, &shape)?, TensorMut::new(lse_a, &shape[..2])?);
            let other = (TensorRef::new(b_out, &shape)?, TensorRef::new(lse_b, &shape[..2])?);
            merge_state_in_place(exec, into, other, None)?;
            narrow(&self.wide[..rows * m.kv_rank], &mut b.o)?;
        }
        if let (Some((plan, scratch)), Some(table)) = (&mut plans.plain, &tables.plain) {
            let [q_nope, q_pe] = [q_nope.slice(0, shared..n)?, q_pe.slice(0, shared..n)?];
            let out = heads_mut(&mut b.o, n, c.heads)?.slice(0, shared..n)?;
            plan.run(exec, MlaArgs { q_nope, q_pe, kv, table, sm_scale, scratch, out, lse: None })?;
        }
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

/// Writes f32 to the front of a buffer of f32 or bf16.
fn narrow(from: &[f32], to: &mut Tensor) -> Result<()> {
    match to.dtype() {
        DType::BF16 => {
            for (to, &x) in to.as_mut_slice::<bf16>()?.iter_mut().zip(from) {
                *to = bf16::from_f32(x);
            }
        }
        _ => to.as_mut_slice::<f32>()?[..from.len()].copy_from_slice(from),
    }
    Ok(())
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
fn stack(t: TensorMut<'_>, batch: usize, n: usize, k: usize) -> Result<TensorMut<'_>> {
    const OP: &str = "latent attention";
    let shape = [batch, n, k];
    Ok(match t.dtype() {
        DType::BF16 => TensorMut::new(t.typed::<bf16>(OP, "out")?.into_parts().0, &shape)?,
        _ => TensorMut::new(t.typed::<f32>(OP, "out")?.into_parts().0, &shape)?,
    })
}

/// The first `n` rows of a buffer by heads.
fn heads_mut(t: &mut Tensor, n: usize, heads: usize) -> Result<TensorMut<'_>> {
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

/// Causal attention that rotates queries and keys as it reads them, for models whose rotation the library has as a formula.
fn fused_of(c: &ModelConfig) -> Result<Variant, String> {
    let RopeConfig { theta, rotary, interleave, ref scaling, ref factors } = c.rope;
    if c.mla.is_some() || c.windows.iter().any(Option::is_some) || c.attn_soft_cap.is_some() {
        return Err(format!("streaming attention with {}, which has a window, a bound or latent attention", c.arch));
    }
    let (scale, llama31) = match *scaling {
        Scaling::None => (1.0, None),
        Scaling::Linear(factor) => (factor, None),
        Scaling::Llama3 { factor, low, high, old } => {
            let [low_freq_factor, high_freq_factor, old_context_len] = [low, high, old].map(|x| x as f32);
            (factor, Some(Llama31 { low_freq_factor, high_freq_factor, old_context_len }))
        }
        Scaling::Yarn { .. } => return Err("streaming attention with a model of YaRN's frequencies".into()),
    };
    if factors.is_some() {
        return Err("streaming attention with a model that brings its own frequencies".into());
    }
    let (theta, scale) = (theta as f32, scale as f32);
    let r = Rope { theta, scale, interleave, rotary_dim: Some(rotary), llama31 };
    let hooks = |_: &mut variant::Declare| query(variant::rope(r)).key(variant::rope(r)).mask(kv_pos().le(q_pos()));
    variant::variant("Streaming", hooks).map_err(|e| e.to_string())
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
