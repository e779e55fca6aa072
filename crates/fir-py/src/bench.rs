//! The benchmark of kernels: `fir.bench` is Python over these functions, which take and give JSON.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use fir_bench::benchmark::{self, Config, Evaluating, Event};
use fir_bench::schema::{Definition, Solution, Trace, Workload};
use fir_bench::validate::validate;
use fir_bench::{TraceSet, report};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde_json::Value;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bench_check, module)?)?;
    module.add_function(wrap_pyfunction!(bench_hash, module)?)?;
    module.add_function(wrap_pyfunction!(bench_run, module)?)?;
    module.add_function(wrap_pyfunction!(bench_worker, module)?)?;
    module.add_function(wrap_pyfunction!(bench_validate, module)?)?;
    module.add_function(wrap_pyfunction!(bench_report, module)?)
}

fn wrong(e: impl ToString) -> PyErr {
    PyValueError::new_err(e.to_string())
}

/// Raises what is wrong with the JSON of a definition, solution, workload or trace.
#[pyfunction]
fn bench_check(kind: &str, text: &str) -> PyResult<()> {
    let value: Value = serde_json::from_str(text).map_err(wrong)?;
    match kind {
        "definition" => Definition::from_value(&value).map(drop),
        "solution" => Solution::from_value(&value).map(drop),
        "workload" => Workload::from_value(&value).map(drop),
        "trace" => Trace::from_value(&value).map(drop),
        other => return Err(PyValueError::new_err(format!("{other} is not a kind of document"))),
    }
    .map_err(wrong)
}

/// The content hash of a solution's JSON.
#[pyfunction]
fn bench_hash(text: &str) -> PyResult<String> {
    Solution::parse(text, "solution").map(|s| s.hash()).map_err(wrong)
}

/// Runs a benchmark of the set in `root` as `options`, JSON, say; the traces' JSON.
#[pyfunction]
fn bench_run(py: Python<'_>, root: PathBuf, native: Vec<OsString>, options: &str) -> PyResult<Vec<String>> {
    let o: Value = serde_json::from_str(options).map_err(wrong)?;
    let python = o["python"].as_str().ok_or_else(|| PyValueError::new_err("`python` is missing"))?;
    let names = |field: &str| -> Option<Vec<String>> {
        Some(o[field].as_array()?.iter().filter_map(Value::as_str).map(str::to_owned).collect())
    };
    let evaluating = |o: &Value| {
        let count = |field: &str| o[field].as_u64().map(|n| n as usize);
        Evaluating {
            warmup_runs: count("warmup_runs"),
            iterations: count("iterations"),
            num_trials: count("num_trials"),
            rtol: o["rtol"].as_f64(),
            atol: o["atol"].as_f64(),
            required_matched_ratio: o["required_matched_ratio"].as_f64(),
            sampling_draws: count("sampling_draws"),
        }
    };
    let mut config = Config::new(python, native);
    config.device = o["device"].as_str().unwrap_or("cpu").into();
    config.isolated = o["use_isolated_runner"] == true;
    config.definitions = names("definitions");
    config.solutions = names("solutions");
    config.resume = o["resume"] == true;
    config.save = o["save"] != false;
    config.profile_baseline = o["profile_baseline"] != false;
    config.timeout = Duration::from_secs(o["timeout_seconds"].as_u64().unwrap_or(300));
    config.evaluating = evaluating(&o);
    for (field, layer) in [("op_type_config", &mut config.by_op_type), ("definition_config", &mut config.by_definition)]
    {
        layer.extend(o[field].as_object().into_iter().flatten().map(|(name, o)| (name.clone(), evaluating(o))));
    }
    py.detach(|| {
        let mut set = TraceSet::load(root).map_err(wrong)?;
        let mut skipped = Vec::new();
        let traces = benchmark::run(&mut set, &config, &mut |event| {
            if let Event::Skipped { definition, workload, why } = event {
                skipped.push(format!("{definition}, workload {workload}: {why}"));
            }
        });
        let traces = traces.map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
        if traces.is_empty() && !skipped.is_empty() {
            return Err(PyRuntimeError::new_err(skipped.join("\n")));
        }
        Ok(traces.iter().map(|t| t.to_json().to_owned()).collect())
    })
}

/// Serves a benchmark as its native worker.
#[pyfunction]
fn bench_worker(py: Python<'_>, socket: PathBuf) -> PyResult<()> {
    py.detach(|| fir_bench::worker::serve_native(&socket)).map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

/// What is wrong or missing in the set in `root`, as JSON.
#[pyfunction]
fn bench_validate(root: PathBuf) -> PyResult<String> {
    validate(root).map(|(_, report)| report.to_value().to_string()).map_err(wrong)
}

/// The report of the set in `root`: Markdown, or one HTML file.
#[pyfunction]
fn bench_report(root: PathBuf, html: bool) -> PyResult<String> {
    let set = TraceSet::load(root).map_err(wrong)?;
    Ok(if html { report::html(&set) } else { report::markdown(&set) })
}
