//! `apply`: the best solution for a call, by what was measured.
//!
//! A [`Table`] is made of a trace set: for every definition and every shape that was measured on this hardware, the fastest
//! solution within the tolerances. While one is [enabled](enable), an [`Op`] asks it which of the implementations it knows to
//! run, and falls back to the one it was made with.
//!
//! ```
//! use fir_bench::apply::Op;
//!
//! type Scale = dyn Fn(&[f32], f32) -> Vec<f32> + Send + Sync;
//! let op = Op::<Scale>::new("scale", Box::new(|x, f| x.iter().map(|x| x * f).collect()))
//!     .solution("scale_unrolled", Box::new(|x, f| x.iter().map(|x| f * x).collect()));
//! // Nothing is enabled: the first one runs.
//! assert_eq!(op.pick(&[2])(&[1.0, 2.0], 3.0), [3.0, 6.0]);
//! ```
//!
//! | policy | what it says |
//! |---|---|
//! | tolerance | what passed counts, by the benchmark's own; upstream's 1e-2 and 1e-5 leave out nearly all of bf16 |
//! | hardware | only traces of the device's own name count |
//! | a size that was not measured | [`Miss`]: the fallback, the nearest measured size, or the definition's best |
//!
//! Operators of the kernel library ask too, on an executor that carries [`Deployed`].
//!
//! Sizes are near by the sum over axes of `|log2(a / b)|`: twice as large is as far as half as large.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError, RwLock};

use fir::exec::{Call, KernelArg, Override};
use fir::tensor::{Place, TensorRef};

use crate::array::Array;
use crate::benchmark::cpu_name;
use crate::build::{self, Arg, Library};
use crate::calls::{Given, inputs_of, name_of};
use crate::error::Error;
use crate::record::{Dump, Keep, Recorder};
use crate::schema::{Definition, Facts, Language, Solution, TensorSpec};
use crate::traceset::TraceSet;
use crate::worker::kernel::Kernel;

/// What is run for a size that was not measured.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Miss {
    /// The caller's own.
    #[default]
    Fallback,
    /// What was best at the nearest size, if that is within this many doublings, all axes together.
    Nearest(f64),
    /// What was best at most sizes.
    Best,
}

/// What counts, and what is done when nothing does.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Largest absolute error of a trace that counts; infinite by default, as large numbers of bf16 have large ones.
    pub atol: f64,
    /// Largest relative error of a trace that counts; infinite by default, as small numbers have large ones.
    pub rtol: f64,
    /// Device that traces must be of; any when `None`.
    pub hardware: Option<String>,
    /// What is run for a size that was not measured.
    pub miss: Miss,
}

impl Default for Policy {
    fn default() -> Self {
        Self { atol: f64::INFINITY, rtol: f64::INFINITY, hardware: None, miss: Miss::Fallback }
    }
}

/// The best solutions of one definition.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    /// A key has the values of its variable axes, in order.
    definition: Definition,
    by_key: HashMap<Vec<u64>, String>,
    best: String,
}

/// The best solution for every definition and size that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    entries: HashMap<String, Entry>,
    /// Those that are chosen somewhere.
    solutions: HashMap<String, Solution>,
    miss: Miss,
}

