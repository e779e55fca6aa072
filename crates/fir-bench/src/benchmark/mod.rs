//! The benchmark: every solution on every workload, right first, then timed.
//!
//! For each workload and trial:
//!
//! 1. Inputs are drawn from the seed, and the reference runs on them, in a worker of its own.
//! 2. Each solution runs once in its worker; its outputs are compared.
//! 3. It is timed. Every timed call has inputs that no call had before (all but whole numbers of files are moved around by numbers
//!    it does not know; where nothing can be, the log says so), in cold caches, with its outputs poisoned; one call of each trial, chosen beforehand and told to nobody,
//!    has its outputs compared with the reference's on the same inputs, looked at again a moment later, and its inputs
//!    compared with what they were.
//!
//! So what is checked is what was timed. The latency is the median of a trial, averaged over trials.

mod attempt;
mod config;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Instant;

use serde_json::{Value, json};

use self::attempt::{Attempt, Failed, read};
use self::config::Plan;
pub use self::config::{Config, Evaluating};
use crate::array::Array;
use crate::build::{self, Caller};
use crate::error::{Error, Result};
use crate::inputs::{Known, Ready, Rng, make_inputs};
use crate::schema::{Definition, Environment, Solution, Status, Trace, Workload};
use crate::traceset::TraceSet;
use crate::worker::{Ended, Limits, Python, Session, Worker};

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

/// A benchmark in progress on one device.
struct Bench<'a> {
    config: &'a Config,
    device: &'a str,
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

/// A definition with what is run of it.
type Whole = (Definition, Vec<Solution>, Vec<Workload>);

/// Workloads and solutions that have a trace already, by name.
type Had = HashSet<(String, String)>;

/// What a device's thread tells.
enum Told {
    Done(Box<Trace>),
    Skipped {
        definition: String,
        workload: String,
        why: String,
        /// Solutions that were not run for it.
        count: usize,
    },
    /// So many pairs were left out, as they have a trace.
    Had(usize),
}

/// Runs what `config` selects and returns the traces. Several devices share the definitions.
pub fn run(set: &mut TraceSet, config: &Config, on: &mut dyn FnMut(Event<'_>)) -> Result<Vec<Trace>> {
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
    let benches = config.device.split(',').map(|device| Bench::new(config, device.trim()));
    let benches = benches.collect::<Result<Vec<_>>>()?;
    let had: Had = if config.resume {
        set.traces().filter_map(|t| Some((t.workload().uuid().to_owned(), t.solution()?.to_owned()))).collect()
    } else {
        HashSet::new()
    };
    // Cloned, as traces are added to the set on the way.
    let definitions: Vec<Definition> =
        set.definitions().filter(|d| wanted(&config.definitions, d.name())).cloned().collect();
    let mut jobs: Vec<Whole> = Vec::new();
    for definition in definitions {
        let solutions: Vec<Solution> =
            set.solutions_of(definition.name()).filter(|s| wanted(&config.solutions, s.name())).cloned().collect();
        let workloads: Vec<Workload> = set.workloads_of(definition.name()).cloned().collect();
        jobs.push((definition, solutions, workloads));
    }
    let total = jobs.iter().map(|(_, s, w)| s.len() * w.len()).sum();
    let (mut traces, mut count) = (Vec::new(), 0);
    let root = set.root().to_owned();
    let left = Mutex::new(jobs.iter().filter(|(_, solutions, _)| !solutions.is_empty()));
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        for bench in &benches {
            let (tell, left, had, root) = (tell.clone(), &left, &had, &root);
            scope.spawn(move || {
                let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
                // Nobody listens any more once a trace could not be kept.
                while let Some(job) = next()
                    && bench.definition(job, root, had, &|said| tell.send(said).is_ok())
                {}
            });
        }
        drop(tell);
        for said in told {
            match said {
                Told::Done(trace) => {
                    count += 1;
                    on(Event::Done { trace: &trace, progress: (count, total) });
                    if config.save {
                        set.append(vec![(*trace).clone()])?;
                    } else {
                        set.add_trace((*trace).clone())?;
                    }
                    traces.push(*trace);
                }
                Told::Skipped { definition, workload, why, count: skipped } => {
                    count += skipped;
                    on(Event::Skipped { definition: &definition, workload: &workload, why });
                }
                Told::Had(of) => count += of,
            }
        }
        Ok(traces)
    })
}

#[derive(Clone, Copy)]
struct Job<'a> {
    definition: &'a Definition,
    workload: &'a Workload,
    root: &'a std::path::Path,
    plan: Plan,
}

