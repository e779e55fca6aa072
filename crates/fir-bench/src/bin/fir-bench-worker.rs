//! A native worker, for benchmarks that are not started by the `fir` program: `fir-bench-worker <socket>`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(socket) = std::env::args_os().nth(1) else { return ExitCode::from(2) };
    match fir_bench::worker::serve_native(Path::new(&socket)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
