//! The benchmark: every solution on every workload, right first, then timed.
//!
//! For each workload and trial:
//!
//! 1. Inputs are drawn from the seed, and the reference runs on them, in a worker of its own.
//! 2. Each solution runs once in its worker; its outputs are compared.
//! 3. It is timed. Every timed call has inputs that no call had before (random ones are moved around by numbers it
//!    does not know), in cold caches, with its outputs poisoned; one call of each trial, chosen beforehand and told to nobody,
//!    has its outputs compared with the reference's on the same inputs, looked at again a moment later, and its inputs
//!    compared with what they were.
//!
//! So what is checked is what was timed. The latency is the median of a trial, averaged over trials.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::array::Array;
use crate::build::{self, AxisFacts, Caller};
use crate::error::{Error, Result};
use crate::evaluate::{Custom, Target, Tolerance, Verdict, compare_all};
use crate::inputs::{Ready, Rng, make_inputs};
use crate::schema::{
    Correctness, DType, Definition, Environment, Evaluation, Performance, Solution, Status, Trace, Workload,
};
use crate::traceset::TraceSet;
use crate::worker::{Ended, Limits, Python, Session, Worker};

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
    /// `cpu`, or a CUDA device as torch names it.
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

    fn evaluating(&self, definition: &Definition) -> Plan {
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
struct Plan {
    warmup: usize,
    iterations: usize,
    trials: usize,
    tolerance: Tolerance,
    draws: usize,
}

/// What a benchmark tells while it runs.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A workload could not be used: a file is absent, or the reference failed.
    Skipped {
        /// Of this definition.
        definition: &'a str,
        /// The workload's name.
        workload: &'a str,
        /// Why.
        why: String,
    },
    /// A solution is done with a workload.
    Done {
        /// How it went.
        trace: &'a Trace,
        /// How many are done, of how many.
        progress: (usize, usize),
    },
}

/// A benchmark in progress.
struct Bench<'a> {
    config: &'a Config,
    session: Session,
    python: Arc<Mutex<Python>>,
    environment: Environment,
    /// Bytes to write between calls, so that caches hold nothing of theirs.
    cold: u64,
}

/// Inputs of a trial in files, and where the timed calls move them.
struct Trial {
    inputs: Vec<Ready>,
    specs: Value,
    rolls: Vec<[u64; 2]>,
    /// The timed call whose outputs are compared.
    keep: usize,
    /// The reference's outputs as inputs are, and as call `keep` has them.
    want: [Vec<Array>; 2],
    reference_ms: f64,
    /// Inputs that the reference writes to, so that a solution may.
    edited: HashSet<String>,
}

/// A solution on a workload, so far.
struct Attempt<'a> {
    solution: &'a Solution,
    worker: Option<Worker>,
    deadline: Instant,
    times: Vec<f64>,
    checked_ms: f64,
    correctness: Correctness,
    verdict: Option<(Status, String)>,
}

