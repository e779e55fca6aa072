//! Norms and activations: one row at a time.

use fir::norm::{ModulatedArgs, Modulation};
use fir::{TensorRef, activation, norm};
use pyo3::prelude::*;

use super::{Arg, prepare, run};

macro_rules! norms {
    ($($name:ident)*) => {$(
        #[pyfunction]
        fn $name(py: Python<'_>, mut x: Arg, mut weight: Arg, eps: f32, mut out: Arg) -> PyResult<()> {
            let exec = prepare(py, &mut [&mut x, &mut weight], &[&out])?;
            run(py, || norm::$name(&exec, x.view()?, weight.view()?, eps, out.view_mut()?))
        }
    )*};
}
norms!(rms_norm gemma_rms_norm);

macro_rules! added_norms {
    ($($name:ident)*) => {$(
        #[pyfunction]
        fn $name(py: Python<'_>, mut x: Arg, mut residual: Arg, mut weight: Arg, eps: f32) -> PyResult<()> {
            let exec = prepare(py, &mut [&mut weight], &[&x, &residual])?;
            run(py, || norm::$name(&exec, x.view_mut()?, residual.view_mut()?, weight.view()?, eps))
        }
    )*};
}
added_norms!(fused_add_rms_norm gemma_fused_add_rms_norm);

#[pyfunction]
fn layer_norm(py: Python<'_>, mut x: Arg, mut gamma: Arg, mut beta: Arg, eps: f32, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut gamma, &mut beta], &[&out])?;
    run(py, || norm::layer_norm(&exec, x.view()?, gamma.view()?, beta.view()?, eps, out.view_mut()?))
}

#[pyfunction]
fn qk_rms_norm(py: Python<'_>, mut q: Arg, mut k: Arg, mut q_weight: Arg, mut k_weight: Arg, eps: f32) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut q_weight, &mut k_weight], &[&q, &k])?;
    run(py, || norm::qk_rms_norm(&exec, q.view_mut()?, k.view_mut()?, q_weight.view()?, k_weight.view()?, eps))
}

#[pyfunction]
fn rms_norm_quant(py: Python<'_>, mut x: Arg, mut weight: Arg, scale: f32, eps: f32, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut weight], &[&out])?;
    run(py, || norm::rms_norm_quant(&exec, x.view()?, weight.view()?, scale, eps, out.view_mut()?))
}

#[pyfunction]
fn fused_add_rms_norm_quant(
    py: Python<'_>,
    mut x: Arg,
    mut residual: Arg,
    mut weight: Arg,
    scale: f32,
    eps: f32,
    mut out: Arg,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut weight], &[&out, &residual])?;
    run(py, || {
        let residual = residual.view_mut()?;
        norm::fused_add_rms_norm_quant(&exec, x.view()?, residual, weight.view()?, scale, eps, out.view_mut()?)
    })
}

#[pyfunction]
fn layer_norm_quant(
    py: Python<'_>,
    mut x: Arg,
    mut gamma: Arg,
    mut beta: Arg,
    scale: f32,
    eps: f32,
    mut out: Arg,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x, &mut gamma, &mut beta], &[&out])?;
    run(py, || norm::layer_norm_quant(&exec, x.view()?, gamma.view()?, beta.view()?, scale, eps, out.view_mut()?))
}

fn view(arg: &Option<Arg>) -> fir::Result<Option<TensorRef<'_>>> {
    arg.as_ref().map(Arg::view).transpose()
}

/// A number, and what is added to it: for each element, for each column.
#[derive(FromPyObject)]
struct Term(f32, Option<Arg>, Option<Arg>);

impl Term {
    fn get(&self) -> fir::Result<Modulation<'_>> {
        Ok(Modulation { plus: self.0, rows: view(&self.1)?, columns: view(&self.2)? })
    }
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn modulated_layer_norm(
    py: Python<'_>,
    mut x: Arg,
    x_scale: Option<Arg>,
    mut residual: Option<Arg>,
    mut gate: Term,
    mut scale: Term,
    mut shift: Term,
    eps: f32,
    mut residual_out: Arg,
    mut out: Arg,
) -> PyResult<()> {
    let mut inputs = vec![&mut x];
    inputs.extend([&mut residual, &mut gate.1, &mut scale.1, &mut shift.1].into_iter().flatten());
    let exec = prepare(py, &mut inputs, &[&residual_out, &out])?;
    run(py, || {
        let args = ModulatedArgs {
            x: x.view()?,
            x_scale: view(&x_scale)?,
            residual: view(&residual)?,
            gate: gate.get()?,
            scale: scale.get()?,
            shift: shift.get()?,
            eps,
            residual_out: residual_out.view_mut()?,
            out: out.view_mut()?,
        };
        norm::modulated_layer_norm(&exec, args)
    })
}

macro_rules! activations {
    ($($name:ident)*) => {$(
        #[pyfunction]
        fn $name(py: Python<'_>, mut x: Arg, mut out: Arg) -> PyResult<()> {
            let exec = prepare(py, &mut [&mut x], &[&out])?;
            run(py, || activation::$name(&exec, x.view()?, out.view_mut()?))
        }
    )*};
}
activations!(silu_and_mul gelu_and_mul gelu_tanh_and_mul);

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(gemma_rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(fused_add_rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(gemma_fused_add_rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(layer_norm, module)?)?;
    module.add_function(wrap_pyfunction!(qk_rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(rms_norm_quant, module)?)?;
    module.add_function(wrap_pyfunction!(fused_add_rms_norm_quant, module)?)?;
    module.add_function(wrap_pyfunction!(layer_norm_quant, module)?)?;
    module.add_function(wrap_pyfunction!(modulated_layer_norm, module)?)?;
    module.add_function(wrap_pyfunction!(silu_and_mul, module)?)?;
    module.add_function(wrap_pyfunction!(gelu_and_mul, module)?)?;
    module.add_function(wrap_pyfunction!(gelu_tanh_and_mul, module)?)
}
