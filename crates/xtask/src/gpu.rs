//! The lanes of the GPU: `cargo xtask jit` compiles kernels where there is none, `cargo xtask gpu-bundle` packs what runs
//! where there is one.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::step::{Step, cargo, program};

const VENV: &str = "target/nvrtc";
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const BUNDLE: &str = "target/gpu-bundle";
/// Most bytes of the bundle.
const BUNDLE_BYTES: u64 = 60 << 20;

/// The folder of NVRTC, from PyPI in a virtual environment of its own.
pub(crate) fn install() -> Result<PathBuf> {
    if let Some(folder) = nvrtc() {
        return Ok(folder);
    }
    program("python3", &format!("-m venv {VENV}")).run()?;
    program(&format!("{VENV}/bin/python"), &format!("-m pip install --quiet --no-deps {PACKAGE}")).run()?;
    nvrtc().with_context(|| format!("{PACKAGE} has no lib folder under {VENV}"))
}

/// The JIT lane. What CI leaves out, `FIR_TEST_EVERY_KERNEL` brings.
pub(crate) fn jit() -> Result<Step> {
    let folder = fs::canonicalize(install()?)?;
    // Apart from the user's cache: a lane must not find what another version of it left.
    let cache = std::env::current_dir()?.join("target/jit-cache");
    Ok(cargo("test --workspace --all-features --test it --test bench_it -- --nocapture jit:: kernels_are_compiled")
        .env("FIR_REQUIRE_NVRTC", "1")
        .env("FIR_NVRTC", &folder.to_string_lossy())
        .env("FIR_CACHE_DIR", &cache.to_string_lossy()))
}

/// The folder of the installed library.
fn nvrtc() -> Option<PathBuf> {
    let lib = Path::new(VENV).join("lib");
    let python = fs::read_dir(lib).ok()?.flatten().map(|e| e.path()).find(|p| p.join("site-packages").exists())?;
    Some(python.join("site-packages/nvidia/cu13/lib")).filter(|folder| folder.join("libnvrtc.so.13").exists())
}

/// Release binaries of the conformance suite and of the bench, with a page that says how to run them.
pub(crate) fn bundle() -> Result<()> {
    let binary = |args: &str| -> Result<PathBuf> {
        let messages = cargo(&format!("{args} -p fir-infer --all-features --no-run --message-format=json")).quiet()?;
        let built = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let path = built.filter_map(|m| m["executable"].as_str().map(PathBuf::from)).next_back();
        path.with_context(|| format!("`cargo {args}` made no binary"))
    };
    if Path::new(BUNDLE).exists() {
        fs::remove_dir_all(BUNDLE)?;
    }
    fs::create_dir_all(BUNDLE)?;
    for (name, built) in
        [("gpu-test", binary("test --release --test it")?), ("gpu-bench", binary("bench --bench gpu")?)]
    {
        let to = Path::new(BUNDLE).join(name);
        fs::copy(&built, &to)?;
        // Symbols stay for backtraces, debugging information is most of the size.
        program("strip", &format!("--strip-debug {}", to.display())).run()?;
    }
    fs::write(Path::new(BUNDLE).join("README"), README)?;
    let bytes: u64 = fs::read_dir(BUNDLE)?.flatten().filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum();
    println!("{BUNDLE}: {:.1} MiB", bytes as f64 / f64::from(1 << 20));
    ensure!(bytes <= BUNDLE_BYTES, "{bytes} bytes, at most {BUNDLE_BYTES}");
    Ok(())
}

const README: &str = "\
Needs an NVIDIA driver (525 or newer) and NVRTC: a CUDA toolkit, or `pip install nvidia-cuda-nvrtc`.

FIR_REQUIRE_GPU=1 ./gpu-test norm activation   the conformance suite of these operators, on the CPU and on the GPU
FIR_REQUIRE_GPU=1 ./gpu-test                   all of it; what reads the repository's own files and snapshots fails elsewhere:
                                               --skip sources --skip layers --skip matrix --skip dry --skip variant
FIR_REQUIRE_GPU=1 ./gpu-bench                  times beside goals and peers
";