/// Runs what `config` selects and returns the traces.
pub fn run(set: &mut TraceSet, config: &Config, on: &mut dyn FnMut(Event<'_>)) -> Result<Vec<Trace>> {
    let session = Session::new()?;
    let python = Arc::new(Mutex::new(Python::start(&config.python, &session)?));
    let mut bench = Bench {
        environment: Environment { hardware: cpu_name(), libs: BTreeMap::new() },
        cold: last_level_cache(),
        config,
        session,
        python,
    };
    bench.look_around()?;
    let wanted = |list: &Option<Vec<String>>, name: &str| list.as_ref().is_none_or(|l| l.iter().any(|n| n == name));
    for (what, list) in [("definition", &config.definitions), ("solution", &config.solutions)] {
        for name in list.iter().flatten() {
            let there =
                if what == "definition" { set.definition(name).is_some() } else { set.solution(name).is_some() };
            if !there {
                return Err(Error::refused("benchmark", format!("{what} `{name}` is not in the set")));
            }
        }
    }
    let done: HashSet<(String, String)> = if config.resume {
        set.traces().filter_map(|t| Some((t.workload().uuid().to_owned(), t.solution()?.to_owned()))).collect()
    } else {
        HashSet::new()
    };
    // Cloned, as traces are added to the set on the way.
    let definitions: Vec<Definition> =
        set.definitions().filter(|d| wanted(&config.definitions, d.name())).cloned().collect();
    let mut jobs = Vec::new();
    for definition in definitions {
        let solutions: Vec<Solution> =
            set.solutions_of(definition.name()).filter(|s| wanted(&config.solutions, s.name())).cloned().collect();
        let workloads: Vec<Workload> = set.workloads_of(definition.name()).cloned().collect();
        jobs.push((definition, solutions, workloads));
    }
    let total = jobs.iter().map(|(_, s, w)| s.len() * w.len()).sum();
    let (mut traces, mut count) = (Vec::new(), 0);
    let root = set.root().to_owned();
    for (definition, solutions, workloads) in &jobs {
        if solutions.is_empty() {
            continue;
        }
        let mut reference = None;
        let mut workers = HashMap::new();
        let mut broken = HashMap::new();
        for workload in workloads {
            let new: Vec<&Solution> = solutions
                .iter()
                .filter(|s| !done.contains(&(workload.uuid().to_owned(), s.name().to_owned())))
                .collect();
            count += solutions.len() - new.len();
            if new.is_empty() {
                continue;
            }
            let job = Job { definition, workload, root: &root, plan: config.evaluating(definition) };
            match bench.workload(&job, &new, &mut reference, &mut workers, &mut broken) {
                Ok(found) => {
                    for trace in found {
                        count += 1;
                        on(Event::Done { trace: &trace, progress: (count, total) });
                        if config.save {
                            set.append(vec![trace.clone()])?;
                        } else {
                            set.add_trace(trace.clone())?;
                        }
                        traces.push(trace);
                    }
                }
                Err(e) => {
                    count += new.len();
                    on(Event::Skipped { definition: definition.name(), workload: workload.uuid(), why: e.to_string() });
                }
            }
        }
    }
    Ok(traces)
}

#[derive(Clone, Copy)]
struct Job<'a> {
    definition: &'a Definition,
    workload: &'a Workload,
    root: &'a std::path::Path,
    plan: Plan,
}

