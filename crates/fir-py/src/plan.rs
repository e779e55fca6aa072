//! Plans as Python objects: a problem, then batches of it, then one layer after another.

use std::sync::{Mutex, MutexGuard};

use fir::attention::{
    self, BatchArgs, BlockMask, CascadeArgs, CascadeLevel, MlaArgs, MlaProblem, Problem, Scratch, SingleArgs,
    SparseArgs, Split,
};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged, RaggedKv};
use fir::tensor::Place;
use fir::variant::{ParamType, Params};
use fir::{DType, Error, Exec};
use pyo3::exceptions::{PyRuntimeWarning, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};

use crate::error::to_py;
use crate::ops::run;
use crate::table::{Lens, Table};
use crate::tensor::{Arg, exec_at, exec_of, prepare, torch_dtype};
use crate::values::{Cut, KvOrder, host_i32, ragged};
use crate::variant::Variant;

/// An element type, by torch's dtype or its name.
pub(crate) struct Element(pub(crate) DType);

impl<'a, 'py> FromPyObject<'a, 'py> for Element {
    type Error = PyErr;
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        torch_dtype(&object).map(Self)
    }
}

/// [`prepare`] for a plan's run, whose second output may be left out.
fn prepare_run(py: Python<'_>, inputs: &mut [&mut Arg], out: &Arg, lse: Option<&Arg>) -> PyResult<Exec> {
    match lse {
        Some(lse) => prepare(py, inputs, &[out, lse]),
        None => prepare(py, inputs, &[out]),
    }
}

/// A value of a variant's parameter, held for a call.
enum Value {
    F32(f32),
    I32(i32),
    Tensor(Arg),
    Bits(Arg, Arg),
}

/// The values that a variant asks for, from a dict.
struct Values(Vec<(String, Value)>);

impl Values {
    fn new(variant: &fir::variant::Variant, given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut values = vec![];
        for (name, ty) in variant.params() {
            let Some(value) = given.map(|d| d.get_item(name)).transpose()?.flatten() else { continue };
            let wrong = |e: PyErr| PyTypeError::new_err(format!("parameter `{name}` of {}: {e}", variant.name()));
            let value = match ty {
                ParamType::F32 => Value::F32(value.extract().map_err(wrong)?),
                ParamType::I32 => Value::I32(value.extract().map_err(wrong)?),
                ParamType::Bits => {
                    let (bytes, indptr): (Arg, Arg) = value.extract().map_err(wrong)?;
                    Value::Bits(bytes, indptr)
                }
                _ => Value::Tensor(value.extract().map_err(wrong)?),
            };
            values.push((name.to_owned(), value));
        }
        Ok(Self(values))
    }

    fn params(&self) -> fir::Result<Params<'_>> {
        let mut params = Params::new();
        for (name, value) in &self.0 {
            params = match value {
                Value::F32(x) => params.f32(name, *x),
                Value::I32(x) => params.i32(name, *x),
                Value::Tensor(t) => params.tensor(name, t.view()?),
                Value::Bits(bytes, indptr) => params.bits_tensors(name, bytes.view()?, indptr.view()?),
            };
        }
        Ok(params)
    }
}

/// The fields of a problem that all plans share, in order.
#[derive(FromPyObject)]
struct Shape(usize, usize, usize, usize, Element, Element, Element);

impl Shape {
    fn problem(self, variant: &Variant) -> Problem {
        let Self(qo_heads, kv_heads, head_dim_qk, head_dim_vo, Element(q), Element(kv), Element(out)) = self;
        let variant = variant.0.clone();
        Problem { qo_heads, kv_heads, head_dim_qk, head_dim_vo, q_dtype: q, kv_dtype: kv, out_dtype: out, variant }
    }
}

/// Keys and values, and what turns their bytes into numbers.
struct Cache {
    k: Arg,
    /// None: in `k`, next to the keys.
    v: Option<Arg>,
    scales: Option<(Arg, Arg)>,
    k_scale: f32,
    v_scale: f32,
    layout: KvLayout,
}

