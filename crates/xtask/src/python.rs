//! The Python package: its wheel, and its tests on CPU tensors with torch.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::bench_cpu::{TEST_ENV, torch};
use crate::step::{cargo, program};

const PIP: &str = "-m pip install -q --disable-pip-version-check --no-compile";
/// On two processes: half of the time is starting operators one by one.
const TESTS: &str = "-m pytest -q -n 2 -p no:cacheprovider --every-argument crates/fir-py/python/tests";

const PYTEST: &str = "pytest pytest-xdist";

const WHEELS: &str = "target/wheels";
const BUNDLE: &str = "target/python-bundle";
/// Most bytes of the wheel.
const WHEEL_BYTES: u64 = 20 << 20;

/// Builds the wheel with an environment's maturin; its file.
fn build(python: &str) -> Result<PathBuf> {
    program(python, &format!("{PIP} maturin {PYTEST}")).quiet()?;
    if Path::new(WHEELS).exists() {
        fs::remove_dir_all(WHEELS)?;
    }
    program(python, &format!("-m maturin build --release --quiet --out {WHEELS}")).run()?;
    let wheel = fs::read_dir(WHEELS)?.flatten().map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "whl"));
    let wheel = wheel.with_context(|| format!("a wheel in {WHEELS}"))?;
    let bytes = fs::metadata(&wheel)?.len();
    println!("{}: {:.1} MiB", wheel.display(), bytes as f64 / f64::from(1 << 20));
    ensure!(bytes <= WHEEL_BYTES, "{bytes} bytes, at most {WHEEL_BYTES}");
    Ok(wheel)
}

/// Builds the wheel, installs it beside torch, and runs pytest on it.
pub(crate) fn wheel() -> Result<()> {
    let python = torch()?;
    build(&python)?;
    // By its folder and not its file's name, which has the platform in it.
    program(&python, &format!("{PIP} --force-reinstall --no-deps --no-index --find-links {WHEELS} fir-infer")).run()?;
    program(&python, TESTS).envs(&TEST_ENV).run()
}

/// The wheel's files, the tests and pytest in one folder, and a script that runs the tests on CUDA tensors.
pub(crate) fn bundle() -> Result<()> {
    let python = torch()?;
    let wheel = build(&python)?;
    if Path::new(BUNDLE).exists() {
        fs::remove_dir_all(BUNDLE)?;
    }
    let site = format!("{BUNDLE}/site");
    fs::create_dir_all(&site)?;
    program(&python, &format!("-m zipfile -e {} {site}", wheel.display())).run()?;
    program(&python, &format!("{PIP} --target {site} pytest")).run()?;
    // As deep as in the repository, whose files some tests look for beside them.
    let tests = "crates/fir-py/python/tests";
    copy(Path::new(tests), &Path::new(BUNDLE).join(tests))?;
    fs::write(Path::new(BUNDLE).join("run"), RUN)?;
    Ok(())
}

const RUN: &str = "\
#!/bin/bash
# Runs the tests of the Python package on CUDA tensors: one process per file, all at once, as most of the time is NVRTC's.
# Needs a GPU, its driver, NVRTC and python3 with torch. Logs are in $OUT, or in ./out.
cd \"$(dirname \"$0\")\" && out=${OUT:-$PWD/out} && mkdir -p \"$out\"
export PYTHONPATH=$PWD/site PYTHONDONTWRITEBYTECODE=1
for file in crates/fir-py/python/tests/test_*.py; do
  timeout \"${LIMIT:-300}\" python3 -m pytest -q -p no:cacheprovider --tb=short --show-capture=no -k \"${1:-cuda}\" \"$file\" \\
    > \"$out/$(basename \"$file\" .py).log\" 2>&1 &
done
wait
for log in \"$out\"/test_*.log; do echo \"$(basename \"$log\" .log): $(tail -n 1 \"$log\")\"; done
cat \"$out\"/test_*.log > \"$out/all.txt\"
";

/// The Python of an environment with torch and pytest.
pub(crate) fn install() -> Result<String> {
    let python = torch()?;
    program(&python, &format!("{PIP} {PYTEST}")).quiet()?;
    Ok(python)
}

/// Runs pytest on the package with the extension of the test profile: a wheel's release build would compile the library once more.
pub(crate) fn test() -> Result<()> {
    let python = install()?;
    cargo("build --quiet --profile test --workspace --all-features --lib").run()?;
    let (target, from, to) = (crate::test::target(), "crates/fir-py/python/fir", "target/python/fir");
    if Path::new(to).exists() {
        fs::remove_dir_all(to)?;
    }
    copy(Path::new(from), Path::new(to))?;
    let library = format!("{target}/debug/lib_fir.so");
    fs::copy(&library, format!("{to}/_fir.abi3.so")).context(library)?;
    program(&python, TESTS).envs(&TEST_ENV).env("PYTHONPATH", "target/python").run()
}

/// The files of a folder and of those in it, but for libraries and what Python leaves behind.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().context("a name")?;
        if name == "__pycache__" {
            continue;
        }
        if path.is_dir() {
            copy(&path, &to.join(name))?;
        } else if path.extension().is_none_or(|e| e != "so") {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}
