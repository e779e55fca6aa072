//! [`Trace`]: how a solution went on a workload.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::read::{At, number, parse};
use super::workload::Workload;
use crate::error::Result;

named! {
    /// How an evaluation ended.
    pub enum Status {
        /// Right, and timed.
        Passed = "PASSED",
        /// An output of another shape.
        IncorrectShape = "INCORRECT_SHAPE",
        /// An output of another element type.
        IncorrectDtype = "INCORRECT_DTYPE",
        /// Outputs too far from the reference's.
        IncorrectNumerical = "INCORRECT_NUMERICAL",
        /// It failed when it ran, or broke the rules of a run.
        RuntimeError = "RUNTIME_ERROR",
        /// It could not be built.
        CompileError = "COMPILE_ERROR",
        /// It took longer than allowed.
        Timeout = "TIMEOUT",
    }
}

/// The largest errors of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Correctness {
    /// Largest `|got - want| / (|want| + 1e-8)`.
    pub max_relative_error: f64,
    /// Largest `|got - want|`.
    pub max_absolute_error: f64,
    /// What an evaluator adds.
    pub extra: Option<Map<String, Value>>,
}

/// Times of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Performance {
    /// The solution's, milliseconds.
    pub latency_ms: f64,
    /// The reference's, milliseconds; 0 when it was not timed.
    pub reference_latency_ms: f64,
    /// Their ratio.
    pub speedup_factor: f64,
}

/// Where an evaluation ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Name of the device.
    pub hardware: String,
    /// Versions of libraries.
    pub libs: BTreeMap<String, String>,
}

/// The result of running a solution on a workload; what it holds follows from its status.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    status: Status,
    environment: Environment,
    timestamp: String,
    log: String,
    correctness: Option<Correctness>,
    performance: Option<Performance>,
}

impl Evaluation {
    fn new(status: Status, environment: Environment, log: String) -> Self {
        Self { status, environment, timestamp: now(), log, correctness: None, performance: None }
    }

    /// Right, and timed.
    pub fn passed(environment: Environment, log: String, correctness: Correctness, performance: Performance) -> Self {
        Self {
            correctness: Some(correctness),
            performance: Some(performance),
            ..Self::new(Status::Passed, environment, log)
        }
    }

    /// Too far from the reference.
    pub fn incorrect(environment: Environment, log: String, correctness: Correctness) -> Self {
        Self { correctness: Some(correctness), ..Self::new(Status::IncorrectNumerical, environment, log) }
    }

    /// Any other end; `None` for the two statuses that have numbers.
    pub fn failed(status: Status, environment: Environment, log: String) -> Option<Self> {
        let bare = !matches!(status, Status::Passed | Status::IncorrectNumerical);
        bare.then(|| Self::new(status, environment, log))
    }

    fn read(at: &At<'_>) -> Result<Self> {
        let status = at.get("status")?.one_of(&Status::ALL, Status::name)?;
        let (correctness, performance) = (at.optional("correctness")?, at.optional("performance")?);
        let wants_correctness = matches!(status, Status::Passed | Status::IncorrectNumerical);
        let wants_performance = status == Status::Passed;
        for (field, there, wanted) in [
            ("correctness", correctness.is_some(), wants_correctness),
            ("performance", performance.is_some(), wants_performance),
        ] {
            if there != wanted {
                let rule = if wanted { "is required" } else { "must be null" };
                let at = at.find(field)?.unwrap_or_else(|| at.clone());
                return Err(at.refuse(format!("`{field}` {rule} with status {}", status.name())));
            }
        }
        let environment = at.get("environment")?;
        let libs = match environment.find("libs")? {
            Some(at) => at.entries()?.into_iter().map(|(name, at)| Ok((name, at.text()?))).collect::<Result<_>>()?,
            None => BTreeMap::new(),
        };
        Ok(Self {
            status,
            environment: Environment { hardware: environment.get("hardware")?.non_empty()?, libs },
            timestamp: at.get("timestamp")?.non_empty()?,
            log: at.find("log")?.map_or(Ok(String::new()), |at| at.text())?,
            correctness: correctness.map(|at| read_correctness(&at)).transpose()?,
            performance: performance.map(|at| read_performance(&at)).transpose()?,
        })
    }

    fn to_value(&self) -> Value {
        let correctness = self.correctness.as_ref().map(|c| {
            json!({
                "max_relative_error": number(c.max_relative_error),
                "max_absolute_error": number(c.max_absolute_error),
                "extra": c.extra,
            })
        });
        let performance = self.performance.map(|p| {
            json!({
                "latency_ms": p.latency_ms,
                "reference_latency_ms": p.reference_latency_ms,
                "speedup_factor": p.speedup_factor,
            })
        });
        json!({
            "status": self.status.name(),
            "environment": {"hardware": self.environment.hardware, "libs": self.environment.libs},
            "timestamp": self.timestamp,
            "log": self.log,
            "correctness": correctness,
            "performance": performance,
        })
    }

