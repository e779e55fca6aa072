//! Quantization, products of matrices, mixtures of experts.
#![allow(unsafe_code)]

use fir::gemm::{self as products, GroupedArgs, Scaled};
use fir::lora::{self, AdaptArgs, RowOf};
use fir::moe::{self, FfnArgs, Gate, Groups, RouteArgs, Routing, Score, TableRouteArgs};
use fir::quantize::{self, BitOrder, Block};
use fir::tensor::Place;
use fir::{DType, Ragged};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Arg, prepare, run};
use crate::error::to_py;
use crate::values::ragged;

/// `(rows, columns)` that share a scale; 0 for all of them.
fn block((rows, columns): (usize, usize)) -> Block {
    let each = |n| if n == 0 { Block::ALL } else { n };
    Block { rows: each(rows), columns: each(columns) }
}

fn bit_order(name: &str) -> PyResult<BitOrder> {
    match name {
        "big" => Ok(BitOrder::Big),
        "little" => Ok(BitOrder::Little),
        _ => Err(PyValueError::new_err(format!("bitorder {name:?}, expected \"big\" or \"little\""))),
    }
}

#[pyfunction]
fn packbits(py: Python<'_>, mut x: Arg, bitorder: &str, mut out: Arg) -> PyResult<()> {
    let (exec, order) = (prepare(py, &mut [&mut x], &[&out])?, bit_order(bitorder)?);
    run(py, || quantize::packbits(&exec, x.view()?, order, out.view_mut()?))
}

/// Offsets of the packed segments.
#[pyfunction]
fn packed_indptr(indptr: Arg) -> PyResult<Vec<i32>> {
    let packed = quantize::packed_indptr(&ragged(&indptr, "indptr")?).map_err(to_py)?;
    Ok(packed.indptr().to_vec())
}

#[pyfunction]
fn segment_packbits(py: Python<'_>, mut x: Arg, indptr: Arg, bitorder: &str, mut out: Arg) -> PyResult<()> {
    let (exec, order) = (prepare(py, &mut [&mut x], &[&out])?, bit_order(bitorder)?);
    let indptr = ragged(&indptr, "indptr")?;
    run(py, || quantize::segment_packbits(&exec, x.view()?, &indptr, order, out.view_mut()?))
}

#[pyfunction]
fn quantize_fp8(py: Python<'_>, mut x: Arg, blocks: (usize, usize), mut out: Arg, mut scales: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x], &[&out, &scales])?;
    run(py, || quantize::quantize_fp8(&exec, x.view()?, block(blocks), out.view_mut()?, scales.view_mut()?))
}

#[pyfunction]
fn quantize_fp8_with_scales(
    py: Python<'_>,
    mut x: Arg,
    mut scales: Arg,
    blocks: (usize, usize),
    mut out: Arg,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut scales], &[&out])?;
    run(py, || quantize::quantize_fp8_with_scales(&exec, x.view()?, scales.view()?, block(blocks), out.view_mut()?))
}

#[pyfunction]
fn dequantize_fp8(py: Python<'_>, mut x: Arg, mut scales: Arg, blocks: (usize, usize), mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut scales], &[&out])?;
    run(py, || quantize::dequantize_fp8(&exec, x.view()?, scales.view()?, block(blocks), out.view_mut()?))
}

/// To MXFP8, MXFP4 or NVFP4; packed codes and scales may be `uint8`. `scale` is NVFP4's scale of the whole tensor.
#[pyfunction]
#[pyo3(signature = (format, x, out, scales, scale=1.0))]
fn quantize_blocks(py: Python<'_>, format: &str, mut x: Arg, out: Arg, scales: Arg, scale: f32) -> PyResult<()> {
    let (mut out, mut scales) = typed(format, out, scales)?;
    let exec = prepare(py, &mut [&mut x], &[&out, &scales])?;
    run(py, || {
        let (x, out, scales) = (x.view()?, out.view_mut()?, scales.view_mut()?);
        match format {
            "mxfp8" => quantize::quantize_mxfp8(&exec, x, out, scales),
            "mxfp4" => quantize::quantize_mxfp4(&exec, x, out, scales),
            _ => quantize::quantize_nvfp4(&exec, x, scale, out, scales),
        }
    })
}