impl Cache {
    fn new(
        k: Arg,
        v: Option<Arg>,
        scales: Option<(Arg, Arg)>,
        factors: (f32, f32),
        layout: KvLayout,
    ) -> PyResult<Self> {
        let packed = |t: Arg| if t.dtype() == DType::U8 { t.taken_as(DType::E2M1x2) } else { Ok(t) };
        let scales = match scales {
            Some((a, b)) => Some((a.taken_as(DType::E4M3)?, b.taken_as(DType::E4M3)?)),
            None => None,
        };
        Ok(Self {
            k: packed(k)?,
            v: v.map(packed).transpose()?,
            scales,
            k_scale: factors.0,
            v_scale: factors.1,
            layout,
        })
    }

    fn paged(&self) -> fir::Result<PagedKv<'_>> {
        let (k, v) = match &self.v {
            Some(v) => (self.k.view()?, v.view()?),
            None => {
                let kv = self.k.view()?;
                if kv.shape().len() != 5 || kv.shape()[1] != 2 {
                    let want = "[pages, 2, page_size, kv_heads, head_dim] or its HND form";
                    return Err(Error::layout("run", "kv", format!("shape {:?}", kv.shape()), want));
                }
                (kv.select(1, 0)?, kv.select(1, 1)?)
            }
        };
        let kv = match &self.scales {
            Some((ks, vs)) => PagedKv::nvfp4(k, v, ks.view()?, vs.view()?, self.layout),
            None => PagedKv::new(k, v, self.layout),
        };
        kv?.with_scales(self.k_scale, self.v_scale)
    }

    fn ragged<'a>(&'a self, indptr: &'a Ragged) -> fir::Result<RaggedKv<'a>> {
        let Some(v) = &self.v else {
            return Err(Error::value("run", "v", "none", "the values, as keys are a tensor of their own"));
        };
        RaggedKv::new(self.k.view()?, v.view()?, indptr)?.with_scales(self.k_scale, self.v_scale)
    }
}

/// Where a planned batch has its keys and values.
#[expect(clippy::large_enum_variant, reason = "one, on the stack of one call")]
enum Where {
    Nowhere,
    Paged(Table),
    Ragged(Ragged),
}

struct Batch {
    plan: attention::BatchPlan,
    at: Where,
    /// The table before, whose memory the next one takes: runs on other streams may still read the last one's.
    spent: Option<Table>,
    scratch: Scratch,
    /// What graphs that recorded a run count on.
    recorded: Option<u64>,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

const UNPLANNED: &str = "one that plan_paged or plan_ragged was called for";

/// A batch of requests with any number of query tokens each: prefill, decode and append alike.
#[pyclass(frozen, name = "BatchPlan", module = "fir")]
pub(crate) struct BatchPlan {
    problem: Problem,
    /// Where its memory on a device is written: the stream that was current when it was made.
    own: Exec,
    batch: Mutex<Batch>,
}

#[pymethods]
impl BatchPlan {
    /// `like`: a tensor on the device that the plan is for.
    #[new]
    #[pyo3(signature = (shape, variant, like, *, requests=0, split=Cut(Split::Balanced)))]
    fn new(py: Python<'_>, shape: Shape, variant: &Variant, like: Arg, requests: usize, split: Cut) -> PyResult<Self> {
        let (exec, problem) = (exec_of(py, &like)?, shape.problem(variant));
        let plan = run(py, || attention::BatchPlan::with_capacity(&exec, problem.clone(), requests, split.0))?;
        let batch = Batch { plan, at: Where::Nowhere, spent: None, scratch: Scratch::default(), recorded: None };
        Ok(Self { problem, own: exec, batch: Mutex::new(batch) })
    }

    /// Plans a batch whose keys and values are in pages. `qo`: offsets of the query tokens, or how many each request has.
    ///
    /// `offsets`: a device tensor with the numbers of `indptr`, for runs that are captured in CUDA graphs. Graphs then read it
    /// and `indices`, and the plan of the last call, when they are replayed on the stream that was current in that call.
    #[pyo3(signature = (like, qo, page_size, indptr, indices, lens, *, last_page=true, offsets=None))]
    #[expect(clippy::too_many_arguments, reason = "a page table")]
    fn plan_paged(
        &self,
        py: Python<'_>,
        like: Arg,
        qo: &Bound<'_, PyAny>,
        page_size: usize,
        indptr: Arg,
        indices: &Bound<'_, PyAny>,
        lens: Arg,
        last_page: bool,
        offsets: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let exec = exec_of(py, &like)?;
        let (lens, spent) = (Lens::new(&lens, last_page), locked(&self.batch).spent.take());
        let table = Table::new(&exec, page_size, &indptr, indices, lens, offsets, spent)?;
        let qo = queries(qo, table.get().batch())?;
        let mut batch = locked(&self.batch);
        let Batch { plan, at, spent, scratch, recorded } = &mut *batch;
        in_turn(&self.own, &exec, offsets.is_some(), || plan.refill(&qo, table.get().lens())).map_err(to_py)?;
        if let Where::Paged(before) = std::mem::replace(at, Where::Paged(table)) {
            *spent = before.reusable();
        }
        check_recorded(py, recorded, plan.recorded(scratch))
    }

