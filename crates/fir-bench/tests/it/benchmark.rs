//! The benchmark around its solutions: plans, files, resuming.

use fir_bench::TraceSet;
use fir_bench::benchmark::{Event, run};
use fir_bench::schema::{Definition, Solution, Status, Trace};
use serde_json::json;

use crate::support::{self, python, workload};

fn set(name: &str, solutions: &[(&str, &str)]) -> TraceSet {
    let mut set = TraceSet::new(support::folder(name));
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    for (name, code) in solutions {
        set.add_solution(Solution::from_value(&python(name, "test", code)).unwrap()).unwrap();
    }
    set
}

#[test]
fn traces_are_saved_and_resumed_from() {
    let Some(mut config) = support::quick() else { return };
    let mut set = set("resume", &[("one", "def run(x, factor):\n    return x * factor\n")]);
    for (batch, uuid) in [(3, "a"), (5, "b")] {
        set.add_trace(Trace::of_workload("scale_h8", &workload(batch, uuid)).unwrap()).unwrap();
    }
    let root = set.root().to_owned();
    set.save(&root).unwrap();
    (config.save, config.resume, config.isolated) = (true, true, true);
    assert_eq!(run(&mut set, &config, &mut |_| {}).unwrap().len(), 2);
    let mut again = TraceSet::load(&root).unwrap();
    assert_eq!(again.traces().count(), 2);
    assert!(again.traces().all(|t| t.passed().is_some()));
    assert_eq!(run(&mut again, &config, &mut |_| {}).unwrap().len(), 0);
    config.solutions = Some(vec!["none".into()]);
    let error = run(&mut again, &config, &mut |_| {}).unwrap_err().to_string();
    assert_eq!(error, "benchmark: solution `none` is not in the set");
}

#[test]
fn what_cannot_be_used_is_skipped_and_said() {
    let Some(config) = support::quick() else { return };
    let mut set = set("skipped", &[("one", "def run(x, factor):\n    return x * factor\n")]);
    let absent = json!({"axes": {"batch": 2}, "uuid": "absent", "inputs": {
        "x": {"type": "safetensors", "path": "./blob/none.safetensors", "tensor_key": "x"},
        "factor": {"type": "scalar", "value": 1.0}}});
    let large = json!({"axes": {"batch": 2000}, "uuid": "large", "inputs": {
        "x": {"type": "random"}, "factor": {"type": "scalar", "value": 1.0}}});
    for w in [absent, large] {
        let w = json!({"definition": "scale_h8", "workload": w, "solution": null, "evaluation": null});
        set.add_trace(Trace::from_value(&w).unwrap()).unwrap();
    }
    let mut said = Vec::new();
    let traces = run(&mut set, &config, &mut |event| {
        if let Event::Skipped { workload, why, .. } = event {
            said.push(format!("{workload}: {why}"));
        }
    });
    assert_eq!(traces.unwrap().len(), 0);
    assert!(said[0].starts_with("absent: ") && said[0].contains("No such file"), "{said:?}");
    assert_eq!(said[1], "large: benchmark: `batch <= 1024` does not hold");
}

#[test]
fn a_plan_is_made_outside_the_timed_calls_and_without_what_is_drawn() {
    let Some(config) = support::quick() else { return };
    let planned = "import time\n\ndef plan(factor):\n    time.sleep(0.05)\n    return factor\n\n\
        def run(x, factor, plan):\n    return x * plan\n";
    let greedy = "def plan(x, factor):\n    return x * factor\n\ndef run(x, factor, plan):\n    return plan\n";
    let mut set = set("plans", &[("planned", planned), ("greedy", greedy)]);
    set.add_trace(Trace::of_workload("scale_h8", &workload(8, "w")).unwrap()).unwrap();
    let results = support::results(&mut set, &config);
    let (_, times) = results["planned"].passed().unwrap();
    assert!(times.latency_ms < 20.0, "{times:?}");
    // A plan is not given what is drawn.
    assert_eq!(results["greedy"].evaluation().unwrap().status(), Status::RuntimeError);
}