/// The numbers that MXFP8, MXFP4 or NVFP4 stand for.
#[pyfunction]
#[pyo3(signature = (format, x, scales, out, scale=1.0))]
fn dequantize_blocks(py: Python<'_>, format: &str, x: Arg, scales: Arg, mut out: Arg, scale: f32) -> PyResult<()> {
    let (mut x, mut scales) = typed(format, x, scales)?;
    let exec = prepare(py, &mut [&mut x, &mut scales], &[&out])?;
    run(py, || {
        let (x, scales, out) = (x.view()?, scales.view()?, out.view_mut()?);
        match format {
            "mxfp8" => quantize::dequantize_mxfp8(&exec, x, scales, out),
            "mxfp4" => quantize::dequantize_mxfp4(&exec, x, scales, out),
            _ => quantize::dequantize_nvfp4(&exec, x, scales, scale, out),
        }
    })
}

/// Codes and scales of a format in the types that the library has for them.
fn typed(format: &str, codes: Arg, scales: Arg) -> PyResult<(Arg, Arg)> {
    match format {
        "mxfp8" => Ok((codes, scales.taken_as(DType::E8M0)?)),
        "mxfp4" => Ok((codes.taken_as(DType::E2M1x2)?, scales.taken_as(DType::E8M0)?)),
        "nvfp4" => Ok((codes.taken_as(DType::E2M1x2)?, scales.taken_as(DType::E4M3)?)),
        _ => Err(PyValueError::new_err(format!("format {format:?}, expected \"mxfp8\", \"mxfp4\" or \"nvfp4\""))),
    }
}

/// The scale of a whole tensor that NVFP4 wants: its largest magnitude over what the format holds.
#[pyfunction]
fn nvfp4_scale(py: Python<'_>, mut x: Arg) -> PyResult<f32> {
    let exec = prepare(py, &mut [&mut x], &[])?;
    run(py, || quantize::nvfp4_scale(&exec, x.view()?))
}

/// `out = x · wᵀ (+ bias)`, with `w` of `[n, k]`.
#[pyfunction]
#[pyo3(signature = (x, w, out, bias=None))]
fn gemm(py: Python<'_>, mut x: Arg, mut w: Arg, mut out: Arg, mut bias: Option<Arg>) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut w], &[&out])?;
    run(py, || match &mut bias {
        Some(bias) => products::gemm_bias(&exec, x.view()?, w.view()?, bias.view()?, out.view_mut()?),
        None => products::gemm(&exec, x.view()?, w.view()?, out.view_mut()?),
    })
}

/// A matrix, its scales or None, and which elements share one.
#[derive(FromPyObject)]
struct Matrix(Arg, Option<Arg>, (usize, usize));

impl Matrix {
    fn get(&self) -> fir::Result<Scaled<'_>> {
        Ok(match &self.1 {
            Some(scales) => Scaled::new(self.0.view()?, scales.view()?, block(self.2)),
            None => Scaled::from(self.0.view()?),
        })
    }
}

#[pyfunction]
fn scaled_gemm(py: Python<'_>, mut x: Matrix, mut w: Matrix, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x.0, &mut w.0], &[&out])?;
    run(py, || products::scaled_gemm(&exec, x.get()?, w.get()?, out.view_mut()?))
}

#[pyfunction]
fn batched_gemm(py: Python<'_>, mut x: Matrix, mut w: Matrix, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x.0, &mut w.0], &[&out])?;
    run(py, || products::batched_gemm(&exec, x.get()?, w.get()?, out.view_mut()?))
}

