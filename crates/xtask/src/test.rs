//! `cargo xtask test`: the whole CI. Each step is announced; the first failure ends it.

use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::bench_cpu::TEST_ENV;
use crate::step::{Step, cargo, program, rust_files};
use crate::{deny, gpu, python, server};

/// Results of all the test binaries run so far.
#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
}

enum Action {
    Run(Step),
    /// A test run, whose results are added up.
    Count(Step),
    /// As `Count`, of the JIT lane; its compiler is installed first.
    Jit,
    /// Clients in Python against the server.
    Server,
    Deny,
    Python,
    /// Python environments: torch, which the benchmark's tests run references in, NVRTC, the server's clients.
    Environments,
}

/// The steps, cheapest and most often broken first.
///
/// Kernels, benches, examples and programs are built for the whole workspace in the test profile, as the tests are: with other packages or
/// another profile the library would be compiled again, for minutes.
fn steps() -> Result<Vec<(String, Action)>> {
    use Action::{Count, Deny, Environments, Jit, Python, Run, Server};
    let docs = cargo("doc --quiet --workspace --no-deps --all-features").env("RUSTDOCFLAGS", "-D warnings");
    let mut steps = vec![
        ("format", Run(cargo("fmt --all --check"))),
        ("lints", Run(cargo("clippy --workspace --all-targets --all-features -- -D warnings"))),
        ("no features", Run(cargo("clippy -p fir-infer --no-default-features -- -D warnings"))),
        ("default features", Run(cargo("clippy -p fir-infer -- -D warnings"))),
        ("docs", Run(docs)),
        ("environments", Environments),
        ("tests", Count(cargo("test --workspace --all-features --no-fail-fast").envs(&TEST_ENV))),
        // Without optimisation: 64 s of a core where the test profile takes 240.
        (
            "unit tests of the library",
            Count(cargo("test -p fir-infer --lib --all-features --profile unit").envs(&TEST_ENV)),
        ),
        ("kernels", Jit),
        ("benches, checked but not timed", Run(cargo("test --quiet --workspace --all-features --bench *"))),
        ("programs", Run(cargo("build --quiet --profile test --workspace --all-features --bins --examples"))),
    ];
    let examples = rust_files("crates/fir/examples")?;
    for example in &examples {
        steps.push((example, Run(program(&format!("{}/debug/examples/{example}", target()), ""))));
    }
    steps.push(("demo", Run(program(&format!("{}/debug/fir", target()), "demo --quick"))));
    steps.push(("clients of the server", Server));
    steps.push(("python", Python));
    steps.push(("dependencies", Deny));
    Ok(steps.into_iter().map(|(name, action)| (name.to_owned(), action)).collect())
}

/// Where cargo builds.
pub(crate) fn target() -> String {
    std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".into())
}

pub(crate) fn run() -> Result<()> {
    let (begin, mut tally) = (Instant::now(), Tally::default());
    let steps = steps()?;
    // Downloads, beside the compiler.
    let install = || python::install().and_then(|_| gpu::install()).and_then(|_| server::install());
    let mut environments = Some(std::thread::spawn(install));
    let count = steps.len();
    for (i, (name, action)) in steps.into_iter().enumerate() {
        println!("\n== {}/{count} {name}", i + 1);
        let start = Instant::now();
        let result = match action {
            Action::Run(step) => step.run(),
            Action::Count(step) => counted(step, &mut tally),
            Action::Jit => gpu::jit().and_then(|step| counted(step, &mut tally)),
            Action::Server => server::run(false),
            Action::Deny => deny::run(false),
            Action::Python => python::test(),
            Action::Environments => match environments.take().map(JoinHandle::join) {
                Some(Ok(result)) => result,
                _ => bail!("the thread that makes environments panicked"),
            },
        };
        println!("== {} after {:.1} s", if result.is_ok() { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        if let Err(e) = result {
            println!(
                "\n{} passed, {} failed, {} ignored; stopped at `{name}`",
                tally.passed, tally.failed, tally.ignored
            );
            return Err(e);
        }
    }
    println!(
        "\nall {count} steps ok in {:.0} s\n{} passed, {} failed, {} ignored",
        begin.elapsed().as_secs_f64(),
        tally.passed,
        tally.failed,
        tally.ignored
    );
    Ok(())
}

/// Runs tests and adds their results to `tally`.
fn counted(step: Step, tally: &mut Tally) -> Result<()> {
    let failed = tally.failed;
    let ok = step.watch(|line| {
        if let Some((passed, failed, ignored)) = results(line) {
            tally.passed += passed;
            tally.failed += failed;
            tally.ignored += ignored;
        }
    })?;
    if !ok {
        bail!("tests: {} failed", tally.failed - failed);
    }
    Ok(())
}

/// The numbers of passed, failed and ignored tests in a test binary's closing line.
fn results(line: &str) -> Option<(u64, u64, u64)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what: &str| counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok());
    Some((count(" passed")?, count(" failed")?, count(" ignored")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_read() {
        let line = "test result: FAILED. 12 passed; 1 failed; 3 ignored; 0 measured; 2 filtered out; finished in 0.09s";
        assert_eq!(results(line), Some((12, 1, 3)));
        assert_eq!(results("test norm::rms_norm ... ok"), None);
    }
}
