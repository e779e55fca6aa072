//! Attention: every plan, over every kind of KV, with library variants and random ones.

use super::{Arg, Bytes};
use crate::error::Result;
use crate::exec::Exec;
use crate::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged, RaggedKv};
use crate::ops::attention::{
    BatchArgs, BatchPlan, BlockMask, CascadeArgs, CascadeLevel, CascadePlan, MlaArgs, MlaPlan, MlaProblem, Problem,
    Scratch, SingleArgs, SparseArgs, SparsePlan, Split, VariableSparsePlan, merge_state, merge_state_in_place,
    merge_states, single_decode, single_prefill,
};
use crate::tensor::{DType, TensorMut};
use crate::testing::{Case, Rng};
use crate::variant::{self, ParamType, Params, Variant};

/// Values for any variant's parameters, one of each type.
struct Values {
    number: f32,
    integer: i32,
    numbers: Vec<f32>,
    integers: Vec<i32>,
    per_head: Vec<f32>,
    bytes: Vec<u8>,
    indptr: Vec<i32>,
    /// Which one to leave out, and whether to add one that no variant has.
    missing: usize,
    more: bool,
}

impl Values {
    fn params(&self, variant: &Variant) -> Params<'_> {
        let mut params = Params::new();
        for (i, (name, ty)) in variant.params().enumerate() {
            params = match ty {
                _ if i == self.missing => params,
                ParamType::F32 => params.f32(name, self.number),
                ParamType::I32 => params.i32(name, self.integer),
                ParamType::F32Tensor => params.f32_tensor(name, &self.numbers),
                ParamType::I32Tensor => params.i32_tensor(name, &self.integers),
                ParamType::PerHead => params.f32_tensor(name, &self.per_head),
                ParamType::Bits => params.bits(name, &self.bytes, &self.indptr),
                ParamType::Tensor(_) => params.f32_tensor(name, &self.numbers),
            };
        }
        if self.more { params.f32("unheard of", 0.0) } else { params }
    }
}