/// Why a solution was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<'a> {
    /// It was best at this size.
    Exact(&'a str),
    /// It was best at the nearest size.
    Nearest(&'a str),
    /// It was best at most sizes.
    Best(&'a str),
}

impl<'a> Choice<'a> {
    /// The solution's name.
    pub fn solution(self) -> &'a str {
        match self {
            Self::Exact(s) | Self::Nearest(s) | Self::Best(s) => s,
        }
    }
}

impl Table {
    /// The table of a trace set under a policy.
    pub fn new(set: &TraceSet, policy: &Policy) -> Self {
        let (mut entries, mut solutions) = (HashMap::new(), HashMap::new());
        for definition in set.definitions() {
            let mut found: HashMap<Vec<u64>, (f64, String)> = HashMap::new();
            for trace in set.passed_within(definition.name(), policy.atol, policy.rtol) {
                let here = trace.evaluation().map(|e| e.environment().hardware.as_str());
                let (Some(solution), Some((_, times))) = (trace.solution(), trace.passed()) else { continue };
                if policy.hardware.as_deref().is_some_and(|want| here != Some(want)) {
                    continue;
                }
                let key = key_of(definition, trace.workload().axes());
                // Latencies of one machine compare; speed-ups do, only if the reference took as long every time.
                let best = found.entry(key).or_insert((f64::INFINITY, String::new()));
                if times.latency_ms < best.0 {
                    *best = (times.latency_ms, solution.to_owned());
                }
            }
            let mut wins: BTreeMap<&str, usize> = BTreeMap::new();
            found.values().for_each(|(_, solution)| *wins.entry(solution).or_default() += 1);
            let most = wins.values().max().copied();
            let Some(best) = wins.iter().find(|(_, n)| Some(**n) == most).map(|(s, _)| (*s).to_owned()) else {
                continue;
            };
            let by_key: HashMap<_, _> = found.into_iter().map(|(key, (_, solution))| (key, solution)).collect();
            let chosen = by_key.values().filter_map(|name| set.solution(name));
            solutions.extend(chosen.map(|s| (s.name().to_owned(), s.clone())));
            entries.insert(definition.name().to_owned(), Entry { definition: definition.clone(), by_key, best });
        }
        Self { entries, solutions, miss: policy.miss }
    }

    /// The solution for a definition with these values of its variable axes, in order; `None` for the caller's own.
    pub fn choose(&self, definition: &str, axes: &[u64]) -> Option<Choice<'_>> {
        let entry = self.entries.get(definition)?;
        if let Some(solution) = entry.by_key.get(axes) {
            return Some(Choice::Exact(solution));
        }
        match self.miss {
            Miss::Fallback => None,
            Miss::Best => Some(Choice::Best(&entry.best)),
            Miss::Nearest(within) => {
                let far = |key: &[u64]| -> f64 {
                    key.iter().zip(axes).map(|(a, b)| (*a.max(&1) as f64 / *b.max(&1) as f64).log2().abs()).sum()
                };
                let same = |key: &&Vec<u64>| key.len() == axes.len();
                // Of equally near sizes the smaller, so that the answer does not depend on the map's order.
                let nearest =
                    entry.by_key.keys().filter(same).min_by(|a, b| far(a).total_cmp(&far(b)).then_with(|| a.cmp(b)))?;
                (far(nearest) <= within).then(|| Choice::Nearest(&entry.by_key[nearest]))
            }
        }
    }

    /// How many definitions and sizes it has.
    pub fn len(&self) -> (usize, usize) {
        (self.entries.len(), self.entries.values().map(|e| e.by_key.len()).sum())
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Values of the variable axes in the definition's order.
fn key_of(definition: &Definition, axes: &BTreeMap<String, u64>) -> Vec<u64> {
    definition.var_axes().map(|name| axes.get(name).copied().unwrap_or(0)).collect()
}

/// Tables that are enabled, the last one on top.
static STACK: RwLock<Vec<(u64, Arc<Table>)>> = RwLock::new(Vec::new());
/// Whether there is one: all that a call looks at when there is none.
static ON: AtomicBool = AtomicBool::new(false);
/// Changes with the stack.
static GENERATION: AtomicU64 = AtomicU64::new(0);
static ENVIRONMENT: Once = Once::new();

/// A table that is enabled as long as this lives.
#[derive(Debug)]
#[must_use = "dropping it disables the table"]
pub struct Enabled(u64);

impl Drop for Enabled {
    fn drop(&mut self) {
        change(|stack| stack.retain(|(id, _)| *id != self.0));
    }
}

fn change(with: impl FnOnce(&mut Vec<(u64, Arc<Table>)>)) -> u64 {
    let mut stack = STACK.write().unwrap_or_else(PoisonError::into_inner);
    let generation = GENERATION.load(Ordering::Relaxed) + 1;
    with(&mut stack);
    ON.store(!stack.is_empty(), Ordering::Release);
    GENERATION.store(generation, Ordering::Release);
    generation
}

/// Enables a table for the whole process, over those that are enabled already.
pub fn enable(table: Table) -> Enabled {
    from_environment();
    let mut id = 0;
    change(|stack| {
        id = GENERATION.load(Ordering::Relaxed) + 1;
        stack.push((id, Arc::new(table)));
    });
    Enabled(id)
}

/// Disables every table.
pub fn disable_all() {
    from_environment();
    change(Vec::clear);
}

/// `exec` as the environment wants it: with `FIB_ENABLE_TRACING=1` the workloads of its operators are recorded in the folder
/// `FIB_DATASET_PATH` (a call of each size, with its integers), else with `FIB_ENABLE_APPLY=1` they ask the table made of it.
pub fn attach(exec: fir::Exec) -> crate::Result<fir::Exec> {
    if let fir::Exec::Cuda(gpu) = &exec {
        GPU.get_or_init(|| gpu.properties().name.clone());
    }
    let on = |name: &str| std::env::var(name).is_ok_and(|v| v == "1");
    if on("FIB_ENABLE_TRACING") {
        let root = dataset_folder();
        std::fs::create_dir_all(&root).map_err(Error::io(&root))?;
        let recorder = Recorder::new(TraceSet::load(root)?, Dump::Integers, Keep::FirstByLengths(1));
        return Ok(exec.with_override(Arc::new(recorder)));
    }
    Ok(if on("FIB_ENABLE_APPLY") { exec.with_override(Arc::new(Deployed::default())) } else { exec })
}

/// The GPU of the first executor that [`attach`] was given, if any.
static GPU: OnceLock<String> = OnceLock::new();

/// With `FIB_ENABLE_APPLY=1`, the table of what `FIB_DATASET_PATH` has of this CPU, or of the GPU that is attached, is enabled
/// when the first call asks.
fn from_environment() {
    ENVIRONMENT.call_once(|| {
        if std::env::var("FIB_ENABLE_APPLY").is_ok_and(|v| v == "1")
            && let Ok(set) = TraceSet::load(dataset_folder())
        {
            let hardware = GPU.get().cloned().unwrap_or_else(cpu_name);
            let table = Table::new(&set, &Policy { hardware: Some(hardware), ..Policy::default() });
            change(|stack| stack.push((0, Arc::new(table))));
        }
    });
}

/// Where trace sets are by default: `FIB_DATASET_PATH`, or upstream's folder in the user's cache.
pub fn dataset_folder() -> PathBuf {
    let given = std::env::var_os("FIB_DATASET_PATH").map(PathBuf::from);
    given.unwrap_or_else(|| {
        let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        home.join(".cache/flashinfer_bench/dataset")
    })
}

/// The table on top.
pub fn current() -> Option<Arc<Table>> {
    from_environment();
    if !ON.load(Ordering::Acquire) {
        return None;
    }
    STACK.read().unwrap_or_else(PoisonError::into_inner).last().map(|(_, table)| table.clone())
}

/// An operation with its implementations, of which the table chooses.
pub struct Op<F: ?Sized> {
    definition: String,
    fallback: Box<F>,
    solutions: Vec<(String, Box<F>)>,
    /// Choices made under one generation of the stack: index of a solution, or the fallback.
    made: Mutex<Made>,
}

/// A generation, and what was chosen in it by the axes' values.
type Made = (u64, HashMap<Vec<u64>, Option<usize>>);

impl<F: ?Sized> std::fmt::Debug for Op<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.solutions.iter().map(|(name, _)| name.as_str()).collect();
        write!(f, "Op({}, {names:?})", self.definition)
    }
}

