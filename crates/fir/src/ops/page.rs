//! Writing keys and values into a paged cache.
//!
//! [`Slots`] says where each token goes. On the CPU nothing is written unless every token has a place, and no two the same.
//! What a device holds is not looked at before: there, tokens without a place are left out. [`Slots::Mapping`] is read where
//! it is; a page table is copied to the device by each call.

use super::rope::{check_integers, integers};
use crate::cpu;
use crate::cpu::page::{Move, Target};
use crate::cpu::rope::{Tokens, Work};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::{PageTable, PagedKvMut, PagedMlaMut, Ragged};
use crate::tensor::{DType, Dims, Layout, TensorMut, TensorRef};

/// Where each of `nnz` tokens goes in a paged cache.
#[derive(Clone, Copy, Debug)]
pub enum Slots<'a> {
    /// To a position of a request, which `table` must already count among the request's tokens.
    Tokens {
        /// Pages of the requests, with the new tokens.
        table: &'a PageTable<'a>,
        /// `[nnz]`, i32 or i64: the token's request.
        batch_indices: TensorRef<'a>,
        /// `[nnz]`, i32 or i64: its position there.
        positions: TensorRef<'a>,
    },
    /// `[nnz]`, i32 or i64: `page * page_size + offset`; a token with a negative one is not written.
    Mapping(TensorRef<'a>),
}

impl<'a> Slots<'a> {
    /// Refuses what does not fit a cache, as far as shapes and types tell.
    fn check(&self, op: &'static str, nnz: usize, pages: usize, page_size: usize) -> Result<()> {
        match *self {
            Self::Mapping(slots) => check_integers(op, "slots", slots, "nnz", nnz, "k"),
            Self::Tokens { table, .. } if table.page_size() != page_size => {
                let (arg, axis, got, first) = ("table", "page_size", table.page_size(), "cache");
                Err(Error::Dim { op, arg, axis, got, first, want: page_size })
            }
            Self::Tokens { table, .. } if table.num_pages() > pages => {
                let want = format!("at most the {pages} of `cache`");
                Err(Error::value(op, "table.num_pages()", table.num_pages(), want))
            }
            Self::Tokens { batch_indices, positions, .. } => {
                check_integers(op, "batch_indices", batch_indices, "nnz", nnz, "k")?;
                check_integers(op, "positions", positions, "nnz", nnz, "k")
            }
        }
    }

    /// The slots as CUDA kernels take them.
    #[cfg(feature = "cuda")]
    pub(super) fn on_cuda(
        self,
        op: &'static str,
        nnz: usize,
        pages: usize,
        page_size: usize,
    ) -> Result<cuda::tokens::Pages<'a>> {
        self.check(op, nnz, pages, page_size)?;
        let slots = match self {
            Self::Mapping(slots) => cuda::tokens::Slots::Mapping(slots),
            Self::Tokens { table, batch_indices: requests, positions } => {
                cuda::tokens::Slots::Tokens { table, requests, positions }
            }
        };
        Ok(cuda::tokens::Pages { slots, pages, page_size })
    }

    /// The moves, sorted by slot; each slot is in the cache and named once.
    pub(super) fn moves(&self, op: &'static str, nnz: usize, pages: usize, page_size: usize) -> Result<Vec<Move>> {
        self.check(op, nnz, pages, page_size)?;
        let mut moves = Vec::new();
        match *self {
            Self::Tokens { table, batch_indices, positions } => {
                table.check_host(op)?;
                let batch_indices = integers(op, "batch_indices", batch_indices, "nnz", nnz, "k")?;
                let positions = integers(op, "positions", positions, "nnz", nnz, "k")?;
                for (token, (&request, &position)) in batch_indices.iter().zip(&positions).enumerate() {
                    let lens = table.lens();
                    let Some(&len) = usize::try_from(request).ok().and_then(|r| lens.get(r)) else {
                        let got = format!("{request} at token {token}");
                        return Err(Error::value(op, "batch_indices", got, format!("a request below {}", lens.len())));
                    };
                    let at = usize::try_from(position).ok().and_then(|p| table.locate(request as usize, p));
                    let Some((page, offset)) = at else {
                        let got = format!("{position} at token {token}");
                        let want = format!("0 or more and below {len}, the length of request {request}");
                        return Err(Error::value(op, "positions", got, want));
                    };
                    moves.push(Move { slot: page * page_size + offset, token });
                }
            }
            Self::Mapping(slots) => {
                let end = pages * page_size;
                for (token, slot) in integers(op, "slots", slots, "nnz", nnz, "k")?.into_iter().enumerate() {
                    if let Ok(slot) = usize::try_from(slot) {
                        if slot >= end {
                            let got = format!("{slot} at token {token}");
                            let want = format!("below {end}: {pages} pages of {page_size}");
                            return Err(Error::value(op, "slots", got, want));
                        }
                        moves.push(Move { slot, token });
                    }
                }
            }
        }
        moves.sort_unstable();
        if let Some(two) = moves.windows(2).find(|w| w[0].slot == w[1].slot) {
            let (page, offset) = (two[0].slot / page_size, two[0].slot % page_size);
            let got = format!("tokens {} and {} at page {page}, offset {offset}", two[0].token, two[1].token);
            return Err(Error::value(op, "slots", got, "a slot for each token"));
        }
        Ok(moves)
    }
}

