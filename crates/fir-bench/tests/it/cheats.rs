//! Solutions that cheat, and the status that each deserves. One benchmark runs them all; each test looks at one.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use fir_bench::TraceSet;
use fir_bench::schema::{Definition, Solution, Status, Trace};
use serde_json::Value;

use crate::support::{self, python, workload};

const CODE: &[(&str, bool, &str)] = &[
    ("honest", false, "def run(x, factor):\n    return x * factor\n"),
    ("honest_destination", true, "import torch\ndef run(x, factor, y):\n    torch.mul(x, factor, out=y)\n"),
    // Right once, then whatever it was.
    (
        "caches_its_output",
        false,
        "kept = None\ndef run(x, factor):\n    global kept\n    if kept is None:\n        kept = x * factor\n    return kept\n",
    ),
    // By address, which a benchmark that reuses buffers would not notice.
    (
        "caches_by_address",
        false,
        "kept = {}\ndef run(x, factor):\n    return kept.setdefault(x.data_ptr(), x * factor)\n",
    ),
    // Returns at once and lets a thread do the work.
    (
        "writes_after_timing",
        true,
        "import threading, time, torch\ndef run(x, factor, y):\n    def work():\n        time.sleep(0.002)\n        torch.mul(x, factor, out=y)\n    threading.Thread(target=work).start()\n",
    ),
    // Right when it returns, and then not.
    (
        "changes_it_later",
        true,
        "import threading, time, torch\ndef run(x, factor, y):\n    torch.mul(x, factor, out=y)\n    def work():\n        time.sleep(0.002)\n        y.add_(1)\n    threading.Thread(target=work).start()\n",
    ),
    ("returns_uninitialised_memory", false, "import torch\ndef run(x, factor):\n    return torch.empty_like(x)\n"),
    ("leaves_its_output_alone", true, "def run(x, factor, y):\n    pass\n"),
    // The first call is the checked one.
    (
        "works_only_when_checked",
        false,
        "calls = 0\ndef run(x, factor):\n    global calls\n    calls += 1\n    return x * factor if calls == 1 else x\n",
    ),
    (
        "sleeps_only_when_checked",
        false,
        "import time\ncalls = 0\ndef run(x, factor):\n    global calls\n    calls += 1\n    if calls == 1:\n        time.sleep(0.3)\n    return x * factor\n",
    ),
    ("edits_its_inputs", false, "def run(x, factor):\n    return x.mul_(factor)\n"),
    (
        "replaces_the_clock",
        false,
        "import time, torch\ntime.perf_counter_ns = lambda: 0\ntorch.equal = lambda a, b: True\ndef run(x, factor):\n    time.sleep(0.002)\n    return x * factor\n",
    ),
    ("never_ends", false, "def run(x, factor):\n    while True:\n        pass\n"),
    (
        "takes_all_memory",
        false,
        "import torch\ndef run(x, factor):\n    kept = [torch.ones(1 << 24) for _ in range(1 << 12)]\n    return x\n",
    ),
    ("kills_itself", false, "import os\ndef run(x, factor):\n    os._exit(3)\n"),
    ("raises", false, "def run(x, factor):\n    print('so it was')\n    raise ValueError('no')\n"),
    ("wrong_shape", false, "def run(x, factor):\n    return (x * factor)[:, :4]\n"),
    ("wrong_type", false, "def run(x, factor):\n    return (x * factor).half()\n"),
    ("too_many", false, "def run(x, factor):\n    return x, x\n"),
    ("does_not_parse", false, "def run(x, factor):\n    return x *\n"),
    ("has_no_entry", false, "def walk(x, factor):\n    return x\n"),
    ("imports_nothing", false, "import no_such_module\ndef run(x, factor):\n    return x\n"),
];