impl<F: ?Sized> Op<F> {
    /// An implementation of `definition`, for when nothing better is known.
    pub fn new(definition: impl Into<String>, fallback: Box<F>) -> Self {
        Self { definition: definition.into(), fallback, solutions: Vec::new(), made: Mutex::new((0, HashMap::new())) }
    }

    /// Adds the implementation that is the solution of this name.
    #[must_use]
    pub fn solution(mut self, name: impl Into<String>, implementation: Box<F>) -> Self {
        self.solutions.push((name.into(), implementation));
        self
    }

    /// The implementation for these values of the definition's variable axes, in order.
    ///
    /// A load of one flag when nothing is enabled; a lookup in a map when something is.
    pub fn pick(&self, axes: &[u64]) -> &F {
        if !ON.load(Ordering::Acquire) && ENVIRONMENT.is_completed() {
            return &self.fallback;
        }
        self.chosen(axes)
    }

    #[cold]
    fn chosen(&self, axes: &[u64]) -> &F {
        from_environment();
        let generation = GENERATION.load(Ordering::Acquire);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.0 != generation {
            *made = (generation, HashMap::new());
        }
        let index = match made.1.get(axes) {
            Some(index) => *index,
            None => {
                let table = current();
                let choice = table.as_ref().and_then(|t| t.choose(&self.definition, axes));
                let index = choice.and_then(|c| self.solutions.iter().position(|(name, _)| name == c.solution()));
                made.1.insert(axes.to_vec(), index);
                index
            }
        };
        index.map_or(&self.fallback, |i| &self.solutions[i].1)
    }
}