impl<'a> Job<'a> {
    fn known(&self) -> Known<'a> {
        Known { definition: self.definition, workload: self.workload, arrays: &[] }
    }
}

impl<'a> Bench<'a> {
    fn new(config: &'a Config, device: &'a str) -> Result<Self> {
        let session = Session::new()?;
        let python = Arc::new(Mutex::new(Python::start(&config.python, &session)?));
        let environment = Environment { hardware: cpu_name(), libs: BTreeMap::new() };
        let mut bench = Self { config, device, session, python, environment, cold: last_level_cache() };
        bench.look_around()?;
        Ok(bench)
    }

    /// Every workload of a definition; whether `tell` listened to the end.
    fn definition(
        &self,
        (definition, solutions, workloads): &Whole,
        root: &std::path::Path,
        had: &Had,
        tell: &dyn Fn(Told) -> bool,
    ) -> bool {
        let mut reference = None;
        let mut workers = HashMap::new();
        let mut broken = HashMap::new();
        for workload in workloads {
            let is_new = |s: &&Solution| !had.contains(&(workload.uuid().to_owned(), s.name().to_owned()));
            let new: Vec<&Solution> = solutions.iter().filter(is_new).collect();
            let mut heard = tell(Told::Had(solutions.len() - new.len()));
            if !new.is_empty() {
                let job = Job { definition, workload, root, plan: self.config.evaluating(definition) };
                heard &= match self.workload(&job, &new, &mut reference, &mut workers, &mut broken) {
                    Ok(found) => found.into_iter().all(|trace| tell(Told::Done(Box::new(trace)))),
                    Err(e) => tell(Told::Skipped {
                        definition: definition.name().to_owned(),
                        workload: workload.uuid().to_owned(),
                        why: e.to_string(),
                        count: new.len(),
                    }),
                };
            }
            if !heard {
                return false;
            }
        }
        true
    }

    fn limits(&self) -> Limits {
        Limits { time: self.config.timeout, memory: self.config.memory }
    }

    /// The device's name and the versions of what runs on it.
    fn look_around(&mut self) -> Result<()> {
        let mut worker = Worker::forked(&self.python, &self.session)?;
        let fail = |why: String| Error::Worker { worker: self.config.python.display().to_string(), why };
        let device = self.device;
        let answer = worker.ask(&json!({"op": "info", "device": device}), self.limits());
        let answer = answer.map_err(|e| fail(format!("device {device}: {}", ended(&e))))?;
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
    fn start(&self, definition: &Definition, solution: &Solution) -> std::result::Result<Worker, Failed> {
        let compile = |why: String| (Status::CompileError, why);
        let request = build::build(definition, solution, self.device).map_err(|e| compile(e.to_string()))?;
        let worker = match build::caller(solution) {
            Caller::Python => Worker::forked(&self.python, &self.session),
            Caller::Native => Worker::native(&self.config.native, &self.session),
        };
        let mut worker = worker.map_err(|e| (Status::RuntimeError, e.to_string()))?;
        match worker.ask(&request, self.limits()) {
            Ok(_) => Ok(worker),
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
        broken: &mut HashMap<String, Failed>,
    ) -> Result<Vec<Trace>> {
        if let Some(c) = job.definition.broken_constraints(&job.known()).first() {
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
        let specs = self.session.write(&inputs)?;
        let mut trial =
            Trial { inputs, specs, rolls, keep, want: Default::default(), reference_ms: 0.0, edited: HashSet::new() };
        let done = self.refer(job, &mut trial, reference);
        if done.is_err() {
            self.forget(&trial);
            *reference = None;
        }
        done.map(|()| trial)
    }

    fn forget(&self, trial: &Trial) {
        for spec in trial.specs.as_array().into_iter().flatten() {
            if let Some(file) = spec["file"].as_str() {
                let _ = fs::remove_file(file);
            }
        }
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
        let (outputs, files) = self.session.outputs(job.definition, job.workload)?;
        // A sampler's outputs are judged by what they were drawn from.
        let sampling = job.definition.op_type() == "sampling";
        for (i, roll) in [[0, 0], trial.rolls[trial.keep]].into_iter().enumerate() {
            if sampling && i > 0 {
                break;
            }
            let question =
                json!({"op": "run", "inputs": trial.specs, "roll": roll, "outputs": outputs, "files": files});
            let answer = worker.ask(&question, self.limits()).map_err(|e| fail(ended(&e)))?;
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
            trial.reference_ms = median(&answer["times"]).ok_or_else(|| fail("could not be timed".into()))?;
        }
        Ok(())
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
pub fn cpu_name() -> String {
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
    ((2 * kib) << 10).clamp(16 << 20, 128 << 20)
}
