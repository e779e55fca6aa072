//! The Python package: its wheel, and its tests on CPU tensors with torch.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::bench_cpu::{TORCH_ENV, torch};
use crate::step::{cargo, program};

const PIP: &str = "-m pip install -q --disable-pip-version-check";
const TESTS: &str = "-m pytest -q -p no:cacheprovider crates/fir-py/python/tests";

/// Builds the wheel, installs it beside torch, and runs pytest on it.
pub(crate) fn wheel() -> Result<()> {
    let python = torch()?;
    program(&python, &format!("{PIP} maturin pytest")).quiet()?;
    program(&python, "-m maturin build --release --quiet --out target/wheels").run()?;
    // By its folder and not its file's name, which has the platform in it.
    program(&python, &format!("{PIP} --force-reinstall --no-deps --no-index --find-links target/wheels fir-infer"))
        .run()?;
    let [(name, value)] = TORCH_ENV;
    program(&python, TESTS).env(name, value).run()
}

/// Runs pytest on the package with the extension of the test profile: a wheel's release build would compile the library once more.
pub(crate) fn test() -> Result<()> {
    let python = torch()?;
    program(&python, &format!("{PIP} pytest")).quiet()?;
    cargo("build --quiet --profile test --workspace --all-features --lib").run()?;
    let (target, from, to) = (crate::test::target(), "crates/fir-py/python/fir", "target/python/fir");
    if Path::new(to).exists() {
        fs::remove_dir_all(to)?;
    }
    copy(Path::new(from), Path::new(to))?;
    let library = format!("{target}/debug/lib_fir.so");
    fs::copy(&library, format!("{to}/_fir.abi3.so")).context(library)?;
    let [(name, value)] = TORCH_ENV;
    program(&python, TESTS).env(name, value).env("PYTHONPATH", "target/python").run()
}

/// The Python files of a folder and of those in it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().context("a name")?;
        if path.is_dir() {
            copy(&path, &to.join(name))?;
        } else if path.extension().is_none_or(|e| e != "so") {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}
