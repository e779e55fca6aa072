//! Matrix products: dense ones, and with weights in GGUF's block formats.

mod blocks;

pub use blocks::{BlockWeights, block_gemm, dequantize_blocks};

use crate::cpu;
use crate::error::Result;
use crate::exec::Exec;
pub use crate::tensor::BlockFormat;
use crate::tensor::{Dims, TensorMut, TensorRef};

/// Multiplies the rows of `x` by a matrix of weights stored as a linear layer's are, one output per row.
///
/// `out[i, j] = Σ_l x[i, l] * w[j, l]`
///
/// Sums are f32, and a row of `out` depends on its row of `x` alone: how many others there are changes no bit of it.
///
/// * `x`: `[m, k]`, `w`: `[n, k]`, each f32, f16 or bf16; rows contiguous
/// * `out`: `[m, n]`, f32, f16 or bf16; rows contiguous
pub fn gemm(exec: &Exec, x: TensorRef<'_>, w: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    Dims::of("gemm").bind("x", &x, &["m", "k"])?.bind("w", &w, &["n", "k"])?.bind("out", &out, &["m", "n"])?;
    match exec {
        Exec::Cpu(cpu) => cpu::gemm::gemm(cpu, x, w, out),
    }
}
