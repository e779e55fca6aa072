//! Products with weights in GGUF's block formats.

use crate::cpu;
use crate::cpu::gemm::Epilogue;
use crate::cpu::gemm::blocks::Packed;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::exec::Cpu;
use crate::exec::Exec;
use crate::tensor::{BlockFormat, Dims, TensorMut, TensorRef};

/// Weights of a linear layer in a block format, in the order the kernels read; made once, by [`BlockWeights::pack`].
pub struct BlockWeights(pub(super) Packed);

impl BlockWeights {
    /// Rows that are packed together.
    pub(super) const PANEL: usize = Packed::ROWS;

    /// Repacks the rows of a GGUF tensor: `n` of them, each of `k` elements, whole blocks.
    ///
    /// On a CUDA device this machine's CPU packs, and the result is copied there.
    ///
    /// The packed form is at most 3.6 % larger (see [`Self::bytes`]), rows made up to a multiple of 16.
    pub fn pack(exec: &Exec, format: BlockFormat, data: &[u8], n: usize, k: usize) -> Result<Self> {
        const OP: &str = "BlockWeights::pack";
        match exec {
            Exec::Cpu(cpu) => Packed::new(Some(cpu), OP, format, data, [n, k], true).map(Self),
            #[cfg(feature = "cuda")]
            Exec::Cuda(gpu) => {
                let packed = Packed::new(Some(&Cpu::new()?), OP, format, data, [n, k], true)?;
                // A dry run has no memory of its own.
                let on_device = gpu.stream().map(|_| packed.data().to_device(gpu)).transpose()?;
                Ok(Self(match on_device {
                    Some(data) => packed.with_data(data),
                    None => packed,
                }))
            }
        }
    }

    /// Bytes of the packed form: what a product with few rows reads.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// `[n, k]`
    pub fn shape(&self) -> [usize; 2] {
        [self.0.n(), self.0.k()]
    }

    /// Format of the blocks.
    pub fn format(&self) -> BlockFormat {
        self.0.format()
    }
}

impl std::fmt::Debug for BlockWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockWeights").field("format", &self.format()).field("shape", &self.shape()).finish()
    }
}

/// Multiplies the rows of `x`, quantized to 8 bits, by block-quantized weights, one output per weight row.
///
/// Each 256 elements of a row of `x` (the last ones may be fewer) have a scale:
///
/// `sa = max|x| / 127`, `a = round(x / sa)`, ties to even, within ±127; zeros if `sa` is 0
///
/// Up to four of the 256 may be far larger than the others: those over three times the mean of 16 maxima, of the elements 16 apart (of more than
/// four none is). They are taken out: their `a` is 0, and they do not count for `sa`. Each adds its product with the weight, both f32, in one
/// fused step, in ascending order after what the other elements add. In models they are what most of the error would come from: with them quantized
/// the perplexity of SmolLM2-135M is 1.75 % higher.
///
/// With `isum` the integer dot product of `a` and the codes that share a scale, and `asum` the sum of that `a`, both
/// exact, such 256 elements add `t * sa` to an output in one fused step, where
///
/// * Q8_0: `t = Σ_b d[b] * isum[b]`, in order of `b`, each term in one fused step
/// * the other blocks of 32: `t = step * Σ_b d[b] * isum[b] + m[b] * asum[b]`, the integer sum exact, rounded to f32, and then the
///   product. `d` and `m` are the block's f16 numbers as multiples of `step`, rounded to the nearest: it is the power of two, the least
///   from 2^-24 on, by which no `d * q + m` of any code `q` is over 32000 in these 256 elements. From 1024 steps on they are
///   exact; by the others a weight is off by 16 steps at most, a thousandth of the largest that these blocks can hold
/// * blocks of 256: `t = d * Σ_j sc[j] * isum[j] - dmin * Σ_j min[j] * asum[j]`, integer sums exact, each rounded to
///   f32; the first product rounded, then the second subtracted in one fused step
///
/// All of it is the same at every level and for every number of rows and threads: so are the bits of `out`. A row of `x`
/// that is not finite gives NaN.
///
/// * `x`: `[m, k]`, f32, f16 or bf16; rows contiguous
/// * `w`: `[n, k]`
/// * `out`: `[m, n]`, f32, f16 or bf16; rows contiguous
pub fn block_gemm(exec: &Exec, x: TensorRef<'_>, w: &BlockWeights, out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "block_gemm";
    let [n, k] = w.shape();
    Dims::of(OP).bind("x", &x, &["m", "k"])?.axis("w", "n", n)?.axis("w", "k", k)?.bind("out", &out, &["m", "n"])?;
    match exec {
        Exec::Cpu(cpu) => cpu::gemm::blocks::gemm(cpu, OP, x, &w.0, out, Epilogue::None),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::gemm_blocks::gemm(gpu, OP, x, panels(&w.0), out),
    }
}

/// Dequantizes rows of GGUF blocks, as an embedding's lookup needs them; see [`BlockFormat`] for the values.
///
/// Values are computed in f32, products exactly; then rounded to the type of `out`.
///
/// * `data`: the bytes of `rows` rows
/// * `out`: `[rows, k]`, f32, f16 or bf16; `k` whole blocks; rows contiguous
pub fn dequantize_blocks(exec: &Exec, format: BlockFormat, data: &[u8], out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "dequantize_blocks";
    let mut dims = Dims::of(OP);
    dims.bind("out", &out, &["rows", "k"])?;
    let (rows, row_bytes) = (dims.get("rows"), format.row_bytes(OP, dims.get("k"))?);
    if rows.checked_mul(row_bytes) != Some(data.len()) {
        let want = format!("{rows} rows of {row_bytes} bytes ({} elements of {format})", dims.get("k"));
        return Err(Error::value(OP, "data.len()", data.len(), want));
    }
    match exec {
        Exec::Cpu(cpu) => cpu::gemm::blocks::dequantize(cpu, OP, format, data, out),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => {
            // A thread packs some 100 MB/s: rows of a lookup take less than a pool takes to start.
            let cpu = if data.len() > 4 << 20 { Some(Cpu::new()?) } else { None };
            let packed = Packed::new(cpu.as_ref(), OP, format, data, [rows, dims.get("k")], false)?;
            cuda::gemm_blocks::expand(gpu, OP, panels(&packed), out)
        }
    }
}

#[cfg(feature = "cuda")]
pub(super) fn panels(w: &Packed) -> cuda::gemm_blocks::Panels<'_> {
    let data = w.data();
    cuda::gemm_blocks::Panels {
        format: w.format(),
        n: w.n(),
        k: w.k(),
        panel_bytes: data.shape()[1],
        cell_bytes: w.cell_bytes(),
        data: data.view(),
    }
}
