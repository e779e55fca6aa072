//! Compiled solutions.

use fir_bench::TraceSet;
use fir_bench::schema::{Definition, Solution, Status, Trace};
use serde_json::{Value, json};

use crate::support::{self, workload};

const RUST: &str = r#"
mod fir_bench;
use fir_bench::Tensor;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn run(args: *const Tensor, count: usize, _message: *mut u8, _room: usize) -> i32 {
    // SAFETY: the benchmark passes `count` tensors.
    let args = unsafe { std::slice::from_raw_parts(args, count) };
    let [x, factor, y] = args else { return 1 };
    // SAFETY: their types are the definition's, and the last is written by nobody else.
    let (x, factor, y) = unsafe { (x.get::<f32>(), factor.get::<f32>()[0], y.get_mut::<f32>()) };
    for (y, x) in y.iter_mut().zip(x) {
        *y = x * factor;
    }
    0
}
"#;

const CPP: &str = r#"
#include "fir_bench.h"
#include <stdio.h>

extern "C" int run(const FirTensor* args, size_t count, char* message, size_t room) {
  if (count != 3 || args[0].dtype != FIR_FLOAT32 || args[0].rank != 2) {
    snprintf(message, room, "%zu arguments", count);
    return 1;
  }
  const float* x = (const float*)args[0].data;
  float factor = *(const float*)args[1].data, *y = (float*)args[2].data;
  for (int64_t i = 0; i < args[0].shape[0] * args[0].shape[1]; i++) y[i] = x[i] * factor;
  return 0;
}
"#;

fn solution(name: &str, language: &str, file: &str, code: &str) -> Value {
    json!({
        "name": name, "definition": "scale_h8", "author": "test",
        "spec": {"language": language, "target_hardware": ["cpu"], "entry_point": format!("{file}::run"), "binding": "fir"},
        "sources": [{"path": file, "content": code}],
    })
}

/// A solution in Rust.
pub(crate) fn in_rust(name: &str) -> Solution {
    Solution::from_value(&solution(name, "rust", "lib.rs", RUST)).unwrap()
}

#[test]
fn rust_and_cpp_are_built_called_and_judged_as_others_are() {
    let Some(config) = support::quick() else { return };
    let root = support::folder("builders");
    let mut set = TraceSet::new(&root);
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    set.add_trace(Trace::of_workload("scale_h8", &workload(33, "w")).unwrap()).unwrap();
    let edits = CPP.replace("y[i] = x[i] * factor", "y[i] = ((float*)x)[i] *= factor");
    let refuses = CPP.replace("count != 3", "count == 3");
    let silent = RUST.replace("*y = x * factor;", "let _ = (&y, x, factor);");
    for (name, language, file, code) in [
        ("rust", "rust", "lib.rs", RUST),
        ("cpp", "cpp", "main.cpp", CPP),
        ("rust_silent", "rust", "lib.rs", silent.as_str()),
        ("cpp_edits", "cpp", "main.cpp", edits.as_str()),
        ("cpp_refuses", "cpp", "main.cpp", refuses.as_str()),
        ("rust_broken", "rust", "lib.rs", "pub fn run( {"),
        ("cpp_unexported", "cpp", "main.cpp", "int run() { return 0; }"),
        ("cpp_crashes", "cpp", "main.cpp", "extern \"C\" int run(void*) { *(volatile int*)0 = 1; return 0; }"),
    ] {
        set.add_solution(Solution::from_value(&solution(name, language, file, code)).unwrap()).unwrap();
    }
    let results = support::results(&mut set, &config);
    for (name, status, says) in [
        ("rust", Status::Passed, ""),
        ("cpp", Status::Passed, ""),
        ("rust_silent", Status::IncorrectNumerical, "output `y`"),
        ("cpp_edits", Status::RuntimeError, "it wrote to its input `x`"),
        ("cpp_refuses", Status::RuntimeError, "returned 1: 3 arguments"),
        ("rust_broken", Status::CompileError, "error"),
        ("cpp_unexported", Status::CompileError, "there is no symbol `run`"),
        ("cpp_crashes", Status::RuntimeError, "signal: 11"),
    ] {
        let evaluation = results[name].evaluation().unwrap();
        assert_eq!(evaluation.status(), status, "{name}: {}", evaluation.log());
        assert!(evaluation.log().contains(says), "{name}: {}", evaluation.log());
    }
}

