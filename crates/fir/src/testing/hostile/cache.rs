//! Rotations, and writes into a paged cache.

use super::{Arg, Bytes, Pages};
use crate::error::Result;
use crate::exec::Exec;
use crate::kv::{KvLayout, PageTable, PagedKvMut, PagedMlaMut, Ragged};
use crate::ops::page::{Slots, append_paged_kv, append_paged_mla, batch_indices_positions, seq_lens};
use crate::ops::rope::{
    Angles, Positions, Roped, RopedKv, RopedMla, apply_rope, apply_rope_in_place, cos_sin_cache, rope_quantize,
    rope_quantize_append_paged_kv, rope_quantize_append_paged_mla,
};
use crate::tensor::DType;
use crate::variant::{Llama31, Rope};

/// A cache's element type.
fn cached(b: &mut Bytes<'_>, fp4: bool) -> DType {
    let types = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::E2M1x2];
    types[b.below(if fp4 { 6 } else { 5 })]
}

/// Keys and values in pages, for writing.
struct Cache {
    k: Arg,
    v: Arg,
    scales: Option<[Arg; 2]>,
    layout: KvLayout,
    factors: (f32, f32),
}

impl Cache {
    fn new(b: &mut Bytes<'_>, pages: &Pages, heads: usize, dims: [usize; 2], dtype: DType) -> Self {
        let layout = [KvLayout::Nhd, KvLayout::Hnd][b.below(2)];
        let shape = |dim| match layout {
            KvLayout::Nhd => [pages.num_pages, pages.page_size, heads, dim],
            KvLayout::Hnd => [pages.num_pages, heads, pages.page_size, dim],
        };
        let fp4 = dtype == DType::E2M1x2;
        let [k, v] = dims.map(|dim| b.tensor(dtype, &shape(if fp4 { dim / 2 } else { dim })));
        let scales = fp4.then(|| dims.map(|dim| b.tensor(DType::E4M3, &shape(dim / 16))));
        let factors = if b.byte() < 128 { (1.0, 1.0) } else { (b.f32(), b.f32()) };
        Self { k, v, scales, layout, factors }
    }

    fn view_mut(&mut self) -> Result<PagedKvMut<'_>> {
        let (k, v) = (self.k.view_mut()?, self.v.view_mut()?);
        let cache = match &mut self.scales {
            Some([ks, vs]) => PagedKvMut::nvfp4(k, v, ks.view_mut()?, vs.view_mut()?, self.layout)?,
            None => PagedKvMut::new(k, v, self.layout)?,
        };
        cache.with_scales(self.factors.0, self.factors.1)
    }

    fn assert_only_elements_written(&self) {
        let scales = self.scales.iter().flatten();
        [&self.k, &self.v].into_iter().chain(scales).for_each(Arg::assert_only_elements_written);
    }
}

/// The cache of latent attention, for writing.
struct Latent {
    ckv: Arg,
    kpe: Arg,
    factors: (f32, f32),
}

impl Latent {
    fn new(b: &mut Bytes<'_>, pages: &Pages, dims: [usize; 2]) -> Self {
        let dtype = cached(b, false);
        let [ckv, kpe] = dims.map(|dim| b.tensor(dtype, &[pages.num_pages, pages.page_size, dim]));
        let factors = if b.byte() < 128 { (1.0, 1.0) } else { (b.f32(), b.f32()) };
        Self { ckv, kpe, factors }
    }

    fn view_mut(&mut self) -> Result<PagedMlaMut<'_>> {
        let cache = PagedMlaMut::new(self.ckv.view_mut()?, self.kpe.view_mut()?)?;
        cache.with_scales(self.factors.0, self.factors.1)
    }

    fn assert_only_elements_written(&self) {
        self.ckv.assert_only_elements_written();
        self.kpe.assert_only_elements_written();
    }
}

/// Where `nnz` tokens go: by request and position, or by slot.
enum Places {
    Tokens(Arg, Arg),
    Mapping(Arg),
}