/// The trace of a solution; `None` where there is no Python.
fn trace(name: &str) -> Option<&'static Trace> {
    static TRACES: OnceLock<Option<BTreeMap<String, Trace>>> = OnceLock::new();
    let traces = TRACES.get_or_init(|| {
        let mut config = support::quick()?;
        config.timeout = Duration::from_secs(4);
        config.memory = 1 << 30;
        let mut set = TraceSet::new(support::folder("cheats"));
        set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
        set.add_trace(Trace::of_workload("scale_h8", &workload(64, "w")).unwrap()).unwrap();
        for (name, destination, code) in CODE {
            let mut solution = python(name, "test", code);
            solution["spec"]["destination_passing_style"] = Value::Bool(*destination);
            set.add_solution(Solution::from_value(&solution).unwrap()).unwrap();
        }
        Some(support::results(&mut set, &config))
    });
    traces.as_ref().map(|t| &t[name])
}

/// The status and log of a solution are these.
fn ends(name: &str, status: Status, says: &str) {
    let Some(trace) = trace(name) else { return };
    let evaluation = trace.evaluation().unwrap();
    assert_eq!(evaluation.status(), status, "{name}: {}", evaluation.log());
    assert!(evaluation.log().contains(says), "{name}: {:?} does not say {says:?}", evaluation.log());
}

#[test]
fn an_honest_one_passes_and_is_timed() {
    for name in ["honest", "honest_destination"] {
        ends(name, Status::Passed, "");
        let Some(trace) = trace(name) else { return };
        let (errors, times) = trace.passed().unwrap();
        assert_eq!(errors.max_absolute_error, 0.0);
        assert!(times.latency_ms > 0.0 && times.reference_latency_ms > 0.0 && times.speedup_factor > 0.0, "{times:?}");
        assert!(trace.evaluation().unwrap().environment().libs.contains_key("torch"));
    }
}

#[test]
fn caching_an_output_is_incorrect() {
    ends("caches_its_output", Status::IncorrectNumerical, "in a timed call");
}

#[test]
fn caching_by_address_is_incorrect() {
    ends("caches_by_address", Status::IncorrectNumerical, "in a timed call");
}

#[test]
fn writing_after_timing_is_incorrect() {
    ends("writes_after_timing", Status::IncorrectNumerical, "output `y`");
}

#[test]
fn changing_an_output_later_is_incorrect() {
    // Seen when the output is looked at again, or at once if the change came before the first look.
    ends("changes_it_later", Status::IncorrectNumerical, "");
    let Some(trace) = trace("changes_it_later") else { return };
    let log = trace.evaluation().unwrap().log();
    assert!(log.contains("written after the call had returned") || log.contains("output `y`"), "{log}");
}

#[test]
fn uninitialised_memory_is_incorrect() {
    ends("returns_uninitialised_memory", Status::IncorrectNumerical, "output `y`");
    ends("leaves_its_output_alone", Status::IncorrectNumerical, "output `y`");
    let Some(trace) = trace("leaves_its_output_alone") else { return };
    assert!(trace.evaluation().unwrap().correctness().unwrap().max_absolute_error.is_nan());
}

#[test]
fn working_only_when_checked_is_incorrect() {
    ends("works_only_when_checked", Status::IncorrectNumerical, "in a timed call");
}

#[test]
fn sleeping_only_when_checked_gains_nothing_and_is_noted() {
    ends("sleeps_only_when_checked", Status::Passed, "a call that was only checked took 3");
}

#[test]
fn editing_inputs_is_a_runtime_error() {
    ends("edits_its_inputs", Status::RuntimeError, "it wrote to its input `x`");
}

#[test]
fn replacing_the_clock_changes_nothing() {
    ends("replaces_the_clock", Status::Passed, "");
    let Some(trace) = trace("replaces_the_clock") else { return };
    assert!(trace.passed().unwrap().1.latency_ms >= 2.0);
}

#[test]
fn limits_of_time_and_memory_hold() {
    ends("never_ends", Status::Timeout, "took more than 4s");
    ends("takes_all_memory", Status::RuntimeError, "MiB of memory, more than 1024");
}