/// Flags and folders of headers are a solution's own; a crate is built by cargo; what is built once is found again.
#[test]
fn flags_headers_and_crates_are_taken_and_builds_kept() {
    let Some(config) = support::quick() else { return };
    let root = support::folder("flags");
    std::fs::write(root.join("factor.h"), "#define FACTOR 3.0f\n").unwrap();
    let header = CPP
        .replace("#include <stdio.h>", "#include <stdio.h>\n#include <factor.h>")
        .replace("x[i] * factor", "x[i] * FACTOR");
    let mut by_header = solution("header", "cpp", "main.cpp", &header);
    by_header["spec"]["include_paths"] = json!([root]);
    let mut by_flag = solution("flag", "cpp", "main.cpp", &CPP.replace("x[i] * factor", "x[i] * FACTOR"));
    by_flag["spec"]["flags"] = json!(["-DFACTOR=3.0f"]);
    let mut other_flag = by_flag.clone();
    (other_flag["name"], other_flag["spec"]["flags"]) = (json!("other_flag"), json!(["-DFACTOR=4.0f"]));
    let mut by_cargo = solution("crate", "rust", "src/lib.rs", RUST);
    let manifest = "[package]\nname = \"scale\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[lib]\ncrate-type = [\"cdylib\"]\n\n[workspace]\n";
    // The module lies in the solution's folder, a crate's sources in one of their own.
    by_cargo["sources"][0]["content"] =
        RUST.replace("mod fir_bench;", "#[path = \"../fir_bench.rs\"]\nmod fir_bench;").into();
    by_cargo["sources"].as_array_mut().unwrap().push(json!({"path": "Cargo.toml", "content": manifest}));
    let mut set = TraceSet::new(&root);
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    set.add_trace(Trace::of_workload("scale_h8", &workload(33, "w")).unwrap()).unwrap();
    for value in [&by_header, &by_flag, &other_flag, &by_cargo] {
        set.add_solution(Solution::from_value(value).unwrap()).unwrap();
    }
    let results = support::results(&mut set, &config);
    for (name, status) in [
        ("header", Status::Passed),
        ("flag", Status::Passed),
        ("other_flag", Status::IncorrectNumerical),
        ("crate", Status::Passed),
    ] {
        let evaluation = results[name].evaluation().unwrap();
        assert_eq!(evaluation.status(), status, "{name}: {}", evaluation.log());
    }
    let built = |s: &Solution| fir_bench::build::cache_folder().join("cpp").join(s.build_key()).join("solution.so");
    let made = std::fs::metadata(built(set.solution("flag").unwrap())).unwrap().modified().unwrap();
    support::results(&mut set, &config);
    assert_eq!(std::fs::metadata(built(set.solution("flag").unwrap())).unwrap().modified().unwrap(), made);
}

const TVM_FFI: &str = r#"
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

void scale(tvm::ffi::TensorView x, double factor, tvm::ffi::TensorView y) {
  const float* from = (const float*)x.data_ptr();
  float* to = (float*)y.data_ptr();
  for (int64_t i = 0; i < x.shape()[0] * x.shape()[1]; i++) to[i] = from[i] * (float)factor + BIAS;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, scale);
"#;

const TORCH: &str = r#"
#include <torch/extension.h>

