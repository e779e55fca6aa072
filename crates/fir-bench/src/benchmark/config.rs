//! What is benchmarked, where, and how.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::evaluate::{Custom, Tolerance};
use crate::schema::Definition;

/// How a definition is evaluated; what is `None` is taken from the layer below.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluating {
    /// Calls before those that count.
    pub warmup_runs: Option<usize>,
    /// Calls of a trial that count.
    pub iterations: Option<usize>,
    /// Trials, each with inputs of its own.
    pub num_trials: Option<usize>,
    /// See [`Tolerance::rtol`].
    pub rtol: Option<f64>,
    /// See [`Tolerance::atol`].
    pub atol: Option<f64>,
    /// See [`Tolerance::matched_ratio`].
    pub required_matched_ratio: Option<f64>,
    /// Draws of each row by which a sampler is judged.
    pub sampling_draws: Option<usize>,
}

impl Evaluating {
    /// `self` where it says something, else `below`.
    fn over(&self, below: &Self) -> Self {
        Self {
            warmup_runs: self.warmup_runs.or(below.warmup_runs),
            iterations: self.iterations.or(below.iterations),
            num_trials: self.num_trials.or(below.num_trials),
            rtol: self.rtol.or(below.rtol),
            atol: self.atol.or(below.atol),
            required_matched_ratio: self.required_matched_ratio.or(below.required_matched_ratio),
            sampling_draws: self.sampling_draws.or(below.sampling_draws),
        }
    }
}

/// What is benchmarked, where, and how.
#[derive(Clone)]
pub struct Config {
    /// A Python that has torch, for references and what is written in it.
    pub python: PathBuf,
    /// A command that calls [`serve_native`](crate::worker::serve_native) with its last argument.
    pub native: Vec<OsString>,
    /// `cpu`, or a CUDA device as torch names it; several with commas between, which share the definitions.
    pub device: String,
    /// A new process for every workload of a solution, rather than one for all of them.
    pub isolated: bool,
    /// Names of the definitions; all when `None`.
    pub definitions: Option<Vec<String>>,
    /// Names of the solutions; all when `None`.
    pub solutions: Option<Vec<String>>,
    /// Time for one solution on one workload.
    pub timeout: Duration,
    /// Bytes of memory that a worker may hold.
    pub memory: u64,
    /// Whether the reference is timed, for speed-ups.
    pub profile_baseline: bool,
    /// Whether pairs of a workload and a solution that have a trace are left out.
    pub resume: bool,
    /// Whether traces are appended to the set's files as they are made.
    pub save: bool,
    /// Decides all that is drawn.
    pub seed: u64,
    /// For all definitions, over everything else.
    pub evaluating: Evaluating,
    /// For an op type, over the usual.
    pub by_op_type: BTreeMap<String, Evaluating>,
    /// For a definition, over its op type's.
    pub by_definition: BTreeMap<String, Evaluating>,
    /// Evaluators of op types that are not compared element by element.
    pub evaluators: BTreeMap<String, Custom>,
}

impl Config {
    /// The usual: 10 calls to warm up, 50 that count, 3 trials, errors up to 1e-2; 5 minutes and 16 GiB for a solution on a
    /// workload; mixtures of experts in fp8 need 95 % of their elements right.
    pub fn new(python: impl Into<PathBuf>, native: Vec<OsString>) -> Self {
        let moe = Evaluating { required_matched_ratio: Some(0.95), ..Evaluating::default() };
        Self {
            python: python.into(),
            native,
            device: "cpu".into(),
            isolated: false,
            definitions: None,
            solutions: None,
            timeout: Duration::from_secs(300),
            memory: 16 << 30,
            profile_baseline: true,
            resume: false,
            save: false,
            seed: 0,
            evaluating: Evaluating::default(),
            by_op_type: [("moe".to_owned(), moe)].into(),
            by_definition: BTreeMap::new(),
            evaluators: BTreeMap::new(),
        }
    }

    pub(super) fn evaluating(&self, definition: &Definition) -> Plan {
        let none = Evaluating::default();
        let op_type = self.by_op_type.get(definition.op_type()).unwrap_or(&none);
        let own = self.by_definition.get(definition.name()).unwrap_or(&none);
        let e = self.evaluating.over(&own.over(op_type));
        Plan {
            warmup: e.warmup_runs.unwrap_or(10),
            iterations: e.iterations.unwrap_or(50).max(1),
            trials: e.num_trials.unwrap_or(3).max(1),
            tolerance: Tolerance {
                atol: e.atol.unwrap_or(1e-2),
                rtol: e.rtol.unwrap_or(1e-2),
                matched_ratio: e.required_matched_ratio.unwrap_or(1.0),
            },
            draws: e.sampling_draws.unwrap_or(4096),
        }
    }
}

/// What [`Evaluating`] comes to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) warmup: usize,
    pub(super) iterations: usize,
    pub(super) trials: usize,
    pub(super) tolerance: Tolerance,
    pub(super) draws: usize,
}