impl Bytes<'_> {
    fn variant(&mut self) -> Variant {
        let library = [
            variant::standard,
            variant::causal,
            variant::sliding_window,
            variant::soft_cap,
            variant::alibi,
            variant::sink,
            variant::custom_mask,
            variant::tree_mask,
            variant::sigmoid,
            variant::multi_item,
        ];
        let chosen = match self.below(14) {
            i @ 0..10 => library[i](),
            10 | 11 => Case::random(&mut Rng::new(u64::from(self.byte())), 6).variant,
            _ => {
                let (theta, scale, interleave) = (self.f32(), self.f32(), self.byte() < 128);
                variant::rope_llama(theta, scale, interleave).unwrap_or_else(|_| variant::causal())
            }
        };
        if self.byte() < 64 { variant::causal().and(chosen.clone()).unwrap_or(chosen) } else { chosen }
    }

    fn values(&mut self, heads: usize, batch: usize) -> Values {
        let integers = (0..self.below(8) + usize::from(!self.rarely())).map(|_| self.i32(40)).collect();
        let numbers = (0..self.below(8) + usize::from(!self.rarely())).map(|_| self.f32()).collect();
        let per_head = (0..heads.min(64) + usize::from(self.rarely())).map(|_| self.f32()).collect();
        let mut indptr = vec![0i32];
        for _ in 0..batch {
            indptr.push(indptr[indptr.len() - 1] + self.below(6) as i32);
        }
        let bytes = (0..indptr[batch]).map(|_| self.byte()).collect();
        self.spoil(&mut indptr);
        let (missing, more) = (if self.rarely() { 0 } else { usize::MAX }, self.rarely());
        let (number, integer) = (self.f32(), self.i32(60) - 2);
        Values { number, integer, numbers, integers, per_head, bytes, indptr, missing, more }
    }

    fn split(&mut self) -> Split {
        match self.byte() {
            0..120 => Split::Balanced,
            120..200 => Split::Fixed(64),
            200..250 => Split::Off,
            b => Split::Fixed(u32::from(b).wrapping_mul(self.i32(100) as u32)),
        }
    }

    fn head_dim(&mut self) -> usize {
        if self.rarely() { self.size() } else { [1, 7, 8, 16, 17, 24, 32, 33, 64][self.below(9)] }
    }

    fn problem(&mut self) -> Problem {
        let q_dtype = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2][self.below(5)];
        let kv_dtype = match self.below(6) {
            5 => DType::E2M1x2,
            i => [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2][i],
        };
        let kv_heads = if self.rarely() { self.size() } else { self.below(3) + 1 };
        let qo_heads = if self.rarely() { self.size() } else { kv_heads.saturating_mul(self.below(4) + 1) };
        let (mut head_dim_qk, mut head_dim_vo) = (self.head_dim(), self.head_dim());
        if kv_dtype == DType::E2M1x2 && !self.rarely() {
            (head_dim_qk, head_dim_vo) = (16, 32);
        }
        let out_dtype = if self.rarely() { self.dtype() } else { self.float() };
        let variant = self.variant();
        Problem { qo_heads, kv_heads, head_dim_qk, head_dim_vo, q_dtype, kv_dtype, out_dtype, variant }
    }

    fn sm_scale(&mut self) -> Option<f32> {
        if self.byte() < 128 { None } else { Some(self.f32()) }
    }

    /// Up to four query tokens for each request.
    fn q_lens(&mut self, batch: usize) -> Vec<u32> {
        let mut lens: Vec<u32> = (0..batch).map(|_| self.below(5) as u32).collect();
        if self.rarely() && batch > 0 {
            lens[0] = self.i32(9) as u32;
        }
        lens
    }

    /// Lengths as planned: those of the KV, but for a fault.
    fn planned(&mut self, lens: &[u32]) -> Vec<u32> {
        let mut lens = lens.to_vec();
        if self.rarely() && !lens.is_empty() {
            lens[0] = self.i32(80) as u32;
        }
        lens
    }

    fn pool(&mut self, p: &Problem, pages: usize, page_size: usize) -> Pool {
        let layout = [KvLayout::Nhd, KvLayout::Hnd][self.below(2)];
        let shape = |dim| match layout {
            KvLayout::Nhd => [pages, page_size, p.kv_heads, dim],
            KvLayout::Hnd => [pages, p.kv_heads, page_size, dim],
        };
        let fp4 = p.kv_dtype == DType::E2M1x2;
        let per = if fp4 { 2 } else { 1 };
        let k = self.tensor(p.kv_dtype, &shape(p.head_dim_qk / per));
        let v = self.tensor(p.kv_dtype, &shape(p.head_dim_vo / per));
        let scales = fp4.then(|| [p.head_dim_qk, p.head_dim_vo].map(|dim| self.tensor(DType::E4M3, &shape(dim / 16))));
        let factors = if self.byte() < 128 { (1.0, 1.0) } else { (self.f32(), self.f32()) };
        Pool { k, v, scales, layout, factors }
    }
}

/// Keys and values in pages.
struct Pool {
    k: Arg,
    v: Arg,
    scales: Option<[Arg; 2]>,
    layout: KvLayout,
    factors: (f32, f32),
}

impl Pool {
    fn kv(&self) -> Result<PagedKv<'_>> {
        let (k, v) = (self.k.view()?, self.v.view()?);
        let kv = match &self.scales {
            Some([ks, vs]) => PagedKv::nvfp4(k, v, ks.view()?, vs.view()?, self.layout)?,
            None => PagedKv::new(k, v, self.layout)?,
        };
        kv.with_scales(self.factors.0, self.factors.1)
    }
}

/// Output and log-sum-exp of some rows.
struct Out {
    out: Arg,
    lse: Option<Arg>,
}

