//! `fir._fir`: the library as a Python extension. The rest of the package is Python, in `python/fir`.

mod bench;
mod error;
mod llm;
mod ops;
mod plan;
mod table;
mod tensor;
mod values;
mod variant;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _fir(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    variant::register(module)?;
    plan::register(module)?;
    bench::register(module)?;
    llm::register(module)?;
    ops::register(module)
}