#[pyfunction]
#[pyo3(signature = (x, indptr, w, out, weight_indices=None))]
fn grouped_gemm(
    py: Python<'_>,
    mut x: Matrix,
    indptr: Arg,
    mut w: Matrix,
    mut out: Arg,
    weight_indices: Option<Arg>,
) -> PyResult<()> {
    let indptr: Ragged = ragged(&indptr, "indptr")?;
    let exec = prepare(py, &mut [&mut x.0, &mut w.0], &[&out])?;
    run(py, || {
        let weight_indices = weight_indices.as_ref().map(Arg::view).transpose()?;
        let args = GroupedArgs { x: x.get()?, indptr: &indptr, w: w.get()?, weight_indices, out: out.view_mut()? };
        products::grouped_gemm(&exec, args)
    })
}

/// Chooses each token's experts. `groups`: `(count, chosen)` or None.
#[pyfunction]
#[pyo3(signature = (logits, bias, ids, weights, *, score="softmax", renormalize=true, groups=None, scale=1.0))]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn moe_route(
    py: Python<'_>,
    mut logits: Arg,
    bias: Option<Arg>,
    mut ids: Arg,
    mut weights: Arg,
    score: &str,
    renormalize: bool,
    groups: Option<(usize, usize)>,
    scale: f32,
) -> PyResult<()> {
    let score = match score {
        "softmax" => Score::Softmax,
        "sigmoid" => Score::Sigmoid,
        _ => return Err(PyValueError::new_err(format!("score {score:?}, expected \"softmax\" or \"sigmoid\""))),
    };
    let groups = groups.map(|(count, chosen)| Groups { count, chosen });
    let exec = prepare(py, &mut [&mut logits], &[&ids, &weights])?;
    run(py, || {
        let bias = bias.as_ref().map(Arg::view).transpose()?;
        let args = RouteArgs { logits: logits.view()?, bias, ids: ids.view_mut()?, weights: weights.view_mut()? };
        moe::route(&exec, Routing { score, renormalize, groups, scale }, args)
    })
}

/// Weighs the experts that a table names for each token. `shared`: the weight of one more, or None.
#[pyfunction]
fn moe_route_by_table(
    py: Python<'_>,
    mut logits: Arg,
    mut tokens: Arg,
    mut table: Arg,
    shared: Option<f32>,
    mut ids: Arg,
    mut weights: Arg,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut logits, &mut tokens, &mut table], &[&ids, &weights])?;
    run(py, || {
        let (logits, tokens, table) = (logits.view()?, tokens.view()?, table.view()?);
        let (ids, weights) = (ids.view_mut()?, weights.view_mut()?);
        moe::route_by_table(&exec, TableRouteArgs { logits, tokens, table, shared, ids, weights })
    })
}

/// Matrices of adapters: a tensor, or an address of the caller's with the sizes `(experts, outputs, inputs)` and the strides
/// `(adapters, experts)`; there are as many adapters as are asked for.
#[derive(FromPyObject)]
enum Matrices {
    Tensor(Arg),
    At(usize, (i64, i64, i64), (i64, i64)),
}

