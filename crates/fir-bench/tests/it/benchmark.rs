//! The benchmark around its solutions: plans, files, resuming.

use std::sync::Arc;

use fir::attention::{BatchArgs, BatchPlan, Problem, Split};
use fir::kv::{Kv, KvLayout};
use fir::variant::Params;
use fir::{PageTable, PagedKv, Ragged, gemm, norm};
use fir_bench::TraceSet;
use fir_bench::array::Array;
use fir_bench::benchmark::{Config, Evaluating, Event, run};
use fir_bench::evaluate::Verdict;
use fir_bench::inputs::{Rng, make_inputs, write_tensors};
use fir_bench::ops::solution_for;
use fir_bench::profile::{Tool, profile};
use fir_bench::record::{Dump, Given, Keep, Recorder};
use fir_bench::schema::{Correctness, DType, Definition, Solution, Status, Trace, Workload};
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

/// What a file gives moves too, unless it is whole numbers: what remembers its output is wrong there as well.
#[test]
fn inputs_from_files_are_fresh_in_timed_calls() {
    let Some(config) = support::quick() else { return };
    let cached = "kept = []\ndef run(x, factor):\n    kept.append(x * factor)\n    return kept[0]\n";
    let mut set = set("files", &[("honest", "def run(x, factor):\n    return x * factor\n"), ("cached", cached)]);
    let mut x = Array::zeros(DType::Float32, &[6, 8]).unwrap();
    Rng::new(1, "x").fill(&mut x);
    write_tensors(&set.root().join("blob/x.safetensors"), &[("x", &x)]).unwrap();
    let w = json!({"axes": {"batch": 6}, "uuid": "w", "inputs": {
        "x": {"type": "safetensors", "path": "./blob/x.safetensors", "tensor_key": "x"},
        "factor": {"type": "scalar", "value": 3.0}}});
    set.add_trace(Trace::of_workload("scale_h8", &Workload::from_value(&w).unwrap()).unwrap()).unwrap();
    let results = support::results(&mut set, &config);
    let evaluation = |name: &str| results[name].evaluation().unwrap();
    assert_eq!((evaluation("honest").status(), evaluation("honest").log()), (Status::Passed, ""));
    assert_eq!(evaluation("cached").status(), Status::IncorrectNumerical, "{}", evaluation("cached").log());
    assert!(evaluation("cached").log().contains("in a timed call"), "{}", evaluation("cached").log());
}

#[test]
fn inputs_that_cannot_be_fresh_are_said() {
    let Some(config) = support::quick() else { return };
    let mut value = support::definition();
    value["inputs"]["x"]["dtype"] = "int32".into();
    value["outputs"]["y"]["dtype"] = "int32".into();
    value["reference"] = "def run(x, factor):\n    return x + 1\n".into();
    let mut set = TraceSet::new(support::folder("whole"));
    set.add_definition(Definition::from_value(&value).unwrap()).unwrap();
    set.add_solution(Solution::from_value(&python("one", "test", "def run(x, factor):\n    return x + 1\n")).unwrap())
        .unwrap();
    let x = Array::zeros(DType::Int32, &[2, 8]).unwrap();
    write_tensors(&set.root().join("x.safetensors"), &[("x", &x)]).unwrap();
    let w = json!({"axes": {"batch": 2}, "uuid": "w", "inputs": {
        "x": {"type": "safetensors", "path": "x.safetensors", "tensor_key": "x"}, "factor": {"type": "scalar", "value": 1.0}}});
    set.add_trace(Trace::of_workload("scale_h8", &Workload::from_value(&w).unwrap()).unwrap()).unwrap();
    let results = support::results(&mut set, &config);
    let evaluation = results["one"].evaluation().unwrap();
    assert_eq!(evaluation.status(), Status::Passed, "{}", evaluation.log());
    assert!(evaluation.log().contains("all timed calls had the same inputs"), "{}", evaluation.log());
}

