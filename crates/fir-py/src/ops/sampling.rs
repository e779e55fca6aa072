//! Sampling, speculative sampling and top-k.

use fir::sampling::{self as lib, Draw, FilterOrder, RngState};
use fir::speculative::{self, ChainArgs};
use fir::topk::{self, TopKOrder, TopKPages, TopKRagged};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Arg, prepare, run};
use crate::values::PerRow;

/// `(seed, offset)`, `indices` or None, `out`, `valid` or None.
#[derive(FromPyObject)]
struct Drawn((u64, u64), Option<Arg>, Arg, Option<Arg>);

impl Drawn {
    fn get(&mut self) -> fir::Result<Draw<'_>> {
        let ((seed, offset), indices) = (self.0, self.1.as_ref().map(Arg::view).transpose()?);
        let valid = self.3.as_mut().map(Arg::view_mut).transpose()?;
        Ok(Draw { rng: RngState { seed, offset }.into(), indices, out: self.2.view_mut()?, valid })
    }
}

fn order(name: &str) -> PyResult<FilterOrder> {
    match name {
        "top_k_first" => Ok(FilterOrder::TopKFirst),
        "joint" => Ok(FilterOrder::Joint),
        _ => {
            let want = "expected \"top_k_first\" or \"joint\"";
            Err(PyValueError::new_err(format!("Invalid filter_apply_order: {name}, {want}")))
        }
    }
}

#[pyfunction]
fn softmax(py: Python<'_>, mut logits: Arg, temperature: PerRow<f32>, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut logits], &[&out])?;
    run(py, || lib::softmax(&exec, logits.view()?, temperature.get(), out.view_mut()?))
}

#[pyfunction]
fn sample_from_probs(py: Python<'_>, mut probs: Arg, mut draw: Drawn) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut probs], &[&draw.2])?;
    run(py, || lib::sample_from_probs(&exec, probs.view()?, draw.get()?))
}

#[pyfunction]
fn sample_from_logits(py: Python<'_>, mut logits: Arg, temperature: PerRow<f32>, mut draw: Drawn) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut logits], &[&draw.2])?;
    run(py, || lib::sample_from_logits(&exec, logits.view()?, temperature.get(), draw.get()?))
}

#[pyfunction]
fn top_k_sample(py: Python<'_>, mut probs: Arg, top_k: PerRow<u32>, mut draw: Drawn) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut probs], &[&draw.2])?;
    run(py, || lib::top_k_sample(&exec, probs.view()?, top_k.get(), draw.get()?))
}

#[pyfunction]
fn top_p_sample(py: Python<'_>, mut probs: Arg, top_p: PerRow<f32>, mut draw: Drawn) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut probs], &[&draw.2])?;
    run(py, || lib::top_p_sample(&exec, probs.view()?, top_p.get(), draw.get()?))
}

#[pyfunction]
fn min_p_sample(py: Python<'_>, mut probs: Arg, min_p: PerRow<f32>, mut draw: Drawn) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut probs], &[&draw.2])?;
    run(py, || lib::min_p_sample(&exec, probs.view()?, min_p.get(), draw.get()?))
}

#[pyfunction]
#[pyo3(signature = (x, top_k, top_p, filter_order, draw, *, logits=false))]
fn top_k_top_p_sample(
    py: Python<'_>,
    mut x: Arg,
    top_k: PerRow<u32>,
    top_p: PerRow<f32>,
    filter_order: &str,
    mut draw: Drawn,
    logits: bool,
) -> PyResult<()> {
    let (exec, order) = (prepare(py, &mut [&mut x], &[&draw.2])?, order(filter_order)?);
    run(py, || {
        let sample = if logits { lib::top_k_top_p_sample_from_logits } else { lib::top_k_top_p_sample };
        sample(&exec, x.view()?, top_k.get(), top_p.get(), order, draw.get()?)
    })
}

#[pyfunction]
fn top_k_renorm(py: Python<'_>, mut probs: Arg, top_k: PerRow<u32>, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut probs], &[&out])?;
    run(py, || lib::top_k_renorm(&exec, probs.view()?, top_k.get(), out.view_mut()?))
}

#[pyfunction]
fn top_p_renorm(py: Python<'_>, mut probs: Arg, top_p: PerRow<f32>, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut probs], &[&out])?;
    run(py, || lib::top_p_renorm(&exec, probs.view()?, top_p.get(), out.view_mut()?))
}

