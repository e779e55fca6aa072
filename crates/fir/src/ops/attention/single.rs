//! One request, its keys and values in two plain tensors.

use super::batch::{BatchArgs, BatchPlan, Problem};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{Kv, KvLayout, Ragged, RaggedKv};
use crate::plan::Split;
use crate::tensor::{Dims, TensorMut, TensorRef};
use crate::variant::{Params, Variant};

/// Tensors of one request, for [`single_prefill`] and [`single_decode`].
#[derive(Debug)]
pub struct SingleArgs<'a> {
    /// `[q_len, qo_heads, head_dim_qk]`, or `[qo_heads, head_dim_qk]` for [`single_decode`]
    pub q: TensorRef<'a>,
    /// `[kv_len, kv_heads, head_dim_qk]` (NHD) or `[kv_heads, kv_len, head_dim_qk]` (HND)
    pub k: TensorRef<'a>,
    /// As `k`, with `head_dim_vo`.
    pub v: TensorRef<'a>,
    /// Order of the axes of `k` and `v`.
    pub layout: KvLayout,
    /// What is done to a score between `q · k` and softmax.
    pub variant: &'a Variant,
    /// Values of the variant's parameters.
    pub params: &'a Params<'a>,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when `None`.
    pub sm_scale: Option<f32>,
    /// As `q`, with `head_dim_vo`.
    pub out: TensorMut<'a>,
    /// `[q_len, qo_heads]` or `[qo_heads]`, f32; written when given.
    pub lse: Option<TensorMut<'a>>,
}

/// Attention of the query tokens of one request; the formula is in [`crate::attention`].
pub fn single_prefill(exec: &Exec, args: SingleArgs<'_>) -> Result<()> {
    const OP: &str = "single_prefill";
    let SingleArgs { q, k, v, layout, variant, params, sm_scale, out, lse } = args;
    for (arg, got) in [("q", q.shape().len()), ("k", k.shape().len()), ("v", v.shape().len())] {
        if got != 3 {
            return Err(Error::Rank { op: OP, arg, got, want: 3, axes: "[tokens, heads, head_dim]".into() });
        }
    }
    Dims::of(OP).bind("q", &q, &["tokens", "qo_heads", "head_dim_qk"])?.bind(
        "out",
        &out,
        &["tokens", "qo_heads", "head_dim_vo"],
    )?;
    let (k, v) = match layout {
        KvLayout::Nhd => (k, v),
        KvLayout::Hnd => (k.transpose(0, 1)?, v.transpose(0, 1)?),
    };
    let len = |arg, n: usize| {
        u32::try_from(n).map_err(|_| Error::value(OP, arg, format!("{n} tokens"), "fewer than 2^31 tokens"))
    };
    let (qo, kv_len) = (Ragged::from_lens(&[len("q", q.shape()[0])?])?, len("k", k.shape()[0])?);
    let kv_indptr = Ragged::from_lens(&[kv_len])?;
    let kv = RaggedKv::new(k, v, &kv_indptr)?;
    let problem = Problem {
        qo_heads: q.shape()[1],
        kv_heads: k.shape()[1],
        head_dim_qk: q.shape()[2],
        head_dim_vo: v.shape()[2],
        q_dtype: q.dtype(),
        kv_dtype: k.dtype(),
        out_dtype: out.dtype(),
        variant: variant.clone(),
    };
    let plan = BatchPlan::new(exec, problem, &qo, &[kv_len], Split::Balanced)?;
    let scratch = &mut plan.scratch();
    plan.run(exec, BatchArgs { q, kv: Kv::Ragged(kv), params, sm_scale, scratch, out, lse })
}

/// Attention of one query token; the formula is in [`crate::attention`].
pub fn single_decode(exec: &Exec, args: SingleArgs<'_>) -> Result<()> {
    let lse = args.lse.map(TensorMut::unsqueeze).transpose()?;
    single_prefill(exec, SingleArgs { q: args.q.unsqueeze()?, out: args.out.unsqueeze()?, lse, ..args })
}
