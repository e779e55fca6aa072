//! Token by token: paged caches and rotary position embedding.

use fir::kv::{KvLayout, PagedKvMut, PagedMlaMut};
use fir::page::{self, Slots};
use fir::rope::{self, Angles, Positions, Roped, RopedKv, RopedMla};
use fir::{DType, Error};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Arg, prepare, run};
use crate::table::{Lens, Table};
use crate::tensor::exec_of;
use crate::values::{KvOrder, ragged};
use crate::variant::Rope;

/// Where tokens go: `(page_size, indptr, indices, last_page_len, batch_indices, positions)`, or a mapping to slots.
#[expect(clippy::large_enum_variant, reason = "one, on the stack of one call")]
enum Target {
    Tokens(Table, Arg, Arg),
    Mapping(Arg),
}

impl Target {
    fn new(py: Python<'_>, like: &Arg, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        type Given<'py> = (usize, Arg, Bound<'py, PyAny>, Arg, Arg, Arg);
        let Ok((page_size, indptr, indices, last, batch_indices, positions)) = given.extract::<Given<'_>>() else {
            return given.extract().map(Self::Mapping);
        };
        let lens = Lens::LastPage(&last);
        let table = Table::new(&exec_of(py, like)?, page_size, &indptr, &indices, lens, None, None)?;
        Ok(Self::Tokens(table, batch_indices, positions))
    }

    fn slots(&self) -> fir::Result<Slots<'_>> {
        Ok(match self {
            Self::Tokens(table, batch_indices, positions) => {
                Slots::Tokens { table: table.get(), batch_indices: batch_indices.view()?, positions: positions.view()? }
            }
            Self::Mapping(slots) => Slots::Mapping(slots.view()?),
        })
    }
}

/// A cache that is written; its two parts may be halves of one tensor.
struct Cache {
    k: Arg,
    v: Arg,
    scales: Option<(Arg, Arg)>,
    factors: (f32, f32),
    layout: KvLayout,
}

impl Cache {
    fn new(k: Arg, v: Arg, scales: Option<(Arg, Arg)>, factors: (f32, f32), layout: KvLayout) -> PyResult<Self> {
        let packed = |t: Arg| if t.dtype() == DType::U8 { t.taken_as(DType::E2M1x2) } else { Ok(t) };
        let scales = match scales {
            Some((a, b)) => Some((a.taken_as(DType::E4M3)?, b.taken_as(DType::E4M3)?)),
            None => None,
        };
        Ok(Self { k: packed(k)?, v: packed(v)?, scales, factors, layout })
    }

    fn view(&mut self) -> fir::Result<PagedKvMut<'_>> {
        let (k, v) = (self.k.view_mut()?, self.v.view_mut()?);
        let cache = match &mut self.scales {
            Some((ks, vs)) => PagedKvMut::nvfp4(k, v, ks.view_mut()?, vs.view_mut()?, self.layout),
            None => PagedKvMut::new(k, v, self.layout),
        };
        cache?.with_scales(self.factors.0, self.factors.1)
    }
}

#[pyfunction]
#[pyo3(signature = (k, v, k_cache, v_cache, slots, kv_layout, k_scale=1.0, v_scale=1.0, block_scales=None))]
#[expect(clippy::too_many_arguments, reason = "a cache and what goes there")]
fn append_paged_kv(
    py: Python<'_>,
    mut k: Arg,
    mut v: Arg,
    k_cache: Arg,
    v_cache: Arg,
    slots: &Bound<'_, PyAny>,
    kv_layout: KvOrder,
    k_scale: f32,
    v_scale: f32,
    block_scales: Option<(Arg, Arg)>,
) -> PyResult<()> {
    let target = Target::new(py, &k_cache, slots)?;
    let mut cache = Cache::new(k_cache, v_cache, block_scales, (k_scale, v_scale), kv_layout.0)?;
    let exec = prepare(py, &mut [&mut k, &mut v], &[&cache.k, &cache.v])?;
    run(py, || page::append_paged_kv(&exec, k.view()?, v.view()?, target.slots()?, cache.view()?))
}