/// Multiplies each pair's row by the matrix of its token's adapter for its expert. Rows of `x` and of `out` are of tokens, or
/// of pairs.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn adapt(
    py: Python<'_>,
    mut x: Arg,
    x_of_tokens: bool,
    matrices: Matrices,
    mut tokens: Arg,
    mut experts: Arg,
    mut adapters: Arg,
    factors: Option<Arg>,
    add: bool,
    mut out: Arg,
    out_of_tokens: bool,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut tokens, &mut experts, &mut adapters], &[&out])?;
    let matrices = match matrices {
        Matrices::Tensor(tensor) => tensor,
        Matrices::At(address, (experts, outputs, inputs), (by_adapter, by_expert)) => {
            // Nobody knows how many there are; a device's kernel looks at those that are named, and so does a CPU's.
            let count = match adapters.place() {
                Place::Host => host_ids(&adapters)?.into_iter().max().map_or(1, |most| most.saturating_add(1).max(1)),
                _ => 1 << 20,
            };
            let (shape, strides) = ([count, experts, outputs, inputs], [by_adapter, by_expert, inputs, 1]);
            // SAFETY: the caller's promise, as the address is the caller's.
            unsafe { x.at(address, shape, strides) }?
        }
    };
    let of = |tokens| if tokens { RowOf::Token } else { RowOf::Pair };
    run(py, || {
        let args = AdaptArgs {
            x: x.view()?,
            x_of: of(x_of_tokens),
            weights: matrices.view()?,
            tokens: tokens.view()?,
            experts: experts.view()?,
            adapters: adapters.view()?,
            factors: factors.as_ref().map(Arg::view).transpose()?,
            add,
            out: out.view_mut()?,
            out_of: of(out_of_tokens),
        };
        lora::adapt(&exec, args)
    })
}

/// Integers of a host tensor.
fn host_ids(ids: &Arg) -> PyResult<Vec<i64>> {
    let view = ids.view().map_err(to_py)?;
    let all = match view.dtype() {
        DType::I64 => {
            view.typed::<i64>("adapt", "adapters").map(|x| x.layout().offsets().map(|i| x.data()[i]).collect())
        }
        _ => view
            .typed::<i32>("adapt", "adapters")
            .map(|x| x.layout().offsets().map(|i| i64::from(x.data()[i])).collect()),
    };
    all.map_err(to_py)
}

/// The weighted sum of what a token's experts make of it.
#[pyfunction]
#[pyo3(signature = (x, ids, weights, w_gate_up, w_down, out, gate="silu"))]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn moe_ffn(
    py: Python<'_>,
    mut x: Arg,
    mut ids: Arg,
    mut weights: Arg,
    w_gate_up: Matrix,
    w_down: Matrix,
    mut out: Arg,
    gate: &str,
) -> PyResult<()> {
    let gate = match gate {
        "silu" => Gate::Silu,
        "gelu" => Gate::Gelu,
        "gelu_tanh" => Gate::GeluTanh,
        _ => return Err(PyValueError::new_err(format!("gate {gate:?}, expected \"silu\", \"gelu\" or \"gelu_tanh\""))),
    };
    let exec = prepare(py, &mut [&mut x, &mut ids, &mut weights], &[&out])?;
    run(py, || {
        let (x, ids, weights, out) = (x.view()?, ids.view()?, weights.view()?, out.view_mut()?);
        moe::moe_ffn(&exec, FfnArgs { x, ids, weights, w_gate_up: w_gate_up.get()?, w_down: w_down.get()?, gate, out })
    })
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(packbits, module)?)?;
    module.add_function(wrap_pyfunction!(packed_indptr, module)?)?;
    module.add_function(wrap_pyfunction!(segment_packbits, module)?)?;
    module.add_function(wrap_pyfunction!(quantize_fp8, module)?)?;
    module.add_function(wrap_pyfunction!(quantize_fp8_with_scales, module)?)?;
    module.add_function(wrap_pyfunction!(dequantize_fp8, module)?)?;
    module.add_function(wrap_pyfunction!(quantize_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(dequantize_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(nvfp4_scale, module)?)?;
    module.add_function(wrap_pyfunction!(gemm, module)?)?;
    module.add_function(wrap_pyfunction!(scaled_gemm, module)?)?;
    module.add_function(wrap_pyfunction!(batched_gemm, module)?)?;
    module.add_function(wrap_pyfunction!(grouped_gemm, module)?)?;
    module.add_function(wrap_pyfunction!(moe_route, module)?)?;
    module.add_function(wrap_pyfunction!(moe_route_by_table, module)?)?;
    module.add_function(wrap_pyfunction!(adapt, module)?)?;
    module.add_function(wrap_pyfunction!(moe_ffn, module)?)
}
