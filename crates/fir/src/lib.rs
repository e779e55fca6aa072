//! fir
#![deny(unsafe_code)]

mod cpu;
pub mod env;
pub mod error;
pub mod exec;
pub mod filters;
pub mod kv;
mod ops;
pub mod philox;
pub mod plan;
pub mod reference;
pub mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod variant;

pub use crate::ops::{activation, attention, gemm, norm, page, rope, sampling, speculative, topk};
pub use crate::{
    error::{Error, Result},
    exec::Exec,
    kv::{PageTable, PagedKv, Ragged},
    tensor::{DType, Tensor, TensorMut, TensorRef},
};
