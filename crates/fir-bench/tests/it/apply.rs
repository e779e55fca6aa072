//! Choosing by what was measured. One test: what is enabled is the process's.

use std::sync::Arc;
use std::time::Instant;

use fir_bench::TraceSet;
use fir_bench::apply::{Choice, Deployed, Miss, Op, Policy, Table, current, disable_all, enable};
use fir_bench::report;
use fir_bench::schema::{Definition, Solution, Status, Trace};
use serde_json::{Value, json};

use crate::builders::cuda;
use crate::support::{self, python, trace, workload};

fn measured() -> TraceSet {
    let mut set = TraceSet::new("unwritten");
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    for name in ["small", "large", "wrong<&>"] {
        let solution = python(name, "test", "def run(x, factor):\n    return x\n");
        set.add_solution(Solution::from_value(&solution).unwrap()).unwrap();
    }
    for (batch, best, ms) in
        [(1, "small", 1.0), (1, "large", 2.0), (64, "large", 3.0), (64, "small", 9.0), (128, "large", 4.0)]
    {
        let w = workload(batch, &format!("w{batch}"));
        set.add_trace(Trace::of_workload("scale_h8", &w).unwrap()).unwrap();
        set.add_trace(trace(best, &w, Status::Passed, ms)).unwrap();
        set.add_trace(trace("wrong<&>", &w, Status::IncorrectNumerical, 0.0)).unwrap();
    }
    set
}

#[test]
fn the_table_chooses_by_size_hardware_tolerance_and_policy() {
    let set = measured();
    let table = |policy: &Policy| Table::new(&set, policy);
    let usual = table(&Policy::default());
    assert_eq!(usual.len(), (1, 3));
    assert_eq!(usual.choose("scale_h8", &[1]), Some(Choice::Exact("small")));
    assert_eq!(usual.choose("scale_h8", &[64]), Some(Choice::Exact("large")));
    assert_eq!(usual.choose("scale_h8", &[65]), None);
    assert_eq!(usual.choose("other", &[1]), None);
    let near = table(&Policy { miss: Miss::Nearest(1.0), ..Policy::default() });
    assert_eq!(near.choose("scale_h8", &[2]), Some(Choice::Nearest("small")));
    assert_eq!(near.choose("scale_h8", &[100]), Some(Choice::Nearest("large")));
    assert_eq!(near.choose("scale_h8", &[1000]), None);
    assert_eq!(near.choose("scale_h8", &[1, 1]), None);
    let best = table(&Policy { miss: Miss::Best, ..Policy::default() });
    assert_eq!(best.choose("scale_h8", &[7]), Some(Choice::Best("large")));
    assert!(table(&Policy { hardware: Some("another".into()), ..Policy::default() }).is_empty());
    assert!(!table(&Policy { hardware: Some("test".into()), ..Policy::default() }).is_empty());
    assert!(table(&Policy { atol: 1e-4, ..Policy::default() }).is_empty());

    // The same through an operation, in nested scopes.
    type Name = dyn Fn() -> &'static str + Send + Sync;
    let op = Op::<Name>::new("scale_h8", Box::new(|| "own"))
        .solution("small", Box::new(|| "small"))
        .solution("large", Box::new(|| "large"));
    assert_eq!(op.pick(&[1])(), "own");
    {
        let _outer = enable(usual.clone());
        assert_eq!((op.pick(&[1])(), op.pick(&[64])(), op.pick(&[65])()), ("small", "large", "own"));
        {
            let _inner = enable(best);
            assert_eq!(op.pick(&[65])(), "large");
        }
        assert_eq!(op.pick(&[65])(), "own");
        let alien = Op::<Name>::new("scale_h8", Box::new(|| "own"));
        assert_eq!(alien.pick(&[1])(), "own", "a solution that is not linked in falls back");
    }
    assert_eq!(op.pick(&[1])(), "own");

    let time = |what: &str, most_ns: f64| {
        let n = 200_000;
        let begin = Instant::now();
        for _ in 0..n {
            std::hint::black_box(op.pick(std::hint::black_box(&[64])));
        }
        let ns = begin.elapsed().as_nanos() as f64 / f64::from(n);
        eprintln!("apply, {what}: {ns:.1} ns");
        assert!(ns < most_ns, "{what}: {ns} ns");
    };
    time("off", 100.0);
    let _on = enable(usual);
    time("on", 2000.0);
    disable_all();
    assert!(current().is_none());
    // A machine with a GPU need have no `rustc`.
    if std::env::var("FIR_BENCH_DEVICE").is_ok_and(|device| device != "cpu") {
        the_librarys_operators_ask_on_a_gpu();
    } else {
        the_librarys_operators_ask();
    }
}

