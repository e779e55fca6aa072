//! Low-rank adapters of experts: launches of `kernels/lora.cuh`.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::{check_float, cpp};
use super::params::{Address, params};
use super::rows::Rows;
use super::tokens::check_last_axis;
use crate::args::{AdaptArgs, RowOf};
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorRef};

params! {
    struct AdaptParams = "fir::AdaptParams" {
        x: Address,
        weights: Address,
        tokens: Address,
        experts: Address,
        adapters: Address,
        factors: Address,
        out: Address,
        x_stride: u64,
        out_stride: u64,
        adapter_stride: u64,
        expert_stride: u64,
        row_stride: u64,
        tokens_stride: u64,
        experts_stride: u64,
        adapters_stride: u64,
        factors_stride: u64,
        wide: u32,
        num_tokens: u32,
        num_experts: u32,
        num_adapters: u32,
        inputs: u32,
        outputs: u32,
        per_block: u32,
        width: u32,
        x_by_token: u32,
        out_by_token: u32,
        add: u32,
        out_type: u32,
    }
}

const THREADS: u32 = 128;
/// Outputs that each group of threads has one after the other: its pair's numbers are looked up once for so many.
const EACH: u32 = 4;

fn source(dtype: DType, vector: bool) -> Source {
    Source::new::<AdaptParams>("lora.cuh", format!("fir::adapt<{}, {vector}>", cpp(dtype)))
}

pub(super) fn kernels() -> Vec<Source> {
    [DType::F32, DType::F16, DType::BF16].iter().flat_map(|&d| [false, true].map(|vector| source(d, vector))).collect()
}

pub(crate) fn adapt<'a>(gpu: &'a Gpu, op: &'static str, a: AdaptArgs<'a>) -> Result<()> {
    let dtype = a.x.dtype();
    check_float(op, "x", dtype)?;
    let out_type = a.out.dtype();
    let (x_rows, out_rows) =
        (Rows::new(op, "x", a.x.layout(), dtype)?, Rows::new(op, "out", a.out.layout(), out_type)?);
    check_last_axis(op, "weights", a.weights.shape(), a.weights.strides())?;
    let (shape, strides) = (a.weights.shape(), a.weights.strides());
    let (pairs, tokens) = (a.tokens.shape()[0], a.adapters.shape()[0]);
    let sizes = [("adapters", shape[0]), ("experts", shape[1]), ("outputs", shape[2]), ("inputs", shape[3])];
    for (arg, n) in sizes.into_iter().chain([("pairs", pairs), ("tokens", tokens)]) {
        if n > i32::MAX as usize {
            return Err(Error::value(op, arg, n, "at most 2^31 - 1 on CUDA"));
        }
    }
    let mut wide = 0;
    for (bit, (arg, ids)) in [("tokens", a.tokens), ("experts", a.experts), ("adapters", a.adapters)].iter().enumerate()
    {
        match ids.dtype() {
            DType::I32 => {}
            DType::I64 => wide |= 1 << bit,
            other => return Err(Error::DType { op, arg, got: other.name(), want: "i32 or i64".into() }),
        }
    }
    let stride = |x: &TensorRef<'_>| x.strides()[0] as u64;
    let chunk = 16 / dtype.size();
    let width = shape[3].div_ceil(chunk).next_power_of_two().clamp(1, 32) as u32;
    // As many blocks as fill the device a few times; the groups of a block have `EACH` outputs at most.
    let groups = THREADS / width;
    let most = (8 * gpu.properties().multiprocessors as usize).div_ceil(pairs.max(1));
    let parts = shape[2].div_ceil((groups * EACH) as usize).max(shape[2].div_ceil(groups as usize).min(most)).max(1);
    let per_block = shape[2].div_ceil(parts).next_multiple_of(groups as usize);
    let mut params = AdaptParams {
        x_stride: stride(&a.x),
        out_stride: stride(&a.out.as_ref()),
        adapter_stride: strides[0] as u64,
        expert_stride: strides[1] as u64,
        row_stride: strides[2] as u64,
        tokens_stride: stride(&a.tokens),
        experts_stride: stride(&a.experts),
        adapters_stride: stride(&a.adapters),
        factors_stride: a.factors.as_ref().map_or(0, stride),
        wide,
        num_tokens: tokens as u32,
        num_experts: shape[1] as u32,
        num_adapters: shape[0] as u32,
        inputs: shape[3] as u32,
        outputs: shape[2] as u32,
        per_block: per_block as u32,
        width,
        x_by_token: (a.x_of == RowOf::Token).into(),
        out_by_token: (a.out_of == RowOf::Token).into(),
        add: a.add.into(),
        out_type: (out_type != DType::F32).into(),
        ..bytemuck::Zeroable::zeroed()
    };
    let fits = |n: usize| (n * dtype.size()).is_multiple_of(16);
    let mut call = Call::new(gpu, op);
    (params.x, params.weights) = (call.read("x", a.x)?, call.read("weights", a.weights)?);
    params.tokens = call.read("tokens", a.tokens)?;
    params.experts = call.read("experts", a.experts)?;
    params.adapters = call.read("adapters", a.adapters)?;
    params.factors = a.factors.map_or(Ok(Address(0)), |f| call.read("factors", f))?;
    params.out = call.write("out", a.out)?;
    if pairs == 0 || out_rows.is_empty() {
        return call.finish();
    }
    let aligned = shape[..3].iter().zip(&strides[..3]).all(|(&n, &stride)| n <= 1 || fits(stride));
    let vector = aligned && params.weights.0.is_multiple_of(16) && x_rows.is_vector(params.x, 0, shape[3], chunk);
    let kernel = gpu.kernel(source(dtype, vector))?;
    let grid =
        Grid { grid: [pairs as u32, shape[2].div_ceil(per_block) as u32, 1], early: true, ..Grid::new(0, THREADS) };
    call.launch(&kernel, grid, &params)?;
    call.finish()
}
