//! A solution on a workload: checked, timed, and what was timed checked.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Bench, Job, Trial, median};
use crate::array::{Array, Roll};
use crate::build;
use crate::error::{Error, Result};
use crate::evaluate::{Target, Verdict, compare_all, compare_indices};
use crate::inputs::Ready;
use crate::schema::{Correctness, Environment, Evaluation, Performance, Solution, Status, TensorSpec};
use crate::worker::{Ended, Limits, Worker};

/// Why a solution failed.
pub(super) type Failed = (Status, String);

/// A solution on a workload, so far.
pub(super) struct Attempt<'a> {
    pub(super) solution: &'a Solution,
    pub(super) worker: Option<Worker>,
    pub(super) deadline: Instant,
    /// Its time in each trial, and the reference's.
    pub(super) times: Vec<[f64; 2]>,
    pub(super) checked_ms: f64,
    /// Whether its timed calls had inputs of their own.
    pub(super) fresh: bool,
    pub(super) correctness: Correctness,
    pub(super) verdict: Option<Failed>,
}

impl Bench<'_> {
    /// One trial of a solution: checked, then timed, and what was timed checked.
    pub(super) fn attempt(&self, job: &Job<'_>, trial: &Trial, a: &mut Attempt<'_>) -> std::result::Result<(), Failed> {
        let broken = |e: Error| (Status::RuntimeError, e.to_string());
        let launch = build::launch(job.definition, a.solution, &job.known())
            .map_err(|e| (Status::CompileError, e.to_string()))?;
        let (outputs, files) = self.session.outputs(job.definition, job.workload).map_err(broken)?;
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
        a.fresh &= trial.inputs.iter().any(|i| i.random && i.array.len() > 1);
        let none = || (Status::RuntimeError, "no call was timed".to_owned());
        a.times.push([median(&answer["times"]).ok_or_else(none)?, trial.reference_ms]);
        Ok(())
    }

    fn ask(&self, a: &mut Attempt<'_>, question: &Value) -> std::result::Result<Value, Failed> {
        let time = a.deadline.saturating_duration_since(Instant::now());
        let worker = a.worker.as_mut().ok_or((Status::RuntimeError, "there is no worker".to_owned()))?;
        match worker.ask(question, Limits { time, ..self.limits() }) {
            Ok(answer) => Ok(answer),
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
    ) -> std::result::Result<(), Failed> {
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
            None if job.definition.name().starts_with("dsa_topk_indexer") => {
                compare_indices(job.definition, got, &trial.want[which])
            }
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
    fn draw(&self, job: &Job<'_>, trial: &Trial, a: &mut Attempt<'_>) -> std::result::Result<(), Failed> {
        let broken = |e: Error| (Status::RuntimeError, e.to_string());
        let probs = trial.inputs.iter().find(|i| i.name == "probs").map(|i| i.array.shape());
        let (Some(&[batch, vocab]), [(_, drawn)]) = (probs, job.definition.outputs()) else {
            let why = "a sampler has an input `probs` of two axes and one output".to_owned();
            return Err((Status::RuntimeError, why));
        };
        if batch == 0 || vocab == 0 {
            return Ok(());
        }
        let rows = batch.min(2);
        // As many rows to a call as 64 MiB of probabilities have.
        let tile = ((64 << 20) / (vocab * 4)).clamp(1, job.plan.draws).next_multiple_of(rows);
        let tiled: Vec<Ready> = trial
            .inputs
            .iter()
            .map(|input| {
                let mut shape = input.array.shape().to_vec();
                if shape.first() != Some(&batch) || input.array.is_empty() {
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
        let specs = self.session.write(&tiled).map_err(broken)?;
        let file = self.session.file("out");
        let dtype = drawn.dtype;
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
    pub(super) fn new(solution: &'a Solution, timeout: Duration) -> Self {
        Self {
            solution,
            worker: None,
            deadline: Instant::now() + timeout,
            times: Vec::new(),
            checked_ms: 0.0,
            fresh: true,
            correctness: Correctness { max_relative_error: 0.0, max_absolute_error: 0.0, extra: None },
            verdict: None,
        }
    }

    pub(super) fn finish(self, environment: Environment, printed: String) -> Evaluation {
        if let Some((status, why)) = self.verdict {
            let bare = Evaluation::failed(status, environment.clone(), why.clone());
            return bare.unwrap_or_else(|| Evaluation::incorrect(environment, why, self.correctness));
        }
        let mean = |which: usize| self.times.iter().map(|t| t[which]).sum::<f64>() / self.times.len().max(1) as f64;
        let (latency_ms, reference_latency_ms) = (mean(0), mean(1));
        let speedup_factor = if latency_ms > 0.0 { reference_latency_ms / latency_ms } else { 0.0 };
        let mut log = printed;
        if self.checked_ms > 100.0 && self.checked_ms > 100.0 * latency_ms {
            log.push_str(&format!(
                "note: a call that was only checked took {:.1} ms, timed ones {latency_ms:.3} ms\n",
                self.checked_ms
            ));
        }
        if !self.fresh {
            log.push_str("note: all timed calls had the same inputs: the workload draws none, and its files have whole numbers alone\n");
        }
        let performance = Performance { latency_ms, reference_latency_ms, speedup_factor };
        Evaluation::passed(environment, log, self.correctness, performance)
    }
}

/// Outputs that a worker left in files, if they have the shapes and types they should.
pub(super) fn read(job: &Job<'_>, described: &Value, files: &[PathBuf]) -> std::result::Result<Vec<Array>, Failed> {
    let broken = |e: Error| (Status::RuntimeError, e.to_string());
    let described = described.as_array().map_or(&[][..], Vec::as_slice);
    if described.len() != job.definition.outputs().len() {
        let why = format!("{} outputs, not {}", described.len(), job.definition.outputs().len());
        return Err((Status::RuntimeError, why));
    }
    let one = |((name, spec), (got, file)): (&(String, TensorSpec), (&Value, &PathBuf))| {
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
fn edits(answer: &Value, trial: &Trial) -> std::result::Result<(), Failed> {
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
    let roll = Roll { first: roll[0] as usize, last: roll[1] as usize };
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