    /// Plans a batch whose keys and values lie one request after another. `graphs`: a tensor on the plan's device, for runs
    /// that are captured in CUDA graphs, which then do the batch of the last call when they are replayed on the stream that
    /// was current in that call.
    #[pyo3(signature = (qo, kv_indptr, *, graphs=None))]
    fn plan_ragged(&self, py: Python<'_>, qo: &Bound<'_, PyAny>, kv_indptr: Arg, graphs: Option<Arg>) -> PyResult<()> {
        let kv = ragged(&kv_indptr, "kv_indptr")?;
        let qo = queries(qo, kv.batch())?;
        let now = graphs.as_ref().map(|like| exec_of(py, like)).transpose()?;
        let mut batch = locked(&self.batch);
        let Batch { plan, at, scratch, recorded, .. } = &mut *batch;
        in_turn(&self.own, now.as_ref().unwrap_or(&self.own), now.is_some(), || plan.refill(&qo, kv.lens()))
            .map_err(to_py)?;
        *at = Where::Ragged(kv);
        check_recorded(py, recorded, plan.recorded(scratch))
    }

    /// Runs one layer. `v` is None when keys and values are in one tensor `[pages, 2, ...]`; `captured`: that this call is being
    /// recorded in a CUDA graph.
    #[pyo3(signature = (q, k, v, out, lse=None, sm_scale=None, params=None, k_scale=1.0, v_scale=1.0, kv_layout=KvOrder(KvLayout::Nhd), block_scales=None, captured=false))]
    #[expect(clippy::too_many_arguments, reason = "one layer's tensors")]
    fn run(
        &self,
        py: Python<'_>,
        mut q: Arg,
        k: Arg,
        v: Option<Arg>,
        mut out: Arg,
        mut lse: Option<Arg>,
        sm_scale: Option<f32>,
        params: Option<&Bound<'_, PyDict>>,
        k_scale: f32,
        v_scale: f32,
        kv_layout: KvOrder,
        block_scales: Option<(Arg, Arg)>,
        captured: bool,
    ) -> PyResult<()> {
        let exec = prepare_run(py, &mut [&mut q], &out, lse.as_ref())?;
        let cache = Cache::new(k, v, block_scales, (k_scale, v_scale), kv_layout.0)?;
        let values = Values::new(&self.problem.variant, params)?;
        // Locked without the interpreter's lock: who waits for one must not hold the other.
        run(py, move || {
            let mut batch = locked(&self.batch);
            let Batch { plan, at, scratch, recorded, .. } = &mut *batch;
            let kv = match at {
                Where::Ragged(indptr) => Kv::Ragged(cache.ragged(indptr)?),
                Where::Paged(table) => Kv::Paged(cache.paged()?, table.get()),
                Where::Nowhere => return Err(Error::value("BatchPlan::run", "plan", "without a batch", UNPLANNED)),
            };
            let params = values.params()?;
            let done = with_scratch(
                scratch,
                || plan.scratch(),
                |scratch| {
                    let lse = lse.as_mut().map(Arg::view_mut).transpose()?;
                    let (q, out) = (q.view()?, out.view_mut()?);
                    plan.run(&exec, BatchArgs { q, kv, params: &params, sm_scale, scratch, out, lse })
                },
            );
            if captured {
                *recorded = plan.recorded(scratch);
            }
            done
        })
    }

    /// Bytes that a run of the planned batch needs besides its tensors.
    #[getter]
    fn scratch_bytes(&self) -> usize {
        locked(&self.batch).plan.scratch().bytes()
    }

