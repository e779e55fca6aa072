//! `fir tune`: the kernels' block sizes for this machine, measured and saved.

use std::io::Write;

use anyhow::{Context, Result};
use clap::Args;
use fir::Exec;
use fir::exec::Tuning;
use fir::tune::measure;

/// Options of `fir tune`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Prints the sizes in use and measures nothing
    #[arg(long)]
    print: bool,
    /// Measures, and saves nothing
    #[arg(long, conflicts_with = "print")]
    dry: bool,
}

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    let Exec::Cpu(cpu) = Exec::cpu()? else { unreachable!("asked for a CPU") };
    if options.print {
        writeln!(out, "{}", cpu.tuning())?;
        return Ok(true);
    }
    writeln!(out, "measuring at level {} on {} threads, a few seconds", cpu.level(), cpu.workers())?;
    let (best, trials) = measure(&cpu)?;
    if trials.is_empty() {
        writeln!(out, "this level has no sizes to choose: the defaults stay")?;
        return Ok(true);
    }
    for trial in &trials {
        let t = trial.tuning;
        let sizes = match trial.op {
            "gemm" => format!("depth {:>4} block {:>4}", t.gemm_depth, t.gemm_block),
            _ => format!("span  {:>4} rows  {:>4}", t.attention_span, t.attention_rows),
        };
        writeln!(out, "{:<10} {sizes}  {:>8.2} ms", trial.op, trial.seconds * 1e3)?;
    }
    writeln!(out, "\n{best}")?;
    if !options.dry {
        let path = Tuning::path(cpu.level(), cpu.workers()).context("no HOME to save under: use --dry")?;
        best.save(&path).with_context(|| format!("saving {}", path.display()))?;
        writeln!(out, "\nsaved to {}; FIR_CPU_TUNING=default goes without", path.display())?;
    }
    Ok(true)
}