impl Out {
    fn new(b: &mut Bytes<'_>, dtype: DType, shape: [usize; 3]) -> Self {
        let out = b.tensor(dtype, &shape);
        let lse = (b.byte() < 100).then(|| b.tensor(DType::F32, &shape[..2]));
        Self { out, lse }
    }

    fn views(&mut self) -> Result<(TensorMut<'_>, Option<TensorMut<'_>>)> {
        Ok((self.out.view_mut()?, self.lse.as_mut().map(Arg::view_mut).transpose()?))
    }

    fn assert_only_elements_written(&self) {
        self.out.assert_only_elements_written();
        if let Some(lse) = &self.lse {
            lse.assert_only_elements_written();
        }
    }
}

pub(super) fn batch(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let p = b.problem();
    let ragged = b.byte() < 80;
    let pages = b.pages();
    let (table, kv_indptr);
    let (lens, num_pages, page_size) = if ragged {
        kv_indptr = Ragged::new(&b.indptr(70))?;
        table = PageTable::new(1, 0, vec![0], vec![], &[])?;
        (kv_indptr.lens(), 1, kv_indptr.rows().min(600))
    } else {
        kv_indptr = Ragged::from_lens(&[])?;
        table = pages.table()?;
        (table.lens(), pages.num_pages, pages.page_size)
    };
    let pool = b.pool(&p, num_pages, page_size);
    let kv = if ragged {
        let (k, v) = (pool.k.view()?.select(0, 0)?, pool.v.view()?.select(0, 0)?);
        Kv::Ragged(match pool.layout {
            KvLayout::Nhd => RaggedKv::new(k, v, &kv_indptr)?,
            KvLayout::Hnd => RaggedKv::new(k.transpose(0, 1)?, v.transpose(0, 1)?, &kv_indptr)?,
        })
    } else {
        Kv::Paged(pool.kv()?, &table)
    };
    let qo = Ragged::from_lens(&b.q_lens(lens.len()))?;
    let values = b.values(p.qo_heads, lens.len());
    let planned = b.planned(lens);
    let plan = BatchPlan::new(exec, p.clone(), &qo, &planned, b.split())?;
    let q = b.tensor(p.q_dtype, &[qo.rows(), p.qo_heads, p.head_dim_qk]);
    let mut o = Out::new(b, p.out_dtype, [qo.rows(), p.qo_heads, p.head_dim_vo]);
    let mut scratch = if b.rarely() { Scratch::default() } else { plan.scratch() };
    let (params, sm_scale) = (values.params(&p.variant), b.sm_scale());
    let (out, lse) = o.views()?;
    let args = BatchArgs { q: q.view()?, kv, params: &params, sm_scale, scratch: &mut scratch, out, lse };
    let result = plan.run(exec, args);
    o.assert_only_elements_written();
    result
}