const SEVENS: &str = r#"
mod fir_bench;
use fir_bench::Tensor;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn run(args: *const Tensor, count: usize, _message: *mut u8, _room: usize) -> i32 {
    // SAFETY: the caller passes `count` tensors.
    let args = unsafe { std::slice::from_raw_parts(args, count) };
    let [_x, w, y] = args else { return 1 };
    // SAFETY: the output is written by nobody else.
    let (w, y) = unsafe { (w.get::<f32>(), y.get_mut::<f32>()) };
    y.fill(7.0 * w[0]);
    0
}
"#;

/// A norm of rows of 8 whose best solution for 2 of them is `solution`, named `sevens`.
fn norms(solution: Value) -> TraceSet {
    let name = "rmsnorm_h8";
    let mut set = TraceSet::new("unwritten");
    let tensor = |axes: &[&str]| json!({"shape": axes, "dtype": "float32"});
    let definition = json!({
        "name": name, "op_type": "rmsnorm", "axes": {"n": {"type": "var"}, "h": {"type": "const", "value": 8}},
        "inputs": {"hidden_states": tensor(&["n", "h"]), "weight": tensor(&["h"])},
        "outputs": {"output": tensor(&["n", "h"])}, "reference": "EPS = 1e-5\ndef run(hidden_states, weight):\n    pass\n",
    });
    set.add_definition(Definition::from_value(&definition).unwrap()).unwrap();
    set.add_solution(Solution::from_value(&solution).unwrap()).unwrap();
    let passed = json!({"definition": name, "solution": "sevens", "workload": {"uuid": "u", "inputs": {}, "axes": {"n": 2}},
        "evaluation": {"status": "PASSED", "environment": {"hardware": "h"}, "timestamp": "t", "correctness": {},
            "performance": {"latency_ms": 1.0}}});
    set.add_trace(Trace::from_value(&passed).unwrap()).unwrap();
    set
}

/// A solution in Rust takes the place of the library's kernel, at the size where it was best and nowhere else.
fn the_librarys_operators_ask() {
    let set = norms(json!({
        "name": "sevens", "definition": "rmsnorm_h8", "author": "test",
        "spec": {"language": "rust", "target_hardware": ["cpu"], "entry_point": "lib.rs::run"},
        "sources": [{"path": "lib.rs", "content": SEVENS}],
    }));
    let exec = fir::Exec::cpu().unwrap().with_override(Arc::new(Deployed::default()));
    let first = |rows: usize, eps: f32| {
        let (x, w, mut out) = (vec![1f32; rows * 8], [2f32; 8], vec![0f32; rows * 8]);
        let x = fir::TensorRef::new(&x, &[rows, 8]).unwrap();
        let (w, to) = (fir::TensorRef::new(&w, &[8]).unwrap(), fir::TensorMut::new(&mut out, &[rows, 8]).unwrap());
        fir::norm::rms_norm(&exec, x, w, eps, to).unwrap();
        (out[0] - 2.0).abs() > 1.0
    };
    assert!(!first(2, 1e-5));
    {
        let _on = enable(Table::new(&set, &Policy::default()));
        assert!(first(2, 1e-5), "the solution ran");
        assert!(first(2, 1e-5), "and runs again");
        assert!(!first(3, 1e-5), "another size");
        assert!(!first(2, 1e-6), "another function");
    }
    assert!(!first(2, 1e-5));
}