    /// Query tokens of the batch.
    #[getter]
    fn tokens(&self) -> usize {
        locked(&self.batch).plan.tokens()
    }
}

/// Writes a plan's memory, which lies on the stream of `own`. With `graphs`, whose replays are on the stream of `now`: after
/// those before, and before those that come.
fn in_turn(own: &Exec, now: &Exec, graphs: bool, write: impl FnOnce() -> fir::Result<()>) -> fir::Result<()> {
    let streams = match (own, now) {
        (Exec::Cuda(own), Exec::Cuda(now)) if graphs => own.stream().zip(now.stream()),
        _ => None,
    };
    let Some((own, now)) = streams.filter(|(own, now)| own.handle() != now.handle()) else { return write() };
    now.record().and_then(|before| own.wait(&before))?;
    write()?;
    own.record().and_then(|copied| now.wait(&copied))
}

/// Runs with the scratch of an earlier batch, which mostly fits: making one costs as much as planning.
fn with_scratch<S>(
    scratch: &mut S,
    make: impl FnOnce() -> S,
    mut attempt: impl FnMut(&mut S) -> fir::Result<()>,
) -> fir::Result<()> {
    match attempt(scratch) {
        Err(Error::Value { arg: "scratch", .. }) => {
            *scratch = make();
            attempt(scratch)
        }
        other => other,
    }
}

/// Warns if what graphs have recorded of a plan is not what it is now.
fn check_recorded(py: Python<'_>, recorded: &mut Option<u64>, now: Option<u64>) -> PyResult<()> {
    if recorded.is_some() && *recorded != now {
        *recorded = None;
        let why = c"this batch does not fit what was captured of the plan: capture its CUDA graphs again";
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), why, 2)?;
    }
    Ok(())
}

/// Offsets of query tokens, or the same number for each request.
fn queries(qo: &Bound<'_, PyAny>, batch: usize) -> PyResult<Ragged> {
    // Asking a tensor of offsets for one number costs 4 µs, the exception being made.
    if !qo.is_instance_of::<PyInt>() {
        return ragged(&qo.extract()?, "qo_indptr");
    }
    match qo.extract::<u32>()? {
        1 => Ragged::ones(batch),
        n => Ragged::from_lens(&vec![n; batch]),
    }
    .map_err(to_py)
}

/// A batch with shared prefixes, level by level, or flat where that is expected to be faster.
#[pyclass(frozen, name = "CascadePlan", module = "fir")]
pub(crate) struct CascadePlan {
    variant: fir::variant::Variant,
    /// As in [`BatchPlan`].
    own: Exec,
    state: Mutex<Shared>,
}

#[expect(clippy::large_enum_variant, reason = "one to a plan")]
enum Shared {
    Levels {
        plan: attention::CascadePlan,
        tables: Vec<Table>,
        scratch: Vec<Scratch>,
        /// What graphs that recorded a run count on.
        recorded: Option<u64>,
    },
    Flat(attention::BatchPlan, Scratch, PageTable<'static>),
}

type PagedLevel<'py> = (Arg, Arg, Bound<'py, PyAny>, Arg);

