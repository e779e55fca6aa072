//! Matrix products: dense, with epilogues, of fp8 with scales, of GGUF's block formats, of many matrices at once.

mod blocks;
mod dense;
mod grouped;
mod scaled;

pub(super) use self::scaled::bind as bind_scaled;
pub use self::{
    blocks::{BlockWeights, block_gemm, dequantize_blocks},
    dense::{DenseWeights, Weights},
    grouped::{GroupedArgs, batched_gemm, grouped_gemm},
    scaled::scaled_gemm,
};
use crate::cpu;
use crate::cpu::gemm::{Epilogue, Product};
#[cfg(feature = "cuda")]
use crate::cuda::{self, gemm::Then};
use crate::error::{Error, Result};
use crate::exec::{Call, Exec};
use crate::ops::norm;
pub use crate::tensor::{Block, BlockFormat, Scaled};
use crate::tensor::{Dims, TensorMut, TensorRef};

/// Multiplies the rows of `x` by a matrix of weights stored as a linear layer's are, one output per row.
///
/// `out[i, j] = Σ_l x[i, l] * w[j, l]`
///
/// Sums are f32, and a row of `out` depends on its row of `x` alone: how many others there are changes no bit of it.
///
/// * `x`: `[m, k]`, `w`: `[n, k]`, each f32, f16 or bf16; rows contiguous. Or [`DenseWeights`] or [`BlockWeights`], of which an
///   [override](Exec::with_override) is not told; on CUDA the products with more to them than this one take rows alone
/// * `out`: `[m, n]`, f32, f16 or bf16; rows contiguous
pub fn gemm<'a>(exec: &Exec, x: TensorRef<'_>, w: impl Into<Weights<'a>>, mut out: TensorMut<'_>) -> Result<()> {
    let w = w.into();
    bind("gemm", &x, &w, ("out", &out))?;
    if let Weights::Rows(w) = w {
        let done = exec.overridden(|over| {
            let outputs = &mut [("C", out.reborrow())];
            let (place, stream) = exec.queue();
            over.call(Call { place, stream, op: "gemm", inputs: &[("A", x), ("B", w)], numbers: &[], outputs })
        })?;
        if done {
            return Ok(());
        }
    }
    product("gemm", exec, x, w, out, Epilogue::None)
}

/// [`gemm`] with a bias.
///
/// `out[i, j] = Σ_l x[i, l] * w[j, l] + bias[j]`
///
/// * `bias`: `[n]`, f32, f16 or bf16; the rest as in [`gemm`]
pub fn gemm_bias<'a>(
    exec: &Exec,
    x: TensorRef<'_>,
    w: impl Into<Weights<'a>>,
    bias: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    const OP: &str = "gemm_bias";
    let (w, mut dims) = (w.into(), Dims::of(OP));
    dims.bind("x", &x, &["m", "k"])?;
    w.bind(&mut dims, ["n", "k"])?;
    dims.bind("bias", &bias, &["n"])?.bind("out", &out, &["m", "n"])?;
    match exec {
        Exec::Cpu(_) => {
            let bias = cpu::rows::widened(OP, "bias", bias)?;
            product(OP, exec, x, w, out, Epilogue::Bias(&bias))
        }
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda_product(gpu, OP, x, w, out, Then::Bias(bias)),
    }
}

/// The first half of a gated feed-forward layer: [`gemm`] by two matrices, one on top of the other, and SiLU.
///
/// `g[i, j] = Σ_l x[i, l] * w[j, l]`, `u[i, j] = Σ_l x[i, l] * w[n + j, l]`, `out[i, j] = g / (1 + e^-g) * u`
///
/// `g` and `u` are not rounded in between.
///
/// * `w`: `[2 * n, k]`, packed ones with an `n` that is a multiple of 32, blocks of 16; the rest as in [`gemm`]
pub fn gemm_silu_mul<'a>(exec: &Exec, x: TensorRef<'_>, w: impl Into<Weights<'a>>, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "gemm_silu_mul";
    let (w, mut dims) = (w.into(), Dims::of(OP));
    dims.bind("x", &x, &["m", "k"])?;
    w.bind(&mut dims, ["2n", "k"])?;
    let n = dims.bind("out", &out, &["m", "n"])?.get("n");
    let [rows, _] = w.shape();
    if n.checked_mul(2) != Some(rows) {
        return Err(Error::value(OP, "w", format!("{rows} rows"), format!("2 * {n}")));
    }
    if !n.is_multiple_of(w.together()) {
        let want = format!("2 * n, n a multiple of {}, as they are packed", w.together());
        return Err(Error::value(OP, "w", format!("{rows} rows"), want));
    }
    product(OP, exec, x, w, out, Epilogue::SiluMul)
}

