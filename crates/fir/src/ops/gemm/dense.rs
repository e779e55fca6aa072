//! Weights of products, as they lie or packed once.

use super::blocks::BlockWeights;
use crate::cpu::gemm::Strips;
use crate::cpu::level::Level;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{DType, Dims, TensorRef};

/// Weights of a dense product in the order in which the kernels of one executor read them; made once, by [`DenseWeights::pack`].
pub struct DenseWeights(pub(super) Strips);

impl DenseWeights {
    /// Rows that are packed together.
    pub(super) const STRIP: usize = Strips::ROWS;

    /// Copies `w`, if products on `exec` are faster so; `None` where they read rows as they lie.
    ///
    /// That is worth it for bf16 at the CPU's level AMX, where products of more than 32 rows otherwise copy the weights into
    /// tiles each time: half of what they cost for some hundred rows. An executor with an
    /// [override](Exec::with_override) gets `None`, as that is called with rows.
    ///
    /// * `w`: `[n, k]`, f32, f16 or bf16; rows contiguous
    pub fn pack(exec: &Exec, w: TensorRef<'_>) -> Result<Option<Self>> {
        const OP: &str = "DenseWeights::pack";
        Dims::of(OP).bind("w", &w, &["n", "k"])?;
        if !matches!(w.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::DType { op: OP, arg: "w", got: w.dtype().name(), want: "f32, f16 or bf16".into() });
        }
        match exec {
            Exec::Cpu(cpu) if w.dtype() == DType::BF16 && cpu.level() == Level::Amx && cpu.over().is_none() => {
                Strips::new(cpu, OP, w).map(|strips| Some(Self(strips)))
            }
            _ => Ok(None),
        }
    }

    /// Bytes of the packed form: `2 * n * k`, either made up to a multiple of 32.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// `[n, k]`
    pub fn shape(&self) -> [usize; 2] {
        self.0.shape()
    }
}

impl std::fmt::Debug for DenseWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DenseWeights").field("shape", &self.shape()).finish()
    }
}

/// Weights of a product. Of `Rows` and `Packed` the bits of what comes out are the same.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// `[n, k]`, f32, f16 or bf16; rows contiguous.
    Rows(TensorRef<'a>),
    /// Packed for this executor, or one of the same level; `x` is bf16.
    Packed(&'a DenseWeights),
    /// In a format of GGUF: [`block_gemm`](super::block_gemm) defines the sums. On CUDA they have no epilogue yet.
    Blocks(&'a BlockWeights),
}

impl<'a> From<TensorRef<'a>> for Weights<'a> {
    fn from(w: TensorRef<'a>) -> Self {
        Self::Rows(w)
    }
}

impl<'a> From<&'a DenseWeights> for Weights<'a> {
    fn from(w: &'a DenseWeights) -> Self {
        Self::Packed(w)
    }
}

impl<'a> From<&'a BlockWeights> for Weights<'a> {
    fn from(w: &'a BlockWeights) -> Self {
        Self::Blocks(w)
    }
}

impl Weights<'_> {
    /// Weight rows that are packed together: a product of two matrices, one on top of the other, takes whole ones of each.
    pub fn together(&self) -> usize {
        match self {
            Self::Rows(_) => 1,
            Self::Packed(_) => DenseWeights::STRIP,
            Self::Blocks(_) => BlockWeights::PANEL,
        }
    }

    /// Binds both axes.
    pub(super) fn bind(&self, dims: &mut Dims, axes: [&'static str; 2]) -> Result<()> {
        match self {
            Self::Rows(w) => dims.bind("w", w, &axes).map(drop),
            Self::Packed(_) | Self::Blocks(_) => {
                let [n, k] = self.shape();
                dims.axis("w", axes[0], n)?.axis("w", axes[1], k).map(drop)
            }
        }
    }

    /// `[n, k]`, once bound.
    pub(super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Rows(w) => [w.shape()[0], w.shape()[1]],
            Self::Packed(w) => w.shape(),
            Self::Blocks(w) => w.shape(),
        }
    }
}
