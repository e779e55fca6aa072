//! Builders: from a solution to something a worker can call.
//!
//! | language, binding | built by | called in |
//! |---|---|---|
//! | python, triton, tilelang | the user's Python | its worker |
//! | cuda, `fir` | NVRTC, with `launch.json` beside the kernel | the native worker, on a GPU |
//! | cpp or cuda, `torch` or `tvm-ffi` (also none) | the user's Python | its worker |
//! | cpp, `fir` | `c++` | the native worker, through `fir_bench.h` |
//! | rust | `rustc`, or cargo where there is a `Cargo.toml` | the native worker, through `fir_bench.rs` |
//! | fir | nothing | the native worker: an operator of the kernel library |
//!
//! Builds are kept in a folder under their content's hash ([`Solution::build_key`]); a folder is renamed into place when it is
//! whole, so racing processes do no harm.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::fs;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::Command;

use fir::Exec;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::schema::{DType, Definition, Expr, Facts, Language, Solution};
use crate::worker::kernel::Kernel;

/// The header that C++ solutions include.
pub const HEADER: &str = include_str!("fir_bench.h");
/// The module that Rust solutions include.
pub const RUST_MODULE: &str = include_str!("fir_bench.rs");

/// Which kind of worker calls a solution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The user's Python.
    Python,
    /// This program.
    Native,
}

/// How a solution is built and called; also the worker's word for it.
fn kind(solution: &Solution) -> (&'static str, Caller) {
    match (solution.language(), solution.binding()) {
        (Language::Fir, _) => ("fir", Caller::Native),
        (Language::Rust, _) => ("library", Caller::Native),
        (Language::Cpp, Some("fir")) => ("library", Caller::Native),
        (Language::Cuda, Some("fir")) => ("nvrtc", Caller::Native),
        (Language::Cpp | Language::Cuda, Some("torch")) => ("torch", Caller::Python),
        (Language::Cpp | Language::Cuda, _) => ("tvm-ffi", Caller::Python),
        (Language::Python | Language::Triton | Language::TileLang, _) => ("python", Caller::Python),
    }
}

/// Which kind of worker calls `solution`.
pub fn caller(solution: &Solution) -> Caller {
    kind(solution).1
}

/// Where builds are kept: `FIR_BENCH_CACHE`, or `fir/bench` in the user's cache.
pub fn cache_folder() -> PathBuf {
    let given = std::env::var_os("FIR_BENCH_CACHE").map(PathBuf::from);
    let user = || std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    given.unwrap_or_else(|| user().or_else(home).unwrap_or_else(std::env::temp_dir).join("fir/bench"))
}

/// Writes a solution's files and compiles what is compiled here; the request that makes a worker load it.
pub(crate) fn build(definition: &Definition, solution: &Solution, device: &str) -> Result<Value> {
    let (kind, caller) = kind(solution);
    let fail = |why: String| Error::Build { solution: solution.name().into(), why };
    if caller == Caller::Native && !solution.destination_passing() {
        return Err(fail(
            "compiled code takes its outputs as arguments: `destination_passing_style` must be true".into(),
        ));
    }
    if kind == "library" && device != "cpu" {
        return Err(fail(format!("compiled code is called with host memory, not on {device}")));
    }
    let folder = if kind == "fir" { PathBuf::new() } else { prepared(solution, kind)? };
    let params = solution.sources().iter().find(|s| s.path == solution.entry_file()).map(|s| s.content.as_str());
    let names =
        |specs: &[(String, crate::schema::TensorSpec)]| specs.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    Ok(json!({
        "op": "build", "kind": kind, "folder": folder, "library": folder.join("solution.so"),
        "entry_file": solution.entry_file(), "entry_symbol": solution.entry_symbol(),
        "style": if solution.destination_passing() { "destination" } else { "value" },
        "device": device, "key": solution.build_key(), "language": solution.language().name(),
        "sources": solution.sources().iter().map(|s| &s.path).collect::<Vec<_>>(),
        "flags": solution.flags(), "include_paths": solution.include_paths(), "target_hardware": solution.target_hardware(),
        "params": params.unwrap_or("{}"),
        "input_names": names(definition.inputs()), "output_names": names(definition.outputs()),
    }))
}

/// A kernel in CUDA C++, compiled and loaded on the GPU of `exec`, with its launch for what is known.
pub(crate) fn kernel(definition: &Definition, solution: &Solution, exec: &Exec, facts: &dyn Facts) -> Result<Kernel> {
    let launch = launch(definition, solution, facts)?;
    let launch = launch.ok_or_else(|| Error::refused("build", format!("`{}` is no kernel", solution.name())))?;
    let mut kernel = Kernel::new(&build(definition, solution, "cuda")?, exec)?;
    kernel.set_launch(&launch);
    Ok(kernel)
}

/// A solution in Rust or C++, compiled and loaded into this process.
pub(crate) fn library(definition: &Definition, solution: &Solution) -> Result<Library> {
    let request = build(definition, solution, "cpu")?;
    match (kind(solution).0, request["library"].as_str()) {
        ("library", Some(path)) => Library::open(Path::new(path), solution.entry_symbol()),
        (kind, _) => Err(Error::refused("build", format!("`{}` is {kind}, not a library", solution.name()))),
    }
}