/// Writes the keys and values of new tokens into their pages.
///
/// `cache[slot(t)] = k[t] / k_scale`, and so for `v`, rounded to the cache's type; fp8 saturates. An NVFP4 cache gets,
/// per 16 elements, `block_scale = e4m3(max|k| / (6 k_scale))` and codes `e2m1(k / (block_scale * k_scale))`.
///
/// * `k`: `[nnz, kv_heads, head_dim_qk]`, f32, f16 or bf16; any strides of tokens and heads
/// * `v`: `[nnz, kv_heads, head_dim_vo]`, as `k`
pub fn append_paged_kv(
    exec: &Exec,
    k: TensorRef<'_>,
    v: TensorRef<'_>,
    slots: Slots<'_>,
    cache: PagedKvMut<'_>,
) -> Result<()> {
    const OP: &str = "append_paged_kv";
    let mut dims = Dims::of(OP);
    dims.bind("k", &k, &["nnz", "kv_heads", "head_dim_qk"])?.bind("v", &v, &["nnz", "kv_heads", "head_dim_vo"])?;
    bind_cache(&mut dims, &cache)?;
    for (arg, t) in [("k", &k), ("v", &v)] {
        check_rows(OP, arg, t)?;
    }
    let (nnz, pages, page_size) = (dims.get("nnz"), cache.k.shape()[0], cache.k.shape()[1]);
    append(exec, OP, nnz, slots, [pages, page_size], [("k", k), ("v", v)], targets(cache))
}

/// Writes new tokens into the cache of latent attention.
///
/// `cache.ckv[slot(t)] = ckv[t] / ckv_scale`, and so for `kpe`, rounded to the cache's type; fp8 saturates.
///
/// * `ckv`: `[nnz, head_dim_ckv]`, f32, f16 or bf16
/// * `kpe`: `[nnz, head_dim_kpe]`, as `ckv`
pub fn append_paged_mla(
    exec: &Exec,
    ckv: TensorRef<'_>,
    kpe: TensorRef<'_>,
    slots: Slots<'_>,
    cache: PagedMlaMut<'_>,
) -> Result<()> {
    const OP: &str = "append_paged_mla";
    let mut dims = Dims::of(OP);
    dims.bind("ckv", &ckv, &["nnz", "head_dim_ckv"])?.bind("kpe", &kpe, &["nnz", "head_dim_kpe"])?;
    bind_mla(&mut dims, &cache)?;
    for (arg, t) in [("ckv", &ckv), ("kpe", &kpe)] {
        check_rows(OP, arg, t)?;
    }
    let (nnz, pages, page_size) = (dims.get("nnz"), cache.ckv.shape()[0], cache.ckv.shape()[1]);
    append(exec, OP, nnz, slots, [pages, page_size], [("ckv", ckv), ("kpe", kpe)], mla_targets(cache))
}