    /// How it ended.
    pub fn status(&self) -> Status {
        self.status
    }

    getters! {
        /// Where it ran.
        environment: Environment,
        /// When, as ISO 8601 in UTC.
        timestamp: str,
        /// What it printed, and what the benchmark has to say.
        log: str,
    }

    /// Its errors, where it got as far as being compared.
    pub fn correctness(&self) -> Option<&Correctness> {
        self.correctness.as_ref()
    }

    /// Its times, if it passed.
    pub fn performance(&self) -> Option<&Performance> {
        self.performance.as_ref()
    }
}

fn read_correctness(at: &At<'_>) -> Result<Correctness> {
    let error = |name| at.find(name)?.map_or(Ok(0.0), |at| at.measure());
    Ok(Correctness {
        max_relative_error: error("max_relative_error")?,
        max_absolute_error: error("max_absolute_error")?,
        extra: at.optional("extra")?.map(|at| at.object().cloned()).transpose()?,
    })
}

fn read_performance(at: &At<'_>) -> Result<Performance> {
    // Upstream's writer leaves null for infinity.
    let time = |name| at.optional(name)?.map_or(Ok(0.0), |at| at.measure());
    Ok(Performance {
        latency_ms: time("latency_ms")?,
        reference_latency_ms: time("reference_latency_ms")?,
        speedup_factor: time("speedup_factor")?,
    })
}

/// A workload, alone or with a solution and how it went.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    text: String,
    definition: String,
    workload: Workload,
    result: Option<(String, Evaluation)>,
}

impl Trace {
    /// Reads a line; `file` is for messages.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        Self::read(text.into(), &parse(text, file)?, file)
    }

    /// A trace from its JSON.
    pub fn from_value(value: &Value) -> Result<Self> {
        Self::read(value.to_string(), value, "trace")
    }

    /// A workload of a definition.
    pub fn of_workload(definition: &str, workload: &Workload) -> Result<Self> {
        let workload = workload.to_value();
        Self::from_value(&json!({"definition": definition, "workload": workload, "solution": null, "evaluation": null}))
    }

    /// How `solution` went on `workload`.
    pub fn new(definition: &str, workload: &Workload, solution: &str, evaluation: &Evaluation) -> Result<Self> {
        let (workload, evaluation) = (workload.to_value(), evaluation.to_value());
        Self::from_value(
            &json!({"definition": definition, "workload": workload, "solution": solution, "evaluation": evaluation}),
        )
    }

    fn read(text: String, value: &Value, file: &str) -> Result<Self> {
        let at = At::root(value, file);
        let (solution, evaluation) = (at.optional("solution")?, at.optional("evaluation")?);
        let result = match (solution, evaluation) {
            (None, None) => None,
            (Some(solution), Some(evaluation)) => Some((solution.non_empty()?, Evaluation::read(&evaluation)?)),
            (Some(at), None) => return Err(at.refuse("has no `evaluation`")),
            (None, Some(at)) => return Err(at.refuse("has no `solution`")),
        };
        let definition = at.get("definition")?.non_empty()?;
        Ok(Self { workload: Workload::read(&at.get("workload")?)?, definition, result, text })
    }

    /// Its JSON on one line, byte for byte as it was read.
    pub fn to_json(&self) -> &str {
        &self.text
    }

    getters! {
        /// Name of what was computed.
        definition: str,
        /// On what.
        workload: Workload,
    }

    /// Name of the solution, unless this is a workload alone.
    pub fn solution(&self) -> Option<&str> {
        self.result.as_ref().map(|(solution, _)| solution.as_str())
    }

    /// How it went, unless this is a workload alone.
    pub fn evaluation(&self) -> Option<&Evaluation> {
        self.result.as_ref().map(|(_, evaluation)| evaluation)
    }

    /// Whether it is a workload alone.
    pub fn is_workload(&self) -> bool {
        self.result.is_none()
    }

    /// Its errors and times, if it passed.
    pub fn passed(&self) -> Option<(&Correctness, &Performance)> {
        let evaluation = self.evaluation()?;
        Some((evaluation.correctness()?, evaluation.performance()?))
    }
}

/// The time, as ISO 8601 in UTC with microseconds.
pub(crate) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days to a date: years of March to February in eras of 400 (Hinnant's algorithm).
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (date, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = year + era * 400 + u64::from(month <= 2);
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{date:02}T{h:02}:{m:02}:{s:02}.{:06}", since.subsec_micros())
}