impl Bench<'_> {
    fn limits(&self) -> Limits {
        Limits { time: self.config.timeout, memory: self.config.memory }
    }

    /// The device's name and the versions of what runs on it.
    fn look_around(&mut self) -> Result<()> {
        let mut worker = Worker::forked(&self.python, &self.session)?;
        let fail = |why: String| Error::Worker { worker: self.config.python.display().to_string(), why };
        let answer = match worker.ask(&json!({"op": "info", "device": self.config.device}), self.limits()) {
            Ok(answer) => answer,
            Err(Ended::Timeout) => return Err(fail("did not say what it has in time".into())),
            Err(Ended::Failed(why)) => return Err(fail(why)),
        };
        if let Some(log) = answer["log"].as_str() {
            return Err(fail(format!("device {}: {log}", self.config.device)));
        }
        for (name, version) in answer["libs"].as_object().into_iter().flatten() {
            self.environment.libs.insert(name.clone(), version.as_str().unwrap_or("?").into());
        }
        self.environment.libs.insert("fir".into(), env!("CARGO_PKG_VERSION").into());
        if let Some(hardware) = answer["hardware"].as_str() {
            self.environment.hardware = hardware.into();
        }
        if let Some(l2) = answer["l2"].as_u64() {
            self.cold = 2 * l2;
        }
        Ok(())
    }

    /// A worker that has loaded a solution.
    fn start(&self, definition: &Definition, solution: &Solution) -> std::result::Result<Worker, (Status, String)> {
        let compile = |why: String| (Status::CompileError, why);
        let request = build::build(definition, solution, &self.config.device).map_err(|e| compile(e.to_string()))?;
        let worker = match build::caller(solution) {
            Caller::Python => Worker::forked(&self.python, &self.session),
            Caller::Native => Worker::native(&self.config.native, &self.session),
        };
        let mut worker = worker.map_err(|e| (Status::RuntimeError, e.to_string()))?;
        match worker.ask(&request, self.limits()) {
            Ok(answer) => match answer["log"].as_str() {
                None => Ok(worker),
                Some(log) => Err(compile(format!("{log}\n{}", worker.printed()))),
            },
            Err(Ended::Timeout) => Err((Status::Timeout, format!("building took more than {:?}", self.config.timeout))),
            Err(Ended::Failed(why)) => Err(compile(format!("{why}\n{}", worker.printed()))),
        }
    }

    fn workload(
        &self,
        job: &Job<'_>,
        solutions: &[&Solution],
        reference: &mut Option<Worker>,
        workers: &mut HashMap<String, Worker>,
        broken: &mut HashMap<String, (Status, String)>,
    ) -> Result<Vec<Trace>> {
        let facts = AxisFacts(job.definition, job.workload);
        if let Some(c) = job.definition.broken_constraints(&facts).first() {
            return Err(Error::refused("benchmark", format!("`{}` does not hold", c.text)));
        }
        let mut attempts: Vec<Attempt<'_>> = solutions
            .iter()
            .map(|solution| {
                let known = broken.get(solution.name()).cloned();
                let mut attempt = Attempt::new(solution, self.config.timeout);
                attempt.verdict = known;
                attempt
            })
            .collect();
        for number in 0..job.plan.trials {
            let trial = self.trial(job, number, reference)?;
            for attempt in attempts.iter_mut().filter(|a| a.verdict.is_none()) {
                if attempt.worker.is_none() {
                    let kept = workers.remove(attempt.solution.name()).filter(|_| !self.config.isolated);
                    let started = kept.map_or_else(|| self.start(job.definition, attempt.solution), Ok);
                    match started {
                        Ok(worker) => attempt.worker = Some(worker),
                        Err(verdict) => {
                            if matches!(verdict.0, Status::CompileError | Status::Timeout) {
                                broken.insert(attempt.solution.name().into(), verdict.clone());
                            }
                            attempt.verdict = Some(verdict);
                            continue;
                        }
                    }
                    attempt.deadline = Instant::now() + self.config.timeout;
                }
                if let Err(verdict) = self.attempt(job, &trial, attempt) {
                    if verdict.0 == Status::Timeout {
                        broken.insert(attempt.solution.name().into(), verdict.clone());
                    }
                    attempt.verdict = Some(verdict);
                    // What failed is not trusted with another workload.
                    if let Some(worker) = attempt.worker.take() {
                        let (_, why) = attempt.verdict.get_or_insert((Status::RuntimeError, String::new()));
                        let printed = worker.printed();
                        if !printed.is_empty() {
                            why.push_str(&format!("\n--- printed ---\n{printed}"));
                        }
                    }
                }
            }
            self.forget(&trial);
            let reference_ms = trial.reference_ms;
            attempts.iter_mut().filter(|a| a.verdict.is_none()).for_each(|a| a.times.push(reference_ms));
        }
        let mut traces = Vec::new();
        for mut attempt in attempts {
            let name = attempt.solution.name();
            let worker = attempt.worker.take();
            let printed = worker.as_ref().map(Worker::printed).unwrap_or_default();
            if let Some(worker) = worker {
                workers.insert(name.to_owned(), worker);
            }
            let evaluation = attempt.finish(self.environment.clone(), printed);
            traces.push(Trace::new(job.definition.name(), job.workload, name, &evaluation)?);
        }
        Ok(traces)
    }

    /// Draws a trial's inputs and runs the reference on them.
    fn trial(&self, job: &Job<'_>, number: usize, reference: &mut Option<Worker>) -> Result<Trial> {
        let mut rng = Rng::new(self.config.seed, &format!("{}/{number}", job.workload.uuid()));
        let inputs = make_inputs(job.root, job.definition, job.workload, &mut rng)?;
        let calls = job.plan.warmup + job.plan.iterations;
        let rolls: Vec<[u64; 2]> =
            (0..calls).map(|_| [u64::from(rng.bits() >> 8), u64::from(rng.bits() >> 8)]).collect();
        // Not one of the first two calls, where there are more: by then every place of the inputs was used before.
        let keep = (job.plan.warmup + rng.integer(0, job.plan.iterations as i64) as usize).max(2).min(calls - 1);
        let specs = self.write(&inputs)?;
        let mut trial =
            Trial { inputs, specs, rolls, keep, want: Default::default(), reference_ms: 0.0, edited: HashSet::new() };
        let done = self.refer(job, &mut trial, reference);
        if done.is_err() {
            self.forget(&trial);
            *reference = None;
        }
        done.map(|()| trial)
    }

    /// Writes inputs to files; what a request says of them.
    fn write(&self, inputs: &[Ready]) -> Result<Value> {
        let one = |input: &Ready| {
            let array = &input.array;
            let mut spec = json!({
                "name": input.name, "dtype": array.dtype().name(), "shape": array.shape(), "random": input.random,
            });
            if input.scalar {
                spec["value"] = match array.dtype() {
                    DType::Bool => json!(array.integer(0) != 0),
                    d if d.is_integer() => json!(array.integer(0)),
                    _ => json!(array.get(0)),
                };
            } else {
                let file = self.session.file("bin");
                fs::write(&file, array.bytes()).map_err(Error::io(&file))?;
                spec["file"] = json!(file);
            }
            Ok(spec)
        };
        Ok(Value::Array(inputs.iter().map(one).collect::<Result<_>>()?))
    }

    fn forget(&self, trial: &Trial) {
        for spec in trial.specs.as_array().into_iter().flatten() {
            if let Some(file) = spec["file"].as_str() {
                let _ = fs::remove_file(file);
            }
        }
    }

    fn outputs(&self, job: &Job<'_>) -> Result<(Value, Vec<PathBuf>)> {
        let one = |(_, spec): &(String, crate::schema::TensorSpec)| {
            Ok(json!({"dtype": spec.dtype.name(), "shape": job.definition.shape(spec, job.workload.axes())?}))
        };
        let specs = job.definition.outputs().iter().map(one).collect::<Result<Vec<_>>>()?;
        let files = specs.iter().map(|_| self.session.file("out")).collect();
        Ok((Value::Array(specs), files))
    }

    /// The reference's outputs and time.
    fn refer(&self, job: &Job<'_>, trial: &mut Trial, reference: &mut Option<Worker>) -> Result<()> {
        let fail = |why: String| Error::refused("reference", format!("`{}`: {why}", job.definition.name()));
        let worker = match reference {
            Some(worker) => worker,
            None => {
                let started = self.start(job.definition, &reference_solution(job.definition)?);
                reference.insert(started.map_err(|(_, why)| fail(why))?)
            }
        };
        let (outputs, files) = self.outputs(job)?;
        // A sampler's outputs are judged by what they were drawn from.
        let sampling = job.definition.op_type() == "sampling";
        for (i, roll) in [[0, 0], trial.rolls[trial.keep]].into_iter().enumerate() {
            if sampling && i > 0 {
                break;
            }
            let question =
                json!({"op": "run", "inputs": trial.specs, "roll": roll, "outputs": outputs, "files": files});
            let answer = worker.ask(&question, self.limits()).map_err(|e| fail(ended(&e)))?;
            if let Some(log) = answer["log"].as_str() {
                return Err(fail(log.into()));
            }
            trial
                .edited
                .extend(answer["edited"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned));
            trial.want[i] = match read(job, &answer["outputs"], &files) {
                Ok(want) => want,
                Err((_, why)) => return Err(fail(why)),
            };
        }
        if self.config.profile_baseline {
            let question = json!({
                "op": "time", "inputs": trial.specs, "outputs": outputs, "rolls": trial.rolls, "warmup": job.plan.warmup,
                "keep": [], "files": [], "cold": self.cold,
            });
            let answer = worker.ask(&question, self.limits()).map_err(|e| fail(ended(&e)))?;
            trial.reference_ms =
                median(&answer["times"]).ok_or_else(|| fail(format!("could not be timed: {}", answer["log"])))?;
        }
        Ok(())
    }

    /// One trial of a solution: checked, then timed, and what was timed checked.
    fn attempt(&self, job: &Job<'_>, trial: &Trial, a: &mut Attempt<'_>) -> std::result::Result<(), (Status, String)> {
        let broken = |e: Error| (Status::RuntimeError, e.to_string());
        let launch = build::launch(job.definition, a.solution, &AxisFacts(job.definition, job.workload))
            .map_err(|e| (Status::CompileError, e.to_string()))?;
        let (outputs, files) = self.outputs(job).map_err(broken)?;
        let question = json!({
            "op": "run", "inputs": trial.specs, "roll": [0, 0], "outputs": outputs, "files": files, "launch": launch,
        });
        let answer = self.ask(a, &question)?;
        a.checked_ms = a.checked_ms.max(answer["ms"].as_f64().unwrap_or(0.0));
        let got = read(job, &answer["outputs"], &files)?;
        edits(&answer, trial)?;
        self.judge(job, trial, a, &got, 0)?;
        if job.definition.op_type() == "sampling" {
            self.draw(job, trial, a)?;
        }
        let question = json!({
            "op": "time", "inputs": trial.specs, "outputs": outputs, "rolls": trial.rolls, "warmup": job.plan.warmup,
            "keep": [trial.keep], "files": [files], "cold": self.cold, "launch": launch,
        });
        let answer = self.ask(a, &question)?;
        let got = read(job, &answer["kept"][0], &files)?;
        edits(&answer, trial)?;
        self.judge(job, trial, a, &got, 1).map_err(|(status, why)| (status, format!("in a timed call: {why}")))?;
        if answer["late"] == true {
            // Right when the call returned, and then changed: as wrong as if it had never been right.
            a.correctness.max_absolute_error = f64::NAN;
            a.correctness.max_relative_error = f64::NAN;
            return Err((Status::IncorrectNumerical, "an output was written after the call had returned".into()));
        }
        // An idle device synchronizes in under 20 µs.
        let leak = answer["leak_us"].as_f64().unwrap_or(0.0);
        if leak > 50.0 {
            let why = format!(
                "the device was still at work {leak:.0} µs after the call's stream was done: another stream was left running"
            );
            return Err((Status::RuntimeError, why));
        }
        let none = || (Status::RuntimeError, "no call was timed".to_owned());
        a.times.push(median(&answer["times"]).ok_or_else(none)?);
        Ok(())
    }

    fn ask(&self, a: &mut Attempt<'_>, question: &Value) -> std::result::Result<Value, (Status, String)> {
        let time = a.deadline.saturating_duration_since(Instant::now());
        let worker = a.worker.as_mut().ok_or((Status::RuntimeError, "there is no worker".to_owned()))?;
        match worker.ask(question, Limits { time, ..self.limits() }) {
            Ok(answer) => match answer["log"].as_str() {
                None => Ok(answer),
                Some(log) => Err((Status::RuntimeError, log.to_owned())),
            },
            Err(Ended::Timeout) => Err((Status::Timeout, format!("took more than {:?}", self.config.timeout))),
            Err(Ended::Failed(why)) => Err((Status::RuntimeError, why)),
        }
    }

    /// Compares outputs: of the inputs as they are (`which` 0), or of the timed call (1).
    fn judge(
        &self,
        job: &Job<'_>,
        trial: &Trial,
        a: &mut Attempt<'_>,
        got: &[Array],
        which: usize,
    ) -> std::result::Result<(), (Status, String)> {
        let sampling = job.definition.op_type() == "sampling";
        let custom = self.config.evaluators.get(job.definition.op_type());
        let moved;
        let inputs = if which == 0 || (custom.is_none() && !sampling) {
            &trial.inputs
        } else {
            moved = rolled(&trial.inputs, trial.rolls[trial.keep]);
            &moved
        };
        let verdict = match custom {
            Some(custom) => custom(job.definition, inputs, got, &trial.want[which], job.plan.tolerance),
            None if sampling => allowed(inputs, got),
            None => compare_all(job.definition, got, &trial.want[which], job.plan.tolerance),
        };
        let (correctness, wrong) = match verdict {
            Verdict::Right(c) => (c, None),
            Verdict::Wrong(c, why) => (c, Some(why)),
        };
        let larger = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
        a.correctness.max_absolute_error = larger(a.correctness.max_absolute_error, correctness.max_absolute_error);
        a.correctness.max_relative_error = larger(a.correctness.max_relative_error, correctness.max_relative_error);
        if let Some(extra) = correctness.extra {
            a.correctness.extra.get_or_insert_default().extend(extra);
        }
        wrong.map_or(Ok(()), |why| Err((Status::IncorrectNumerical, why)))
    }

    /// Whether a sampler draws what it should: many draws of two rows, in parts of equal mass.
    fn draw(&self, job: &Job<'_>, trial: &Trial, a: &mut Attempt<'_>) -> std::result::Result<(), (Status, String)> {
        let broken = |e: Error| (Status::RuntimeError, e.to_string());
        let probs = &trial.inputs[0].array;
        let (batch, vocab) = (probs.shape()[0], probs.shape().last().copied().unwrap_or(1));
        let rows = batch.min(2);
        // As many rows to a call as 64 MiB of probabilities have.
        let tile = ((64 << 20) / (vocab * 4)).clamp(1, job.plan.draws).next_multiple_of(rows);
        let tiled: Vec<Ready> = trial
            .inputs
            .iter()
            .map(|input| {
                let mut shape = input.array.shape().to_vec();
                if shape.first() != Some(&batch) {
                    return Ok(input.clone());
                }
                shape[0] = tile;
                let mut array = Array::zeros(input.array.dtype(), &shape)?;
                let row = input.array.bytes().len() / batch;
                for (i, to) in array.bytes_mut().chunks_exact_mut(row).enumerate() {
                    to.copy_from_slice(&input.array.bytes()[i % rows * row..][..row]);
                }
                Ok(Ready { array, ..input.clone() })
            })
            .collect::<Result<_>>()
            .map_err(broken)?;
        let specs = self.write(&tiled).map_err(broken)?;
        let file = self.session.file("out");
        let dtype = job.definition.outputs()[0].1.dtype;
        let question = json!({
            "op": "run", "inputs": specs, "roll": [0, 0], "files": [file], "outputs": [{"dtype": dtype.name(), "shape": [tile]}],
        });
        let mut draws = vec![Vec::new(); rows];
        let asked = (|| {
            while draws[0].len() < job.plan.draws {
                self.ask(a, &question)?;
                let bytes = fs::read(&file).map_err(|e| broken(Error::io(&file)(e)))?;
                let ids = Array::from_bytes(dtype, &[tile], &bytes).map_err(broken)?;
                (0..tile).for_each(|i| draws[i % rows].push(ids.integer(i)));
            }
            Ok(())
        })();
        for spec in specs.as_array().into_iter().flatten().filter_map(|s| s["file"].as_str()) {
            let _ = fs::remove_file(spec);
        }
        asked?;
        let (mut worst, mut furthest) = (0f64, f64::NEG_INFINITY);
        for (row, draws) in draws.iter().enumerate() {
            let target =
                Target::new(&trial.inputs, row).ok_or((Status::RuntimeError, "there are no `probs`".to_owned()))?;
            let (tvd, z) = target.distance(draws);
            let stray = draws.iter().find(|t| !target.allows(**t));
            worst = worst.max(tvd);
            furthest = furthest.max(z);
            let extra = a.correctness.extra.get_or_insert_default();
            extra.insert("tvd".into(), json!(worst));
            extra.insert("z".into(), json!(furthest));
            if let Some(token) = stray {
                return Err((Status::IncorrectNumerical, format!("row {row}: token {token} should never be drawn")));
            }
            // 6 standard deviations: a right sampler fails once in a billion.
            if z > 6.0 {
                let why =
                    format!("row {row}: {} draws are {z:.1} standard deviations from their distribution", draws.len());
                return Err((Status::IncorrectNumerical, why));
            }
        }
        Ok(())
    }
}

