//! fir
#![deny(unsafe_code)]

mod cpu;
pub mod env;
pub mod error;
pub mod exec;
pub mod filters;
mod ops;
pub mod philox;
pub mod reference;
pub mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use crate::ops::{norm, sampling, speculative, topk};
pub use crate::{
    error::{Error, Result},
    exec::Exec,
    tensor::{DType, Tensor, TensorMut, TensorRef},
};
