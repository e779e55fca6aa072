//! What tests share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fir_bench::TraceSet;
use fir_bench::benchmark::{Config, Evaluating, Event};
use fir_bench::schema::{Correctness, Environment, Evaluation, Performance, Status, Trace, Workload};
use serde_json::{Value, json};

/// Real definitions and workloads, where this machine has them.
pub(crate) fn real_data() -> Option<PathBuf> {
    let given = std::env::var_os("FIR_TRACE_DATA").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|p| p.join("shared/data/flashinfer_trace"));
    let found = given.into_iter().chain(beside).find(|p| p.is_dir());
    if found.is_none() {
        eprintln!("skipped: no folder of real definitions; FIR_TRACE_DATA names one");
    }
    found
}

/// An empty folder of this test's.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench").join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// All files under a folder, by path from it.
pub(crate) fn files(root: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    fn walk(root: &Path, at: &Path, found: &mut std::collections::BTreeMap<PathBuf, Vec<u8>>) {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
            } else {
                found.insert(path.strip_prefix(root).unwrap().to_owned(), std::fs::read(&path).unwrap());
            }
        }
    }
    let mut found = std::collections::BTreeMap::new();
    walk(root, root, &mut found);
    found
}

/// A definition with a constant axis, a scalar and two outputs.
pub(crate) fn definition() -> Value {
    json!({
        "name": "scale_h8", "op_type": "scale",
        "axes": {"batch": {"type": "var"}, "hidden": {"type": "const", "value": 8}},
        "constraints": ["hidden == 8", "batch <= 1024"],
        "inputs": {
            "x": {"shape": ["batch", "hidden"], "dtype": "float32"},
            "factor": {"shape": null, "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["batch", "hidden"], "dtype": "float32"}},
        "reference": "import torch\n\ndef run(x, factor):\n    return x * factor\n",
    })
}

/// A solution of [`definition`] in Python that returns its output.
pub(crate) fn python(name: &str, author: &str, code: &str) -> Value {
    json!({
        "name": name, "definition": "scale_h8", "author": author,
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run",
            "destination_passing_style": false},
        "sources": [{"path": "main.py", "content": code}],
    })
}

pub(crate) fn workload(batch: u64, uuid: &str) -> Workload {
    Workload::from_value(&json!({
        "axes": {"batch": batch}, "uuid": uuid,
        "inputs": {"x": {"type": "random"}, "factor": {"type": "scalar", "value": 3.0}},
    }))
    .unwrap()
}

/// A trace with this status and latency, errors of 1e-3.
pub(crate) fn trace(solution: &str, workload: &Workload, status: Status, ms: f64) -> Trace {
    let environment = Environment { hardware: "test".into(), libs: [("torch".into(), "2".into())].into() };
    let correctness = Correctness { max_relative_error: 1e-3, max_absolute_error: 1e-3, extra: None };
    let performance = Performance { latency_ms: ms, reference_latency_ms: 1.0, speedup_factor: 1.0 / ms };
    let evaluation = match status {
        Status::Passed => Evaluation::passed(environment, String::new(), correctness, performance),
        Status::IncorrectNumerical => Evaluation::incorrect(environment, String::new(), correctness),
        status => Evaluation::failed(status, environment, String::new()).unwrap(),
    };
    Trace::new("scale_h8", workload, solution, &evaluation).unwrap()
}

/// A benchmark that takes little time; `None`, said, where there is no Python with torch.
pub(crate) fn quick() -> Option<Config> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let given = std::env::var_os("FIR_PYTHON").map(PathBuf::from);
    let made = root.join("target/torch/bin/python");
    let Some(python) = given.or_else(|| made.exists().then_some(made)) else {
        eprintln!("skipped: no Python with torch; FIR_PYTHON names one, `cargo xtask bench-cpu` makes one");
        return None;
    };
    let mut config = Config::new(python, vec![env!("CARGO_BIN_EXE_fir-bench-worker").into()]);
    config.evaluating = Evaluating {
        warmup_runs: Some(1),
        iterations: Some(4),
        num_trials: Some(1),
        sampling_draws: Some(512),
        ..Evaluating::default()
    };
    config.timeout = Duration::from_secs(60);
    Some(config)
}

/// Traces of a benchmark, by solution; workloads that were skipped fail the test.
pub(crate) fn results(set: &mut TraceSet, config: &Config) -> BTreeMap<String, Trace> {
    let traces = fir_bench::benchmark::run(set, config, &mut |event| {
        if let Event::Skipped { definition, why, .. } = event {
            panic!("{definition}: {why}");
        }
    });
    traces.unwrap().into_iter().map(|t| (t.solution().unwrap().to_owned(), t)).collect()
}