#[pyfunction]
#[pyo3(signature = (ckv, kpe, ckv_cache, kpe_cache, slots, ckv_scale=1.0, kpe_scale=1.0))]
#[expect(clippy::too_many_arguments, reason = "a cache and what goes there")]
fn append_paged_mla(
    py: Python<'_>,
    mut ckv: Arg,
    mut kpe: Arg,
    mut ckv_cache: Arg,
    mut kpe_cache: Arg,
    slots: &Bound<'_, PyAny>,
    ckv_scale: f32,
    kpe_scale: f32,
) -> PyResult<()> {
    let target = Target::new(py, &ckv_cache, slots)?;
    let exec = prepare(py, &mut [&mut ckv, &mut kpe], &[&ckv_cache, &kpe_cache])?;
    run(py, || {
        let cache =
            PagedMlaMut::new(ckv_cache.view_mut()?, kpe_cache.view_mut()?)?.with_scales(ckv_scale, kpe_scale)?;
        page::append_paged_mla(&exec, ckv.view()?, kpe.view()?, target.slots()?, cache)
    })
}

#[pyfunction]
fn batch_indices_positions(
    py: Python<'_>,
    indptr: Arg,
    mut seq_lens: Arg,
    mut batch_indices: Arg,
    mut positions: Arg,
) -> PyResult<()> {
    let indptr = ragged(&indptr, "append_indptr")?;
    let exec = prepare(py, &mut [&mut seq_lens], &[&batch_indices, &positions])?;
    run(py, || {
        let (batch_indices, positions) = (batch_indices.view_mut()?, positions.view_mut()?);
        page::batch_indices_positions(&exec, &indptr, seq_lens.view()?, batch_indices, positions)
    })
}

#[pyfunction]
fn seq_lens(py: Python<'_>, indptr: Arg, mut last_page_len: Arg, page_size: usize, mut out: Arg) -> PyResult<()> {
    let indptr = ragged(&indptr, "kv_indptr")?;
    let exec = prepare(py, &mut [&mut last_page_len], &[&out])?;
    run(py, || page::seq_lens(&exec, &indptr, last_page_len.view()?, page_size, out.view_mut()?))
}

/// Where tokens stand: position ids, or `(indptr, offsets)` of requests one after another.
enum Standing {
    Ids(Arg),
    Ragged(fir::Ragged, Arg),
}

impl Standing {
    fn new(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        match given.extract::<(Arg, Arg)>() {
            Ok((indptr, offsets)) => Ok(Self::Ragged(ragged(&indptr, "indptr")?, offsets)),
            Err(_) => given.extract().map(Self::Ids),
        }
    }

    fn get(&self) -> fir::Result<Positions<'_>> {
        Ok(match self {
            Self::Ids(ids) => Positions::Ids(ids.view()?),
            Self::Ragged(indptr, offsets) => Positions::Ragged { indptr, offsets: offsets.view()? },
        })
    }
}

/// Where angles come from: a `Rope`, or `(table, interleave)`.
enum Turning {
    Rope(Rope),
    Cache(Arg, bool),
}

impl Turning {
    fn new(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(rope) = given.extract::<Rope>() {
            return Ok(Self::Rope(rope));
        }
        let (table, interleave): (Arg, bool) = given.extract()?;
        Ok(Self::Cache(table, interleave))
    }

    fn get(&self) -> fir::Result<Angles<'_>> {
        Ok(match self {
            Self::Rope(rope) => Angles::Rope(rope.0),
            Self::Cache(table, interleave) => Angles::Cache { table: table.view()?, interleave: *interleave },
        })
    }
}

/// Rotates queries and keys into `outs`, or in place without them.
#[pyfunction]
#[pyo3(signature = (q, k, positions, angles, outs=None))]
fn apply_rope(
    py: Python<'_>,
    mut q: Arg,
    mut k: Arg,
    positions: &Bound<'_, PyAny>,
    angles: &Bound<'_, PyAny>,
    outs: Option<(Arg, Arg)>,
) -> PyResult<()> {
    let (positions, angles) = (Standing::new(positions)?, Turning::new(angles)?);
    let Some((mut q_out, mut k_out)) = outs else {
        let exec = prepare(py, &mut [], &[&q, &k])?;
        return run(py, || {
            rope::apply_rope_in_place(&exec, positions.get()?, angles.get()?, q.view_mut()?, k.view_mut()?)
        });
    };
    let exec = prepare(py, &mut [&mut q, &mut k], &[&q_out, &k_out])?;
    run(py, || {
        let (q_out, k_out) = (q_out.view_mut()?, k_out.view_mut()?);
        rope::apply_rope(&exec, q.view()?, k.view()?, positions.get()?, angles.get()?, q_out, k_out)
    })
}

