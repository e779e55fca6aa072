//! [`Linear`]: a product with weights in any format, several matrices stacked into one where their formats agree.

use fir::gemm::{self, BlockWeights, DenseWeights, GemmAddNormArgs, Weights};
use fir::tensor::Foreign;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef, norm};
use half::bf16;

use crate::error::{Error, Result};
use crate::weights::{Kind, Stored};

/// A matrix of weights, `[n, k]`.
enum Weight {
    Blocks(BlockWeights),
    Dense(Tensor),
    /// In the order of the executor's kernels.
    Packed(DenseWeights),
    /// In the file, as it lies.
    Mapped(Foreign),
}

impl Weight {
    fn rows(&self) -> usize {
        match self {
            Self::Blocks(w) => w.shape()[0],
            Self::Dense(w) => w.view().layout().shape()[0],
            Self::Packed(w) => w.shape()[0],
            Self::Mapped(w) => w.layout().shape()[0],
        }
    }

    /// The weights, unless they are blocks.
    fn dense(&self) -> Option<Weights<'_>> {
        match self {
            Self::Blocks(_) => None,
            Self::Dense(w) => Some(w.view().into()),
            Self::Packed(w) => Some(w.into()),
            Self::Mapped(w) => w.view().ok().map(Weights::from),
        }
    }
}

/// `x · wᵀ + bias` for matrices that lie one above the other.
pub(crate) struct Linear {
    parts: Vec<Weight>,
    bias: Option<Vec<f32>>,
    pub(crate) n: usize,
}

impl Linear {
    /// The matrices `[n, k]` on top of each other. Those of f32, f16 and bf16 become `dtype`.
    pub(crate) fn stack(exec: &Exec, from: &[Stored<'_>], k: usize, dtype: DType) -> Result<Self> {
        let mut parts = Vec::new();
        let mut rest = from;
        while let Some(first) = rest.first() {
            let same = rest.iter().take_while(|s| s.kind == first.kind).count();
            let (run, others) = rest.split_at(same);
            for s in run {
                if s.shape.len() != 2 || s.shape[1] != k {
                    return Err(s.wrong(&format!("has shape {:?}, expected [n, {k}]", s.shape)));
                }
            }
            let n: usize = run.iter().map(|s| s.shape[0]).sum();
            parts.push(match first.kind {
                Kind::Blocks(format) => {
                    let joined: Vec<u8>;
                    let data = match run {
                        [one] => one.data,
                        many => {
                            joined = many.iter().flat_map(|s| s.data).copied().collect();
                            &joined
                        }
                    };
                    Weight::Blocks(BlockWeights::pack(exec, format, data, n, k)?)
                }
                Kind::Dense(stored) => match run {
                    // Aligned by every writer that we know of; if not, it is copied.
                    [one] if stored == dtype && cfg!(target_endian = "little") => {
                        match Foreign::from_owner(Box::new(one.part()), dtype, &[n, k]) {
                            Ok(mapped) => Weight::Mapped(mapped),
                            Err(_) => Weight::Dense(dense(run, &[n, k], dtype)?),
                        }
                    }
                    many => Weight::Dense(dense(many, &[n, k], dtype)?),
                },
            });
            rest = others;
        }
        let n = parts.iter().map(Weight::rows).sum();
        Ok(Self { parts, bias: None, n })
    }

    /// Dense weights in the order of the kernels, where that is of use: for activations of their own type. What is
    /// multiplied by a few rows at a time, such as an output matrix, can stay in the file.
    pub(crate) fn packed(mut self, exec: &Exec) -> Result<Self> {
        for part in &mut self.parts {
            if let Some(Weights::Rows(w)) = part.dense()
                && let Some(packed) = DenseWeights::pack(exec, w)?
            {
                *part = Weight::Packed(packed);
            }
        }
        Ok(self)
    }

    /// With a bias, of the stacked matrices in turn.
    pub(crate) fn with_bias(mut self, bias: Option<Vec<f32>>) -> Result<Self> {
        if let Some(bias) = &bias
            && bias.len() != self.n
        {
            let why = format!("a bias of {} for {} outputs", bias.len(), self.n);
            return Err(Error::Model { path: "weights".into(), why });
        }
        self.bias = bias;
        Ok(self)
    }

    /// The one matrix, if it is not of blocks and has no bias: what the fused epilogues take.
    fn plain(&self) -> Option<Weights<'_>> {
        match (&self.parts[..], &self.bias) {
            ([one], None) => one.dense(),
            _ => None,
        }
    }