#[pyfunction]
fn top_k_mask_logits(py: Python<'_>, mut logits: Arg, top_k: PerRow<u32>, mut out: Arg) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut logits], &[&out])?;
    run(py, || lib::top_k_mask_logits(&exec, logits.view()?, top_k.get(), out.view_mut()?))
}

#[pyfunction]
#[pyo3(signature = (draft_probs, draft_tokens, target_probs, rng, out, accepted=None, emitted=None))]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn chain_speculative_sample(
    py: Python<'_>,
    mut draft_probs: Arg,
    mut draft_tokens: Arg,
    mut target_probs: Arg,
    rng: (u64, u64),
    mut out: Arg,
    mut accepted: Option<Arg>,
    mut emitted: Option<Arg>,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut draft_probs, &mut draft_tokens, &mut target_probs], &[&out])?;
    run(py, || {
        let args = ChainArgs {
            draft_probs: draft_probs.view()?,
            draft_tokens: draft_tokens.view()?,
            target_probs: target_probs.view()?,
            rng: RngState { seed: rng.0, offset: rng.1 }.into(),
            out: out.view_mut()?,
            accepted: accepted.as_mut().map(Arg::view_mut).transpose()?,
            emitted: emitted.as_mut().map(Arg::view_mut).transpose()?,
            valid: None,
        };
        speculative::chain_speculative_sample(&exec, args)
    })
}

#[pyfunction]
#[pyo3(signature = (x, values, indices, *, sorted=false))]
fn top_k(py: Python<'_>, mut x: Arg, mut values: Arg, mut indices: Arg, sorted: bool) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut x], &[&values, &indices])?;
    let order = if sorted { TopKOrder::Value } else { TopKOrder::Place };
    run(py, || topk::top_k(&exec, x.view()?, order, values.view_mut()?, indices.view_mut()?))
}

#[pyfunction]
#[pyo3(signature = (scores, lens, page_table, out, *, starts=None, requests=None, page_starts=None, page_size=1, raw=None))]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn top_k_page_table_transform(
    py: Python<'_>,
    mut scores: Arg,
    mut lens: Arg,
    mut page_table: Arg,
    mut out: Arg,
    starts: Option<Arg>,
    requests: Option<Arg>,
    page_starts: Option<Arg>,
    page_size: usize,
    mut raw: Option<Arg>,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut scores, &mut lens, &mut page_table], &[&out])?;
    run(py, || {
        let args = TopKPages {
            scores: scores.view()?,
            lens: lens.view()?,
            starts: starts.as_ref().map(Arg::view).transpose()?,
            page_table: page_table.view()?,
            requests: requests.as_ref().map(Arg::view).transpose()?,
            page_starts: page_starts.as_ref().map(Arg::view).transpose()?,
            page_size,
            out: out.view_mut()?,
            raw: raw.as_mut().map(Arg::view_mut).transpose()?,
        };
        topk::top_k_page_table_transform(&exec, args)
    })
}

#[pyfunction]
#[pyo3(signature = (scores, lens, offsets, out, *, starts=None))]
fn top_k_ragged_transform(
    py: Python<'_>,
    mut scores: Arg,
    mut lens: Arg,
    mut offsets: Arg,
    mut out: Arg,
    starts: Option<Arg>,
) -> PyResult<()> {
    let exec = prepare(py, &mut [&mut scores, &mut lens, &mut offsets], &[&out])?;
    run(py, || {
        let starts = starts.as_ref().map(Arg::view).transpose()?;
        let (scores, lens, offsets) = (scores.view()?, lens.view()?, offsets.view()?);
        topk::top_k_ragged_transform(&exec, TopKRagged { scores, lens, starts, offsets, out: out.view_mut()? })
    })
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(softmax, module)?)?;
    module.add_function(wrap_pyfunction!(sample_from_probs, module)?)?;
    module.add_function(wrap_pyfunction!(sample_from_logits, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_sample, module)?)?;
    module.add_function(wrap_pyfunction!(top_p_sample, module)?)?;
    module.add_function(wrap_pyfunction!(min_p_sample, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_top_p_sample, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_renorm, module)?)?;
    module.add_function(wrap_pyfunction!(top_p_renorm, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_mask_logits, module)?)?;
    module.add_function(wrap_pyfunction!(chain_speculative_sample, module)?)?;
    module.add_function(wrap_pyfunction!(top_k, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_page_table_transform, module)?)?;
    module.add_function(wrap_pyfunction!(top_k_ragged_transform, module)?)
}
