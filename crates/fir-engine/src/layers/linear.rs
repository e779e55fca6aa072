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

    fn view(&self) -> Result<Weights<'_>> {
        Ok(match self {
            Self::Blocks(w) => w.into(),
            Self::Dense(w) => w.view().into(),
            Self::Packed(w) => w.into(),
            Self::Mapped(w) => w.view().map_err(|_| Error::Stopped("a mapped file became shorter".into()))?.into(),
        })
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
            if let Weights::Rows(w) = part.view()?
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

    /// The one matrix, if it has no bias: what the fused epilogues take.
    fn plain(&self) -> Result<Option<Weights<'_>>> {
        match (&self.parts[..], &self.bias) {
            ([one], None) => one.view().map(Some),
            _ => Ok(None),
        }
    }

    /// `out = x · wᵀ + bias`
    pub(crate) fn run(&self, exec: &Exec, x: TensorRef<'_>, mut out: TensorMut<'_>) -> Result<()> {
        let mut at = 0;
        for w in &self.parts {
            let columns = at..at + w.rows();
            let to = out.reborrow().slice(1, columns.clone())?;
            match &self.bias {
                None => gemm::gemm(exec, x, w.view()?, to)?,
                Some(bias) => {
                    let bias = TensorRef::new(&bias[columns.clone()], &[columns.len()])?;
                    gemm::gemm_bias(exec, x, w.view()?, bias, to)?;
                }
            }
            at = columns.end;
        }
        Ok(())
    }

    /// `out = silu(gate) * up`, if that can be one product.
    pub(crate) fn silu_mul(&self, exec: &Exec, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<bool> {
        let Some(w) = self.plain()? else { return Ok(false) };
        if !self.n.is_multiple_of(2 * w.together()) {
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
        // A model of blocks (SmolLM2, Q4_1, on a Zen 5) is 0.97 to 0.99 times as fast so.
        if let Some(w) = self.plain()?
            && !matches!(w, Weights::Blocks(_))
        {
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