/// The folder with a solution's sources and, for compiled code, `solution.so`.
fn prepared(solution: &Solution, kind: &str) -> Result<PathBuf> {
    let base = cache_folder().join(solution.language().name());
    let folder = base.join(solution.build_key());
    if folder.is_dir() {
        return Ok(folder);
    }
    let making =
        base.join(format!("{}.{}.{:?}", solution.build_key(), std::process::id(), std::thread::current().id()));
    let _ = fs::remove_dir_all(&making);
    for source in solution.sources() {
        crate::traceset::write(&making.join(&source.path), &source.content)?;
    }
    if kind == "library" {
        compile(solution, &making).inspect_err(|_| {
            let _ = fs::remove_dir_all(&making);
        })?;
    }
    if let Err(e) = fs::rename(&making, &folder) {
        // Another process was first: what it made is the same.
        let _ = fs::remove_dir_all(&making);
        if !folder.is_dir() {
            return Err(Error::io(&folder)(e));
        }
    }
    Ok(folder)
}

fn compile(solution: &Solution, folder: &Path) -> Result<()> {
    let fail = |why: String| Error::Build { solution: solution.name().into(), why };
    let output = folder.join("solution.so");
    let mut command = if solution.language() == Language::Rust {
        crate::traceset::write(&folder.join("fir_bench.rs"), RUST_MODULE)?;
        if folder.join("Cargo.toml").exists() {
            let mut command = Command::new("cargo");
            command.args(["build", "--release", "--target-dir", "target"]).args(solution.flags());
            command
        } else {
            let mut command = Command::new("rustc");
            command.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "solution"]);
            command.args(["-C", "opt-level=3", "-C", "target-cpu=native", "-C", "panic=abort"]);
            command.args(solution.flags()).arg("-o").arg(&output).arg(solution.entry_file());
            command
        }
    } else {
        crate::traceset::write(&folder.join("fir_bench.h"), HEADER)?;
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command.args(["-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-I."]);
        command.args(solution.include_paths().iter().map(|p| format!("-I{p}"))).arg("-o").arg(&output);
        let compiled = |path: &str| [".cpp", ".cc", ".cxx", ".c"].iter().any(|e| path.ends_with(e));
        command.args(solution.sources().iter().map(|s| s.path.as_str()).filter(|p| compiled(p))).args(solution.flags());
        command
    };
    let done = command.current_dir(folder).output().map_err(|e| fail(format!("{command:?} cannot be started: {e}")))?;
    if !done.status.success() {
        return Err(fail(format!("{}\n{}", done.status, String::from_utf8_lossy(&done.stderr))));
    }
    if !output.exists() {
        let built = fs::read_dir(folder.join("target/release")).into_iter().flatten().flatten().map(|e| e.path());
        let library = built.into_iter().find(|p| p.extension().is_some_and(|e| e == "so"));
        let library = library.ok_or_else(|| fail("cargo made no cdylib".into()))?;
        fs::copy(&library, &output).map_err(Error::io(&library))?;
    }
    Ok(())
}

/// A tensor as compiled code sees it; `fir_bench.h` has its twin.
#[repr(C)]
struct CTensor {
    data: *mut u8,
    shape: *const i64,
    rank: i32,
    dtype: i32,
}

const _: () = assert!(size_of::<CTensor>() == 24, "as FirTensor on 64-bit machines");

/// An argument of compiled code.
pub(crate) struct Arg<'a> {
    data: *mut u8,
    dtype: DType,
    shape: Vec<i64>,
    life: PhantomData<&'a mut [u8]>,
}

impl<'a> Arg<'a> {
    /// An output; an input of code that is not trusted to leave it alone.
    pub(crate) fn written(data: &'a mut [u8], dtype: DType, shape: &[usize]) -> Self {
        Self { data: data.as_mut_ptr(), dtype, shape: shape.iter().map(|&n| n as i64).collect(), life: PhantomData }
    }

    /// An input.
    pub(crate) fn read(data: &'a [u8], dtype: DType, shape: &[usize]) -> Self {
        let shape = shape.iter().map(|&n| n as i64).collect();
        Self { data: data.as_ptr().cast_mut(), dtype, shape, life: PhantomData }
    }
}

/// Code of a type in the C ABI.
fn code(dtype: DType) -> i32 {
    DType::ALL.iter().position(|d| *d == dtype).unwrap_or(0) as i32
}

type Entry = unsafe extern "C" fn(*const CTensor, usize, *mut c_char, usize) -> i32;

/// A solution's shared library.
pub(crate) struct Library {
    entry: Entry,
    /// Keeps `entry` loaded.
    _library: libloading::Library,
}