impl<'a> Attempt<'a> {
    fn new(solution: &'a Solution, timeout: Duration) -> Self {
        Self {
            solution,
            worker: None,
            deadline: Instant::now() + timeout,
            times: Vec::new(),
            checked_ms: 0.0,
            correctness: Correctness { max_relative_error: 0.0, max_absolute_error: 0.0, extra: None },
            verdict: None,
        }
    }

    fn finish(self, environment: Environment, printed: String) -> Evaluation {
        if let Some((status, why)) = self.verdict {
            let bare = Evaluation::failed(status, environment.clone(), why.clone());
            return bare.unwrap_or_else(|| Evaluation::incorrect(environment, why, self.correctness));
        }
        // Own times and the reference's, in turn.
        let mean = |from: usize| {
            let of: Vec<f64> = self.times.iter().skip(from).step_by(2).copied().collect();
            of.iter().sum::<f64>() / of.len().max(1) as f64
        };
        let (latency_ms, reference_latency_ms) = (mean(0), mean(1));
        let speedup_factor = if latency_ms > 0.0 { reference_latency_ms / latency_ms } else { 0.0 };
        let mut log = printed;
        if self.checked_ms > 100.0 && self.checked_ms > 100.0 * latency_ms {
            log.push_str(&format!(
                "note: a call that was only checked took {:.1} ms, timed ones {latency_ms:.3} ms\n",
                self.checked_ms
            ));
        }
        let performance = Performance { latency_ms, reference_latency_ms, speedup_factor };
        Evaluation::passed(environment, log, self.correctness, performance)
    }
}

