//! The Python package: its wheel, and its tests on CPU tensors with torch.

use anyhow::Result;

use crate::bench_cpu::{TORCH_ENV, torch};
use crate::step::program;

/// Builds the wheel, installs it beside torch, and runs pytest on it.
pub(crate) fn run() -> Result<()> {
    let python = torch()?;
    let pip = "-m pip install -q --disable-pip-version-check";
    program(&python, &format!("{pip} maturin pytest")).quiet()?;
    program(&python, "-m maturin build --release --quiet --out target/wheels").run()?;
    // By its folder and not its file's name, which has the platform in it.
    program(&python, &format!("{pip} --force-reinstall --no-deps --no-index --find-links target/wheels fir-infer"))
        .run()?;
    let [(name, value)] = TORCH_ENV;
    program(&python, "-m pytest -q crates/fir-py/python/tests").env(name, value).run()
}
