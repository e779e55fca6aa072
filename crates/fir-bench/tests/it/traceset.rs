//! Folders of the nouns.

use std::collections::BTreeMap;

use fir_bench::schema::{Definition, Solution, Status, Trace};
use fir_bench::score::{rank_authors, solution_score};
use fir_bench::validate::{Severity, validate};
use fir_bench::{Error, TraceSet};
use serde_json::json;

use crate::support::{self, trace, workload};

/// Two workloads; a baseline, a faster solution, one that fails on the second workload.
fn example() -> TraceSet {
    let mut set = TraceSet::new("unwritten");
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    for (name, author) in [("base", "baseline"), ("fast", "ann"), ("flaky", "bob")] {
        let solution = support::python(name, author, "def run(x, factor):\n    return x * factor\n");
        set.add_solution(Solution::from_value(&solution).unwrap()).unwrap();
    }
    let (a, b) = (workload(2, "a"), workload(64, "b"));
    for w in [&a, &b] {
        set.add_trace(Trace::of_workload("scale_h8", w).unwrap()).unwrap();
    }
    for (solution, w, status, ms) in [
        ("base", &a, Status::Passed, 2.0),
        ("base", &b, Status::Passed, 8.0),
        ("fast", &a, Status::Passed, 1.0),
        ("fast", &a, Status::Passed, 3.0),
        ("fast", &b, Status::Passed, 2.0),
        ("flaky", &a, Status::Passed, 0.1),
        ("flaky", &b, Status::IncorrectNumerical, 0.0),
    ] {
        set.add_trace(trace(solution, w, status, ms)).unwrap();
    }
    set
}

#[test]
fn every_real_file_loads_and_is_written_byte_for_byte() {
    let Some(root) = support::real_data() else { return };
    let set = TraceSet::load(&root).unwrap();
    let to = support::folder("round_trip");
    set.save(&to).unwrap();
    let (before, after) = (support::files(&root), support::files(&to));
    assert!(before.len() > 100, "{} files", before.len());
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (path, bytes) in &before {
        assert!(*bytes == after[path], "{} changed", path.display());
    }
}

#[test]
fn every_real_definition_means_the_same_when_written_anew() {
    let Some(root) = support::real_data() else { return };
    for definition in TraceSet::load(&root).unwrap().definitions() {
        let value: serde_json::Value = serde_json::from_str(definition.to_json()).unwrap();
        let again = Definition::from_value(&value).unwrap();
        assert_eq!(
            (again.axes(), again.inputs(), again.outputs()),
            (definition.axes(), definition.inputs(), definition.outputs())
        );
        assert!(
            definition.constraints().iter().all(|c| c.expr.is_some()),
            "{}: a constraint is not understood",
            again.name()
        );
    }
}

#[test]
fn absent_blobs_are_warnings_and_sizes_of_zero_are_errors() {
    let Some(root) = support::real_data() else { return };
    let (set, report) = validate(&root).unwrap();
    assert_eq!(report.definitions.len(), set.definitions().count());
    assert!(report.workloads > 400, "{}", report.workloads);
    for finding in report.findings.iter().filter(|f| f.severity == Severity::Error) {
        assert!(finding.message.contains("is 0"), "{}: {}", finding.about, finding.message);
    }
    let absent = report.findings.iter().filter(|f| f.message.contains("is not there")).count();
    assert!(absent > 400, "{absent}");
}

#[test]
fn the_best_is_the_fastest_within_the_tolerance() {
    let set = example();
    let none = BTreeMap::new();
    assert_eq!(set.best("scale_h8", &none, 1e-2, 1e-2).unwrap().solution(), Some("flaky"));
    let axes = BTreeMap::from([("batch".into(), 64)]);
    assert_eq!(set.best("scale_h8", &axes, 1e-2, 1e-2).unwrap().solution(), Some("fast"));
    assert!(set.best("scale_h8", &axes, 1e-2, 1e-4).is_none());
    let by = set.best_by_workload("scale_h8", 1e-2, 1e-2);
    assert_eq!(by.values().map(|t| t.solution().unwrap()).collect::<Vec<_>>(), ["flaky", "fast"]);
}

#[test]
fn a_solution_that_failed_once_scores_nothing() {
    let set = example();
    let score = |name: &str| solution_score(&set, set.solution(name).unwrap(), "baseline").unwrap();
    assert_eq!(score("base"), None);
    let fast = score("fast").unwrap();
    assert_eq!((fast.avg_speedup, fast.win_rate, fast.workloads), (3.0, 1.0, 2));
    let flaky = score("flaky").unwrap();
    assert_eq!((flaky.avg_speedup, flaky.success_rate), (0.0, 0.0));
    let ranked = rank_authors(&set, "baseline").unwrap();
    assert_eq!(ranked.iter().map(|r| r.author.as_str()).collect::<Vec<_>>(), ["ann", "bob"]);
    let missing = solution_score(&set, set.solution("fast").unwrap(), "nobody").unwrap_err().to_string();
    assert_eq!(missing, "score: `scale_h8` has 0 solutions by `nobody`, not 1");
}

