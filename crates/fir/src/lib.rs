//! fir
#![deny(unsafe_code)]

mod cpu;
pub mod env;
pub mod error;
pub mod exec;
mod ops;
pub mod reference;
pub mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use crate::ops::{activation, gemm, norm};
pub use crate::{
    error::{Error, Result},
    exec::Exec,
    tensor::{DType, Tensor, TensorMut, TensorRef},
};
