//! The command line of fir: `fir generate` answers a prompt, `fir chat` talks, `fir serve` serves a model, `fir bench`
//! measures that, `fir pull` fetches a model, `fir demo` shows the library at work in a terminal, `fir tune` fits it to a
//! machine, `fir jit` compiles kernels ahead of their first use, `fir trace` benchmarks kernels.
#![forbid(unsafe_code)]

mod cmd;
mod picture;

use std::io::{ErrorKind, IsTerminal, stdout};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::picture::Style;

#[derive(Parser)]
#[command(name = "fir", version, about = "Attention for serving language models", arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures a running server, or what a model's answers are worth
    #[command(subcommand)]
    Bench(Bench),
    /// Talks with a model in the terminal
    Chat(cmd::chat::Options),
    /// Plans, runs, checks and times a batch of requests that share a system prompt
    Demo(cmd::demo::Options),
    /// Answers a prompt with a model, fetched on first use
    Generate(cmd::generate::Options),
    /// Compiles, lists and removes the kernels of CUDA devices
    Jit(cmd::jit::Options),
    /// Fetches a model and prints where it is
    Pull(cmd::pull::Options),
    /// Serves a model to OpenAI's clients
    Serve(Box<cmd::serve::Options>),
    /// Benchmarks kernels: definitions, solutions, workloads and traces in FlashInfer-Trace's files
    Trace(cmd::trace::Options),
    /// Measures the kernels' block sizes on this machine and saves them
    Tune(cmd::tune::Options),
}

#[derive(Subcommand)]
enum Bench {
    /// Hides a number in texts of many lengths, and asks for it
    Needle(cmd::bench_quality::NeedleOptions),
    /// Tells how well a text is predicted
    Perplexity(cmd::bench_quality::PerplexityOptions),
    /// Sends requests at random or recorded times and tells how long tokens took
    Serve(cmd::bench_serve::Options),
}

fn main() -> anyhow::Result<ExitCode> {
    let command = Cli::parse().command;
    // A first use of a GPU is not silent; `fir jit` reports on its own.
    if !matches!(command, Command::Jit(_)) {
        fir::jit::on_compile(|kernel, arch| eprintln!("compiling {kernel} for {arch}, once"));
    }
    let done = match command {
        Command::Bench(Bench::Needle(options)) => cmd::bench_quality::needle(&options, &mut stdout().lock()),
        Command::Bench(Bench::Perplexity(options)) => cmd::bench_quality::perplexity(&options, &mut stdout().lock()),
        Command::Bench(Bench::Serve(options)) => cmd::bench_serve::run(&options, &mut stdout().lock()),
        Command::Chat(options) => cmd::chat::run(&options, &mut stdout().lock()),
        Command::Demo(options) => cmd::demo::run(&options, style(), &mut stdout().lock()),
        Command::Generate(options) => cmd::generate::run(&options, &mut stdout().lock()),
        Command::Jit(options) => cmd::jit::run(&options, &mut stdout()),
        Command::Pull(options) => cmd::pull::run(&options, &mut stdout().lock()),
        Command::Serve(options) => cmd::serve::run(&options, &mut stdout()),
        Command::Trace(options) => cmd::trace::run(&options, &mut stdout()),
        Command::Tune(options) => cmd::tune::run(&options, &mut stdout().lock()),
    };
    match done {
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) => Ok(ExitCode::FAILURE),
        // Whoever read the output has seen enough of it.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            Ok(ExitCode::SUCCESS)
        }
        Err(e) => Err(e),
    }
}

/// Colour for a terminal that has it, plain ASCII for everything else and for who asked for it by `NO_COLOR`.
fn style() -> Style {
    let set = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|t| t == "dumb");
    if stdout().is_terminal() && !set("NO_COLOR") && !dumb { Style::Color } else { Style::Plain }
}