impl Places {
    fn new(b: &mut Bytes<'_>, pages: &Pages, nnz: usize) -> Self {
        if b.byte() < 128 {
            // Different slots, as far as there are enough.
            let (slots, first) = (pages.num_pages.saturating_mul(pages.page_size).clamp(1, 1 << 20), b.below(200));
            let dtype = b.int();
            return Self::Mapping(b.ids(
                dtype,
                &[nnz],
                |b, i| {
                    if b.byte() < 20 { -1 } else { ((first + i) % slots) as i64 }
                },
            ));
        }
        // One request after another, from its start on.
        let lens: Vec<u32> = pages.table().map_or(vec![], |t| t.lens().to_vec());
        let tokens: Vec<(usize, u32)> =
            (0..lens.len()).flat_map(|r| (0..lens[r].min(40)).map(move |t| (r, t))).collect();
        let at = |i: usize| tokens.get(i).copied().unwrap_or((0, 0));
        let dtypes = (b.int(), b.int());
        let requests = b.ids(dtypes.0, &[nnz], |_, i| at(i).0 as i64);
        Self::Tokens(requests, b.ids(dtypes.1, &[nnz], |_, i| i64::from(at(i).1)))
    }

    fn slots<'a>(&'a self, table: &'a PageTable<'a>) -> Result<Slots<'a>> {
        Ok(match self {
            Self::Tokens(requests, positions) => {
                Slots::Tokens { table, batch_indices: requests.view()?, positions: positions.view()? }
            }
            Self::Mapping(slots) => Slots::Mapping(slots.view()?),
        })
    }
}

/// A number of tokens: mostly few enough for the pages.
fn few(b: &mut Bytes<'_>) -> usize {
    if b.rarely() { b.size() } else { b.below(6) }
}

pub(super) fn append_kv(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, to, heads, nnz) = (b.float(), cached(b, true), b.below(3) + 1, few(b));
    let dims = if to == DType::E2M1x2 && !b.rarely() { [16, 32] } else { [b.size() % 40, b.size() % 40] };
    let pages = b.pages();
    let mut cache = Cache::new(b, &pages, heads, dims, to);
    let [k, v] = dims.map(|dim| b.tensor(dtype, &[nnz, heads, dim]));
    let places = Places::new(b, &pages, nnz);
    let table = pages.table()?;
    let result = append_paged_kv(exec, k.view()?, v.view()?, places.slots(&table)?, cache.view_mut()?);
    cache.assert_only_elements_written();
    result
}

pub(super) fn append_mla(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, nnz, dims) = (b.float(), few(b), [b.size() % 50, b.size() % 50]);
    let pages = b.pages();
    let mut cache = Latent::new(b, &pages, dims);
    let [ckv, kpe] = dims.map(|dim| b.tensor(dtype, &[nnz, dim]));
    let places = Places::new(b, &pages, nnz);
    let table = pages.table()?;
    let result = append_paged_mla(exec, ckv.view()?, kpe.view()?, places.slots(&table)?, cache.view_mut()?);
    cache.assert_only_elements_written();
    result
}

/// Lengths of requests, and where their new tokens stand.
pub(super) fn lengths(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let indptr = Ragged::new(&b.indptr(9))?;
    let (batch, nnz, dtype) = (indptr.batch(), indptr.rows().min(200), b.int());
    if b.byte() < 128 {
        let page_size = if b.rarely() { b.size() } else { b.below(20) + 1 };
        let last = b.ids(dtype, &[batch], |b, _| b.below(page_size.min(200)) as i64);
        let mut out = b.tensor(DType::I32, &[batch]);
        let result = seq_lens(exec, &indptr, last.view()?, page_size, out.view_mut()?);
        out.assert_only_elements_written();
        return result;
    }
    let lens = b.ids(dtype, &[batch], |b, _| 9 + b.below(40) as i64);
    let (mut requests, mut positions) = (b.tensor(DType::I32, &[nnz]), b.tensor(DType::I32, &[nnz]));
    let (into, at) = (requests.view_mut()?, positions.view_mut()?);
    let result = batch_indices_positions(exec, &indptr, lens.view()?, into, at);
    requests.assert_only_elements_written();
    positions.assert_only_elements_written();
    result
}