/// The same of a kernel in CUDA C++, on the stream of the call.
fn the_librarys_operators_ask_on_a_gpu() {
    let code = "extern \"C\" __global__ void run(const float* w, float* y, int n) {\n  \
        for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = 7 * w[0];\n}\n";
    let launch = json!({"grid": [1], "block": [32], "args": ["weight", "output", "n: i32 = n * h"]});
    let mut sevens = cuda("sevens", code, launch);
    sevens["definition"] = "rmsnorm_h8".into();
    let set = norms(sevens);
    let exec = fir::Exec::cuda(0).unwrap().with_override(Arc::new(Deployed::default()));
    let fir::Exec::Cuda(gpu) = &exec else { panic!("{exec:?}") };
    let fir::Exec::Cuda(side) = fir::Exec::cuda(0).unwrap() else { panic!("no GPU") };
    let side = fir::Exec::Cuda(gpu.on_stream(side.stream().unwrap()).unwrap());
    let sevens = |exec: &fir::Exec, rows: usize| {
        let fir::Exec::Cuda(gpu) = exec else { panic!("{exec:?}") };
        let there = |x: f32, shape: &[usize]| {
            let x = vec![x; shape.iter().product()];
            fir::Tensor::from_slice(&x, shape).unwrap().to_device(gpu).unwrap()
        };
        let (x, w, mut out) = (there(1.0, &[rows, 8]), there(2.0, &[8]), there(0.0, &[rows, 8]));
        fir::norm::rms_norm(exec, x.view(), w.view(), 1e-5, out.view_mut()).unwrap();
        gpu.synchronize().unwrap();
        out.to_host().unwrap().as_slice::<f32>().unwrap().iter().all(|x| *x == 14.0)
    };
    assert!(!sevens(&exec, 2));
    let _on = enable(Table::new(&set, &Policy::default()));
    assert!(sevens(&exec, 2) && sevens(&exec, 2) && sevens(&side, 2), "the kernel ran");
    assert!(!sevens(&exec, 3), "another size");
}

/// `FIB_ENABLE_APPLY=1` enables what `FIB_DATASET_PATH` has of this CPU: asked in a process of its own, as it is the process's.
#[test]
fn the_environment_enables_a_table_of_this_hardware() {
    type Name = dyn Fn() -> &'static str + Send + Sync;
    const CHILD: &str = "FIR_BENCH_TEST_CHILD";
    let op = Op::<Name>::new("scale_h8", Box::new(|| "own")).solution("here", Box::new(|| "here"));
    if std::env::var_os(CHILD).is_some() {
        println!("batch 1: {}, batch 64: {}", op.pick(&[1])(), op.pick(&[64])());
        return;
    }
    let root = support::folder("environment");
    let mut set = TraceSet::new(&root);
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    let solution = python("here", "test", "def run(x, factor):\n    return x\n");
    set.add_solution(Solution::from_value(&solution).unwrap()).unwrap();
    for (batch, hardware) in [(1u64, fir_bench::benchmark::cpu_name()), (64, "another".into())] {
        let of = trace("here", &workload(batch, &format!("w{batch}")), Status::Passed, 1.0);
        let text = of.to_json().replace("\"hardware\":\"test\"", &format!("\"hardware\":{}", json!(hardware)));
        set.add_trace(Trace::parse(&text, "trace").unwrap()).unwrap();
    }
    set.save(&root).unwrap();
    let said = |enabled: &str| {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "apply::the_environment_enables_a_table_of_this_hardware", "--nocapture"]);
        let output = child.env(CHILD, "1").env("FIB_ENABLE_APPLY", enabled).env("FIB_DATASET_PATH", &root).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    assert!(said("1").contains("batch 1: here, batch 64: own"), "{}", said("1"));
    assert!(said("0").contains("batch 1: own, batch 64: own"), "{}", said("0"));
}

#[test]
fn reports_say_who_leads_and_escape_names() {
    let set = measured();
    let text = report::markdown(&set);
    assert!(text.contains("* PASSED: 5\n* INCORRECT_NUMERICAL: 5\n"), "{text}");
    let lines = report::leaders(&set, set.definition("scale_h8").unwrap());
    assert_eq!(lines.iter().map(|l| l.solution).collect::<Vec<_>>(), ["large", "small", "wrong<&>"]);
    for html in
        [report::html(&set), report::index(&set), report::definition_page(&set, set.definition("scale_h8").unwrap())]
    {
        assert!(html.starts_with("<!doctype html>") && !html.contains("wrong<&>"));
    }
    let page = report::definition_page(&set, set.definition("scale_h8").unwrap());
    assert!(page.contains("<a href=\"/compare/large/small\">large beside small</a>"), "{page}");
    let mut odd = TraceSet::new("unwritten");
    let mut value = support::definition();
    value["name"] = "50% #1?".into();
    odd.add_definition(Definition::from_value(&value).unwrap()).unwrap();
    assert!(report::index(&odd).contains("<a href=\"/definitions/50%25%20%231%3F\">50% #1?</a>"));
    let both = report::compare_page(&set, set.solution("small").unwrap(), set.solution("large").unwrap());
    assert!(both.contains("batch=64<td class=n>9.0000<td class=n>3.0000<td class=n>3.000"), "{both}");
}