/// A table of requests of these lengths.
fn table_of(b: &mut Bytes<'_>, lens: &[u32], page_size: usize, pages: usize) -> Result<PageTable<'static>> {
    let (mut indptr, mut indices) = (vec![0i32], vec![]);
    for &len in lens {
        indices.extend((0..(len as usize).div_ceil(page_size)).map(|_| b.below(pages) as i32));
        indptr.push(indices.len() as i32);
    }
    let lens: Vec<i32> = lens.iter().map(|&n| n as i32).collect();
    PageTable::with_lens(page_size, pages, indptr, indices, &lens)
}

pub(super) fn cascade(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let p = b.problem();
    let (page_size, pages, requests) = (b.below(9) + 1, b.below(8) + 1, b.below(6) + 1);
    let q_lens = b.q_lens(requests);
    // The levels, the last one first: each joins neighbours of the one below, but for a fault.
    let mut levels = vec![(q_lens.clone(), (0..requests).map(|_| b.below(90) as u32).collect::<Vec<_>>())];
    for _ in 0..b.below(3) {
        let below = &levels[levels.len() - 1].0;
        let each = b.below(3) + 1;
        let mut groups: Vec<u32> = below.chunks(each).map(|g| g.iter().fold(0u32, |a, &n| a.wrapping_add(n))).collect();
        if b.rarely() {
            groups[0] = b.below(6) as u32;
        }
        let lens = groups.iter().map(|_| b.below(90) as u32).collect();
        levels.push((groups, lens));
    }
    levels.reverse();
    let mut parts = vec![];
    for (groups, lens) in &levels {
        let table = table_of(b, lens, page_size, pages)?;
        let planned = b.planned(lens);
        parts.push((Ragged::from_lens(groups)?, table, planned));
    }
    let pool = b.pool(&p, pages, page_size);
    let kv = pool.kv()?;
    let mut kvs: Vec<_> = parts.iter().map(|(_, table, _)| Kv::Paged(kv, table)).collect();
    let described: Vec<_> = parts.iter().map(|(qo, _, kv_lens)| CascadeLevel { qo, kv_lens }).collect();
    let values = b.values(p.qo_heads, requests);
    let plan = CascadePlan::new(exec, p.clone(), &described, b.split())?;
    if b.rarely() {
        kvs.pop();
    }
    let tokens = q_lens.iter().map(|&n| n as usize).sum();
    let q = b.tensor(p.q_dtype, &[tokens, p.qo_heads, p.head_dim_qk]);
    let mut o = Out::new(b, p.out_dtype, [tokens, p.qo_heads, p.head_dim_vo]);
    let (params, sm_scale, mut scratch) = (values.params(&p.variant), b.sm_scale(), plan.scratch());
    let (out, lse) = o.views()?;
    let args = CascadeArgs { q: q.view()?, kv: &kvs, params: &params, sm_scale, scratch: &mut scratch, out, lse };
    let result = plan.run(exec, args);
    o.assert_only_elements_written();
    result
}

pub(super) fn mla(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let Problem { qo_heads: heads, head_dim_qk: head_dim_ckv, q_dtype, out_dtype, .. } = b.problem();
    let kv_dtype = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2][b.below(5)];
    let head_dim_kpe = if b.byte() < 32 { 0 } else { b.head_dim() };
    let p = MlaProblem { heads, head_dim_ckv, head_dim_kpe, q_dtype, kv_dtype, out_dtype, causal: b.byte() < 128 };
    let pages = b.pages();
    let table = pages.table()?;
    let ckv = b.tensor(kv_dtype, &[pages.num_pages, pages.page_size, head_dim_ckv]);
    let kpe = b.tensor(kv_dtype, &[pages.num_pages, pages.page_size, head_dim_kpe]);
    let qo = Ragged::from_lens(&b.q_lens(table.batch()))?;
    let planned = b.planned(table.lens());
    let plan = MlaPlan::new(exec, p, &qo, &planned, b.split())?;
    let q_nope = b.tensor(q_dtype, &[qo.rows(), heads, head_dim_ckv]);
    let q_pe = b.tensor(q_dtype, &[qo.rows(), heads, head_dim_kpe]);
    let mut o = Out::new(b, out_dtype, [qo.rows(), heads, head_dim_ckv]);
    let kv = PagedMla::new(ckv.view()?, kpe.view()?)?;
    let kv = if b.byte() < 128 { kv } else { kv.with_scales(b.f32(), b.f32())? };
    let (sm_scale, mut scratch) = (b.f32(), plan.scratch());
    let (out, lse) = o.views()?;
    let (q_nope, q_pe) = (q_nope.view()?, q_pe.view()?);
    let args = MlaArgs { q_nope, q_pe, kv, table: &table, sm_scale, scratch: &mut scratch, out, lse };
    let result = plan.run(exec, args);
    o.assert_only_elements_written();
    result
}