/// The reference as a solution: Python that returns its outputs.
pub fn reference_solution(definition: &Definition) -> Result<Solution> {
    Solution::from_value(&json!({
        "name": format!("{}__reference", definition.name()), "definition": definition.name(), "author": "__builtin__",
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run",
            "destination_passing_style": false},
        "sources": [{"path": "main.py", "content": definition.reference()}],
    }))
}

fn ended(end: &Ended) -> String {
    match end {
        Ended::Timeout => "took too long".into(),
        Ended::Failed(why) => why.clone(),
    }
}

/// Outputs that a worker left in files, if they have the shapes and types they should.
fn read(job: &Job<'_>, described: &Value, files: &[PathBuf]) -> std::result::Result<Vec<Array>, (Status, String)> {
    let broken = |e: Error| (Status::RuntimeError, e.to_string());
    let described = described.as_array().map_or(&[][..], Vec::as_slice);
    if described.len() != job.definition.outputs().len() {
        let why = format!("{} outputs, not {}", described.len(), job.definition.outputs().len());
        return Err((Status::RuntimeError, why));
    }
    let one = |((name, spec), (got, file)): (&(String, crate::schema::TensorSpec), (&Value, &PathBuf))| {
        let shape = job.definition.shape(spec, job.workload.axes()).map_err(broken)?;
        if got["shape"] != json!(shape) {
            return Err((Status::IncorrectShape, format!("output `{name}` has shape {}, not {shape:?}", got["shape"])));
        }
        if got["dtype"] != spec.dtype.name() {
            return Err((
                Status::IncorrectDtype,
                format!("output `{name}` is of {}, not {}", got["dtype"], spec.dtype),
            ));
        }
        let bytes = fs::read(file).map_err(|e| broken(Error::io(file)(e)))?;
        Array::from_bytes(spec.dtype, &shape, &bytes).map_err(broken)
    };
    job.definition.outputs().iter().zip(described.iter().zip(files)).map(one).collect()
}