/// Gives calls of the kernel library's operators to the solutions that the enabled table chooses for them, built and loaded
/// here: those in Rust and C++ for calls on the CPU, kernels in CUDA C++ with a `launch.json` for calls on a GPU whose tensors
/// are all there (norms and products; page tables are on the host). Anything else runs as usual.
///
/// ```
/// # use std::sync::Arc;
/// let exec = fir::Exec::cpu()?.with_override(Arc::new(fir_bench::apply::Deployed::default()));
/// # let _ = exec;
/// # Ok::<(), fir::Error>(())
/// ```
///
/// Operators that work in place are not given away, as definitions do not. The first call of a size waits for its solution to
/// be built; one that cannot be is not asked again while the same tables are enabled.
#[derive(Debug, Default)]
pub struct Deployed {
    /// A generation of the stack, and what was chosen in it by what a call looks like.
    made: Mutex<(u64, Choices)>,
    /// What was chosen before: kernels may still be queued, or in graphs.
    kept: Mutex<Vec<Arc<Chosen>>>,
}

type Choices = HashMap<Vec<usize>, Option<Arc<Chosen>>>;

/// A solution for calls of one size.
struct Chosen {
    definition: Definition,
    axes: BTreeMap<String, u64>,
    code: Code,
}

enum Code {
    Library(Library),
    /// And the device that it is loaded on.
    Kernel(Kernel, fir::Exec),
}

/// What a call says, for the expressions of a launch.
struct Sizes<'a>(&'a Definition, &'a BTreeMap<String, u64>);

impl Facts for Sizes<'_> {
    fn axis(&self, name: &str) -> Option<i64> {
        self.0.axis(name, self.1).and_then(|v| i64::try_from(v).ok())
    }

    fn shape(&self, tensor: &str) -> Option<Vec<usize>> {
        self.0.shape(self.0.input(tensor)?, self.1).ok()
    }
}

impl std::fmt::Debug for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chosen({} {:?})", self.definition.name(), self.axes)
    }
}

impl Override for Deployed {
    fn call(&self, call: Call<'_, '_>) -> fir::Result<bool> {
        if !ON.load(Ordering::Acquire) && ENVIRONMENT.is_completed() {
            return Ok(false);
        }
        from_environment();
        let usable = |t: &TensorRef<'_>| t.place() == call.place && t.layout().is_contiguous();
        let all =
            call.inputs.iter().map(|(_, t)| usable(t)).chain(call.outputs.iter().map(|(_, t)| usable(&t.as_ref())));
        if !all.into_iter().all(|fits| fits) {
            return Ok(false);
        }
        let device = if let Place::Cuda(ordinal) = call.place { ordinal as usize + 1 } else { 0 };
        let number = call.numbers.first().map_or(0, |(_, x)| x.to_bits() as usize);
        let mut key = vec![call.op.as_ptr() as usize, number, device];
        for (_, t) in call.inputs {
            key.push(t.dtype() as usize);
            key.extend(t.shape());
        }
        key.extend(call.outputs.iter().map(|(_, t)| t.dtype() as usize));
        let generation = GENERATION.load(Ordering::Acquire);
        let chosen = {
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            if made.0 != generation {
                let old = std::mem::replace(&mut *made, (generation, HashMap::new()));
                let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend(old.1.into_values().flatten());
            }
            match made.1.get(&key) {
                Some(chosen) => chosen.clone(),
                None => made.1.entry(key).or_insert(choose(&call)).clone(),
            }
        };
        let refuse = |e: Error| fir::Error::Unsupported { op: "apply", why: vec![e.to_string()] };
        chosen.map_or(Ok(false), |chosen| chosen.run(call).map_err(refuse))
    }
}

