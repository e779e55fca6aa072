//! Developer commands, as `cargo xtask COMMAND`. `test` is the whole CI.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a command line tool speaks on stdout")]

mod bench;
mod bench_cpu;
mod bench_llama;
mod deny;
mod gpu;
mod models;
mod nightly;
mod python;
mod server;
mod step;
mod test;

use std::process::ExitCode;

use clap::Parser;

/// Developer commands of the fir workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Command {
    /// Everything CI checks: format, lints, tests, docs, features, examples, benches, the demo, licences and sources.
    Test,
    /// Licences, bans, sources and advisories of the dependencies.
    Deny,
    /// Runs the benches of one operator, or of all.
    Bench {
        /// Name of its file, such as `norm`.
        op: Option<String>,
        /// Writes the results into docs/bench/cpu.md.
        #[arg(long)]
        update: bool,
    },
    /// Times operators beside PyTorch's on the CPU and what the machine can do, in one run.
    BenchCpu {
        /// Part of the names of the cases to run, such as `decode/bf16`.
        filter: Option<String>,
        /// The small cases alone, less exactly: a minute.
        #[arg(long)]
        quick: bool,
        /// Writes the results into docs/bench/cpu.md.
        #[arg(long)]
        update: bool,
    },
    /// Times a model's prompts and answers beside llama.cpp's, alone and beside busy processes.
    BenchLlama {
        /// A Python that has `llama-cpp-python`, built so that its AMX code runs.
        python: String,
        /// A GGUF file; the default model if none is given.
        #[arg(long)]
        model: Option<String>,
        /// Threads of both.
        #[arg(long, default_value_t = 2)]
        threads: usize,
        /// Samples of each case.
        #[arg(long, default_value_t = 7)]
        rounds: usize,
        /// Leaves out the half beside busy processes.
        #[arg(long)]
        alone: bool,
        /// Part of the cases' names, such as `x16`.
        #[arg(long, default_value = "")]
        cases: String,
    },
    /// Fuzzes the public API under the address sanitizer (nightly).
    Fuzz {
        /// How long.
        #[arg(default_value_t = 10)]
        minutes: u64,
    },
    /// Fetches real models, half a gigabyte at most each, and asks them something that they know.
    Models {
        /// Also those of more than that.
        #[arg(long)]
        large: bool,
    },
    /// Runs the unit tests of the unsafe code under Miri (nightly).
    Miri,
    /// Runs all tests under the address sanitizer (nightly).
    Asan,
    /// Compiles every kernel for sm_90a and some for every architecture, without a GPU; installs NVRTC for it.
    Jit,
    /// Makes target/gpu-bundle: tests and benches to run on a machine with a GPU, a driver and NVRTC.
    GpuBundle,
    /// Builds the wheel of the Python package and runs its tests with torch, which is installed for it.
    Python {
        /// With the extension of the test profile instead of a wheel, as CI does.
        #[arg(long)]
        quick: bool,
        /// Makes target/python-bundle instead of running the tests: the wheel's files, the tests and pytest, to run on a
        /// machine with a GPU and torch.
        #[arg(long, conflicts_with = "quick")]
        bundle: bool,
    },
    /// Tries OpenAI's Python client and a fuzzer on the server; installs them from PyPI.
    Server {
        /// Also with the default model behind it.
        #[arg(long)]
        live: bool,
    },
    /// Prints the size of every part of the library beside its budget.
    Lines,
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
    match command {
        Command::Test => test::run(),
        Command::Deny => deny::run(true),
        Command::Bench { op, update } => bench::run(op.as_deref(), update),
        Command::BenchCpu { filter, quick, update } => bench_cpu::run(filter.as_deref(), quick, update),
        Command::BenchLlama { python, model, threads, rounds, alone, cases } => {
            bench_llama::run(&python, model.as_deref(), threads, rounds, alone, &cases)
        }
        Command::Server { live } => server::run(live),
        Command::Fuzz { minutes } => nightly::fuzz(minutes),
        Command::Models { large } => models::run(large),
        Command::Miri => nightly::miri(),
        Command::Asan => nightly::asan(),
        Command::Jit => gpu::jit()?.env("FIR_TEST_EVERY_KERNEL", "1").run(),
        Command::GpuBundle => gpu::bundle(),
        Command::Python { quick: true, .. } => python::test(),
        Command::Python { bundle: true, .. } => python::bundle(),
        Command::Python { .. } => python::wheel(),
        Command::Lines => step::cargo("test -q -p fir-infer --test it sources::sizes_stay -- --nocapture").run(),
    }
}
