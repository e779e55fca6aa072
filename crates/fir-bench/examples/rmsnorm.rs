//! RMSNorm from its definition to the best of its solutions, and `apply` routing calls to it:
//! `cargo run --release -p fir-bench --example rmsnorm -- <python with torch> [cpu | cuda:0] [folder]`

use std::path::PathBuf;
use std::sync::Arc;

use fir_bench::apply::{Deployed, Op, Policy, Table, enable};
use fir_bench::benchmark::{self, Config, Evaluating, Event};
use fir_bench::ops::solution_for;
use fir_bench::schema::{Definition, Solution, Trace, Workload};
use fir_bench::{TraceSet, report};
use serde_json::{Value, json};

const REFERENCE: &str = "import torch\n\nEPS = 1e-6\n\n@torch.no_grad()\ndef run(hidden_states, weight):\n    \
    x = hidden_states.to(torch.float32)\n    \
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * weight.to(torch.float32)\n    \
    return y.to(hidden_states.dtype)\n";

const PYTHON: &str = "import torch\n\ndef run(hidden_states, weight):\n    \
    return torch.nn.functional.rms_norm(hidden_states, (4096,), weight, 1e-6)\n";

const TRITON: &str = "import torch, triton\nimport triton.language as tl\n\n@triton.jit\n\
def kernel(x, w, y, N: tl.constexpr):\n    row, i = tl.program_id(0), tl.arange(0, N)\n    \
    v = tl.load(x + row * N + i).to(tl.float32)\n    r = tl.rsqrt(tl.sum(v * v, axis=0) / N + 1e-6)\n    \
    tl.store(y + row * N + i, (v * r * tl.load(w + i).to(tl.float32)).to(tl.bfloat16))\n\n\
def run(hidden_states, weight, output):\n    kernel[(hidden_states.shape[0],)](hidden_states, weight, output, 4096, num_warps=8)\n";

const CUDA: &str = r#"
typedef unsigned short u16;
static __device__ float wide(u16 x) { return __uint_as_float((unsigned)x << 16); }
static __device__ u16 narrow(float x) {
  unsigned b = __float_as_uint(x);
  return (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}

// A block of 512 threads to a row of 4096; each has 8 elements, 16 bytes.
extern "C" __global__ void rms_norm(const uint4* x, const uint4* w, uint4* y, float eps) {
  __shared__ float sums[16];
  uint4 in = x[blockIdx.x * 512 + threadIdx.x], by = w[threadIdx.x], out;
  const u16 *a = (const u16*)&in, *b = (const u16*)&by;
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += wide(a[i]) * wide(a[i]);
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 16; i++) sum += sums[i];
  float r = rsqrtf(sum / 4096 + eps);
  for (int i = 0; i < 8; i++) ((u16*)&out)[i] = narrow(wide(a[i]) * r * wide(b[i]));
  y[blockIdx.x * 512 + threadIdx.x] = out;
}
"#;

const RUST: &str = r#"
mod fir_bench;
use fir_bench::Tensor;

fn wide(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn run(args: *const Tensor, count: usize, _message: *mut u8, _room: usize) -> i32 {
    // SAFETY: the benchmark passes `count` tensors.
    let args = unsafe { std::slice::from_raw_parts(args, count) };
    let [x, w, y] = args else { return 1 };
    // SAFETY: their types are the definition's, and the last is written by nobody else.
    let (x, w, y) = unsafe { (x.get::<u16>(), w.get::<u16>(), y.get_mut::<u16>()) };
    for (x, y) in x.chunks_exact(4096).zip(y.chunks_exact_mut(4096)) {
        let mut sums = [0f32; 16];
        for part in x.chunks_exact(16) {
            for (s, x) in sums.iter_mut().zip(part) {
                *s += wide(*x) * wide(*x);
            }
        }
        let r = 1.0 / (sums.iter().sum::<f32>() / 4096.0 + 1e-6).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            let bits = (wide(*x) * r * wide(*w)).to_bits();
            *y = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        }
    }
    0
}
"#;