/// Writes two tensors of tokens, which were checked, to their places.
fn append(
    exec: &Exec,
    op: &'static str,
    nnz: usize,
    slots: Slots<'_>,
    [pages, page_size]: [usize; 2],
    from: [(&'static str, TensorRef<'_>); 2],
    to: [Target<'_>; 2],
) -> Result<()> {
    match exec {
        Exec::Cpu(cpu) => {
            let moves = slots.moves(op, nnz, pages, page_size)?;
            let mut work = Work::new(cpu, &from.each_ref().map(|(_, x)| x.layout().len()));
            for ((arg, x), to) in from.into_iter().zip(to) {
                cpu::page::append(&mut work, op, Tokens::plain(op, arg, x)?, &moves, to)?;
            }
            work.run();
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let pages = slots.on_cuda(op, nnz, pages, page_size)?;
            let streams = from.into_iter().zip(to).map(|(from, to)| to.stream(from, false, None)).collect();
            cuda::tokens::run(gpu, op, nnz, None, Some(pages), streams)
        }
    }
}

#[cfg(feature = "cuda")]
impl<'a> Target<'a> {
    /// The stream of `from` into these pages.
    pub(super) fn stream(
        self,
        from: (&'static str, TensorRef<'a>),
        rotated: bool,
        rest: Option<(&'static str, TensorRef<'a>)>,
    ) -> cuda::tokens::Stream<'a> {
        let Self { arg, data, block_scales, scale } = self;
        cuda::tokens::Stream { from: Some(from), rotated, rest, to: (arg, data), paged: true, block_scales, scale }
    }
}

/// Request and position of each appended token, from how many each request gets and how long it then is.
///
/// Token `j` of the new ones of request `r` stands at `seq_lens[r] - (indptr[r + 1] - indptr[r]) + j`.
///
/// * `indptr`: offsets of the requests' new tokens, `nnz` in all
/// * `seq_lens`: `[batch]`, i32 or i64: lengths with the new tokens
/// * `batch_indices`, `positions`: `[nnz]`, i32
pub fn batch_indices_positions(
    exec: &Exec,
    indptr: &Ragged,
    seq_lens: TensorRef<'_>,
    batch_indices: TensorMut<'_>,
    positions: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "batch_indices_positions";
    let mut dims = Dims::of(OP);
    dims.axis("indptr", "nnz", indptr.rows())?;
    dims.bind("batch_indices", &batch_indices, &["nnz"])?.bind("positions", &positions, &["nnz"])?;
    check_integers(OP, "seq_lens", seq_lens, "batch", indptr.batch(), "indptr")?;
    check_i32(OP, "batch_indices", batch_indices.dtype())?;
    check_i32(OP, "positions", positions.dtype())?;
    match exec {
        Exec::Cpu(_) => {}
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            return cuda::page::batch_indices_positions(gpu, OP, indptr, seq_lens, batch_indices, positions);
        }
    }
    let seq_lens = integers(OP, "seq_lens", seq_lens, "batch", indptr.batch(), "indptr")?;
    for (r, (&len, &new)) in seq_lens.iter().zip(indptr.lens()).enumerate() {
        if len < i64::from(new) || len > i64::from(i32::MAX) {
            let want = format!("{new}, its new tokens, to 2^31 - 1");
            return Err(Error::value(OP, "seq_lens", format!("{len} at request {r}"), want));
        }
    }
    let (requests, positions) = (
        batch_indices.typed::<i32>(OP, "batch_indices")?.into_parts(),
        positions.typed::<i32>(OP, "positions")?.into_parts(),
    );
    let mut slots = requests.1.offsets().zip(positions.1.offsets());
    for (r, (&len, &new)) in seq_lens.iter().zip(indptr.lens()).enumerate() {
        for (position, (i, j)) in (len - i64::from(new)..len).zip(slots.by_ref()) {
            (requests.0[i], positions.0[j]) = (r as i32, position as i32);
        }
    }
    Ok(())
}

