//! Products of many matrices in one launch.

use super::scaled::bind;
use crate::cpu;
use crate::cpu::gemm::scaled::ScaledProduct;
use crate::cpu::gemm::{Epilogue, Product};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kv::Ragged;
use crate::ops::sampling::check_ids;
#[cfg(feature = "cuda")]
use crate::tensor::Place;
use crate::tensor::{DType, Dims, Scaled, TensorMut, TensorRef};

/// What [`grouped_gemm`] reads and writes. A plain tensor becomes a [`Scaled`] without scales by `into()`.
#[derive(Debug)]
pub struct GroupedArgs<'a> {
    /// `[tokens, k]`, sorted by group; rows contiguous
    pub x: Scaled<'a>,
    /// Rows of each of the groups; `tokens` in all
    pub indptr: &'a Ragged,
    /// `[weights, n, k]`; rows contiguous
    pub w: Scaled<'a>,
    /// `[groups]`, i32 or i64: which weights a group meets; when not given, group `g` meets weights `g`. In a device's
    /// memory nobody looks at them before the kernels do, which take one past the weights for the last
    pub weight_indices: Option<TensorRef<'a>>,
    /// `[tokens, n]`; rows contiguous
    pub out: TensorMut<'a>,
}

/// Multiplies each group of rows by weights of its own, as experts and adapters do.
///
/// `out[i, j] = Σ_l x[i, l] * w[weight_indices[g], j, l]` for the rows `i` of group `g`, values being data times scale
///
/// Sums are f32, and a row of `out` depends on its row of `x` and its group's weights alone.
///
/// * types as in [`gemm`](super::gemm), without scales, or as in [`scaled_gemm`](super::scaled_gemm)
pub fn grouped_gemm(exec: &Exec, args: GroupedArgs<'_>) -> Result<()> {
    const OP: &str = "grouped_gemm";
    let GroupedArgs { x, indptr, w, weight_indices, out } = args;
    let mut dims = Dims::of(OP);
    bind(&mut dims, OP, ["x", "x.scales"], &x, &["tokens", "k"])?;
    bind(&mut dims, OP, ["w", "w.scales"], &w, &["weights", "n", "k"])?;
    dims.bind("out", &out, &["tokens", "n"])?;
    dims.axis("indptr", "tokens", indptr.rows())?;
    #[cfg(feature = "cuda")]
    if let Exec::Cuda(gpu) = exec {
        match weight_indices {
            Some(ids) => {
                dims.axis("indptr", "groups", indptr.batch())?.bind("weight_indices", &ids, &["groups"])?;
                // Ids on the device are not looked at: a kernel takes one past the weights for the last.
                if ids.place() == Place::Host {
                    check_ids(OP, "weight_indices", ids, dims.get("weights"))?;
                }
            }
            None => {
                dims.axis("indptr", "weights", indptr.batch())?;
            }
        }
        check_x_block(&x)?;
        check_unscaled(OP, &x, &w)?;
        let product = cuda::gemm::Product { x, w, out, then: cuda::gemm::Then::None };
        return cuda::gemm::grouped(gpu, OP, product, indptr.indptr(), weight_indices);
    }
    let weights: Vec<usize> = match weight_indices {
        Some(ids) => {
            dims.axis("indptr", "groups", indptr.batch())?.bind("weight_indices", &ids, &["groups"])?;
            check_ids(OP, "weight_indices", ids, dims.get("weights"))?
        }
        None => {
            dims.axis("indptr", "weights", indptr.batch())?;
            (0..indptr.batch()).collect()
        }
    };
    let lens = indptr.lens().iter().map(|&n| n as usize);
    let mut list = Vec::new();
    for ((out, &w_of), rows) in out.split_rows(lens)?.into_iter().zip(&weights).zip(indptr.indptr().windows(2)) {
        if rows[0] < rows[1] {
            let x = rows_of(x, rows[0] as usize..rows[1] as usize)?;
            list.push(ScaledProduct { x, w: w.select(w_of)?, out });
        }
    }
    run(exec, OP, list)
}

/// Multiplies the matrices of a batch, each by weights of its own.
///
/// `out[b, i, j] = Σ_l x[b, i, l] * w[b, j, l]`, values being data times scale
///
/// * `x`: `[batch, m, k]`, `w`: `[batch, n, k]`; types as in [`grouped_gemm`]; rows contiguous
/// * `out`: `[batch, m, n]`; rows contiguous
pub fn batched_gemm(exec: &Exec, x: Scaled<'_>, w: Scaled<'_>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "batched_gemm";
    let mut dims = Dims::of(OP);
    bind(&mut dims, OP, ["x", "x.scales"], &x, &["batch", "m", "k"])?;
    bind(&mut dims, OP, ["w", "w.scales"], &w, &["batch", "n", "k"])?;
    dims.bind("out", &out, &["batch", "m", "n"])?;
    if out.layout().is_empty() {
        // A batch of nothing may be longer than memory.
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if let Exec::Cuda(gpu) = exec {
        check_unscaled(OP, &x, &w)?;
        let scaled = is_fp8(w.data.dtype());
        let product = cuda::gemm::Product { x, w, out, then: cuda::gemm::Then::None };
        return cuda::gemm::product(gpu, OP, scaled, product);
    }
    let mut list = Vec::new();
    for (b, out) in out.split_rows(std::iter::repeat_n(1, dims.get("batch")))?.into_iter().enumerate() {
        list.push(ScaledProduct { x: x.select(b)?, w: w.select(b)?, out: out.select(0, 0)? });
    }
    run(exec, OP, list)
}

/// Rows of a matrix with those of its scales.
fn rows_of(x: Scaled<'_>, rows: std::ops::Range<usize>) -> Result<Scaled<'_>> {
    check_x_block(&x)?;
    let scales = match x.scales {
        Some(scales) if x.block.rows == 1 => Some(scales.slice(0, rows.clone())?),
        other => other,
    };
    Ok(Scaled { data: x.data.slice(0, rows)?, scales, block: x.block })
}

/// Scales must be of single rows, or of all: groups cut blocks of several.
fn check_x_block(x: &Scaled<'_>) -> Result<()> {
    match x.scales {
        Some(scales) if x.block.rows != 1 && scales.shape()[0] != 1 => {
            let got = format!("blocks of {} rows", x.block.rows);
            Err(Error::value("grouped_gemm", "x.scales", got, "blocks of one row or of all"))
        }
        _ => Ok(()),
    }
}

/// Scales are for weights of fp8 alone.
fn check_unscaled(op: &'static str, x: &Scaled<'_>, w: &Scaled<'_>) -> Result<()> {
    for (arg, side) in [("x.scales", x), ("w.scales", w)] {
        if side.scales.is_some() && !is_fp8(w.data.dtype()) {
            return Err(Error::value(op, arg, "given", format!("none with `w` of {}", w.data.dtype())));
        }
    }
    Ok(())
}

fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::E4M3 | DType::E5M2)
}

/// Products of fp8, or else products without scales.
fn run(exec: &Exec, op: &'static str, list: Vec<ScaledProduct<'_>>) -> Result<()> {
    let Some(first) = list.first() else { return Ok(()) };
    let (x, w) = (&first.x, &first.w);
    if is_fp8(w.data.dtype()) {
        return cpu::gemm::scaled::products(exec.cpu_only(op)?, op, list);
    }
    check_unscaled(op, x, w)?;
    let list = list.into_iter().map(|p| Product { x: p.x.data, w: p.w.data, out: p.out, then: Epilogue::None });
    cpu::gemm::products(exec.cpu_only(op)?, op, list.collect())
}
