//! Small values from Python: integers of a host tensor, one value or one per row, a layout, a split.

use std::borrow::Cow;

use fir::attention::Split;
use fir::kv::{KvLayout, Ragged};
use fir::{DType, Error};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::to_py;
use crate::tensor::Arg;

/// `[n]` integers of host memory as i32, borrowed if they are that already.
pub(crate) fn host_i32<'a>(arg: &'a Arg, name: &'static str) -> PyResult<Cow<'a, [i32]>> {
    const OP: &str = "plan";
    let view = arg.view().map_err(to_py)?;
    if view.shape().len() != 1 {
        let axes = "[n]".into();
        return Err(to_py(Error::Rank { op: OP, arg: name, got: view.shape().len(), want: 1, axes }));
    }
    match view.dtype() {
        DType::I32 => {
            let typed = view.typed::<i32>(OP, name).map_err(to_py)?;
            if typed.layout().is_contiguous() {
                return Ok(Cow::Borrowed(&typed.data()[..view.shape()[0]]));
            }
            Ok(typed.layout().offsets().map(|i| typed.data()[i]).collect())
        }
        DType::I64 => {
            let typed = view.typed::<i64>(OP, name).map_err(to_py)?;
            let narrow = |i: usize| {
                let x = typed.data()[i];
                i32::try_from(x).map_err(|_| to_py(Error::value(OP, name, x, "an integer of 32 bits")))
            };
            typed.layout().offsets().map(narrow).collect()
        }
        other => Err(to_py(Error::DType { op: OP, arg: name, got: other.name(), want: "i32 or i64".into() })),
    }
}

/// Offsets of requests over rows.
pub(crate) fn ragged(arg: &Arg, name: &'static str) -> PyResult<Ragged> {
    Ragged::new(&host_i32(arg, name)?).map_err(to_py)
}

/// One value for all rows, or a host tensor with one for each.
pub(crate) enum PerRow<T> {
    One(T),
    Each(Vec<T>),
}

impl<T: Copy> PerRow<T> {
    pub(crate) fn get(&self) -> fir::filters::PerRow<'_, T> {
        match self {
            Self::One(x) => fir::filters::PerRow::One(*x),
            Self::Each(xs) => fir::filters::PerRow::Each(xs),
        }
    }
}

fn each<T>(arg: &Arg, of: impl Fn(f64) -> PyResult<T>) -> PyResult<Vec<T>> {
    let view = arg.view().map_err(to_py)?;
    macro_rules! values {
        ($t:ty) => {{
            let typed = view.typed::<$t>("sampling", "value of each row").map_err(to_py)?;
            typed.layout().offsets().map(|i| of(f64::from(typed.data()[i]))).collect()
        }};
    }
    match view.dtype() {
        DType::F32 => values!(f32),
        DType::F16 => values!(fir::tensor::f16),
        DType::BF16 => values!(fir::tensor::bf16),
        DType::I32 => values!(i32),
        DType::I64 => {
            let typed = view.typed::<i64>("sampling", "value of each row").map_err(to_py)?;
            typed.layout().offsets().map(|i| of(typed.data()[i] as f64)).collect()
        }
        other => Err(PyTypeError::new_err(format!("a tensor of {other}, expected numbers"))),
    }
}

fn count(x: f64) -> PyResult<u32> {
    if x.fract() != 0.0 || !(0.0..=f64::from(u32::MAX)).contains(&x) {
        return Err(PyValueError::new_err(format!("{x}, expected a number of tokens")));
    }
    Ok(x as u32)
}

impl<'a, 'py> FromPyObject<'a, 'py> for PerRow<f32> {
    type Error = PyErr;
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<pyo3::types::PyFloat>() || object.is_instance_of::<pyo3::types::PyInt>() {
            return object.extract().map(Self::One);
        }
        each(&object.extract()?, |x| Ok(x as f32)).map(Self::Each)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for PerRow<u32> {
    type Error = PyErr;
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<pyo3::types::PyFloat>() || object.is_instance_of::<pyo3::types::PyInt>() {
            return count(object.extract()?).map(Self::One);
        }
        each(&object.extract()?, count).map(Self::Each)
    }
}

/// `"NHD"` or `"HND"`.
pub(crate) struct KvOrder(pub(crate) KvLayout);

impl<'a, 'py> FromPyObject<'a, 'py> for KvOrder {
    type Error = PyErr;
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<&str>()? {
            "NHD" => Ok(Self(KvLayout::Nhd)),
            "HND" => Ok(Self(KvLayout::Hnd)),
            other => Err(PyValueError::new_err(format!("kv_layout {other:?}, expected \"NHD\" or \"HND\""))),
        }
    }
}

/// How a plan cuts requests along KV: `"balanced"`, `"none"`, or a number of tokens per piece.
pub(crate) struct Cut(pub(crate) Split);

impl<'a, 'py> FromPyObject<'a, 'py> for Cut {
    type Error = PyErr;
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(tokens) = object.extract::<u32>() {
            return Ok(Self(Split::Fixed(tokens)));
        }
        match object.extract::<&str>()? {
            "balanced" => Ok(Self(Split::Balanced)),
            "none" => Ok(Self(Split::Off)),
            other => {
                let want = "expected \"balanced\", \"none\" or a number of tokens";
                Err(PyValueError::new_err(format!("split {other:?}, {want}")))
            }
        }
    }
}
