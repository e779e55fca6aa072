//! Everything that is wrong or missing in a trace set's folder.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::array::Array;
use crate::error::{Error, Result};
use crate::inputs::Known;
use crate::schema::{Definition, Input, Status, Workload};
use crate::traceset::TraceSet;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Something that is usually there is not.
    Warning,
    /// Something breaks a rule.
    Error,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Definition it belongs to, or the file that is wrong.
    pub about: String,
    /// What it is.
    pub message: String,
}

/// What [`validate`] found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All findings.
    pub findings: Vec<Finding>,
    /// Definitions that were looked at.
    pub definitions: Vec<String>,
    /// Workloads that were looked at.
    pub workloads: usize,
    /// Solutions and traces that were looked at.
    pub solutions: usize,
    /// Traces that were looked at.
    pub traces: usize,
}

impl Report {
    /// The worst of a definition's findings.
    pub fn severity(&self, about: &str) -> Option<Severity> {
        self.findings.iter().filter(|f| f.about == about).map(|f| f.severity).max()
    }

    /// Definitions without findings, with warnings, and with errors; files that could not be read count as errors.
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for name in &self.definitions {
            counts[self.severity(name).map_or(0, |s| 1 + s as usize)] += 1;
        }
        counts[2] += self.findings.iter().filter(|f| !self.definitions.contains(&f.about)).count();
        counts
    }

    /// It as JSON: a status and messages for each definition.
    pub fn to_value(&self) -> Value {
        let mut by: BTreeMap<&str, Vec<Value>> = self.definitions.iter().map(|d| (d.as_str(), Vec::new())).collect();
        for f in &self.findings {
            by.entry(&f.about).or_default().push(json!({"level": f.severity.to_string(), "message": f.message}));
        }
        let entry = |(name, messages): (&str, Vec<Value>)| {
            let status = self.severity(name).map_or("ok".into(), |s| s.to_string());
            (name.to_owned(), json!({"status": status, "messages": messages}))
        };
        json!({"definitions": by.into_iter().map(entry).collect::<serde_json::Map<_, _>>()})
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// Reads a folder and tells all that is wrong with it.
pub fn validate(root: impl AsRef<Path>) -> Result<(TraceSet, Report)> {
    let (set, faults) = TraceSet::load_lenient(root.as_ref())?;
    let mut report = Report::default();
    for fault in faults {
        let (about, message) = match &fault {
            Error::Schema { file, field, rule } => (file.clone(), format!("`{field}`: {rule}")),
            other => (String::new(), other.to_string()),
        };
        report.findings.push(Finding { severity: Severity::Error, about, message });
    }
    for definition in set.definitions() {
        report.definitions.push(definition.name().to_owned());
        check(&set, definition, &mut report);
    }
    for solution in set.solutions().filter(|s| set.definition(s.definition()).is_none()) {
        let message = format!("solution `{}` is of a definition that is not there", solution.name());
        report.findings.push(Finding { severity: Severity::Error, about: solution.definition().into(), message });
    }
    Ok((set, report))
}

fn check(set: &TraceSet, definition: &Definition, report: &mut Report) {
    let name = definition.name();
    let mut tell = |severity, message: String| {
        report.findings.push(Finding { severity, about: name.into(), message });
    };
    if definition.description().is_none_or(str::is_empty) {
        tell(Severity::Warning, "has no description".into());
    }
    let mut workloads = 0;
    for workload in set.workloads_of(name) {
        workloads += 1;
        for fault in workload.faults(definition) {
            tell(Severity::Error, format!("workload {}: {fault}", workload.uuid()));
        }
        match blobs(set.root(), definition, workload) {
            Ok((arrays, faults)) => {
                faults
                    .into_iter()
                    .for_each(|(severity, m)| tell(severity, format!("workload {}: {m}", workload.uuid())));
                for broken in definition.broken_constraints(&Known { definition, workload, arrays: &arrays }) {
                    tell(Severity::Error, format!("workload {}: `{}` does not hold", workload.uuid(), broken.text));
                }
            }
            Err(e) => tell(Severity::Error, format!("workload {}: {e}", workload.uuid())),
        }
    }
    if workloads == 0 {
        tell(Severity::Warning, "has no workloads".into());
    }
    let (mut solutions, mut traces) = (0, 0);
    for solution in set.solutions_of(name) {
        solutions += 1;
        let done = set.traces_of(name).filter(|t| t.solution() == Some(solution.name())).count();
        if done < workloads {
            tell(
                Severity::Warning,
                format!("solution `{}` has traces of {done} of {workloads} workloads", solution.name()),
            );
        }
    }
    for trace in set.traces_of(name) {
        traces += 1;
        let solution = trace.solution().unwrap_or("");
        match set.solution(solution) {
            Some(s) if s.definition() != name => {
                tell(Severity::Error, format!("a trace of `{solution}`, which is of `{}`", s.definition()));
            }
            Some(s) if s.author() == crate::score::BASELINE => {
                if let Some(e) = trace.evaluation().filter(|e| e.status() != Status::Passed) {
                    tell(Severity::Warning, format!("baseline `{solution}` ended with {}", e.status().name()));
                }
            }
            Some(_) => {}
            None => tell(Severity::Error, format!("a trace of `{solution}`, which is not there")),
        }
    }
    if !set.solutions_of(name).any(|s| s.author() == crate::score::BASELINE) {
        tell(Severity::Warning, "has no baseline solution".into());
    }
    report.workloads += workloads;
    report.solutions += solutions;
    report.traces += traces;
}

/// What a workload's files hold, for its constraints, and what is wrong with them.
type Blobs = (Vec<(String, Array)>, Vec<(Severity, String)>);

fn blobs(root: &Path, definition: &Definition, workload: &Workload) -> Result<Blobs> {
    let (mut arrays, mut faults) = (Vec::new(), Vec::new());
    for (name, input) in workload.inputs() {
        let (Input::Safetensors { path, tensor_key }, Some(spec)) = (input, definition.input(name)) else { continue };
        let file = root.join(path);
        if !file.exists() {
            faults.push((Severity::Warning, format!("input `{name}`: {path} is not there")));
            continue;
        }
        let bytes = fs::read(&file).map_err(Error::io(&file))?;
        let mut wrong = |what: String| faults.push((Severity::Error, format!("input `{name}` {what}")));
        match crate::inputs::tensor_of(&bytes, path, tensor_key) {
            Err(e) => wrong(format!("cannot be read: {e}")),
            Ok(tensor) => {
                let want = definition.shape(spec, workload.axes())?;
                if tensor.shape() != want {
                    wrong(format!("has shape {:?}, not {want:?}", tensor.shape()));
                }
                if tensor.dtype() != spec.dtype {
                    wrong(format!("is of {}, not {}", tensor.dtype(), spec.dtype));
                } else {
                    arrays.push((name.clone(), tensor));
                }
            }
        }
    }
    Ok((arrays, faults))
}