pub(super) fn sparse(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let mut p = b.problem();
    if p.kv_dtype == DType::E2M1x2 && !b.rarely() {
        p.kv_dtype = DType::BF16;
    }
    let (block_rows, block_cols) = (b.below(6) + 1, b.below(8) + 1);
    let indptr = b.indptr(4);
    let slots = indptr.iter().copied().max().unwrap_or(0).clamp(0, 64);
    let col_blocks = b.below(9) + 1;
    let mut indices: Vec<i32> = (0..slots).map(|_| b.below(col_blocks) as i32).collect();
    b.spoil(&mut indices);
    let rows = (indptr.len().saturating_sub(1) * block_rows).saturating_sub(b.below(block_rows));
    let rows = if b.rarely() { b.size() } else { rows };
    let cols = if b.rarely() { b.size() } else { col_blocks * block_cols + b.below(2) };
    let block_rows = if b.rarely() { b.size() } else { block_rows };
    let mask = BlockMask { indptr: &indptr, indices: &indices, rows, cols, block_rows, block_cols };
    let values = b.values(p.qo_heads, indptr.len().saturating_sub(1));
    let plan = SparsePlan::new(exec, p.clone(), mask, b.split())?;
    let q = b.tensor(p.q_dtype, &[rows, p.qo_heads, p.head_dim_qk]);
    let k = b.tensor(p.kv_dtype, &[cols, p.kv_heads, p.head_dim_qk]);
    let v = b.tensor(p.kv_dtype, &[cols, p.kv_heads, p.head_dim_vo]);
    let mut o = Out::new(b, p.out_dtype, [rows, p.qo_heads, p.head_dim_vo]);
    let (params, sm_scale, mut scratch) = (values.params(&p.variant), b.sm_scale(), plan.scratch());
    let (out, lse) = o.views()?;
    let (q, k, v) = (q.view()?, k.view()?, v.view()?);
    let args = SparseArgs { q, k, v, params: &params, sm_scale, scratch: &mut scratch, out, lse };
    let result = plan.run(exec, args);
    o.assert_only_elements_written();
    result
}

pub(super) fn variable_sparse(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let mut p = b.problem();
    if p.kv_dtype == DType::E2M1x2 && !b.rarely() {
        p.kv_dtype = DType::F16;
    }
    let (row_blocks, col_blocks) = (b.below(4) + 1, b.below(4) + 1);
    let heads = p.kv_heads.min(8);
    // Every head has the first one's blocks, in another order.
    let sizes = |b: &mut Bytes<'_>, blocks: usize, most: usize| {
        let first: Vec<i64> = (0..blocks).map(|_| b.below(most) as i64).collect();
        let sum: i64 = first.iter().sum();
        let arg = b.ids(DType::I32, &[heads, blocks], |_, i| first[(i % blocks + i / blocks) % blocks]);
        (arg, sum as usize)
    };
    let ((row_sizes, rows), (col_sizes, cols)) = (sizes(b, row_blocks, 8), sizes(b, col_blocks, 30));
    let mask = b.ids(DType::Bool, &[heads, row_blocks, col_blocks], |b, _| i64::from(b.byte() < 160));
    let values = b.values(p.group(), row_blocks);
    let split = b.split();
    let plan = VariableSparsePlan::new(exec, p.clone(), mask.view()?, row_sizes.view()?, col_sizes.view()?, split)?;
    let q = b.tensor(p.q_dtype, &[p.qo_heads, rows, p.head_dim_qk]);
    let k = b.tensor(p.kv_dtype, &[p.kv_heads, cols, p.head_dim_qk]);
    let v = b.tensor(p.kv_dtype, &[p.kv_heads, cols, p.head_dim_vo]);
    let mut out = b.tensor(p.out_dtype, &[p.qo_heads, rows, p.head_dim_vo]);
    let mut lse = (b.byte() < 100).then(|| b.tensor(DType::F32, &[p.qo_heads, rows]));
    let (params, sm_scale, mut scratch) = (values.params(&p.variant), b.sm_scale(), plan.scratch());
    let args = SparseArgs {
        q: q.view()?,
        k: k.view()?,
        v: v.view()?,
        params: &params,
        sm_scale,
        scratch: &mut scratch,
        out: out.view_mut()?,
        lse: lse.as_mut().map(Arg::view_mut).transpose()?,
    };
    let result = plan.run(exec, args);
    out.assert_only_elements_written();
    result
}