/// Refuses a solution that writes to inputs which the reference leaves alone.
fn edits(answer: &Value, trial: &Trial) -> std::result::Result<(), (Status, String)> {
    let edited = answer["edited"].as_array().into_iter().flatten().filter_map(Value::as_str);
    match edited.into_iter().find(|name| !trial.edited.contains(*name)) {
        Some(name) => {
            Err((Status::RuntimeError, format!("it wrote to its input `{name}`, which the reference does not")))
        }
        None => Ok(()),
    }
}

/// Inputs as a timed call has them.
fn rolled(inputs: &[Ready], roll: [u64; 2]) -> Vec<Ready> {
    let roll = crate::array::Roll { first: roll[0] as usize, last: roll[1] as usize };
    let one = |input: &Ready| {
        let mut moved = input.clone();
        if input.random && !input.scalar {
            input.array.rolled_into(roll, &mut moved.array);
        }
        moved
    };
    inputs.iter().map(one).collect()
}

/// Whether every token may be drawn in its row.
fn allowed(inputs: &[Ready], got: &[Array]) -> Verdict {
    let right = Correctness { max_relative_error: 0.0, max_absolute_error: 0.0, extra: None };
    let wrong = Correctness { max_relative_error: f64::NAN, max_absolute_error: f64::NAN, extra: None };
    let Some(ids) = got.first() else { return Verdict::Wrong(wrong, "there is no output".into()) };
    for row in 0..ids.len() {
        let token = ids.integer(row);
        if !Target::new(inputs, row).is_some_and(|target| target.allows(token)) {
            return Verdict::Wrong(wrong, format!("row {row}: token {token} should never be drawn"));
        }
    }
    Verdict::Right(right)
}

fn median(times: &Value) -> Option<f64> {
    let mut times: Vec<f64> = times.as_array()?.iter().filter_map(Value::as_f64).collect();
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    match times.len() {
        0 => None,
        n if n % 2 == 1 => Some(times[middle]),
        _ => Some((times[middle - 1] + times[middle]) / 2.0),
    }
}

/// The CPU's name.
fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    name.filter(|n| !n.is_empty()).unwrap_or_else(|| "CPU".into())
}

/// Twice the bytes of the last cache, from 16 to 128 MiB: servers report the cache of a socket, of which a process has a part.
fn last_level_cache() -> u64 {
    let size =
        (0..5).rev().find_map(|i| fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok());
    let kib = size.and_then(|s| s.trim().trim_end_matches('K').parse::<u64>().ok()).unwrap_or(32 << 10);
    (2 * kib << 10).clamp(16 << 20, 128 << 20)
}