fn description(b: &mut Bytes<'_>, dim: usize) -> Rope {
    let mut rope = Rope { interleave: b.byte() < 128, ..Rope::default() };
    if b.byte() < 64 {
        (rope.theta, rope.scale) = (b.f32(), b.f32());
    }
    if b.byte() < 64 {
        rope.rotary_dim = Some(if b.rarely() { b.size() } else { dim / 4 * 2 });
    }
    if b.byte() < 64 {
        let old_context_len = b.f32();
        rope.llama31 = Some(Llama31 { low_freq_factor: b.f32(), high_freq_factor: b.f32(), old_context_len });
    }
    rope
}

/// Positions and angles of `nnz` tokens with heads of `dim`.
struct Turn {
    ids: Option<Arg>,
    ragged: Option<(Ragged, Arg)>,
    rope: Rope,
    table: Option<Arg>,
}

impl Turn {
    fn new(b: &mut Bytes<'_>, nnz: usize, dim: usize) -> Result<Self> {
        let dtype = b.int();
        let (ids, ragged) = if b.byte() < 128 {
            (Some(b.ids(dtype, &[nnz], |b, _| b.below(30) as i64)), None)
        } else {
            let first = b.below(9).min(nnz);
            let indptr = Ragged::new(&[0, first as i32, nnz.min(i32::MAX as usize) as i32])?;
            let offsets = b.ids(dtype, &[2], |b, _| b.below(10) as i64);
            (None, Some((indptr, offsets)))
        };
        let rope = description(b, dim);
        let table = (b.byte() < 80).then(|| b.tensor(DType::F32, &[90, dim / 4 * 2]));
        Ok(Self { ids, ragged, rope, table })
    }

    fn positions(&self) -> Result<Positions<'_>> {
        Ok(match (&self.ids, &self.ragged) {
            (Some(ids), _) => Positions::Ids(ids.view()?),
            (None, Some((indptr, offsets))) => Positions::Ragged { indptr, offsets: offsets.view()? },
            (None, None) => unreachable!("made with one of them"),
        })
    }

    fn angles(&self) -> Result<Angles<'_>> {
        Ok(match &self.table {
            Some(table) => Angles::Cache { table: table.view()?, interleave: self.rope.interleave },
            None => Angles::Rope(self.rope),
        })
    }
}

/// A head dim, mostly even.
fn even(b: &mut Bytes<'_>) -> usize {
    if b.rarely() { b.size() } else { b.below(30) * 2 + 2 }
}

pub(super) fn rope(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, nnz, dim) = (b.float(), b.size() % 60, even(b));
    let nnz = if b.rarely() { b.size() } else { nnz };
    let heads = [b.below(4), b.below(3)];
    if b.byte() < 24 {
        let rope = description(b, dim);
        let mut out = b.tensor(DType::F32, &[nnz, rope.rotary_dim.unwrap_or(dim)]);
        let result = cos_sin_cache(exec, &rope, out.view_mut()?);
        out.assert_only_elements_written();
        return result;
    }
    let turn = Turn::new(b, nnz, dim)?;
    let [mut q, mut k] = heads.map(|heads| b.tensor(dtype, &[nnz, heads, dim]));
    if b.byte() < 100 {
        let result = apply_rope_in_place(exec, turn.positions()?, turn.angles()?, q.view_mut()?, k.view_mut()?);
        q.assert_only_elements_written();
        k.assert_only_elements_written();
        return result;
    }
    let [mut q_out, mut k_out] = heads.map(|heads| b.tensor(dtype, &[nnz, heads, dim]));
    let (at, by) = (turn.positions()?, turn.angles()?);
    let result = apply_rope(exec, q.view()?, k.view()?, at, by, q_out.view_mut()?, k_out.view_mut()?);
    q_out.assert_only_elements_written();
    k_out.assert_only_elements_written();
    result
}