/// A worker is one process for all workloads, or one for each.
#[test]
fn workers_are_kept_or_isolated() {
    let Some(mut config) = support::quick() else { return };
    // One call that is checked, one to warm up and 4 that are timed belong to a workload.
    let tired = "calls = 0\ndef run(x, factor):\n    global calls\n    calls += 1\n    assert calls <= 6\n    return x * factor\n";
    for (isolated, passed) in [(false, 1), (true, 2)] {
        let mut set = set("isolated", &[("tired", tired)]);
        for (batch, uuid) in [(3, "a"), (5, "b")] {
            set.add_trace(Trace::of_workload("scale_h8", &workload(batch, uuid)).unwrap()).unwrap();
        }
        config.isolated = isolated;
        let traces = run(&mut set, &config, &mut |_| {}).unwrap();
        assert_eq!((traces.len(), traces.iter().filter(|t| t.passed().is_some()).count()), (2, passed));
    }
}

/// Devices share the definitions: here two workers of the CPU, each with a definition that waits for the other's.
#[test]
fn devices_work_side_by_side() {
    let Some(mut config) = support::quick() else { return };
    config.device = "cpu, cpu".into();
    let mut set = TraceSet::new(support::folder("devices"));
    let root = set.root().to_owned();
    for (own, other) in [("one", "two"), ("two", "one")] {
        let mut value = support::definition();
        value["name"] = own.into();
        set.add_definition(Definition::from_value(&value).unwrap()).unwrap();
        let code = format!(
            "import pathlib, time\nroot = pathlib.Path({root:?})\n(root / {own:?}).touch()\nend = time.time() + 30\n\
             while not (root / {other:?}).exists():\n    assert time.time() < end\n    time.sleep(0.01)\n\
             def run(x, factor):\n    return x * factor\n"
        );
        let mut solution = python(&format!("solves_{own}"), "test", &code);
        solution["definition"] = own.into();
        set.add_solution(Solution::from_value(&solution).unwrap()).unwrap();
        set.add_trace(Trace::of_workload(own, &workload(4, own)).unwrap()).unwrap();
    }
    let mut progress = Vec::new();
    let traces = run(&mut set, &config, &mut |event| {
        if let Event::Done { progress: (done, of), .. } = event {
            progress.push((done, of));
        }
    });
    let traces = traces.unwrap();
    assert!(traces.iter().all(|t| t.passed().is_some()), "{traces:?}");
    assert_eq!((progress, set.traces().count()), (vec![(1, 2), (2, 2)], 2));
}

#[test]
fn an_op_type_has_an_evaluator_and_limits_of_its_own() {
    let Some(mut config) = support::quick() else { return };
    let near = "def run(x, factor):\n    return x * factor + 0.5\n";
    let mut set = set("evaluators", &[("near", near), ("far", "def run(x, factor):\n    return x * factor + 5\n")]);
    set.add_trace(Trace::of_workload("scale_h8", &workload(8, "w")).unwrap()).unwrap();
    let statuses = |set: &mut TraceSet, config: &Config| {
        let results = support::results(set, config);
        ["near", "far"].map(|name| results[name].evaluation().unwrap().status())
    };
    let wrong = Status::IncorrectNumerical;
    assert_eq!(statuses(&mut set, &config), [wrong, wrong]);
    // A tolerance of the op type, and one of the definition over it.
    config.by_op_type.insert("scale".into(), Evaluating { atol: Some(1.0), ..Evaluating::default() });
    assert_eq!(statuses(&mut set, &config), [Status::Passed, wrong]);
    config.by_definition.insert("scale_h8".into(), Evaluating { atol: Some(10.0), ..Evaluating::default() });
    assert_eq!(statuses(&mut set, &config), [Status::Passed, Status::Passed]);
    // An evaluator sees the inputs that the outputs are of, those of the timed call too.
    config.by_definition.clear();
    config.evaluators.insert(
        "scale".into(),
        Arc::new(|_, inputs, got, want, _| {
            let right = Correctness { max_relative_error: 0.0, max_absolute_error: 0.0, extra: None };
            let same = (0..got[0].len()).all(|i| (inputs[0].array.get(i) * 3.0 - want[0].get(i)).abs() < 1e-5);
            let off = got[0].get(0) - want[0].get(0);
            match (same, off > 1.0) {
                (true, true) => Verdict::Right(right),
                _ => Verdict::Wrong(right, format!("{same} {off}")),
            }
        }),
    );
    assert_eq!(statuses(&mut set, &config), [wrong, Status::Passed]);
}