#[test]
fn a_set_is_written_in_its_layout_and_read_back() {
    let root = support::folder("layout");
    let set = example();
    set.save(&root).unwrap();
    let names: Vec<String> = support::files(&root).keys().map(|p| p.display().to_string()).collect();
    assert_eq!(
        names,
        [
            "definitions/scale/scale_h8.json",
            "solutions/ann/scale/scale_h8/fast.json",
            "solutions/baseline/scale/scale_h8/base.json",
            "solutions/bob/scale/scale_h8/flaky.json",
            "traces/ann/scale/scale_h8.jsonl",
            "traces/baseline/scale/scale_h8.jsonl",
            "traces/bob/scale/scale_h8.jsonl",
            "workloads/scale/scale_h8.jsonl",
        ]
    );
    let mut again = TraceSet::load(&root).unwrap();
    assert_eq!(again.traces().count(), set.traces().count());
    // A file that does not end its last line is continued on a new one.
    let file = root.join("traces/bob/scale/scale_h8.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.trim_end()).unwrap();
    again.append(vec![trace("flaky", &workload(64, "b"), Status::Timeout, 0.0)]).unwrap();
    assert_eq!(TraceSet::load(&root).unwrap().traces().count(), set.traces().count() + 1);
}

#[test]
fn merging_adds_what_is_new_and_refuses_what_differs() {
    let mut set = example();
    assert_eq!(set.merge(set.clone()).unwrap(), 0);
    let mut other = TraceSet::new("other");
    other.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    other.add_trace(Trace::of_workload("scale_h8", &workload(7, "c")).unwrap()).unwrap();
    assert_eq!(set.merge(other).unwrap(), 1);
    let mut changed = support::definition();
    changed["reference"] = "def run(x, factor):\n    return x\n".into();
    let mut other = TraceSet::new("other");
    other.add_definition(Definition::from_value(&changed).unwrap()).unwrap();
    let error = set.merge(other).unwrap_err().to_string();
    assert_eq!(error, "merge: definition `scale_h8` differs between the sets");
}

#[test]
fn files_of_workloads_are_copied_and_stay_inside() {
    let (from, to) = (support::folder("blobs_from"), support::folder("blobs_to"));
    std::fs::create_dir_all(from.join("blob/a")).unwrap();
    std::fs::write(from.join("blob/a/x.safetensors"), "x").unwrap();
    std::fs::write(from.join("../outside.safetensors"), "x").unwrap();
    let mut set = TraceSet::new(&from);
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    for path in ["./blob/a/x.safetensors", "./blob/absent.safetensors", "../outside.safetensors"] {
        let w = json!({"definition": "scale_h8", "workload": {"axes": {"batch": 1}, "uuid": path, "inputs": {
            "x": {"type": "safetensors", "path": path, "tensor_key": "x"}}}});
        set.add_trace(Trace::from_value(&w).unwrap()).unwrap();
    }
    assert_eq!(set.copy_blobs(&to).unwrap(), 1);
    assert_eq!(set.copy_blobs(&to).unwrap(), 0);
    assert!(to.join("blob/a/x.safetensors").exists());
}

#[test]
fn names_do_not_leave_the_folder() {
    let mut set = TraceSet::new("x");
    let mut hostile = support::definition();
    hostile["name"] = "../../escape".into();
    set.add_definition(Definition::from_value(&hostile).unwrap()).unwrap();
    let error = set.save(support::folder("hostile")).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
}

#[test]
fn what_is_wrong_in_a_folder_is_listed_and_the_rest_is_read() {
    let root = support::folder("faulty");
    let mut set = example();
    let bad = json!({"definition": "scale_h8", "solution": null, "evaluation": null,
        "workload": {"axes": {"batch": 2000}, "inputs": {"x": {"type": "scalar", "value": 1}}, "uuid": "bad"}});
    set.add_trace(Trace::from_value(&bad).unwrap()).unwrap();
    set.save(&root).unwrap();
    std::fs::write(root.join("definitions/scale/broken.json"), "{\"name\": 1}").unwrap();
    std::fs::write(root.join("traces/ann/scale/wrong.jsonl"), format!("\n{bad}\n")).unwrap();
    assert!(TraceSet::load(&root).is_err());
    let (set, report) = validate(&root).unwrap();
    assert_eq!(set.definitions().count(), 1);
    let errors: Vec<String> = report
        .findings
        .iter()
        .filter(|f| f.severity == Severity::Error)
        .map(|f| format!("{}: {}", f.about, f.message))
        .collect();
    assert_eq!(
        errors,
        [
            "definitions/scale/broken.json: `axes`: is required",
            "traces/ann/scale/wrong.jsonl:2: `solution`: must not be null in a file of traces",
            "scale_h8: workload bad: input `x` is a tensor, not a number",
            "scale_h8: workload bad: input `factor` is missing",
            "scale_h8: workload bad: `batch <= 1024` does not hold",
        ]
    );
}
