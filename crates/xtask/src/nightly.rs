//! Commands that need a nightly toolchain: fuzzing, Miri and the address sanitizer. They say what is missing.

use anyhow::{Context, Result};

use crate::step::{Step, program};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What libFuzzer steers by: inline counters per edge, with the operands of compares.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
const ASAN: &str = "-Zsanitizer=address -Cdebug-assertions -Coverflow-checks";

fn nightly(args: &str) -> Step {
    program("rustup", &format!("run nightly cargo {args}"))
}

fn require(args: &str, install: &str) -> Result<()> {
    nightly(args).quiet().map(drop).with_context(|| format!("missing; install it with `{install}`"))
}

/// Builds and runs the fuzz target. Needs a C++ compiler for libFuzzer itself; cargo-fuzz is not needed.
pub(crate) fn fuzz(minutes: u64) -> Result<()> {
    require("--version", "rustup toolchain install nightly")?;
    nightly(&format!("build --manifest-path fuzz/Cargo.toml --release --target {TARGET}"))
        .env("RUSTFLAGS", &format!("{COVERAGE} {ASAN}"))
        .run()?;
    std::fs::create_dir_all("fuzz/corpus/ops")?;
    std::fs::create_dir_all("fuzz/artifacts/ops")?;
    let options = format!("-max_total_time={} -timeout=10 -rss_limit_mb=4096 -max_len=512", minutes * 60);
    let run = format!("fuzz/corpus/ops -artifact_prefix=fuzz/artifacts/ops/ -print_final_stats=1 {options}");
    program(&format!("fuzz/target/{TARGET}/release/ops"), &run).run()
}

/// The unit tests beside unsafe code, and those of the types it relies on. Kernels run at the portable level, as
/// Miri has no vector instructions.
pub(crate) fn miri() -> Result<()> {
    require("miri --version", "rustup toolchain install nightly -c miri -c rust-src")?;
    // The sleep of idle workers reads the clock, which isolation forbids.
    nightly("miri test -p fir-infer --lib --all-features -- cpu::pool cpu::arch tensor::foreign tensor::view tensor::layout")
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .run()
}

/// Every test, at every level, with reads and writes checked.
pub(crate) fn asan() -> Result<()> {
    require("--version", "rustup toolchain install nightly")?;
    nightly(&format!("test -p fir-infer --all-features --lib --tests --target {TARGET}"))
        .env("RUSTFLAGS", ASAN)
        .env("CARGO_TARGET_DIR", "target/asan")
        // Memory that is not there is asked for too, and must be refused and not end the program.
        .env("ASAN_OPTIONS", "allocator_may_return_null=1")
        .run()
}
