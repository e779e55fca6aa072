//! Operators as functions: tensors in the library's order, outputs given by the caller.
//!
//! Every function reads its tensors ([`Arg`]), gets the call ready ([`prepare`]), and runs it without the interpreter's lock.

mod matrix;
mod rows;
mod sampling;
mod states;
mod tokens;

use pyo3::prelude::*;

use crate::error::to_py;
use crate::tensor::{Arg, prepare};

/// Runs `work` without the interpreter's lock.
pub(crate) fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> fir::Result<T> + Send) -> PyResult<T> {
    py.detach(work).map_err(to_py)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    rows::register(module)?;
    states::register(module)?;
    tokens::register(module)?;
    sampling::register(module)?;
    matrix::register(module)
}