#[pyfunction]
fn cos_sin_cache(py: Python<'_>, rope: &Rope, mut out: Arg) -> PyResult<()> {
    let (exec, rope) = (prepare(py, &mut [], &[&out])?, rope.0);
    run(py, || rope::cos_sin_cache(&exec, &rope, out.view_mut()?))
}

/// `(rope, rope_out, nope or None, nope_out or None, scale)`
#[derive(FromPyObject)]
struct Half(Arg, Arg, Option<Arg>, Option<Arg>, f32);

impl Half {
    fn get(&mut self) -> fir::Result<Roped<'_>> {
        let nope = match (&self.2, &mut self.3) {
            (Some(nope), Some(out)) => Some((nope.view()?, out.view_mut()?)),
            (None, None) => None,
            _ => return Err(Error::value("rope_quantize", "nope", "one of tensor and output", "both or neither")),
        };
        Ok(Roped { rope: self.0.view()?, rope_out: self.1.view_mut()?, nope, scale: self.4 })
    }
}

#[pyfunction]
fn rope_quantize(
    py: Python<'_>,
    mut q: Half,
    mut k: Half,
    positions: &Bound<'_, PyAny>,
    angles: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (positions, angles) = (Standing::new(positions)?, Turning::new(angles)?);
    let exec = prepare(py, &mut [&mut q.0, &mut k.0], &[&q.1, &k.1])?;
    run(py, || rope::rope_quantize(&exec, q.get()?, k.get()?, positions.get()?, angles.get()?))
}

/// Rotated keys go to pages: `cache` is `(k_cache, v_cache)` with `v` given, or `(ckv_cache, kpe_cache)` without.
#[pyfunction]
#[pyo3(signature = (q, k_rope, k_nope, v, cache, slots, positions, angles, scales, kv_layout))]
#[expect(clippy::too_many_arguments, reason = "the library's own")]
fn rope_quantize_append(
    py: Python<'_>,
    mut q: Half,
    mut k_rope: Arg,
    k_nope: Option<Arg>,
    v: Option<Arg>,
    cache: (Arg, Arg),
    slots: &Bound<'_, PyAny>,
    positions: &Bound<'_, PyAny>,
    angles: &Bound<'_, PyAny>,
    scales: (f32, f32),
    kv_layout: KvOrder,
) -> PyResult<()> {
    let (positions, angles) = (Standing::new(positions)?, Turning::new(angles)?);
    let target = Target::new(py, &cache.0, slots)?;
    let exec = prepare(py, &mut [&mut q.0, &mut k_rope], &[&q.1, &cache.0, &cache.1])?;
    match v {
        Some(v) => {
            let mut cache = Cache::new(cache.0, cache.1, None, scales, kv_layout.0)?;
            run(py, || {
                let (nope, slots) = (k_nope.as_ref().map(Arg::view).transpose()?, target.slots()?);
                let kv = RopedKv { rope: k_rope.view()?, nope, v: v.view()?, slots, cache: cache.view()? };
                rope::rope_quantize_append_paged_kv(&exec, q.get()?, kv, positions.get()?, angles.get()?)
            })
        }
        None => {
            let Some(ckv) = k_nope else {
                return Err(PyValueError::new_err("k_nope is None, expected the latent vectors"));
            };
            let (mut ckv_cache, mut kpe_cache) = cache;
            run(py, || {
                let cache = PagedMlaMut::new(ckv_cache.view_mut()?, kpe_cache.view_mut()?)?;
                let cache = cache.with_scales(scales.0, scales.1)?;
                let kv = RopedMla { kpe: k_rope.view()?, ckv: ckv.view()?, slots: target.slots()?, cache };
                rope::rope_quantize_append_paged_mla(&exec, q.get()?, kv, positions.get()?, angles.get()?)
            })
        }
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(append_paged_kv, module)?)?;
    module.add_function(wrap_pyfunction!(append_paged_mla, module)?)?;
    module.add_function(wrap_pyfunction!(batch_indices_positions, module)?)?;
    module.add_function(wrap_pyfunction!(seq_lens, module)?)?;
    module.add_function(wrap_pyfunction!(apply_rope, module)?)?;
    module.add_function(wrap_pyfunction!(cos_sin_cache, module)?)?;
    module.add_function(wrap_pyfunction!(rope_quantize, module)?)?;
    module.add_function(wrap_pyfunction!(rope_quantize_append, module)?)
}
