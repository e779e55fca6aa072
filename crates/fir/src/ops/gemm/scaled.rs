//! Products of fp8 with scales.

use crate::cpu;
use crate::cpu::gemm::scaled::ScaledProduct;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{DType, Dims, Scaled, TensorMut};

/// [`gemm`](super::gemm) with weights of fp8, and `x` of fp8 or not, each with scales or without.
///
/// `out[i, j] = Σ_l (x[i, l] * x_scale) * (w[j, l] * w_scale)`, the scales being those of the blocks the elements are in
///
/// Any [`Block`](crate::tensor::Block) on either side: per tensor, per token and output channel, or DeepSeek's groups
/// and tiles. A scale that holds for a whole row is applied to the sum, one of a part of it on the way there. Sums are
/// f32, and a row of `out` depends on its row of `x` alone.
///
/// * `x`: `[m, k]`, f32, f16, bf16, e4m3 or e5m2; rows contiguous
/// * `w`: `[n, k]`, e4m3 or e5m2; rows contiguous
/// * `out`: `[m, n]`, f32, f16 or bf16; rows contiguous
pub fn scaled_gemm(exec: &Exec, x: Scaled<'_>, w: Scaled<'_>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "scaled_gemm";
    let mut dims = Dims::of(OP);
    bind(&mut dims, OP, ["x", "x.scales"], &x, &["m", "k"])?;
    bind(&mut dims, OP, ["w", "w.scales"], &w, &["n", "k"])?;
    dims.bind("out", &out, &["m", "n"])?;
    match exec {
        Exec::Cpu(cpu) => cpu::gemm::scaled::products(cpu, OP, vec![ScaledProduct { x, w, out }]),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            let product = cuda::gemm::Product { x, w, out, then: cuda::gemm::Then::None };
            cuda::gemm::product(gpu, OP, true, product)
        }
    }
}

/// Binds the axes of a matrix (or a batch of them) and checks its scales against it; `args` are the names of both.
pub(in crate::ops) fn bind(
    dims: &mut Dims,
    op: &'static str,
    [arg, scales_arg]: [&'static str; 2],
    x: &Scaled<'_>,
    axes: &[&'static str],
) -> Result<()> {
    dims.bind(arg, &x.data, axes)?;
    x.data.layout().check_listed(op, arg)?;
    let Some(scales) = &x.scales else { return Ok(()) };
    let block = x.block;
    if block.rows == 0 || block.columns == 0 {
        return Err(Error::value(
            op,
            scales_arg,
            format!("{} × {} blocks", block.rows, block.columns),
            "at least 1 × 1",
        ));
    }
    let (batch, matrix) = x.data.shape().split_at(axes.len() - 2);
    let want = [batch, &block.counts(matrix[0], matrix[1])].concat();
    if scales.shape() != want {
        return Err(Error::value(op, scales_arg, format!("{:?}", scales.shape()), format!("{want:?}")));
    }
    if scales.dtype() != DType::F32 {
        return Err(Error::DType { op, arg: scales_arg, got: scales.dtype().name(), want: "f32".into() });
    }
    Ok(())
}