impl Library {
    pub(crate) fn open(path: &Path, symbol: &str) -> Result<Self> {
        let fail = |why: String| Error::Build { solution: path.display().to_string(), why };
        // SAFETY: loading runs the library's constructors: code that the user asked to have run, in a process made for it.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| fail(e.to_string()))?;
        // SAFETY: the C ABI says what a solution's entry point is; the solution's author keeps to it.
        let entry = *unsafe { library.get::<Entry>(symbol.as_bytes()) }
            .map_err(|_| fail(format!("there is no symbol `{symbol}`; is it `extern \"C\"`?")))?;
        Ok(Self { entry, _library: library })
    }

    /// Calls it with inputs, then outputs.
    pub(crate) fn call(&self, args: &[Arg<'_>]) -> Result<()> {
        let describe = |a: &Arg<'_>| {
            let (shape, rank) = (a.shape.as_ptr(), a.shape.len() as i32);
            CTensor { data: a.data, shape, rank, dtype: code(a.dtype) }
        };
        let tensors: Vec<CTensor> = args.iter().map(describe).collect();
        let mut message = [0 as c_char; 512];
        // SAFETY: pointers are to memory that is borrowed until the call ends, with the shapes that are given. To stay within
        // it, and to write outputs alone, is for the solution to keep: in a benchmark in a process made for it, and where
        // it is deployed after a benchmark saw it do so.
        let code = unsafe { (self.entry)(tensors.as_ptr(), tensors.len(), message.as_mut_ptr(), message.len()) };
        if code == 0 {
            return Ok(());
        }
        message[511] = 0;
        // SAFETY: the last byte is 0, so the text ends within the array.
        let text = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned();
        Err(Error::refused("solution", format!("returned {code}: {text}")))
    }
}

/// The launch of a CUDA kernel on a workload, from the solution's `launch.json`:
///
/// ```json
/// {"grid": ["batch_size"], "block": [256], "shared": "4 * hidden_size", "args": ["x", "out", "hidden_size", "eps: f32 = 1e-6"]}
/// ```
///
/// Sizes are numbers or expressions of axes. An argument is a tensor, a scalar input (`float`, or `int` if it is whole), an axis (`int`), or
/// `name: type = expression` with type `i32`, `i64` or `f32`.
pub(crate) fn launch(definition: &Definition, solution: &Solution, facts: &dyn Facts) -> Result<Option<Value>> {
    if kind(solution).0 != "nvrtc" {
        return Ok(None);
    }
    let fail = |why: String| Error::Build { solution: solution.name().into(), why };
    let source = solution.sources().iter().find(|s| s.path == "launch.json");
    let source = source.ok_or_else(|| fail("a kernel needs a file `launch.json` with its launch".into()))?;
    let value: Value = serde_json::from_str(&source.content).map_err(|e| fail(format!("launch.json: {e}")))?;
    let size = |value: &Value| -> Result<u64> {
        if let Some(n) = value.as_u64() {
            return Ok(n);
        }
        let text = value.as_str().ok_or_else(|| fail(format!("launch.json: {value} is not a size")))?;
        let expr = Expr::parse(text).map_err(|e| fail(format!("launch.json: `{text}`: {e}")))?;
        match expr.eval(facts) {
            Some(crate::schema::Number::Int(n)) if n >= 0 => Ok(n as u64),
            got => Err(fail(format!("launch.json: `{text}` is {got:?}, not a size"))),
        }
    };
    let triple = |field: &str| -> Result<Vec<u64>> {
        let list = value[field].as_array().filter(|l| (1..=3).contains(&l.len()));
        let list = list.ok_or_else(|| fail(format!("launch.json: `{field}` must have 1 to 3 sizes")))?;
        let mut sizes = list.iter().map(size).collect::<Result<Vec<_>>>()?;
        sizes.resize(3, 1);
        Ok(sizes)
    };
    let shared = value.get("shared").map_or(Ok(0), size)?;
    let arg = |arg: &Value| -> Result<Value> {
        let text = arg.as_str().ok_or_else(|| fail(format!("launch.json: argument {arg} is not a string")))?;
        let mut tensors = definition.inputs().iter().chain(definition.outputs());
        if tensors.any(|(name, _)| name == text) {
            return Ok(json!({"tensor": text}));
        }
        let (kind, text) = match text.split_once(':') {
            Some((_, rest)) => {
                let (kind, text) =
                    rest.split_once('=').ok_or_else(|| fail(format!("launch.json: `{text}` has no `=`")))?;
                (kind.trim(), text.trim())
            }
            None => ("i32", text),
        };
        let number = match kind {
            "f32" => text.parse::<f64>().map(|x| json!(x)).or_else(|_| size(&json!(text)).map(|n| json!(n)))?,
            "i32" | "i64" => json!(size(&json!(text))?),
            other => return Err(fail(format!("launch.json: type `{other}` is not i32, i64 or f32"))),
        };
        Ok(json!({"type": kind, "value": number}))
    };
    let args = value["args"].as_array().ok_or_else(|| fail("launch.json: `args` is missing".into()))?;
    let args = args.iter().map(arg).collect::<Result<Vec<_>>>()?;
    Ok(Some(json!({"grid": triple("grid")?, "block": triple("block")?, "shared": shared, "args": args})))
}