/// Tokens of each request of a page table.
///
/// `out[r] = (pages - 1) * page_size + last_page_len[r]`, with `pages = indptr[r + 1] - indptr[r]`; 0 without pages.
///
/// * `indptr`: offsets of the requests' pages
/// * `last_page_len`: `[batch]`, i32 or i64
/// * `out`: `[batch]`, i32
pub fn seq_lens(
    exec: &Exec,
    indptr: &Ragged,
    last_page_len: TensorRef<'_>,
    page_size: usize,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "seq_lens";
    check_integers(OP, "last_page_len", last_page_len, "batch", indptr.batch(), "indptr")?;
    let mut dims = Dims::of(OP);
    dims.axis("indptr", "batch", indptr.batch())?;
    dims.bind("out", &out, &["batch"])?;
    check_i32(OP, "out", out.dtype())?;
    match exec {
        Exec::Cpu(_) => {}
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => return cuda::page::seq_lens(gpu, OP, indptr, last_page_len, page_size, out),
    }
    let last = integers(OP, "last_page_len", last_page_len, "batch", indptr.batch(), "indptr")?;
    let (out, layout) = out.typed::<i32>(OP, "out")?.into_parts();
    for (r, (i, (&pages, &last))) in layout.offsets().zip(indptr.lens().iter().zip(&last)).enumerate() {
        if pages == 0 {
            out[i] = 0;
            continue;
        }
        let last = usize::try_from(last).ok().filter(|&l| l <= page_size).ok_or_else(|| {
            let want = format!("0 to page_size={page_size}");
            Error::value(OP, "last_page_len", format!("{last} at request {r}"), want)
        })?;
        let len = (pages as usize - 1).checked_mul(page_size).and_then(|n| n.checked_add(last));
        out[i] = len.and_then(|n| i32::try_from(n).ok()).ok_or_else(|| {
            Error::value(OP, "indptr", format!("{pages} pages at request {r}"), "at most 2^31 - 1 tokens")
        })?;
    }
    Ok(())
}

fn check_i32(op: &'static str, arg: &'static str, got: DType) -> Result<()> {
    if got == DType::I32 {
        return Ok(());
    }
    Err(Error::DType { op, arg, got: got.name(), want: "i32".into() })
}

/// A float type, and contiguous rows: checked for all tensors before the first is read.
pub(super) fn check_rows(op: &'static str, arg: &'static str, t: &TensorRef<'_>) -> Result<()> {
    if !matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::DType { op, arg, got: t.dtype().name(), want: "f32, f16 or bf16".into() });
    }
    check_last_axis(op, arg, t.layout())
}

pub(super) fn check_last_axis(op: &'static str, arg: &'static str, layout: &Layout) -> Result<()> {
    match (layout.shape().last(), layout.strides().last()) {
        (Some(&dim), Some(&stride)) if dim > 1 && stride != 1 => {
            Err(Error::layout(op, arg, format!("stride {stride} of the last axis"), "1"))
        }
        _ => Ok(()),
    }
}

/// Checks the axes of a cache against those of the tokens.
pub(super) fn bind_cache(dims: &mut Dims, cache: &PagedKvMut<'_>) -> Result<()> {
    let per_element = if cache.block_scales.is_some() { 2 } else { 1 };
    dims.axis("cache", "kv_heads", cache.k.shape()[2])?
        .axis("cache", "head_dim_qk", cache.k.shape()[3].saturating_mul(per_element))?
        .axis("cache", "head_dim_vo", cache.v.shape()[3].saturating_mul(per_element))?;
    Ok(())
}

/// As [`bind_cache`].
pub(super) fn bind_mla(dims: &mut Dims, cache: &PagedMlaMut<'_>) -> Result<()> {
    dims.axis("cache.ckv", "head_dim_ckv", cache.ckv.shape()[2])?.axis(
        "cache.kpe",
        "head_dim_kpe",
        cache.kpe.shape()[2],
    )?;
    Ok(())
}

/// Keys and values, apart.
pub(super) fn targets(cache: PagedKvMut<'_>) -> [Target<'_>; 2] {
    let PagedKvMut { k, v, block_scales, k_scale, v_scale } = cache;
    let [k_scales, v_scales] = match block_scales {
        Some([k, v]) => [Some(k), Some(v)],
        None => [None, None],
    };
    [
        Target { arg: "cache.k", data: k, block_scales: k_scales, scale: k_scale },
        Target { arg: "cache.v", data: v, block_scales: v_scales, scale: v_scale },
    ]
}

/// As [`targets`].
pub(super) fn mla_targets(cache: PagedMlaMut<'_>) -> [Target<'_>; 2] {
    let PagedMlaMut { ckv, kpe, ckv_scale, kpe_scale } = cache;
    [
        Target { arg: "cache.ckv", data: ckv, block_scales: None, scale: ckv_scale },
        Target { arg: "cache.kpe", data: kpe, block_scales: None, scale: kpe_scale },
    ]
}
