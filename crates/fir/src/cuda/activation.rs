//! Gated activations: which instantiation of `kernels/activation.cuh`, and how rows are cut.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::{check_float, cpp};
use super::params::{Address, params};
use super::rows::{Rows, common_inner};
use crate::error::Result;
use crate::tensor::{DType, TensorMut, TensorRef};

params! {
    struct ActivationParams = "fir::ActivationParams" {
        x: Address,
        out: Address,
        rows: u32,
        inner: u32,
        x_outer: u64,
        x_stride: u64,
        out_outer: u64,
        out_stride: u64,
        d: u32,
        width: u32,
        parts: u32,
        unused: u32,
    }
}

/// A function of one element, by its name in the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Activation {
    Silu,
    Gelu,
    GeluTanh,
}

/// Threads of a block.
const BLOCK: u32 = 256;
fn source(x: DType, act: Activation, vector: bool) -> Source {
    let name = format!("fir::act_and_mul<{}, fir::{act:?}, {vector}>", cpp(x));
    Source::new::<ActivationParams>("activation.cuh", name)
}

/// Every instantiation that [`act_and_mul`] may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for x in [DType::F32, DType::F16, DType::BF16] {
        for act in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            all.extend([false, true].map(|vector| source(x, act, vector)));
        }
    }
    all
}

pub(crate) fn act_and_mul<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    act: Activation,
    x: TensorRef<'a>,
    out: TensorMut<'a>,
) -> Result<()> {
    check_float(op, "x", x.dtype())?;
    let mut call = Call::new(gpu, op);
    let (dtype, chunk) = (x.dtype(), 16 / x.dtype().size());
    let x_rows = Rows::new(op, "x", x.layout(), dtype)?;
    let out_rows = Rows::new(op, "out", out.layout(), dtype)?;
    let (x, out) = (call.read("x", x)?, call.write("out", out)?);
    let (rows, d) = (out_rows.rows, out_rows.row);
    if out_rows.is_empty() {
        return call.finish();
    }
    let row_chunks = d.div_ceil(chunk);
    let width = row_chunks.next_power_of_two().min(BLOCK as usize) as u32;
    let vector = [(&x_rows, x, 0), (&x_rows, x, d), (&out_rows, out, 0)]
        .iter()
        .all(|(rows, start, at)| rows.is_vector(*start, *at, d, chunk));
    let parts = row_chunks.div_ceil(width as usize);
    let (even, inner) = common_inner(&[&x_rows, &out_rows]);
    let ([x_outer, x_stride], [out_outer, out_stride]) = (x_rows.strides(even), out_rows.strides(even));
    let params = ActivationParams {
        x,
        out,
        rows: rows as u32,
        inner,
        x_outer,
        x_stride,
        out_outer,
        out_stride,
        d: d as u32,
        width,
        parts: parts as u32,
        unused: 0,
    };
    let kernel = gpu.kernel(source(dtype, act, vector))?;
    // A multiple of the parts, so that a block keeps its part from one row to the next.
    let row_blocks = rows.div_ceil((BLOCK / width) as usize).min(i32::MAX as usize / parts);
    call.launch(&kernel, Grid { early: true, ..Grid::new((row_blocks * parts) as u32, BLOCK) }, &params)?;
    call.finish()
}