torch::Tensor run(torch::Tensor x, double factor) { return x * factor + BIAS; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"#;

/// Host code through the bindings of the user's Python, which must have them, and ninja.
#[test]
fn bindings_of_the_users_python_are_built() {
    let Some(config) = support::quick() else { return };
    let has = std::process::Command::new(&config.python).args(["-c", "import tvm_ffi, ninja"]).output();
    if !has.is_ok_and(|o| o.status.success()) {
        return eprintln!("skipped: the Python with torch has no tvm_ffi and ninja");
    }
    let mut set = TraceSet::new(support::folder("bindings"));
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    set.add_trace(Trace::of_workload("scale_h8", &workload(33, "w")).unwrap()).unwrap();
    for (name, binding, code, bias) in
        [("tvm", json!(null), TVM_FFI, 0), ("torch", json!("torch"), TORCH, 0), ("wrong", json!("tvm-ffi"), TVM_FFI, 1)]
    {
        let mut value = solution(name, "cpp", "main.cpp", code);
        value["spec"]["binding"] = binding;
        value["spec"]["flags"] = json!([format!("-DBIAS={bias}")]);
        value["spec"]["destination_passing_style"] = json!(name != "torch");
        set.add_solution(Solution::from_value(&value).unwrap()).unwrap();
    }
    let results = support::results(&mut set, &config);
    for (name, status) in [("tvm", Status::Passed), ("torch", Status::Passed), ("wrong", Status::IncorrectNumerical)] {
        let evaluation = results[name].evaluation().unwrap();
        assert_eq!(evaluation.status(), status, "{name}: {}", evaluation.log());
    }
}

const CUDA: &str = "extern \"C\" __global__ void run(const float* x, float* y, int n, float factor) {\n\
  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) y[i] = x[i] * factor;\n}\n";

pub(crate) fn cuda(name: &str, code: &str, launch: Value) -> Value {
    let mut value = solution(name, "cuda", "kernel.cu", code);
    let file = json!({"path": "launch.json", "content": launch.to_string()});
    value["sources"].as_array_mut().unwrap().push(file);
    value
}

/// Without a GPU a kernel is compiled and its launch worked out, and only the call fails; `FIR_BENCH_DEVICE` names one.
#[test]
fn kernels_are_compiled_and_their_launches_checked() {
    let Some(mut config) = support::quick() else { return };
    if let Err(e) = fir::jit::compiler() {
        assert!(!std::env::var("FIR_REQUIRE_NVRTC").is_ok_and(|v| v == "1"), "{e}");
        return eprintln!("skipped: {e}");
    }
    config.device = std::env::var("FIR_BENCH_DEVICE").unwrap_or(config.device);
    let good = json!({"grid": ["ceil_div(batch * hidden, 256)"], "block": [256], "args": ["x", "y", "n: i32 = batch * hidden", "factor"]});
    let mut wrong = good.clone();
    wrong["grid"] = json!(["rows"]);
    let mut set = TraceSet::new(support::folder("kernels"));
    set.add_definition(Definition::from_value(&support::definition()).unwrap()).unwrap();
    set.add_trace(Trace::of_workload("scale_h8", &workload(33, "w")).unwrap()).unwrap();
    let broken = CUDA.replace("n) y", "m) y");
    for (name, code, launch) in [("good", CUDA, &good), ("broken", &broken, &good), ("wrong", CUDA, &wrong)] {
        set.add_solution(Solution::from_value(&cuda(name, code, launch.clone())).unwrap()).unwrap();
    }
    let results = support::results(&mut set, &config);
    for (name, status, says) in [
        ("broken", Status::CompileError, "identifier \"m\" is undefined"),
        ("wrong", Status::CompileError, "launch.json: `rows` is None, not a size"),
    ] {
        let evaluation = results[name].evaluation().unwrap();
        assert_eq!(evaluation.status(), status, "{name}: {}", evaluation.log());
        assert!(evaluation.log().contains(says), "{name}: {}", evaluation.log());
    }
    // On the CPU it was compiled, and then there was nothing to run it on.
    let good = results["good"].evaluation().unwrap();
    if config.device == "cpu" {
        assert_eq!(good.status(), Status::RuntimeError, "{}", good.log());
        assert!(good.log().contains("no GPU to run it on"), "{}", good.log());
    } else {
        assert_eq!(good.status(), Status::Passed, "{:?} {}", good.correctness(), good.log());
    }
}
