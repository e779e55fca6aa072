//! Plain f64 loops for every operator: the definition of right.
//!
//! Functions take the operator's tensors and return the result as a row-major `Vec<f64>`. They check nothing beyond
//! what indexing checks: the operators do. With [`Precision::Exact`] they are the definition; with
//! [`Precision::Naive`] the same loops round as plain low-precision code would, which is what the tests' tolerance
//! is measured from.

pub mod activation;
pub mod attention;
pub mod gemm;
pub mod lora;
pub mod moe;
pub mod norm;
pub mod page;
pub mod quantize;
pub mod rope;
pub mod sampling;
pub mod speculative;
pub mod topk;

use crate::error::Result;
use crate::tensor::{DType, E4m3, E5m2, Float, TensorRef, bf16, f16};

/// How a reference rounds on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Not at all: f64 throughout.
    Exact,
    /// As plain code in this type: sums in f32, every tensor that such code would store rounded to the type.
    Naive(DType),
}

impl Precision {
    /// A running sum or a scalar held in a register.
    pub fn acc(self, x: f64) -> f64 {
        match self {
            Self::Exact => x,
            Self::Naive(_) => f64::from(x as f32),
        }
    }

    /// An element of a tensor that is stored.
    pub fn store(self, x: f64) -> f64 {
        match self {
            Self::Exact => x,
            Self::Naive(dtype) => round(dtype, x),
        }
    }
}

/// `x` rounded to `dtype`; not at all for a type that is no float.
pub fn round(dtype: DType, x: f64) -> f64 {
    let x32 = x as f32;
    f64::from(match dtype {
        DType::F32 => x32,
        DType::F16 => f16::from_f32(x32).to_f32(),
        DType::BF16 => bf16::from_f32(x32).to_f32(),
        DType::E4M3 => E4m3::from_f32(x32).to_f32(),
        DType::E5M2 => E5m2::from_f32(x32).to_f32(),
        _ => return x,
    })
}

/// The elements of a float tensor (not fp4) in row-major order.
pub fn values(x: TensorRef<'_>) -> Result<Vec<f64>> {
    Ok(x.to_f32_vec()?.into_iter().map(f64::from).collect())
}