/// The tables of a cascade's levels; for graphs with offsets in device tensors.
fn level_tables(
    exec: &Exec,
    page_size: usize,
    given: &[PagedLevel<'_>],
    offsets: Option<&[Bound<'_, PyAny>]>,
) -> PyResult<(Vec<Ragged>, Vec<Table>)> {
    if let Some(offsets) = offsets
        && offsets.len() != given.len()
    {
        let (got, want) = (offsets.len(), given.len());
        let error = Error::Dim { op: "CascadePlan", arg: "offsets", axis: "levels", got, first: "levels", want };
        return Err(to_py(error));
    }
    let (mut qo, mut tables) = (vec![], vec![]);
    for (l, (rows, indptr, indices, last)) in given.iter().enumerate() {
        let offsets = offsets.and_then(|all| all.get(l));
        qo.push(ragged(rows, "qo_indptr")?);
        tables.push(Table::new(exec, page_size, indptr, indices, Lens::LastPage(last), offsets, None)?);
    }
    Ok((qo, tables))
}

fn levels_of<'a>(qo: &'a [Ragged], tables: &'a [Table]) -> Vec<CascadeLevel<'a>> {
    qo.iter().zip(tables).map(|(qo, t)| CascadeLevel { qo, kv_lens: t.get().lens() }).collect()
}

impl Shared {
    fn new(
        exec: &Exec,
        problem: Problem,
        page_size: usize,
        given: &[PagedLevel<'_>],
        split: Split,
        offsets: Option<&[Bound<'_, PyAny>]>,
    ) -> PyResult<Self> {
        let (qo, tables) = level_tables(exec, page_size, given, offsets)?;
        let levels = levels_of(&qo, &tables);
        // Cuts that do not depend on the batch stay where they are, as do the launches of graphs; a single level is flat
        // already.
        if offsets.is_none()
            && levels.len() > 1
            && split == Split::Balanced
            && !attention::CascadePlan::pays(exec, &problem, &levels).map_err(to_py)?
            && let Some(flat) = Self::flat(exec, &problem, page_size, given, &qo)?
        {
            return Ok(flat);
        }
        let plan = attention::CascadePlan::new(exec, problem, &levels, split).map_err(to_py)?;
        let scratch = plan.scratch();
        Ok(Self::Levels { plan, tables, scratch, recorded: None })
    }

    /// The requests with all their pages, unless a shared part ends within one. Page ids on a device are copied first.
    fn flat(
        exec: &Exec,
        problem: &Problem,
        page_size: usize,
        given: &[PagedLevel<'_>],
        qo: &[Ragged],
    ) -> PyResult<Option<Self>> {
        let cpu = exec_at(Place::Host)?;
        let mut tables = vec![];
        for (_, indptr, indices, last) in given {
            let on_host = indices.extract::<Arg>()?.place() == Place::Host;
            // Other libraries than torch have other words for it.
            let copy = || indices.call_method0("cpu").ok();
            let Some(indices) = (if on_host { Some(indices.clone()) } else { copy() }) else { return Ok(None) };
            tables.push(Table::new(&cpu, page_size, indptr, &indices, Lens::LastPage(last), None, None)?);
        }
        let levels: Vec<_> = qo.iter().zip(&tables).map(|(qo, t)| (qo, t.get())).collect();
        let (Ok(mut table), Some(qo)) = (PageTable::joined(&levels), qo.last()) else { return Ok(None) };
        if let Exec::Cuda(gpu) = exec {
            table = table.into_device(gpu).map_err(to_py)?;
        }
        let plan =
            attention::BatchPlan::new(exec, problem.clone(), qo, table.lens(), Split::Balanced).map_err(to_py)?;
        let scratch = plan.scratch();
        Ok(Some(Self::Flat(plan, scratch, table)))
    }
}

#[pymethods]
impl CascadePlan {
    /// `levels`: `(qo_indptr, indptr, indices, last_page_len)` of each level, the requests' own last; `offsets`: as in
    /// [`BatchPlan::plan_paged`], for each level. Plans for graphs are never flat.
    #[new]
    #[pyo3(signature = (shape, variant, like, page_size, levels, *, split=Cut(Split::Balanced), offsets=None))]
    #[expect(clippy::too_many_arguments, reason = "page tables")]
    fn new(
        py: Python<'_>,
        shape: Shape,
        variant: &Variant,
        like: Arg,
        page_size: usize,
        levels: Vec<PagedLevel<'_>>,
        split: Cut,
        offsets: Option<Vec<Bound<'_, PyAny>>>,
    ) -> PyResult<Self> {
        let (own, problem) = (exec_of(py, &like)?, shape.problem(variant));
        let state = Shared::new(&own, problem, page_size, &levels, split.0, offsets.as_deref())?;
        Ok(Self { variant: variant.0.clone(), own, state: Mutex::new(state) })
    }

    /// Plans another batch of as many levels, for runs that were captured in CUDA graphs; arguments as of the constructor.
    fn refill(
        &self,
        py: Python<'_>,
        like: Arg,
        page_size: usize,
        levels: Vec<PagedLevel<'_>>,
        offsets: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let exec = exec_of(py, &like)?;
        let (qo, new) = level_tables(&exec, page_size, &levels, Some(&offsets))?;
        let mut state = locked(&self.state);
        let Shared::Levels { plan, tables, scratch, recorded } = &mut *state else {
            let want = "one that was made with offsets";
            return Err(to_py(Error::value("CascadePlan::refill", "plan", "a flat one", want)));
        };
        in_turn(&self.own, &exec, true, || plan.refill(&levels_of(&qo, &new))).map_err(to_py)?;
        *tables = new;
        check_recorded(py, recorded, plan.recorded(scratch))
    }

    /// Whether each request reads its prefix for itself, as that is expected to be faster.
    #[getter]
    fn is_flat(&self) -> bool {
        matches!(*locked(&self.state), Shared::Flat(..))
    }

    /// Runs one layer; every level reads the same cache. `captured` as in [`BatchPlan::run`].
    #[pyo3(signature = (q, k, v, out, lse=None, sm_scale=None, params=None, k_scale=1.0, v_scale=1.0, kv_layout=KvOrder(KvLayout::Nhd), captured=false))]
    #[expect(clippy::too_many_arguments, reason = "one layer's tensors")]
    fn run(
        &self,
        py: Python<'_>,
        mut q: Arg,
        k: Arg,
        v: Option<Arg>,
        mut out: Arg,
        mut lse: Option<Arg>,
        sm_scale: Option<f32>,
        params: Option<&Bound<'_, PyDict>>,
        k_scale: f32,
        v_scale: f32,
        kv_layout: KvOrder,
        captured: bool,
    ) -> PyResult<()> {
        let exec = prepare_run(py, &mut [&mut q], &out, lse.as_ref())?;
        let cache = Cache::new(k, v, None, (k_scale, v_scale), kv_layout.0)?;
        let values = Values::new(&self.variant, params)?;
        run(py, move || {
            let mut state = locked(&self.state);
            let paged = cache.paged()?;
            let params = &values.params()?;
            match &mut *state {
                Shared::Levels { plan, tables, scratch, recorded } => {
                    let kv: Vec<_> = tables.iter().map(|t| Kv::Paged(paged, t.get())).collect();
                    let done = with_scratch(
                        scratch,
                        || plan.scratch(),
                        |scratch| {
                            let lse = lse.as_mut().map(Arg::view_mut).transpose()?;
                            let (q, out) = (q.view()?, out.view_mut()?);
                            plan.run(&exec, CascadeArgs { q, kv: &kv, params, sm_scale, scratch, out, lse })
                        },
                    );
                    if captured {
                        *recorded = plan.recorded(scratch);
                    }
                    done
                }
                Shared::Flat(plan, scratch, table) => {
                    let (lse, kv) = (lse.as_mut().map(Arg::view_mut).transpose()?, Kv::Paged(paged, table));
                    let (q, out) = (q.view()?, out.view_mut()?);
                    plan.run(&exec, BatchArgs { q, kv, params, sm_scale, scratch, out, lse })
                }
            }
        })
    }
}

/// A batch of latent attention.
#[pyclass(frozen, name = "MlaPlan", module = "fir")]
pub(crate) struct MlaPlan {
    /// As in [`BatchPlan`].
    own: Exec,
    state: Mutex<Latent>,
}

struct Latent {
    plan: attention::MlaPlan,
    /// None before the first batch.
    table: Option<Table>,
    /// As in [`Batch`].
    spent: Option<Table>,
    scratch: Scratch,
    recorded: Option<u64>,
}

#[pymethods]
impl MlaPlan {
    /// `shape`: heads, head_dim_ckv, head_dim_kpe, and the element types of queries, cache and output.
    #[new]
    #[pyo3(signature = (shape, like, *, requests=0, causal=false, split=Cut(Split::Balanced)))]
    fn new(
        py: Python<'_>,
        shape: (usize, usize, usize, Element, Element, Element),
        like: Arg,
        requests: usize,
        causal: bool,
        split: Cut,
    ) -> PyResult<Self> {
        let own = exec_of(py, &like)?;
        let (heads, head_dim_ckv, head_dim_kpe, Element(q), Element(kv), Element(out)) = shape;
        let problem =
            MlaProblem { heads, head_dim_ckv, head_dim_kpe, q_dtype: q, kv_dtype: kv, out_dtype: out, causal };
        let plan = run(py, || attention::MlaPlan::with_capacity(&own, problem, requests, split.0))?;
        let state = Latent { plan, table: None, spent: None, scratch: Scratch::default(), recorded: None };
        Ok(Self { own, state: Mutex::new(state) })
    }

    /// Plans a batch; arguments as of [`BatchPlan::plan_paged`].
    #[pyo3(signature = (like, qo, page_size, indptr, indices, lens, *, last_page=false, offsets=None))]
    #[expect(clippy::too_many_arguments, reason = "a page table")]
    fn plan(
        &self,
        py: Python<'_>,
        like: Arg,
        qo: &Bound<'_, PyAny>,
        page_size: usize,
        indptr: Arg,
        indices: &Bound<'_, PyAny>,
        lens: Arg,
        last_page: bool,
        offsets: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let exec = exec_of(py, &like)?;
        let (lens, spent) = (Lens::new(&lens, last_page), locked(&self.state).spent.take());
        let new = Table::new(&exec, page_size, &indptr, indices, lens, offsets, spent)?;
        let qo = queries(qo, new.get().batch())?;
        let mut state = locked(&self.state);
        let Latent { plan, table, spent, scratch, recorded } = &mut *state;
        in_turn(&self.own, &exec, offsets.is_some(), || plan.refill(&qo, new.get().lens())).map_err(to_py)?;
        *spent = table.replace(new).and_then(Table::reusable);
        check_recorded(py, recorded, plan.recorded(scratch))
    }

    /// Runs one layer; `captured` as in [`BatchPlan::run`].
    #[pyo3(signature = (q_nope, q_pe, ckv, kpe, sm_scale, out, lse=None, ckv_scale=1.0, kpe_scale=1.0, captured=false))]
    #[expect(clippy::too_many_arguments, reason = "one layer's tensors")]
    fn run(
        &self,
        py: Python<'_>,
        mut q_nope: Arg,
        mut q_pe: Arg,
        ckv: Arg,
        kpe: Arg,
        sm_scale: f32,
        mut out: Arg,
        mut lse: Option<Arg>,
        ckv_scale: f32,
        kpe_scale: f32,
        captured: bool,
    ) -> PyResult<()> {
        let exec = prepare_run(py, &mut [&mut q_nope, &mut q_pe], &out, lse.as_ref())?;
        run(py, move || {
            let mut state = locked(&self.state);
            let Latent { plan, table, scratch, recorded, .. } = &mut *state;
            let Some(table) = table.as_ref().map(Table::get) else {
                return Err(Error::value("MlaPlan::run", "plan", "without a batch", "one that plan was called for"));
            };
            let kv = PagedMla::new(ckv.view()?, kpe.view()?)?.with_scales(ckv_scale, kpe_scale)?;
            let done = with_scratch(
                scratch,
                || plan.scratch(),
                |scratch| {
                    let lse = lse.as_mut().map(Arg::view_mut).transpose()?;
                    let (q_nope, q_pe, out) = (q_nope.view()?, q_pe.view()?, out.view_mut()?);
                    plan.run(&exec, MlaArgs { q_nope, q_pe, kv, table, sm_scale, scratch, out, lse })
                },
            );
            if captured {
                *recorded = plan.recorded(scratch);
            }
            done
        })
    }
}

#[expect(clippy::large_enum_variant, reason = "one to a plan")]
enum Sparse {
    Fixed(attention::SparsePlan),
    Variable(attention::VariableSparsePlan),
}

/// Attention under a mask of blocks.
#[pyclass(frozen, name = "SparsePlan", module = "fir")]
pub(crate) struct SparsePlan {
    variant: fir::variant::Variant,
    state: Mutex<(Sparse, Scratch)>,
}

#[pymethods]
impl SparsePlan {
    /// Blocks of one size: the column blocks of each row block, in CSR form (BSR).
    #[staticmethod]
    #[pyo3(signature = (shape, variant, like, indptr, indices, rows, cols, block_rows, block_cols, *, split=Cut(Split::Balanced)))]
    #[expect(clippy::too_many_arguments, reason = "a block mask")]
    fn fixed(
        py: Python<'_>,
        shape: Shape,
        variant: &Variant,
        like: Arg,
        indptr: Arg,
        indices: Arg,
        rows: usize,
        cols: usize,
        block_rows: usize,
        block_cols: usize,
        split: Cut,
    ) -> PyResult<Self> {
        let (indptr, indices) = (host_i32(&indptr, "indptr")?, host_i32(&indices, "indices")?);
        let mask = BlockMask { indptr: &indptr, indices: &indices, rows, cols, block_rows, block_cols };
        let plan = attention::SparsePlan::new(&exec_of(py, &like)?, shape.problem(variant), mask, split.0);
        let plan = plan.map_err(to_py)?;
        let scratch = plan.scratch();
        Ok(Self { variant: variant.0.clone(), state: Mutex::new((Sparse::Fixed(plan), scratch)) })
    }

    /// Blocks of any size, per KV head: host tensors of bool, i32 and i32.
    #[staticmethod]
    #[pyo3(signature = (shape, variant, like, mask, row_sizes, col_sizes, *, split=Cut(Split::Balanced)))]
    #[expect(clippy::too_many_arguments, reason = "a block mask")]
    fn variable(
        py: Python<'_>,
        shape: Shape,
        variant: &Variant,
        like: Arg,
        mask: Arg,
        row_sizes: Arg,
        col_sizes: Arg,
        split: Cut,
    ) -> PyResult<Self> {
        let (exec, problem) = (exec_of(py, &like)?, shape.problem(variant));
        let plan = run(py, || {
            let (mask, rows, cols) = (mask.view()?, row_sizes.view()?, col_sizes.view()?);
            attention::VariableSparsePlan::new(&exec, problem, mask, rows, cols, split.0)
        })?;
        let scratch = plan.scratch();
        Ok(Self { variant: variant.0.clone(), state: Mutex::new((Sparse::Variable(plan), scratch)) })
    }

    /// Runs one layer.
    #[pyo3(signature = (q, k, v, out, lse=None, sm_scale=None, params=None))]
    #[expect(clippy::too_many_arguments, reason = "one layer's tensors")]
    fn run(
        &self,
        py: Python<'_>,
        mut q: Arg,
        mut k: Arg,
        mut v: Arg,
        mut out: Arg,
        mut lse: Option<Arg>,
        sm_scale: Option<f32>,
        params: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let exec = prepare_run(py, &mut [&mut q, &mut k, &mut v], &out, lse.as_ref())?;
        let values = Values::new(&self.variant, params)?;
        run(py, move || {
            let mut state = locked(&self.state);
            let (plan, scratch) = &mut *state;
            let (lse, params) = (lse.as_mut().map(Arg::view_mut).transpose()?, values.params()?);
            let (q, k, v, out) = (q.view()?, k.view()?, v.view()?, out.view_mut()?);
            let args = SparseArgs { q, k, v, params: &params, sm_scale, scratch, out, lse };
            match plan {
                Sparse::Fixed(plan) => plan.run(&exec, args),
                Sparse::Variable(plan) => plan.run(&exec, args),
            }
        })
    }
}

/// One request, its keys and values in two plain tensors.
#[pyfunction]
#[pyo3(signature = (q, k, v, variant, out, lse=None, sm_scale=None, params=None, kv_layout=KvOrder(KvLayout::Nhd), decode=false))]
#[expect(clippy::too_many_arguments, reason = "one layer's tensors")]
fn single(
    py: Python<'_>,
    mut q: Arg,
    mut k: Arg,
    mut v: Arg,
    variant: &Variant,
    mut out: Arg,
    mut lse: Option<Arg>,
    sm_scale: Option<f32>,
    params: Option<&Bound<'_, PyDict>>,
    kv_layout: KvOrder,
    decode: bool,
) -> PyResult<()> {
    let exec = prepare_run(py, &mut [&mut q, &mut k, &mut v], &out, lse.as_ref())?;
    let (values, variant) = (Values::new(&variant.0, params)?, &variant.0);
    run(py, move || {
        let (lse, params) = (lse.as_mut().map(Arg::view_mut).transpose()?, values.params()?);
        let (q, k, v, out) = (q.view()?, k.view()?, v.view()?, out.view_mut()?);
        let args = SingleArgs { q, k, v, layout: kv_layout.0, variant, params: &params, sm_scale, out, lse };
        if decode { attention::single_decode(&exec, args) } else { attention::single_prefill(&exec, args) }
    })
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BatchPlan>()?;
    module.add_class::<CascadePlan>()?;
    module.add_class::<MlaPlan>()?;
    module.add_class::<SparsePlan>()?;
    module.add_function(wrap_pyfunction!(single, module)?)
}