/// The solution for a call, loaded.
fn choose(call: &Call<'_, '_>) -> Option<Arc<Chosen>> {
    let (table, name) = (current()?, name_of(call)?);
    let definition = &table.entries.get(&name)?.definition;
    let inputs = inputs_of(definition, call)?;
    let written = |name: &str| call.outputs.iter().find(|(n, _)| *n == name).map(|(_, t)| t.dtype());
    let outputs = definition.outputs();
    // In place: an output of the call that is no output of the definition.
    if call.outputs.iter().any(|(n, _)| !outputs.iter().any(|(name, _)| name == n))
        || outputs.iter().any(|(name, spec)| written(name).is_some_and(|d| d != spec.dtype.fir()))
    {
        return None;
    }
    let axes = definition.axes_of(&inputs.iter().map(Given::shape).collect::<Vec<_>>()).ok()?;
    let solution = table.choose(&name, &key_of(definition, &axes)).and_then(|c| table.solutions.get(c.solution()))?;
    let code = match (solution.language(), call.place) {
        (Language::Rust | Language::Cpp, Place::Host) => Code::Library(build::library(definition, solution).ok()?),
        // A kernel writes all outputs of its definition.
        (Language::Cuda, Place::Cuda(ordinal)) if call.outputs.len() == outputs.len() => {
            let exec = fir::Exec::cuda(ordinal).ok()?;
            Code::Kernel(build::kernel(definition, solution, &exec, &Sizes(definition, &axes)).ok()?, exec)
        }
        _ => return None,
    };
    Some(Arc::new(Chosen { definition: definition.clone(), axes, code }))
}

impl Chosen {
    fn run(&self, call: Call<'_, '_>) -> crate::Result<bool> {
        match &self.code {
            Code::Library(library) => self.call(library, call),
            Code::Kernel(kernel, exec) => {
                let mut outputs: Vec<_> = call.outputs.iter_mut().map(|(n, t)| (*n, Some(t.reborrow()))).collect();
                let mut find = |name: &str| {
                    let read = call.inputs.iter().find(|(n, _)| *n == name).map(|(_, t)| KernelArg::Read(*t));
                    let number = || call.numbers.iter().find(|(n, _)| *n == name).map(|(_, x)| KernelArg::F32(*x));
                    let mut written = || outputs.iter_mut().find(|(n, _)| *n == name)?.1.take().map(KernelArg::Write);
                    read.or_else(number).or_else(&mut written)
                };
                kernel.run(exec, Some(call.stream), &mut find).map(|()| true)
            }
        }
    }

    fn call(&self, library: &Library, call: Call<'_, '_>) -> crate::Result<bool> {
        let d = &self.definition;
        let number = |name: &str| call.numbers.iter().find(|(n, _)| *n == name).map_or(0.0, |(_, x)| f64::from(*x));
        let is_number = |(_, spec): &&(String, TensorSpec)| spec.shape.is_none();
        let numbers = d.inputs().iter().filter(is_number).map(|(name, spec)| Array::scalar(spec.dtype, number(name)));
        let numbers = numbers.collect::<crate::Result<Vec<_>>>()?;
        // What the definition computes and the call does not want.
        let unwanted = |(name, _): &&(String, TensorSpec)| !call.outputs.iter().any(|(n, _)| n == name);
        let spare = d.outputs().iter().filter(unwanted);
        let spare = spare.map(|(_, spec)| Array::zeros(spec.dtype, &d.shape(spec, &self.axes)?));
        let mut spare = spare.collect::<crate::Result<Vec<_>>>()?;
        let (mut numbers, mut spare, mut args) = (numbers.iter(), spare.iter_mut(), Vec::new());
        for (name, spec) in d.inputs() {
            match call.inputs.iter().find(|(n, _)| n == name) {
                Some((_, t)) => args.push(Arg::read(t.host_bytes("apply", "input")?, spec.dtype, t.shape())),
                None => args.extend(numbers.next().map(|x| Arg::read(x.bytes(), spec.dtype, &[]))),
            }
        }
        let mut outputs: Vec<_> = call.outputs.iter_mut().map(|(n, t)| (*n, Some(t.reborrow()))).collect();
        for (name, spec) in d.outputs() {
            let to = match outputs.iter_mut().find(|(n, _)| n == name).and_then(|(_, t)| t.take()) {
                Some(t) => Some(t),
                None => spare.next().map(Array::view_mut),
            };
            let Some(to) = to else { return Ok(false) };
            let shape = to.shape().to_vec();
            args.push(Arg::written(to.into_host_bytes("apply", "output")?, spec.dtype, &shape));
        }
        library.call(&args).map(|()| true)
    }
}
