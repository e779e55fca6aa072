//! Recording workloads of a running program: which calls are kept, and what of their inputs goes into files.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::array::Array;
use crate::error::{Error, Result};
use crate::inputs::write_tensors;
use crate::schema::{Definition, Input, Scalar, Trace, Workload};
use crate::traceset::TraceSet;

/// An input of a call.
#[derive(Clone, Debug)]
pub enum Given<'a> {
    /// A tensor whose numbers are at hand.
    Tensor(&'a Array),
    /// A tensor of which only the shape is.
    Shape(&'a [usize]),
    /// A number.
    Scalar(Scalar),
}

/// Which tensors' numbers are written; others become `random`. Numbers are always kept.
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

/// Keeps workloads until they are written.
#[derive(Debug)]
pub struct Recorder {
    dump: Dump,
    keep: Keep,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    seen: HashMap<String, usize>,
    kept: Vec<Kept>,
}

#[derive(Debug)]
struct Kept {
    definition: Definition,
    axes: BTreeMap<String, u64>,
    inputs: Vec<(String, Option<Scalar>)>,
    tensors: Vec<(String, Array)>,
}

impl Recorder {
    /// An empty one.
    pub fn new(dump: Dump, keep: Keep) -> Self {
        Self { dump, keep, inner: Mutex::new(Inner::default()) }
    }

    /// Looks at a call, with its inputs in the definition's order; whether it was kept.
    pub fn record(&self, definition: &Definition, given: &[Given<'_>]) -> Result<bool> {
        let shapes: Vec<Option<&[usize]>> = given
            .iter()
            .map(|g| match g {
                Given::Tensor(array) => Some(array.shape()),
                Given::Shape(shape) => Some(*shape),
                Given::Scalar(_) => None,
            })
            .collect();
        let axes = definition.axes_of(&shapes)?;
        let (key, most) = match self.keep {
            Keep::All => (String::new(), usize::MAX),
            Keep::First(n) => (definition.name().to_owned(), n),
            Keep::FirstByAxes(n) => (format!("{} {axes:?}", definition.name()), n),
            Keep::FirstByLengths(n) => (lengths(definition, &axes, given), n),
        };
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = inner.seen.entry(key).or_default();
        if *seen >= most {
            return Ok(false);
        }
        *seen += 1;
        let mut kept = Kept { definition: definition.clone(), axes, inputs: Vec::new(), tensors: Vec::new() };
        for ((name, spec), given) in definition.inputs().iter().zip(given) {
            let scalar = if let Given::Scalar(value) = given { Some(*value) } else { None };
            kept.inputs.push((name.clone(), scalar));
            let wanted = match &self.dump {
                Dump::None => false,
                Dump::Integers => spec.dtype.is_integer(),
                Dump::All => true,
                Dump::Only(names) => names.contains(name),
            };
            if let Given::Tensor(array) = given
                && wanted
            {
                if array.dtype() != spec.dtype {
                    let why = format!("`{name}` is of {}, not {}", array.dtype(), spec.dtype);
                    return Err(Error::refused("record", why));
                }
                kept.tensors.push((name.clone(), (*array).clone()));
            }
        }
        inner.kept.push(kept);
        Ok(true)
    }

    /// Writes what was kept to a set's folder, with the definitions it does not have; how many workloads that were.
    pub fn flush(&self, set: &mut TraceSet) -> Result<usize> {
        let kept = std::mem::take(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner).kept);
        let count = kept.len();
        for k in kept {
            let name = k.definition.name().to_owned();
            let uuid = crate::schema::fresh_uuid()?;
            let folder = format!("./blob/workloads/{}/{name}", k.definition.op_type());
            let path = format!("{folder}/{name}_{uuid}.safetensors");
            if !k.tensors.is_empty() {
                let tensors: Vec<(&str, &Array)> = k.tensors.iter().map(|(n, a)| (n.as_str(), a)).collect();
                write_tensors(&PathBuf::from(set.root()).join(&path), &tensors)?;
            }
            let input = |(n, scalar): &(String, Option<Scalar>)| {
                let input = match scalar {
                    Some(value) => Input::Scalar(*value),
                    None if k.tensors.iter().any(|(t, _)| t == n) => {
                        Input::Safetensors { path: path.clone(), tensor_key: n.clone() }
                    }
                    None => Input::Random,
                };
                (n.clone(), input)
            };
            let inputs: Vec<_> = k.inputs.iter().map(input).collect();
            if set.definition(&name).is_none() {
                let file = set.root().join("definitions").join(k.definition.op_type()).join(format!("{name}.json"));
                crate::traceset::write(&file, k.definition.to_json())?;
                set.add_definition(k.definition)?;
            }
            set.append(vec![Trace::of_workload(&name, &Workload::new(&k.axes, &inputs)?)?])?;
        }
        Ok(count)
    }
}

/// A key of what matters of a batch of requests: how many, and how long on average.
fn lengths(definition: &Definition, axes: &BTreeMap<String, u64>, given: &[Given<'_>]) -> String {
    const TOTALS: [&str; 5] = ["num_pages", "total_q", "total_kv", "len_indptr", "num_kv_indices"];
    let rest: BTreeMap<_, _> = axes.iter().filter(|(name, _)| !TOTALS.contains(&name.as_str())).collect();
    let average = |input: &str| {
        let at = definition.inputs().iter().position(|(name, _)| name == input)?;
        let Some(Given::Tensor(indptr)) = given.get(at) else { return None };
        let requests = indptr.len().checked_sub(1).filter(|n| *n > 0)?;
        Some((requests, (indptr.integer(requests) as f64 / requests as f64).round() as i64))
    };
    format!("{} {rest:?} {:?} {:?}", definition.name(), average("qo_indptr"), average("kv_indptr"))
}