#[test]
fn a_process_that_ends_is_a_runtime_error() {
    ends("kills_itself", Status::RuntimeError, "exit code 3");
    ends("raises", Status::RuntimeError, "ValueError: no");
    ends("raises", Status::RuntimeError, "so it was");
    ends("too_many", Status::RuntimeError, "2 outputs were returned, not 1");
}

#[test]
fn shapes_and_types_are_looked_at_first() {
    ends("wrong_shape", Status::IncorrectShape, "output `y` has shape [64,4], not [64, 8]");
    ends("wrong_type", Status::IncorrectDtype, "output `y` is of \"float16\", not float32");
}

#[test]
fn what_does_not_build_is_a_compile_error() {
    ends("does_not_parse", Status::CompileError, "SyntaxError");
    ends("has_no_entry", Status::CompileError, "main.py has no function `run`");
    ends("imports_nothing", Status::CompileError, "no_such_module");
}

/// On a GPU, which `FIR_BENCH_DEVICE` names: `cuda:0`.
#[test]
fn streams_left_running_and_graphs_of_other_inputs_are_seen() {
    let Some(mut config) = support::quick() else { return };
    let Ok(device) = std::env::var("FIR_BENCH_DEVICE") else {
        return eprintln!("skipped: FIR_BENCH_DEVICE names no GPU");
    };
    config.device = device;
    // Some 2 ms of work that the call does not wait for.
    let leaks = "import torch\nside = torch.cuda.Stream()\ndef run(x, factor):\n    y = torch.empty_like(x)\n    \
        side.wait_stream(torch.cuda.current_stream())\n    with torch.cuda.stream(side):\n        \
        torch.cuda._sleep(4_000_000)\n        torch.mul(x, factor, out=y)\n    return y\n";
    // Graphs: of the first call's inputs for all calls; beside the stream that is timed; and as it is right.
    let graph = |body: &str, call: &str| {
        format!(
            "import torch\nside, graph = torch.cuda.Stream(), None\ndef run(x, factor):\n    global graph, xs, y\n    \
            if graph is None:\n        xs, y = {body}, torch.empty_like(x)\n        torch.cuda.synchronize()\n        \
            graph = torch.cuda.CUDAGraph()\n        with torch.cuda.graph(graph):\n            \
            torch.cuda._sleep(200_000)\n            torch.mul(xs, factor, out=y)\n    {call}\n"
        )
    };
    let first = graph("x", "graph.replay()\n    return y.clone()");
    let aside = graph(
        "x.clone()",
        "side.wait_stream(torch.cuda.current_stream())\n    with torch.cuda.stream(side):\n        xs.copy_(x)\n        \
        for _ in range(20):\n            graph.replay()\n    return y",
    );
    let right = graph("x.clone()", "xs.copy_(x)\n    graph.replay()\n    return y.clone()");
    let mut set = TraceSet::new(support::folder("streams"));
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    set.add_trace(Trace::of_workload("scale_h8", &workload(64, "w")).unwrap()).unwrap();
    let (honest, cached) = ("def run(x, factor):\n    return x * factor\n", CODE[2].2);
    let all = [
        ("leaks", leaks),
        ("honest", honest),
        ("cached", cached),
        ("first", &first),
        ("aside", &aside),
        ("right", &right),
    ];
    for (name, code) in all {
        set.add_solution(Solution::from_value(&python(name, "test", code)).unwrap()).unwrap();
    }
    let results = support::results(&mut set, &config);
    for (name, status) in [
        ("leaks", Status::RuntimeError),
        ("honest", Status::Passed),
        ("cached", Status::IncorrectNumerical),
        ("first", Status::IncorrectNumerical),
        ("aside", Status::RuntimeError),
        ("right", Status::Passed),
    ] {
        let evaluation = results[name].evaluation().unwrap();
        eprintln!("{name}: {} {}", evaluation.status().name(), evaluation.log());
        assert_eq!(evaluation.status(), status, "{name}: {}", evaluation.log());
    }
    for name in ["leaks", "aside"] {
        assert!(results[name].evaluation().unwrap().log().contains("another stream was left running"));
    }
}