    /// `out = x · wᵀ + bias`
    pub(crate) fn run(&self, exec: &Exec, x: TensorRef<'_>, mut out: TensorMut<'_>) -> Result<()> {
        let mut at = 0;
        for w in &self.parts {
            let to = out.reborrow().slice(1, at..at + w.rows())?;
            match (w, &self.bias) {
                (Weight::Blocks(w), _) => gemm::block_gemm(exec, x, w, to)?,
                (Weight::Dense(_) | Weight::Packed(_) | Weight::Mapped(_), bias) => {
                    let rows = w.rows();
                    let w = w.dense().ok_or_else(|| Error::Stopped("a mapped file became shorter".into()))?;
                    match bias {
                        None => gemm::gemm(exec, x, w, to)?,
                        Some(bias) => {
                            let bias = &bias[at..at + rows];
                            gemm::gemm_bias(exec, x, w, TensorRef::new(bias, &[bias.len()])?, to)?;
                        }
                    }
                }
            }
            if let (Weight::Blocks(w), Some(bias)) = (w, &self.bias) {
                let n = w.shape()[0];
                add_bias(&bias[at..at + n], out.reborrow().slice(1, at..at + n)?)?;
            }
            at += w.rows();
        }
        Ok(())
    }

    /// `out = silu(gate) * up`, if that can be one product.
    pub(crate) fn silu_mul(&self, exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<bool> {
        let Some(w) = self.plain() else { return Ok(false) };
        // As two matrices packed as one want it.
        if matches!(w, Weights::Packed(_)) && !self.n.is_multiple_of(64) {
            return Ok(false);
        }
        gemm::gemm_silu_mul(exec, x, w, out)?;
        Ok(true)
    }

    /// `residual += x · wᵀ`, and the norm of it into `out`.
    pub(crate) fn add_norm(
        &self,
        exec: &Exec,
        x: TensorRef<'_>,
        residual: TensorMut<'_>,
        weight: TensorRef<'_>,
        eps: f32,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        if let Some(w) = self.plain() {
            gemm::gemm_add_rms_norm(exec, GemmAddNormArgs { x, w, residual, weight, eps, out })?;
            return Ok(());
        }
        self.run(exec, x, out.reborrow())?;
        norm::fused_add_rms_norm(exec, out, residual, weight, eps)?;
        Ok(())
    }
}

/// Stored matrices, one behind another, as one tensor of `dtype`.
pub(crate) fn dense(from: &[Stored<'_>], shape: &[usize], dtype: DType) -> Result<Tensor> {
    let mut t = Tensor::zeros(dtype, shape)?;
    let mut at = 0;
    for s in from {
        let values = s.to_f32()?;
        fill(&mut t, at, &values)?;
        at += values.len();
    }
    Ok(t)
}

/// Writes values, rounded to its type, to a tensor of f32 or bf16, from element `at` on.
fn fill(t: &mut Tensor, at: usize, values: &[f32]) -> Result<()> {
    match t.dtype() {
        DType::BF16 => {
            for (o, &x) in t.as_mut_slice::<bf16>()?[at..].iter_mut().zip(values) {
                *o = bf16::from_f32(x);
            }
        }
        _ => t.as_mut_slice::<f32>()?[at..][..values.len()].copy_from_slice(values),
    }
    Ok(())
}

/// Adds a bias to every row. Products with blocks have no epilogue; the rows are still in the cache.
fn add_bias(bias: &[f32], out: TensorMut<'_>) -> Result<()> {
    const OP: &str = "bias";
    let (rows, stride) = (out.layout().shape()[0], out.layout().strides()[0]);
    if out.dtype() == DType::BF16 {
        let (data, _) = out.typed::<bf16>(OP, "out")?.into_parts();
        for r in 0..rows {
            for (o, b) in data[r * stride..].iter_mut().zip(bias) {
                *o = bf16::from_f32(o.to_f32() + b);
            }
        }
    } else {
        let (data, _) = out.typed::<f32>(OP, "out")?.into_parts();
        for r in 0..rows {
            for (o, b) in data[r * stride..].iter_mut().zip(bias) {
                *o += b;
            }
        }
    }
    Ok(())
}
