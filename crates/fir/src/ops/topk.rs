//! The largest elements of rows: values and places, or places turned into those of a KV cache.
//!
//! Linear in the row's length, without sorting it. Of equal elements the first ones are taken, and NaN never: where
//! elements are compared, the result is the same on every run.
//!
//! On CUDA integers in the device's memory are not looked at before the launch: the kernel stays within the tensors whatever
//! they are, and vectors of them have no gaps.

#[cfg(feature = "cuda")]
use super::sampling::on_host;
use super::sampling::{check_dtype, check_float, check_id_type, check_ids, check_vocab};
use crate::cpu;
use crate::cpu::topk::{Places, Window};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{DType, Dims, TensorMut, TensorRef};

/// In which order [`top_k`] gives what it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TopKOrder {
    /// As they stand in the row: ascending places.
    #[default]
    Place,
    /// The largest first, and equal ones by ascending places.
    Value,
}

/// Finds the `k` largest elements of each row, `k` being the outputs' row length.
///
/// `values[r, j] = x[r, indices[r, j]]`, with `indices[r]` the places for which fewer than `k` elements are greater, or
/// equal and before them
///
/// A row of fewer than `k` numbers is filled up with values of -inf and indices of -1.
///
/// * `x`: `[rows, n]`, f32, f16 or bf16; rows contiguous
/// * `values`: `[rows, k]`, of `x`'s type; `indices`: `[rows, k]`, i32 or i64; rows contiguous
pub fn top_k(
    exec: &Exec,
    x: TensorRef<'_>,
    order: TopKOrder,
    values: TensorMut<'_>,
    indices: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "top_k";
    let mut dims = Dims::of(OP);
    dims.bind("x", &x, &["rows", "n"])?.bind("values", &values, &["rows", "k"])?;
    dims.bind("indices", &indices, &["rows", "k"])?;
    check_float(OP, "x", x.dtype())?;
    check_dtype(OP, "values", values.dtype(), x.dtype())?;
    check_id_type(OP, "indices", indices.dtype())?;
    check_vocab(OP, dims.get("n"))?;
    let sorted = order == TopKOrder::Value;
    match exec {
        Exec::Cpu(cpu) => cpu::topk::top_k(cpu, x, sorted, values, indices),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::topk::top_k(gpu, x, sorted, values, indices),
    }
}

/// What [`top_k_page_table_transform`] reads and writes. All integers are i32.
#[derive(Debug)]
pub struct TopKPages<'a> {
    /// `[rows, max_len]`, f32, f16 or bf16; rows contiguous
    pub scores: TensorRef<'a>,
    /// `[rows]`: number of scores in each row
    pub lens: TensorRef<'a>,
    /// `[rows]`: where each row's scores begin; 0 when not given
    pub starts: Option<TensorRef<'a>>,
    /// `[requests, max_pages]`; rows contiguous
    pub page_table: TensorRef<'a>,
    /// `[rows]`: row of the page table for each row of scores; the same row when not given
    pub requests: Option<TensorRef<'a>>,
    /// `[rows]`: entry of the page table that the first score belongs to. When not given it is `starts`, which only a
    /// page size of 1 allows, as the two count differently.
    pub page_starts: Option<TensorRef<'a>>,
    /// Scores per page: a power of two, at most 2³⁰
    pub page_size: usize,
    /// `[rows, k]`; rows contiguous
    pub out: TensorMut<'a>,
    /// `[rows, k]`: the places before the translation; rows contiguous; written when given
    pub raw: Option<TensorMut<'a>>,
}

