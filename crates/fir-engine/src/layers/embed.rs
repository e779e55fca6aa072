//! [`Embedding`]: rows of a table in the file, looked up by token.

use fir::gemm::dequantize_blocks;
use fir::{DType, Exec, TensorMut};
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::weights::{Kind, Part, Stored};

/// The table of embeddings, left in the mapped file.
pub(crate) struct Embedding {
    part: Part,
    kind: Kind,
    rows: usize,
    hidden: usize,
    scale: f32,
}

impl Embedding {
    pub(crate) fn new(from: &Stored<'_>, scale: f32) -> Self {
        Self { part: from.part(), kind: from.kind, rows: from.shape[0], hidden: from.shape[1], scale }
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.part.as_ref().len() / self.rows.max(1)
    }

    /// Writes the rows of `tokens` to `out`, `[tokens, hidden]`, f32 or bf16. `staging` holds their bytes meanwhile.
    pub(crate) fn look_up(
        &self,
        exec: &Exec,
        tokens: &[u32],
        staging: &mut Vec<u8>,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let (table, each) = (self.part.as_ref(), self.row_bytes());
        staging.clear();
        for &t in tokens {
            let row = (t as usize).checked_mul(each).and_then(|at| table.get(at..at + each));
            let row = row.ok_or_else(|| Error::Request {
                field: "tokens",
                why: format!("{t} is no token of a vocabulary of {}", self.rows),
            })?;
            staging.extend_from_slice(row);
        }
        match self.kind {
            Kind::Blocks(format) => dequantize_blocks(exec, format, staging, out.reborrow())?,
            Kind::Dense(dtype) => widen_into(dtype, staging, out.reborrow())?,
        }
        if self.scale != 1.0 {
            scale(self.scale, tokens.len() * self.hidden, out)?;
        }
        Ok(())
    }
}

fn widen_into(dtype: DType, bytes: &[u8], out: TensorMut<'_>) -> Result<()> {
    let narrow = out.dtype() == DType::BF16;
    let value = |i: usize| match dtype {
        DType::F16 => f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]),
    };
    if narrow {
        let (out, _) = out.typed::<bf16>("embedding", "out")?.into_parts();
        out.iter_mut().enumerate().for_each(|(i, o)| *o = bf16::from_f32(value(i)));
    } else {
        let (out, _) = out.typed::<f32>("embedding", "out")?.into_parts();
        out.iter_mut().enumerate().for_each(|(i, o)| *o = value(i));
    }
    Ok(())
}

/// In bf16 the factor is rounded first, as the models that have one were trained.
fn scale(by: f32, n: usize, out: TensorMut<'_>) -> Result<()> {
    if out.dtype() == DType::BF16 {
        let by = bf16::from_f32(by).to_f32();
        let (out, _) = out.typed::<bf16>("embedding", "out")?.into_parts();
        out[..n].iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * by));
    } else {
        let (out, _) = out.typed::<f32>("embedding", "out")?.into_parts();
        out[..n].iter_mut().for_each(|x| *x *= by);
    }
    Ok(())
}
