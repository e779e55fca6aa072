//! Attention: one query row against the positions it sees, and everything made of that.

use super::{Precision, values};
use crate::error::Result;
use crate::kv::{Kv, PageTable, PagedMla, Ragged};
use crate::tensor::{E2m1x2, TensorRef};
use crate::variant::{Bound, Normalize, Params, RowCtx, Side, Variant, eval};

/// Output rows and their base-2 log-sum-exps, row-major.
pub type States = (Vec<f64>, Vec<f64>);

/// A batch of requests.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// `[tokens, qo_heads, head_dim_qk]`
    pub q: TensorRef<'a>,
    /// Query tokens of each request.
    pub qo: &'a Ragged,
    /// Keys and values of each request.
    pub kv: Kv<'a>,
    /// What is done to a score.
    pub variant: &'a Variant,
    /// Values of its parameters.
    pub params: &'a Params<'a>,
    /// Factor of the scores.
    pub sm_scale: f64,
}

/// Attention of every query token of a batch: `o` as `[tokens, qo_heads, head_dim_vo]`, `lse` as `[tokens, qo_heads]`.
pub fn batch(p: Precision, b: &Batch<'_>) -> Result<States> {
    let (heads, dim_qk) = (b.q.shape()[1], b.q.shape()[2]);
    let (kv_heads, dim_vo) = (b.kv.pool().kv_heads(), b.kv.pool().head_dim_vo());
    let q = values(b.q)?;
    let bound = b.variant.bind(b.params, heads, b.qo.batch())?;
    let (mut o, mut lse) = (Vec::with_capacity(q.len()), vec![]);
    for r in 0..b.qo.batch() {
        let (k, v) = gather(&b.kv, r)?;
        let (q_len, kv_len) = (b.qo.lens()[r] as i32, b.kv.lens()[r] as i32);
        for q_idx in 0..q_len {
            let token = b.qo.indptr()[r] as usize + q_idx as usize;
            for h in 0..heads {
                let kv_head = h / (heads / kv_heads);
                let ctx = RowCtx { batch: r as i32, q_idx, q_len, kv_len, qo_head: h as i32, kv_head: kv_head as i32 };
                let at = |x: &[f64], j: usize, dim: usize| x[(j * kv_heads + kv_head) * dim..][..dim].to_vec();
                let row = Row { variant: b.variant, bound: &bound, ctx, sm_scale: b.sm_scale, dim_vo };
                let q = q[(token * heads + h) * dim_qk..][..dim_qk].to_vec();
                let (row_o, row_lse) =
                    attend(p, &row, q, kv_len as usize, |j| at(&k, j, dim_qk), |j| at(&v, j, dim_vo));
                o.extend(row_o);
                lse.push(row_lse);
            }
        }
    }
    Ok((o, lse))
}

/// Keys and values of request `r`: `[kv_len, kv_heads, dim]` each, scales applied.
fn gather(kv: &Kv<'_>, r: usize) -> Result<(Vec<f64>, Vec<f64>)> {
    let pool = kv.pool();
    let (mut k, mut v) = (vec![], vec![]);
    for j in 0..kv.lens()[r] as usize {
        let (page, slot) = match kv {
            Kv::Paged(_, table) => table.locate(r, j).unwrap_or_default(),
            Kv::Ragged(kv) => (0, kv.indptr().indptr()[r] as usize + j),
        };
        for (out, data, scale, which) in [(&mut k, pool.k, pool.k_scale, 0), (&mut v, pool.v, pool.v_scale, 1)] {
            let data = data.select(0, page)?.select(0, slot)?;
            let row = match pool.block_scales {
                Some(scales) => nvfp4(data, scales[which].select(0, page)?.select(0, slot)?)?,
                None => values(data)?,
            };
            out.extend(row.into_iter().map(|x| x * f64::from(scale)));
        }
    }
    Ok((k, v))
}

/// `[heads, dim / 2]` pairs with `[heads, dim / 16]` scales.
fn nvfp4(data: TensorRef<'_>, scales: TensorRef<'_>) -> Result<Vec<f64>> {
    let scales = values(scales)?;
    let data = data.typed::<E2m1x2>("nvfp4", "data")?;
    let pairs = data.layout().offsets().flat_map(|i| data.data()[i].to_f32());
    Ok(pairs.enumerate().map(|(i, x)| f64::from(x) * scales[i / 16]).collect())
}

struct Row<'a> {
    variant: &'a Variant,
    bound: &'a Bound<'a>,
    ctx: RowCtx,
    sm_scale: f64,
    dim_vo: usize,
}