/// Finds the `k` largest scores of each row and gives their places in a paged KV cache.
///
/// `out[r, j] = page_table[requests[r], page_starts[r] + i / page_size] * page_size + i % page_size`, where `i` runs
/// over the places, counted from `starts[r]`, of the `k` largest of `scores[r, starts[r]..][..lens[r]]`, in ascending
/// order
///
/// A row of fewer than `k` numbers is filled up with -1. Page ids are looked at only where a chosen place needs them; a
/// negative one there, or a place beyond i32, is an error, and on CUDA, where the call has returned before, an output of -1.
pub fn top_k_page_table_transform(exec: &Exec, args: TopKPages<'_>) -> Result<()> {
    const OP: &str = "top_k_page_table_transform";
    let TopKPages { scores, lens, starts, page_table, requests, page_starts, page_size, .. } = args;
    let mut dims = Dims::of(OP);
    dims.bind("page_table", &page_table, &["requests", "max_pages"])?;
    check_dtype(OP, "page_table", page_table.dtype(), DType::I32)?;
    check_scores(OP, &mut dims, scores, lens, starts, &args.out)?;
    if !page_size.is_power_of_two() || page_size > 1 << 30 {
        return Err(Error::value(OP, "page_size", page_size, "a power of two, at most 2^30"));
    }
    if page_starts.is_none() && starts.is_some() && page_size > 1 {
        let want = "given with `starts` and a page size above 1";
        return Err(Error::value(OP, "page_starts", "missing", want));
    }
    for (arg, ids) in [("page_starts", page_starts), ("requests", requests)] {
        if let Some(ids) = ids {
            dims.bind(arg, &ids, &["rows"])?;
            check_dtype(OP, arg, ids.dtype(), DType::I32)?;
        }
    }
    if requests.is_none() {
        dims.axis("scores", "requests", dims.get("rows"))?;
    }
    if let Some(raw) = &args.raw {
        dims.bind("raw", raw, &["rows", "k"])?;
        check_dtype(OP, "raw", raw.dtype(), DType::I32)?;
    }
    let (stride, max_pages) = (page_table.strides()[1], dims.get("max_pages"));
    if stride != 1 && max_pages > 1 {
        return Err(Error::layout(OP, "page_table", format!("stride {stride} of the last axis"), 1));
    }
    match exec {
        Exec::Cpu(cpu) => {
            let (windows, requests) = paged_windows(OP, &args)?;
            match cpu::topk::top_k_transform(cpu, OP, scores, &windows, args.out, args.raw)? {
                Some(r) => Err(Error::value(
                    OP,
                    "page_table",
                    format!("a negative or too large page in row {}, for row {r} of the scores", requests[r]),
                    format!("pages of {page_size} whose places are 0 to {}", i32::MAX),
                )),
                None => Ok(()),
            }
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            if on_host(&[Some(lens), starts, Some(page_table), requests, page_starts]) {
                paged_windows(OP, &args)?;
            }
            let scores = cuda::topk::Scores { scores, lens, starts };
            let places = cuda::topk::Places::Paged { page_table, requests, page_starts, page_size, raw: args.raw };
            cuda::topk::transform(gpu, OP, scores, places, args.out)
        }
    }
}

/// Each row's window of scores with its pages, and its row of the page table.
fn paged_windows<'a>(op: &'static str, args: &TopKPages<'a>) -> Result<(Vec<Window<'a>>, Vec<usize>)> {
    let mut windows = windows(op, args.scores, args.lens, args.starts)?;
    let (table, page_size) = (args.page_table.shape(), args.page_size);
    let page_starts = match args.page_starts {
        Some(page_starts) => check_ids(op, "page_starts", page_starts, usize::MAX)?,
        None => windows.iter().map(|w| w.start).collect(),
    };
    let requests = match args.requests {
        Some(requests) => check_ids(op, "requests", requests, table[0])?,
        None => (0..windows.len()).collect(),
    };
    let pages = args.page_table.typed::<i32>(op, "page_table")?;
    for (r, window) in windows.iter_mut().enumerate() {
        let (first, used) = (page_starts[r], window.len.div_ceil(page_size));
        if used > 0 && first.saturating_add(used) > table[1] {
            return Err(Error::value(
                op,
                "lens",
                format!("{} for row {r}, pages {first}..{}", window.len, first.saturating_add(used)),
                format!("pages within the table's {}", table[1]),
            ));
        }
        let pages = if used == 0 { &[] } else { &pages.data()[requests[r] * pages.strides()[0] + first..][..used] };
        window.to = Places::Paged { pages, page_size };
    }
    Ok((windows, requests))
}

/// What [`top_k_ragged_transform`] reads and writes. All integers are i32.
#[derive(Debug)]
pub struct TopKRagged<'a> {
    /// `[rows, max_len]`, f32, f16 or bf16; rows contiguous
    pub scores: TensorRef<'a>,
    /// `[rows]`: number of scores in each row
    pub lens: TensorRef<'a>,
    /// `[rows]`: where each row's scores begin; 0 when not given
    pub starts: Option<TensorRef<'a>>,
    /// `[rows]`: what is added to each row's places
    pub offsets: TensorRef<'a>,
    /// `[rows, k]`; rows contiguous
    pub out: TensorMut<'a>,
}

