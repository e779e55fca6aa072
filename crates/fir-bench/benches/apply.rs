//! What a call costs that asks `apply` first: nanoseconds when nothing is enabled, and when something is.

use std::hint::black_box;
use std::time::Instant;

use fir_bench::TraceSet;
use fir_bench::apply::{Op, Policy, Table, enable};
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
    let _on = enable(Table::new(&set, &Policy::default()));
    time("on", 1);
    Ok(())
}