pub(super) fn single(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let mut p = b.problem();
    if p.kv_dtype == DType::E2M1x2 && !b.rarely() {
        p.kv_dtype = DType::E4M3;
    }
    let (q_len, kv_len, decode) = (b.size() % 20, b.size() % 150, b.byte() < 100);
    let q_len = if b.rarely() { b.size() } else { q_len };
    let layout = [KvLayout::Nhd, KvLayout::Hnd][b.below(2)];
    let shape = |dim| match layout {
        KvLayout::Nhd => [kv_len, p.kv_heads, dim],
        KvLayout::Hnd => [p.kv_heads, kv_len, dim],
    };
    let k = b.tensor(p.kv_dtype, &shape(p.head_dim_qk));
    let v = b.tensor(p.kv_dtype, &shape(p.head_dim_vo));
    let (q, mut o) = if decode {
        let q = b.tensor(p.q_dtype, &[p.qo_heads, p.head_dim_qk]);
        let out = b.tensor(p.out_dtype, &[p.qo_heads, p.head_dim_vo]);
        (q, Out { out, lse: (b.byte() < 100).then(|| b.tensor(DType::F32, &[p.qo_heads])) })
    } else {
        let q = b.tensor(p.q_dtype, &[q_len, p.qo_heads, p.head_dim_qk]);
        (q, Out::new(b, p.out_dtype, [q_len, p.qo_heads, p.head_dim_vo]))
    };
    let values = b.values(p.qo_heads, 1);
    let (params, sm_scale) = (values.params(&p.variant), b.sm_scale());
    let (q, k, v) = (q.view()?, k.view()?, v.view()?);
    let (out, lse) = o.views()?;
    let args = SingleArgs { q, k, v, layout, variant: &p.variant, params: &params, sm_scale, out, lse };
    let result = if decode { single_decode(exec, args) } else { single_prefill(exec, args) };
    o.assert_only_elements_written();
    result
}

pub(super) fn merge(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, tokens, heads, dim) = (b.float(), b.size(), b.size() % 7, b.size());
    let (o_shape, lse_shape) = ([tokens, heads, dim], [tokens, heads]);
    let (mut out, mut lse_out) = (b.tensor(dtype, &o_shape), b.tensor(DType::F32, &lse_shape));
    let result = match b.below(3) {
        0 => {
            let [a, c] = [(); 2].map(|()| (b.tensor(dtype, &o_shape), b.tensor(DType::F32, &lse_shape)));
            let into = (out.view_mut()?, lse_out.view_mut()?);
            merge_state(exec, (a.0.view()?, a.1.view()?), (c.0.view()?, c.1.view()?), into)
        }
        1 => {
            let states = if b.rarely() { b.size() } else { b.below(4) };
            let o = b.tensor(dtype, &[tokens, states, heads, dim]);
            let lse = b.tensor(DType::F32, &[tokens, states, heads]);
            merge_states(exec, (o.view()?, lse.view()?), (out.view_mut()?, lse_out.view_mut()?))
        }
        _ => {
            let other = (b.tensor(dtype, &o_shape), b.tensor(DType::F32, &lse_shape));
            let mask = (b.byte() < 128).then(|| b.ids(DType::Bool, &[tokens], |b, _| i64::from(b.byte() < 128)));
            let mask = mask.as_ref().map(Arg::view).transpose()?;
            let into = (out.view_mut()?, lse_out.view_mut()?);
            merge_state_in_place(exec, into, (other.0.view()?, other.1.view()?), mask)
        }
    };
    out.assert_only_elements_written();
    lse_out.assert_only_elements_written();
    result
}