/// Adds a product to what is there: a layer's output to the residual stream.
///
/// `residual[i, j] += Σ_l x[i, l] * w[j, l]`, rounded once
///
/// * `residual`: `[m, n]`; the rest as in [`gemm`]
pub fn gemm_add<'a>(exec: &Exec, x: TensorRef<'_>, w: impl Into<Weights<'a>>, residual: TensorMut<'_>) -> Result<()> {
    const OP: &str = "gemm_add";
    let w = w.into();
    bind(OP, &x, &w, ("residual", &residual))?;
    product(OP, exec, x, w, residual, Epilogue::Add)
}

/// Tensors of [`gemm_add_rms_norm`].
#[derive(Debug)]
pub struct GemmAddNormArgs<'a> {
    /// `[m, k]`
    pub x: TensorRef<'a>,
    /// `[n, k]`
    pub w: Weights<'a>,
    /// `[m, n]`; added to.
    pub residual: TensorMut<'a>,
    /// `[n]`
    pub weight: TensorRef<'a>,
    /// Added to the mean of the squares.
    pub eps: f32,
    /// `[m, n]`, of the type of `residual`.
    pub out: TensorMut<'a>,
}

/// [`gemm_add`], then [`norm::rms_norm`] of the sum: the end of one layer and the start of the next.
///
/// `residual[i, j] += Σ_l x[i, l] * w[j, l]`, `out[i, j] = residual[i, j] / sqrt(mean_j(residual[i, j]²) + eps) * weight[j]`
pub fn gemm_add_rms_norm(exec: &Exec, args: GemmAddNormArgs<'_>) -> Result<()> {
    const OP: &str = "gemm_add_rms_norm";
    let GemmAddNormArgs { x, w, mut residual, weight, eps, out } = args;
    let mut dims = bind(OP, &x, &w, ("residual", &residual))?;
    dims.bind("weight", &weight, &["n"])?.bind("out", &out, &["m", "n"])?;
    // What the norm would refuse is refused before anything is written.
    if !(eps.is_finite() && eps >= 0.0) {
        return Err(Error::value(OP, "eps", eps, "a finite number from 0 on"));
    }
    if out.dtype() != residual.dtype() {
        let want = format!("{}, as `residual`", residual.dtype());
        return Err(Error::DType { op: OP, arg: "out", got: out.dtype().name(), want });
    }
    product(OP, exec, x, w, residual.reborrow(), Epilogue::Add)?;
    norm::rms_norm(exec, residual.as_ref(), weight, eps, out)
}

/// The shapes of a product.
fn bind(
    op: &'static str,
    x: &TensorRef<'_>,
    w: &Weights<'_>,
    (arg, out): (&'static str, &TensorMut<'_>),
) -> Result<Dims> {
    let mut dims = Dims::of(op);
    dims.bind("x", x, &["m", "k"])?;
    w.bind(&mut dims, ["n", "k"])?;
    dims.bind(arg, out, &["m", "n"])?;
    Ok(dims)
}

fn product(
    op: &'static str,
    exec: &Exec,
    x: TensorRef<'_>,
    w: Weights<'_>,
    out: TensorMut<'_>,
    then: Epilogue<'_>,
) -> Result<()> {
    match (exec, w) {
        (Exec::Cpu(cpu), Weights::Rows(w)) => cpu::gemm::products(cpu, op, vec![Product { x, w, out, then }]),
        (Exec::Cpu(cpu), Weights::Packed(w)) => cpu::gemm::packed_product(cpu, op, x, &w.0, out, then),
        (Exec::Cpu(cpu), Weights::Blocks(w)) => cpu::gemm::blocks::gemm(cpu, op, x, &w.0, out, then),
        #[cfg(feature = "cuda")]
        (Exec::Cuda(gpu), w) => {
            let then = match then {
                Epilogue::Add => Then::Add,
                Epilogue::SiluMul => Then::Gate(cuda::gemm::Gate::Silu),
                _ => Then::None,
            };
            cuda_product(gpu, op, x, w, out, then)
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda_product<'a>(
    gpu: &'a crate::exec::Gpu,
    op: &'static str,
    x: TensorRef<'a>,
    w: Weights<'a>,
    out: TensorMut<'a>,
    then: Then<'a>,
) -> Result<()> {
    let w = match (w, &then) {
        (Weights::Rows(w), _) => w,
        (Weights::Packed(_), _) => return Err(Error::value(op, "w", "packed for a CPU, on a CUDA device", "rows")),
        (Weights::Blocks(w), Then::None) => return cuda::gemm_blocks::gemm(gpu, op, x, blocks::panels(&w.0), out),
        (Weights::Blocks(_), _) => {
            return Err(Error::value(op, "w", "blocks, whose products have no epilogue on a CUDA device", "rows"));
        }
    };
    let product = cuda::gemm::Product { x: x.into(), w: w.into(), out, then };
    cuda::gemm::product(gpu, op, false, product)
}