/// Finds the `k` largest scores of each row and gives their places in a ragged KV cache.
///
/// `out[r, j] = offsets[r] + i`, where `i` runs over the places, counted from `starts[r]`, of the `k` largest of
/// `scores[r, starts[r]..][..lens[r]]`, in ascending order
///
/// A row of fewer than `k` numbers is filled up with -1.
pub fn top_k_ragged_transform(exec: &Exec, args: TopKRagged<'_>) -> Result<()> {
    const OP: &str = "top_k_ragged_transform";
    let TopKRagged { scores, lens, starts, offsets, out } = args;
    let mut dims = Dims::of(OP);
    check_scores(OP, &mut dims, scores, lens, starts, &out)?;
    dims.bind("offsets", &offsets, &["rows"])?;
    check_dtype(OP, "offsets", offsets.dtype(), DType::I32)?;
    match exec {
        Exec::Cpu(cpu) => {
            let windows = ragged_windows(OP, scores, lens, starts, offsets)?;
            cpu::topk::top_k_transform(cpu, OP, scores, &windows, out, None).map(|_| ())
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            if on_host(&[Some(lens), starts, Some(offsets)]) {
                ragged_windows(OP, scores, lens, starts, offsets)?;
            }
            let scores = cuda::topk::Scores { scores, lens, starts };
            cuda::topk::transform(gpu, OP, scores, cuda::topk::Places::Ragged { offsets }, out)
        }
    }
}

/// Each row's window of scores with its offset.
fn ragged_windows(
    op: &'static str,
    scores: TensorRef<'_>,
    lens: TensorRef<'_>,
    starts: Option<TensorRef<'_>>,
    offsets: TensorRef<'_>,
) -> Result<Vec<Window<'static>>> {
    let mut windows = windows(op, scores, lens, starts)?;
    for (r, (window, offset)) in windows.iter_mut().zip(check_ids(op, "offsets", offsets, usize::MAX)?).enumerate() {
        if offset + window.len > i32::MAX as usize {
            let want = format!("at most {} with the row's {}", i32::MAX, window.len);
            return Err(Error::value(op, "offsets", format!("{offset} for row {r}"), want));
        }
        window.to = Places::From(offset as i64);
    }
    Ok(windows)
}

/// Checks shapes and types that both transforms share.
fn check_scores(
    op: &'static str,
    dims: &mut Dims,
    scores: TensorRef<'_>,
    lens: TensorRef<'_>,
    starts: Option<TensorRef<'_>>,
    out: &TensorMut<'_>,
) -> Result<()> {
    dims.bind("scores", &scores, &["rows", "max_len"])?.bind("lens", &lens, &["rows"])?;
    dims.bind("out", out, &["rows", "k"])?;
    check_float(op, "scores", scores.dtype())?;
    check_dtype(op, "lens", lens.dtype(), DType::I32)?;
    check_dtype(op, "out", out.dtype(), DType::I32)?;
    if let Some(starts) = starts {
        dims.bind("starts", &starts, &["rows"])?;
        check_dtype(op, "starts", starts.dtype(), DType::I32)?;
    }
    check_vocab(op, dims.get("max_len"))
}

/// Each row's window of scores.
fn windows<'a>(
    op: &'static str,
    scores: TensorRef<'_>,
    lens: TensorRef<'_>,
    starts: Option<TensorRef<'_>>,
) -> Result<Vec<Window<'a>>> {
    let max_len = scores.shape()[1];
    let lens = check_ids(op, "lens", lens, max_len + 1)?;
    let starts = match starts {
        Some(starts) => check_ids(op, "starts", starts, max_len + 1)?,
        None => vec![0; lens.len()],
    };
    if let Some(r) = (0..lens.len()).find(|&r| starts[r] + lens[r] > max_len) {
        let got = format!("{} from {} for row {r}", lens[r], starts[r]);
        return Err(Error::value(op, "lens", got, format!("at most the {max_len} scores of a row")));
    }
    Ok(starts.into_iter().zip(lens).map(|(start, len)| Window { start, len, to: Places::From(0) }).collect())
}
