//! `fir jit`: the kernels of CUDA devices, compiled ahead of their first use.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Result, anyhow};
use clap::{Args, Subcommand};
use fir::exec::{Arch, Gpu};
use fir::jit::{self, Origin};

/// Options of `fir jit`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Compiles every kernel that is not in the cache
    Build {
        /// Architecture, such as sm_90a; this machine's device unless given
        #[arg(long)]
        arch: Option<String>,
        /// Part of the kernels' names, such as `norm` or `bf16`
        #[arg(long, default_value = "")]
        filter: String,
        /// Folder for a copy of each: set FIR_CUBIN_DIR to it on a machine without a compiler
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Lists the cache
    List,
    /// Empties the cache
    Clean,
}

pub(crate) fn run(options: &Options, out: &mut (impl Write + Send)) -> Result<bool> {
    match &options.command {
        Command::Build { arch, filter, out: folder } => build(arch.as_deref(), filter, folder.as_deref(), out),
        Command::List => {
            let entries = jit::list()?;
            for entry in &entries {
                writeln!(out, "{:>8} bytes  {}", entry.bytes, entry.title)?;
            }
            let bytes: u64 = entries.iter().map(|e| e.bytes).sum();
            writeln!(out, "{} kernels, {bytes} bytes, in {}", entries.len(), jit::folder()?.display())?;
            Ok(true)
        }
        Command::Clean => {
            writeln!(out, "removed {} kernels from {}", jit::clean()?, jit::folder()?.display())?;
            Ok(true)
        }
    }
}

fn build(arch: Option<&str>, filter: &str, folder: Option<&Path>, out: &mut (impl Write + Send)) -> Result<bool> {
    let arch = match arch {
        Some(name) => name.parse::<Arch>().map_err(|()| anyhow!("{name}: expected one such as {}", Arch::HOPPER))?,
        None => Gpu::new(0)?.properties().arch,
    };
    let kernels: Vec<_> = jit::kernels().into_iter().filter(|k| k.runs_on(arch) && k.name().contains(filter)).collect();
    writeln!(out, "{} kernels for {arch}, by {}", kernels.len(), jit::compiler()?)?;
    let (begin, next, failed) = (Instant::now(), AtomicUsize::new(0), AtomicUsize::new(0));
    let (out, cores) = (Mutex::new(out), std::thread::available_parallelism()?.get());
    let work = || -> Result<()> {
        while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let result = match folder {
                Some(folder) => jit::build_into(folder, kernel, arch),
                None => jit::build(kernel, arch),
            };
            let mut out = out.lock().unwrap_or_else(|e| e.into_inner());
            match result {
                Ok((cubin, origin)) => {
                    let how = if origin == Origin::Compiled { "" } else { ", was there" };
                    let registers = cubin.usage.registers;
                    writeln!(
                        out,
                        "{:>6.2} s  {registers:>3} registers  {}{how}",
                        start.elapsed().as_secs_f64(),
                        kernel.name()
                    )?;
                }
                Err(e) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    writeln!(out, "{e}")?;
                }
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a thread ended early"))))
    })?;
    let (out, failed) = (out.into_inner().unwrap_or_else(|e| e.into_inner()), failed.into_inner());
    let seconds = begin.elapsed().as_secs_f64();
    let cache = jit::folder()?;
    let place = folder.unwrap_or(&cache).display();
    writeln!(out, "{} of {} in {seconds:.1} s, in {place}", kernels.len() - failed, kernels.len())?;
    Ok(failed == 0)
}