/// The tensors of a [`Roped`].
struct Turned {
    rope: Arg,
    rope_out: Arg,
    nope: Option<(Arg, Arg)>,
    scale: f32,
}

impl Turned {
    fn new(b: &mut Bytes<'_>, lead: &[usize], dim: usize) -> Self {
        let (from, to) = (b.float(), cached(b, false));
        let shape = |dim| [lead, &[dim]].concat();
        let rope = b.tensor(from, &shape(dim));
        let rope_out = b.tensor(to, &shape(dim));
        let nope = (b.byte() < 100).then(|| {
            let dim = b.size() % 40;
            (b.tensor(from, &shape(dim)), b.tensor(to, &shape(dim)))
        });
        let scale = if b.byte() < 160 { 1.5 } else { b.f32() };
        Self { rope, rope_out, nope, scale }
    }

    fn view(&mut self) -> Result<Roped<'_>> {
        let nope = match &mut self.nope {
            Some((x, out)) => Some((x.view()?, out.view_mut()?)),
            None => None,
        };
        Ok(Roped { rope: self.rope.view()?, rope_out: self.rope_out.view_mut()?, nope, scale: self.scale })
    }

    fn assert_only_elements_written(&self) {
        self.rope_out.assert_only_elements_written();
        if let Some((_, out)) = &self.nope {
            out.assert_only_elements_written();
        }
    }
}

pub(super) fn rope_append(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (nnz, dim, heads, kind) = (few(b), even(b), b.below(3) + 1, b.below(3));
    let turn = Turn::new(b, nnz, dim)?;
    let qo_heads = b.below(4);
    let mut q = Turned::new(b, &[nnz, qo_heads], dim);
    let dtype = b.float();
    let result = match kind {
        0 => {
            let mut k = if b.byte() < 128 { Turned::new(b, &[nnz], dim) } else { Turned::new(b, &[nnz, heads], dim) };
            let result = rope_quantize(exec, q.view()?, k.view()?, turn.positions()?, turn.angles()?);
            k.assert_only_elements_written();
            result
        }
        1 => {
            let (to, nope_dim, vo) = (cached(b, true), if b.byte() < 128 { 0 } else { 16 }, b.size() % 40);
            let vo = if to == DType::E2M1x2 { 32 } else { vo };
            let pages = b.pages();
            let mut cache = Cache::new(b, &pages, heads, [dim.saturating_add(nope_dim), vo], to);
            let (rope, v) = (b.tensor(dtype, &[nnz, heads, dim]), b.tensor(dtype, &[nnz, heads, vo]));
            let nope = (nope_dim > 0).then(|| b.tensor(dtype, &[nnz, heads, nope_dim]));
            let places = Places::new(b, &pages, nnz);
            let table = pages.table()?;
            let kv = RopedKv {
                rope: rope.view()?,
                nope: nope.as_ref().map(Arg::view).transpose()?,
                v: v.view()?,
                slots: places.slots(&table)?,
                cache: cache.view_mut()?,
            };
            let result = rope_quantize_append_paged_kv(exec, q.view()?, kv, turn.positions()?, turn.angles()?);
            cache.assert_only_elements_written();
            result
        }
        _ => {
            let ckv_dim = b.size() % 50;
            let pages = b.pages();
            let mut cache = Latent::new(b, &pages, [ckv_dim, dim]);
            let (kpe, ckv) = (b.tensor(dtype, &[nnz, dim]), b.tensor(dtype, &[nnz, ckv_dim]));
            let places = Places::new(b, &pages, nnz);
            let table = pages.table()?;
            let slots = places.slots(&table)?;
            let kv = RopedMla { kpe: kpe.view()?, ckv: ckv.view()?, slots, cache: cache.view_mut()? };
            let result = rope_quantize_append_paged_mla(exec, q.view()?, kv, turn.positions()?, turn.angles()?);
            cache.assert_only_elements_written();
            result
        }
    };
    q.assert_only_elements_written();
    result
}
