//! [`Exec`]: where an operator runs.

pub use crate::cpu::{exec::Cpu, level::Level, tuning::Tuning};
use crate::error::Result;

/// Where operators run; every one takes it first.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Exec {
    /// Threads of this machine.
    Cpu(Cpu),
}

impl Exec {
    /// The CPU at its highest level, on all its cores; see [`Cpu::new`].
    pub fn cpu() -> Result<Self> {
        Cpu::new().map(Self::Cpu)
    }

    /// The CPU at a given level with a given number of threads.
    pub fn cpu_with(level: Level, threads: usize) -> Result<Self> {
        Cpu::with(level, threads).map(Self::Cpu)
    }

    /// Number of workers that plans cut their work for.
    pub fn workers(&self) -> usize {
        match self {
            Self::Cpu(cpu) => cpu.workers(),
        }
    }
}