#[test]
fn calls_are_recorded_by_policy_and_read_back_as_workloads() {
    let root = support::folder("recorded");
    let d = json!({
        "name": "ragged", "op_type": "x", "axes": {"n": {"type": "var"}, "len_indptr": {"type": "var"}},
        "inputs": {"x": {"shape": ["n"], "dtype": "float32"}, "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
            "sm_scale": {"shape": null, "dtype": "float32"}},
        "outputs": {"y": {"shape": ["n"], "dtype": "float32"}}, "reference": "def run(x, kv_indptr, sm_scale):\n    return x\n",
    });
    let d = Definition::from_value(&d).unwrap();
    let indptr = |ends: &[i32]| Array::from_bytes(DType::Int32, &[ends.len()], bytemuck::cast_slice(ends)).unwrap();
    let recorder = Recorder::new(TraceSet::new(&root), Dump::Integers, Keep::FirstByLengths(1));
    let record = |ends: &[i32], n: usize| {
        let (indptr, x) = (indptr(ends), Array::zeros(DType::Float32, &[n]).unwrap());
        recorder.record(&d, &[Given::Tensor(x.view()), Given::Tensor(indptr.view()), Given::Number(0.5)]).unwrap()
    };
    assert!(record(&[0, 10, 20], 4));
    assert!(!record(&[0, 5, 20], 4), "the same average length");
    assert!(record(&[0, 10, 30], 4));
    let wrong = recorder.record(&d, &[Given::Number(1.0)]).unwrap_err().to_string();
    assert_eq!(wrong, "axes_of: `ragged` has 3 inputs, not 1");
    assert_eq!(recorder.kept(), 2);
    let again = TraceSet::load(&root).unwrap();
    let workload = again.workloads_of("ragged").next().unwrap();
    let inputs = make_inputs(&root, &d, workload, &mut Rng::new(0, "")).unwrap();
    assert_eq!(inputs[1].array.typed::<i32>(), [0, 10, 20]);
    assert_eq!((inputs[2].array.get(0), inputs[0].random, inputs[1].random), (0.5, true, false));
}

