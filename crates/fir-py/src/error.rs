//! The library's error as Python's exceptions, with its text unchanged.

use fir::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};

/// A wrong type is a `TypeError`, what no kernel takes a `NotImplementedError`, a device or a compiler that fails a
/// `RuntimeError`; every other refusal is a `ValueError`.
pub(crate) fn to_py(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::DType { .. } => PyTypeError::new_err(text),
        Error::Unsupported { .. } => PyNotImplementedError::new_err(text),
        Error::Unavailable { .. } | Error::Driver { .. } | Error::Compile { .. } | Error::Io { .. } => {
            PyRuntimeError::new_err(text)
        }
        _ => PyValueError::new_err(text),
    }
}