/// One query row over `kv_len` positions. Masked positions are not read at all.
fn attend(
    p: Precision,
    row: &Row<'_>,
    mut q: Vec<f64>,
    kv_len: usize,
    key: impl Fn(usize) -> Vec<f64>,
    value: impl Fn(usize) -> Vec<f64>,
) -> (Vec<f64>, f64) {
    let &Row { variant, bound, ctx, sm_scale, dim_vo } = row;
    eval::transform(variant, bound, Side::Query, &ctx, ctx.q_pos(), &mut q);
    let mut logits: Vec<(usize, f64)> = vec![];
    for j in (0..kv_len).filter(|&j| eval::visible(variant, bound, &ctx, j as i32)) {
        let mut k = key(j);
        eval::transform(variant, bound, Side::Key, &ctx, j as i32, &mut k);
        let mut dot = 0.0;
        for (q, k) in q.iter().zip(&k) {
            dot = p.acc(dot + p.acc(q * k));
        }
        let score = p.store(p.acc(dot * sm_scale));
        let logit = match p {
            Precision::Exact => eval::logit(variant, bound, &ctx, j as i32, score),
            Precision::Naive(_) => f64::from(eval::naive_logit(variant, bound, &ctx, j as i32, score as f32)),
        };
        logits.push((j, logit));
    }
    let softmax = variant.normalize() == Normalize::Softmax;
    let init = eval::init(variant, bound, &ctx);
    let m = logits.iter().map(|l| l.1).chain(init).fold(f64::NEG_INFINITY, f64::max);
    let weight = |l: f64| if softmax { p.store((l - m).exp()) } else { p.store(l) };
    let mut d = if softmax { init.map_or(0.0, |l| p.acc((l - m).exp())) } else { 1.0 };
    let mut o = vec![0.0; dim_vo];
    for &(j, l) in &logits {
        let w = weight(l);
        if softmax {
            d = p.acc(d + w);
        }
        let mut v = value(j);
        eval::transform(variant, bound, Side::Value, &ctx, j as i32, &mut v);
        for (o, v) in o.iter_mut().zip(&v) {
            *o = p.acc(*o + p.acc(w * v));
        }
    }
    for o in &mut o {
        // Nothing visible, no virtual key: 0, and -inf below.
        let x = if d == 0.0 { 0.0 } else { p.acc(*o / d) };
        *o = p.store(eval::output(variant, bound, &ctx, x, m, d));
    }
    (o, p.acc(m * std::f64::consts::LOG2_E + p.acc(d.log2())))
}

/// A batch of latent attention.
#[derive(Clone, Copy, Debug)]
pub struct Mla<'a> {
    /// `[tokens, heads, head_dim_ckv]`
    pub q_nope: TensorRef<'a>,
    /// `[tokens, heads, head_dim_kpe]`
    pub q_pe: TensorRef<'a>,
    /// Query tokens of each request.
    pub qo: &'a Ragged,
    /// The cache.
    pub kv: PagedMla<'a>,
    /// Its pages.
    pub table: &'a PageTable<'a>,
    /// Causal or standard.
    pub variant: &'a Variant,
    /// Factor of the scores.
    pub sm_scale: f64,
}

/// Latent attention: `o` as `[tokens, heads, head_dim_ckv]`, `lse` as `[tokens, heads]`.
pub fn mla(p: Precision, b: &Mla<'_>) -> Result<States> {
    let (heads, dim, dim_pe) = (b.q_nope.shape()[1], b.q_nope.shape()[2], b.q_pe.shape()[2]);
    let (nope, pe) = (values(b.q_nope)?, values(b.q_pe)?);
    let params = Params::new();
    let bound = b.variant.bind(&params, heads, b.qo.batch())?;
    let (mut o, mut lse) = (vec![], vec![]);
    for r in 0..b.qo.batch() {
        let (q_len, kv_len) = (b.qo.lens()[r] as i32, b.table.lens()[r] as i32);
        let mut keys = vec![];
        for j in 0..kv_len as usize {
            let (page, slot) = b.table.locate(r, j).unwrap_or_default();
            let part = |t: TensorRef<'_>, scale: f32| -> Result<Vec<f64>> {
                Ok(values(t.select(0, page)?.select(0, slot)?)?.into_iter().map(|x| x * f64::from(scale)).collect())
            };
            let mut key = part(b.kv.ckv, b.kv.ckv_scale)?;
            key.extend(part(b.kv.kpe, b.kv.kpe_scale)?);
            keys.push(key);
        }
        for q_idx in 0..q_len {
            let token = b.qo.indptr()[r] as usize + q_idx as usize;
            for h in 0..heads {
                let mut q = nope[(token * heads + h) * dim..][..dim].to_vec();
                q.extend(&pe[(token * heads + h) * dim_pe..][..dim_pe]);
                let ctx = RowCtx { batch: r as i32, q_idx, q_len, kv_len, qo_head: h as i32, kv_head: 0 };
                let row = Row { variant: b.variant, bound: &bound, ctx, sm_scale: b.sm_scale, dim_vo: dim };
                let value = |j: usize| keys[j][..dim].to_vec();
                let (row_o, row_lse) = attend(p, &row, q, kv_len as usize, |j| keys[j].clone(), value);
                o.extend(row_o);
                lse.push(row_lse);
            }
        }
    }
    Ok((o, lse))
}

/// Merges states row by row: `o` `[rows, states, dim]`, `lse` `[rows, states]`, base 2, both row-major.
pub fn merge_states(p: Precision, o: &[f64], lse: &[f64], states: usize, dim: usize) -> States {
    let (mut out, mut out_lse) = (vec![], vec![]);
    for (r, lse) in lse.chunks_exact(states.max(1)).enumerate() {
        let m = lse.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(l));
        let weights: Vec<f64> =
            lse.iter().map(|&l| if l == f64::NEG_INFINITY { 0.0 } else { p.acc((l - m).exp2()) }).collect();
        let d = weights.iter().fold(0.0, |d, w| p.acc(d + w));
        for c in 0..dim {
            let mut sum = 0.0;
            for (i, &w) in weights.iter().enumerate().filter(|w| *w.1 != 0.0) {
                sum = p.acc(sum + p.acc(w * o[(r * states + i) * dim + c]));
            }
            out.push(p.store(if d == 0.0 { 0.0 } else { p.acc(sum / d) }));
        }
        out_lse.push(if d == 0.0 { f64::NEG_INFINITY } else { p.acc(m + d.log2()) });
    }
    (out, out_lse)
}
