//! What a call costs that asks `apply` first: nanoseconds when nothing is enabled, and when something is.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use fir_bench::TraceSet;
use fir_bench::apply::{Deployed, Op, Policy, Table, enable};
use fir_bench::schema::{Definition, Solution, Trace};
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let axes = ["batch_size", "num_pages", "len_indptr", "num_kv_indices"];
    let mut set = TraceSet::new("unwritten");
    set.add_definition(Definition::from_value(&json!({
        "name": "decode", "op_type": "gqa_paged", "axes": axes.iter().map(|a| (a.to_string(), json!({"type": "var"}))).collect::<serde_json::Map<_, _>>(),
        "inputs": {"x": {"shape": axes, "dtype": "float32"}}, "outputs": {}, "reference": "def run(x):\n    return ()\n",
    }))?)?;
    set.add_solution(Solution::from_value(&json!({"name": "fast", "definition": "decode", "author": "a",
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "m.py::run"},
        "sources": [{"path": "m.py", "content": "x"}]}))?)?;
    for n in 1..=64u64 {
        set.add_trace(Trace::from_value(&json!({"definition": "decode", "solution": "fast",
            "workload": {"uuid": n.to_string(), "inputs": {}, "axes": {"batch_size": n, "num_pages": 64, "len_indptr": n + 1, "num_kv_indices": 64}},
            "evaluation": {"status": "PASSED", "environment": {"hardware": "h"}, "timestamp": "t",
                "correctness": {}, "performance": {"latency_ms": 1.0}}}))?)?;
    }
    type Kernel = dyn Fn() -> u32 + Send + Sync;
    let op = Op::<Kernel>::new("decode", Box::new(|| 0)).solution("fast", Box::new(|| 1));
    let time = |what: &str, want: u32| {
        let n = 1_000_000u64;
        let begin = Instant::now();
        let mut sum = 0u64;
        for i in 0..n {
            let batch = 1 + i % 64;
            sum += u64::from(op.pick(black_box(&[batch, 64, batch + 1, 64]))());
        }
        assert_eq!(sum, n * u64::from(want), "{what}");
        println!("apply/decode/64 sizes/{what}: {:.1} ns", begin.elapsed().as_nanos() as f64 / n as f64);
    };
    op.pick(&[1, 64, 2, 64]);
    time("off", 0);
    let on = enable(Table::new(&set, &Policy::default()));
    time("on", 1);

    // The same for an operator of the library: a norm of one row of 16, by itself, on an executor that carries the hook, and
    // by a solution in Rust that the table chose.
    drop(on);
    let tensor = |axes: &[&str]| json!({"shape": axes, "dtype": "float32"});
    let mut set = TraceSet::new("unwritten");
    set.add_definition(Definition::from_value(&json!({
        "name": "rmsnorm_h16", "op_type": "rmsnorm", "axes": {"n": {"type": "var"}, "h": {"type": "const", "value": 16}},
        "inputs": {"hidden_states": tensor(&["n", "h"]), "weight": tensor(&["h"])},
        "outputs": {"output": tensor(&["n", "h"])}, "reference": "def run(hidden_states, weight):\n    return hidden_states\n",
    }))?)?;
    let nothing =
        "#[unsafe(no_mangle)]\npub extern \"C\" fn run(_: usize, _: usize, _: usize, _: usize) -> i32 {\n    0\n}\n";
    set.add_solution(Solution::from_value(&json!({"name": "nothing", "definition": "rmsnorm_h16", "author": "a",
        "spec": {"language": "rust", "target_hardware": ["cpu"], "entry_point": "lib.rs::run"},
        "sources": [{"path": "lib.rs", "content": nothing}]}))?)?;
    set.add_trace(Trace::from_value(&json!({"definition": "rmsnorm_h16", "solution": "nothing",
        "workload": {"uuid": "u", "inputs": {}, "axes": {"n": 1}},
        "evaluation": {"status": "PASSED", "environment": {"hardware": "h"}, "timestamp": "t",
            "correctness": {}, "performance": {"latency_ms": 1.0}}}))?)?;
    let plain = fir::Exec::cpu()?;
    let hooked = plain.with_override(Arc::new(Deployed::default()));
    let (x, weight) = ([1f32; 16], [1f32; 16]);
    let norm = |what: &str, exec: &fir::Exec, want: f32| -> fir::Result<()> {
        let n = 200_000;
        let (x, weight) = (fir::TensorRef::new(&x, &[1, 16])?, fir::TensorRef::new(&weight, &[16])?);
        let mut out = [0f32; 16];
        let begin = Instant::now();
        for _ in 0..n {
            fir::norm::rms_norm(exec, black_box(x), weight, 1e-6, fir::TensorMut::new(&mut out, &[1, 16])?)?;
        }
        assert!((out[0] - want).abs() < 1e-3, "{what}: {}", out[0]);
        println!("apply/rms_norm/16/{what}: {:.1} ns", begin.elapsed().as_nanos() as f64 / f64::from(n));
        Ok(())
    };
    norm("no hook", &plain, 1.0)?;
    norm("off", &hooked, 1.0)?;
    let _on = enable(Table::new(&set, &Policy::default()));
    norm("on, by a solution that does nothing", &hooked, 0.0)?;
    Ok(())
}