fn solution(name: &str, language: &str, entry: &str, sources: &[(&str, &str)]) -> Value {
    json!({
        "name": name, "definition": "rmsnorm_h4096", "author": "example",
        "spec": {"language": language, "target_hardware": ["any"], "entry_point": entry, "binding": "fir",
            "destination_passing_style": language != "python"},
        "sources": sources.iter().map(|(path, content)| json!({"path": path, "content": content})).collect::<Vec<_>>(),
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, socket] = args.as_slice()
        && word == "worker"
    {
        return Ok(fir_bench::worker::serve_native(socket.as_ref())?);
    }
    let arg = |i: usize, usual: &str| args.get(i).cloned().unwrap_or_else(|| usual.into());
    let (python, device, folder) = (arg(0, "python3"), arg(1, "cpu"), arg(2, "rmsnorm-traces"));

    // What is computed, and on what.
    let mut set = TraceSet::new(PathBuf::from(&folder));
    let definition = Definition::from_value(&json!({
        "name": "rmsnorm_h4096", "op_type": "rmsnorm", "description": "RMSNorm of rows of 4096",
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 4096}},
        "inputs": {"hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
            "weight": {"shape": ["hidden_size"], "dtype": "bfloat16"}},
        "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
        "reference": REFERENCE,
    }))?;
    let own = solution_for(&definition)?;
    set.add_definition(definition)?;
    for batch in [1u64, 64, 1024] {
        let workload = Workload::from_value(&json!({"axes": {"batch_size": batch}, "uuid": format!("batch-{batch}"),
            "inputs": {"hidden_states": {"type": "random"}, "weight": {"type": "random"}}}))?;
        set.add_trace(Trace::of_workload("rmsnorm_h4096", &workload)?)?;
    }

    // How: in Python and by the library everywhere, in Triton and CUDA on a GPU, in Rust on a CPU.
    let launch = json!({"grid": ["batch_size"], "block": [512], "args": ["hidden_states", "weight", "output", "eps: f32 = 1e-6"]});
    let mut solutions = vec![solution("in_python", "python", "main.py::run", &[("main.py", PYTHON)])];
    if device == "cpu" {
        solutions.push(solution("in_rust", "rust", "lib.rs::run", &[("lib.rs", RUST)]));
    } else {
        solutions.push(solution("in_triton", "triton", "main.py::run", &[("main.py", TRITON)]));
        let files = [("kernel.cu", CUDA), ("launch.json", &launch.to_string())];
        solutions.push(solution("in_cuda", "cuda", "kernel.cu::rms_norm", &files));
    }
    for value in &solutions {
        set.add_solution(Solution::from_value(value)?)?;
    }
    own.map_or(Ok(()), |own| set.add_solution(own))?;

    // Measured.
    let mut config = Config::new(python, vec![std::env::current_exe()?.into(), "worker".into()]);
    config.device = device;
    config.evaluating = Evaluating { warmup_runs: Some(5), iterations: Some(20), ..Evaluating::default() };
    benchmark::run(&mut set, &config, &mut |event| match event {
        Event::Done { trace, .. } => {
            let evaluation = trace.evaluation();
            let status = evaluation.map_or("", |e| e.status().name());
            let times = trace.passed().map(|(c, p)| {
                format!("{:.4} ms, {:.2}×, error {:.1e}", p.latency_ms, p.speedup_factor, c.max_absolute_error)
            });
            let log = evaluation.map_or(String::new(), |e| e.log().to_owned());
            println!(
                "{status:<20} {:<18} {:<10} {}",
                trace.solution().unwrap_or(""),
                trace.workload().uuid(),
                times.unwrap_or(log)
            );
        }
        Event::Skipped { workload, why, .. } => println!("skipped {workload}: {why}"),
        _ => {}
    })?;
    set.save(&folder)?;
    println!("\n{}", report::markdown(&set));

    // And used: each call goes to what was best at its size.
    type Name = dyn Fn() -> String + Send + Sync;
    let mut op = Op::<Name>::new("rmsnorm_h4096", Box::new(|| "the caller's own".into()));
    for solution in set.solutions() {
        let name = solution.name().to_owned();
        op = op.solution(solution.name(), Box::new(move || name.clone()));
    }
    let _on = enable(Table::new(&set, &Policy::default()));
    for batch in [1, 64, 1024, 4096] {
        println!("apply: a batch of {batch} runs {}", op.pick(&[batch])());
    }

    // The library's own operators ask too, on an executor that carries the hook.
    if config.device == "cpu" {
        let exec = fir::Exec::cpu()?.with_override(Arc::new(Deployed::default()));
        let x = fir::Tensor::from_f32(fir::DType::BF16, &[1.0; 4096], &[1, 4096])?;
        let mut out = x.clone();
        fir::norm::rms_norm(&exec, x.view(), x.clone().reshaped(&[4096])?.view(), 1e-6, out.view_mut())?;
        println!("rms_norm of ones through it: {}", out.view().to_f32_vec()?[0]);
    }
    Ok(())
}
