//! Merging attention states.

use fir::attention;
use pyo3::prelude::*;

use super::{Arg, prepare, run};

#[pyfunction]
fn merge_state(
    py: Python<'_>,
    mut o_a: Arg,
    mut lse_a: Arg,
    mut o_b: Arg,
    mut lse_b: Arg,
    mut out: Arg,
    mut lse_out: Arg,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut o_a, &mut lse_a, &mut o_b, &mut lse_b], &[&out, &lse_out])?;
    run(py, || {
        let (a, b) = ((o_a.view()?, lse_a.view()?), (o_b.view()?, lse_b.view()?));
        attention::merge_state(&exec, a, b, (out.view_mut()?, lse_out.view_mut()?))
    })
}

#[pyfunction]
#[pyo3(signature = (o, lse, o_other, lse_other, mask=None))]
fn merge_state_in_place(
    py: Python<'_>,
    mut o: Arg,
    mut lse: Arg,
    mut o_other: Arg,
    mut lse_other: Arg,
    mask: Option<Arg>,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut o_other, &mut lse_other], &[&o, &lse])?;
    run(py, || {
        let mask = mask.as_ref().map(Arg::view).transpose()?;
        let other = (o_other.view()?, lse_other.view()?);
        attention::merge_state_in_place(&exec, (o.view_mut()?, lse.view_mut()?), other, mask)
    })
}

#[pyfunction]
fn merge_states(py: Python<'_>, mut o: Arg, mut lse: Arg, mut out: Arg, mut lse_out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut o, &mut lse], &[&out, &lse_out])?;
    run(py, || attention::merge_states(&exec, (o.view()?, lse.view()?), (out.view_mut()?, lse_out.view_mut()?)))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(merge_state, module)?)?;
    module.add_function(wrap_pyfunction!(merge_state_in_place, module)?)?;
    module.add_function(wrap_pyfunction!(merge_states, module)?)
}