/// Calls of the library are recorded under definitions made for them, whose references say what the library computed.
#[test]
fn a_running_program_is_recorded_and_its_workloads_are_benchmarked() {
    let root = support::folder("running");
    let recorder = Arc::new(Recorder::new(TraceSet::new(&root), Dump::Integers, Keep::FirstByAxes(1)));
    let exec = fir::Exec::cpu().unwrap().with_override(recorder.clone());
    let zeros = |shape: &[usize]| fir::Tensor::zeros(fir::DType::BF16, shape).unwrap();
    let (x, w, mut out) = (zeros(&[3, 64]), zeros(&[64]), zeros(&[3, 64]));
    let matrix = zeros(&[32, 64]);
    for eps in [1e-6, 1e-5] {
        for _ in 0..2 {
            norm::rms_norm(&exec, x.view(), w.view(), eps, out.view_mut()).unwrap();
        }
        norm::fused_add_rms_norm(&exec, out.view_mut(), x.clone().view_mut(), w.view(), eps).unwrap();
    }
    gemm::gemm(&exec, x.view(), matrix.view(), zeros(&[3, 32]).view_mut()).unwrap();
    let table = PageTable::with_lens(4, 6, vec![0, 2, 5], vec![3, 1, 0, 5, 2], &[5, 9]).unwrap();
    let pool = zeros(&[6, 4, 2, 16]);
    for lens in [[1, 1], [3, 2]] {
        let qo = Ragged::from_lens(&lens).unwrap();
        let problem = Problem::new(4, 2, 16, fir::DType::BF16, fir::variant::causal());
        let plan = BatchPlan::new(&exec, problem, &qo, &[5, 9], Split::Balanced).unwrap();
        let (q, mut o) = (zeros(&[qo.rows(), 4, 16]), zeros(&[qo.rows(), 4, 16]));
        let kv = PagedKv::new(pool.view(), pool.view(), KvLayout::Nhd).unwrap();
        let (params, scratch) = (&Params::new(), &mut plan.scratch());
        let (kv, out) = (Kv::Paged(kv, &table), o.view_mut());
        plan.run(&exec, BatchArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None }).unwrap();
    }
    assert_eq!((recorder.kept(), recorder.missed().len()), (7, 0), "{:?}", recorder.missed());
    let mut set = TraceSet::load(&root).unwrap();
    let names: Vec<&str> = set.definitions().map(Definition::name).collect();
    let want = [
        "fused_add_rmsnorm_h64",
        "fused_add_rmsnorm_h64_bf16_eps1e-5",
        "gemm_n32_k64",
        "gqa_paged_decode_h4_kv2_d16_ps4",
        "gqa_paged_prefill_causal_h4_kv2_d16_ps4",
        "rmsnorm_h64",
        "rmsnorm_h64_bf16_eps1e-5",
    ];
    assert_eq!(names, want);
    let Some(config) = support::quick() else { return };
    for definition in set.definitions().cloned().collect::<Vec<_>>() {
        set.add_solution(solution_for(&definition).unwrap().unwrap()).unwrap();
    }
    for (name, trace) in support::results(&mut set, &config) {
        let e = trace.evaluation().unwrap();
        assert_eq!(e.status(), Status::Passed, "{name}: {:?} {}", e.correctness(), e.log());
    }
}

#[test]
fn a_profiler_runs_one_call() {
    let Some(config) = support::quick() else { return };
    let set = set("profiled", &[("one", "def run(x, factor):\n    print('it ran')\n    return x * factor\n")]);
    let (d, s) = (set.definition("scale_h8").unwrap(), set.solution("one").unwrap());
    let run = |tool: Tool| profile(&tool, &config.python, &config.native, "cpu", set.root(), d, s, &workload(4, "w"));
    let said = run(Tool::Command(vec!["env".into(), "A=1".into()])).unwrap();
    assert!(said.contains("it ran"), "{said}");
    let (tool, native) = (Tool::Command(vec!["env".into(), "A=1".into()]), crate::builders::in_rust("native"));
    let said =
        profile(&tool, &config.python, &config.native, "cpu", set.root(), d, &native, &workload(4, "w")).unwrap();
    assert!(said.contains("\"outputs\":[{\"shape\":[4,8]"), "{said}");
    let wrong = run(Tool::Sanitizer("all".into())).unwrap_err().to_string();
    assert!(wrong.contains("\"all\" is not memcheck"), "{wrong}");
    let Ok(device) = std::env::var("FIR_BENCH_DEVICE") else { return };
    let run = |tool: Tool| profile(&tool, &config.python, &config.native, &device, set.root(), d, s, &workload(4, "w"));
    let said = run(Tool::Sanitizer("memcheck".into())).unwrap();
    assert!(said.contains("ERROR SUMMARY: 0 errors"), "{said}");
    // Counters are not everybody's to read: where they are, there is a table of each kernel.
    match run(Tool::Ncu(Vec::new())) {
        Ok(said) => assert!(said.contains("Duration") || said.contains("ERR_NVGPUCTRPERM"), "{said}"),
        Err(e) => assert!(e.to_string().contains("ERR_NVGPUCTRPERM"), "{e}"),
    }
}
