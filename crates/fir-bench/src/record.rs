//! Recording workloads of a running program: which calls are kept, and what of their inputs goes into files.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use fir::exec::{Call, Override};

use crate::array::Array;
pub use crate::calls::Given;
use crate::calls::{definition_of, inputs_of};
use crate::error::{Error, Result};
use crate::inputs::write_tensors;
use crate::schema::{Definition, Input, Scalar, Trace, Workload};
use crate::traceset::TraceSet;

/// Which tensors' numbers are written; others become `random`, as do those that are on a device. Scalars are always kept.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Dump {
    /// None.
    None,
    /// Those of integers and truth values: the structure of a batch.
    #[default]
    Integers,
    /// All.
    All,
    /// These.
    Only(Vec<String>),
}

/// Which calls of a definition are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All.
    All,
    /// The first so many.
    First(usize),
    /// The first so many with the same axes.
    FirstByAxes(usize),
    /// The first so many with the same number of requests and the same average lengths: page pools and totals, which differ
    /// with every step, do not count.
    FirstByLengths(usize),
}

/// Writes workloads to a set's folder as they come, with the definitions it does not have.
///
/// As the override of an executor ([`fir::Exec::with_override`]) it sees the calls of a running engine. A call that no
/// definition fits is left out, and counted in [`Self::missed`]; nothing that goes wrong here fails the call.
#[derive(Debug)]
pub struct Recorder {
    dump: Dump,
    keep: Keep,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    set: TraceSet,
    seen: HashMap<String, usize>,
    kept: usize,
    missed: BTreeMap<String, usize>,
}

impl Recorder {
    /// One that writes to the folder of `set`.
    pub fn new(set: TraceSet, dump: Dump, keep: Keep) -> Self {
        let inner = Inner { set, seen: HashMap::new(), kept: 0, missed: BTreeMap::new() };
        Self { dump, keep, inner: Mutex::new(inner) }
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many workloads were written.
    pub fn kept(&self) -> usize {
        self.inner().kept
    }

    /// Calls that were not recorded for want of a definition, and what went wrong with others; how often.
    pub fn missed(&self) -> BTreeMap<String, usize> {
        self.inner().missed.clone()
    }

    /// Looks at a call, with its inputs in the definition's order; whether it was kept.
    pub fn record(&self, definition: &Definition, given: &[Given<'_>]) -> Result<bool> {
        self.inner().record(definition, given, &self.dump, self.keep)
    }
}

impl Override for Recorder {
    fn call(&self, call: Call<'_, '_>) -> fir::Result<bool> {
        let mut inner = self.inner();
        let recorded = match definition_of(&inner.set, &call) {
            Ok(Some(definition)) => match inputs_of(&definition, &call) {
                Some(given) => inner.record(&definition, &given, &self.dump, self.keep).map(drop),
                None => Err(Error::refused("record", format!("`{}` has other inputs", definition.name()))),
            },
            Ok(None) => Err(Error::refused("record", format!("{} has no definition", call.op))),
            Err(e) => Err(e),
        };
        if let Err(e) = recorded {
            *inner.missed.entry(e.to_string()).or_default() += 1;
        }
        Ok(false)
    }
}

impl Inner {
    fn record(&mut self, definition: &Definition, given: &[Given<'_>], dump: &Dump, keep: Keep) -> Result<bool> {
        let shapes: Vec<Option<&[usize]>> = given.iter().map(Given::shape).collect();
        let axes = definition.axes_of(&shapes)?;
        let name = definition.name();
        let (key, most) = match keep {
            Keep::All => (String::new(), usize::MAX),
            Keep::First(n) => (name.to_owned(), n),
            Keep::FirstByAxes(n) => (format!("{name} {axes:?}"), n),
            Keep::FirstByLengths(n) => (lengths(definition, &axes, given), n),
        };
        let seen = self.seen.entry(key).or_default();
        if *seen >= most {
            return Ok(false);
        }
        *seen += 1;
        let uuid = crate::schema::fresh_uuid()?;
        let path = format!("./blob/workloads/{}/{name}/{name}_{uuid}.safetensors", definition.op_type());
        let (mut inputs, mut tensors) = (Vec::new(), Vec::new());
        for ((input, spec), given) in definition.inputs().iter().zip(given) {
            let wanted = match dump {
                Dump::None => false,
                Dump::Integers => spec.dtype.is_integer(),
                Dump::All => true,
                Dump::Only(names) => names.contains(input),
            };
            let source = match given {
                Given::Number(x) if spec.dtype.is_integer() => Input::Scalar(Scalar::Int(*x as i64)),
                Given::Number(x) => Input::Scalar(Scalar::Float(*x)),
                Given::Tensor(t) if t.dtype() != spec.dtype.fir() => {
                    let why = format!("`{input}` is of {}, not {}", t.dtype(), spec.dtype);
                    return Err(Error::refused("record", why));
                }
                Given::Tensor(t) => match Array::copy_of(*t).filter(|_| wanted) {
                    Some(array) => {
                        tensors.push((input.as_str(), array));
                        Input::Safetensors { path: path.clone(), tensor_key: input.clone() }
                    }
                    None => Input::Random,
                },
            };
            inputs.push((input.clone(), source));
        }
        if !tensors.is_empty() {
            let tensors: Vec<(&str, &Array)> = tensors.iter().map(|(n, a)| (*n, a)).collect();
            write_tensors(&self.set.root().join(&path), &tensors)?;
        }
        if self.set.definition(name).is_none() {
            self.set.add_definition(definition.clone())?;
            let file = self.set.root().join("definitions").join(definition.op_type()).join(format!("{name}.json"));
            crate::traceset::write(&file, definition.to_json())?;
        }
        self.set.append(vec![Trace::of_workload(name, &Workload::new(&axes, &inputs)?)?])?;
        self.kept += 1;
        Ok(true)
    }
}

/// A key of what matters of a batch of requests: how many, and how long on average.
fn lengths(definition: &Definition, axes: &BTreeMap<String, u64>, given: &[Given<'_>]) -> String {
    const TOTALS: [&str; 5] = ["num_pages", "total_q", "total_kv", "len_indptr", "num_kv_indices"];
    let rest: BTreeMap<_, _> = axes.iter().filter(|(name, _)| !TOTALS.contains(&name.as_str())).collect();
    let average = |input: &str| {
        let at = definition.inputs().iter().position(|(name, _)| name == input)?;
        let Some(Given::Tensor(indptr)) = given.get(at) else { return None };
        let indptr = Array::copy_of(*indptr)?;
        let requests = indptr.len().checked_sub(1).filter(|n| *n > 0)?;
        Some((requests, (indptr.integer(requests) as f64 / requests as f64).round() as i64))
    };
    format!("{} {rest:?} {:?} {:?}", definition.name(), average("qo_indptr"), average("kv_indptr"))
}
