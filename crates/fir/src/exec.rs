//! [`Exec`]: where an operator runs.

use std::sync::Arc;

pub use crate::cpu::{exec::Cpu, level::Level, tuning::Tuning};
#[cfg(feature = "cuda")]
pub use crate::cuda::{
    driver::{Event, Graph, Properties, Stream},
    dry::Launch,
    exec::Gpu,
    jit::Arch,
    own::{KernelArg, LaunchSize, OwnKernel},
};
use crate::error::Result;
pub use crate::overrides::{Call, Override};
use crate::tensor::Place;

/// Where operators run; every one takes it first.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Exec {
    /// Threads of this machine.
    Cpu(Cpu),
    /// A CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
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

    /// The CUDA device with this ordinal; see [`Gpu::new`].
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Gpu::new(ordinal).map(Self::Cuda)
    }

    /// No device at all, as one of `arch`: launches are recorded and not run; see [`Gpu::dry`].
    #[cfg(feature = "cuda")]
    pub fn dry(arch: Arch) -> Self {
        Self::Cuda(Gpu::dry(arch))
    }

    /// Number of workers that plans cut their work for.
    pub fn workers(&self) -> usize {
        match self {
            Self::Cpu(cpu) => cpu.workers(),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.properties().multiprocessors as usize,
        }
    }

    /// The same executor, whose operators ask `over` before they run; it takes the place of one that was there.
    #[must_use]
    pub fn with_override(&self, over: Arc<dyn Override>) -> Self {
        match self {
            Self::Cpu(cpu) => Self::Cpu(cpu.with_override(over)),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => Self::Cuda(gpu.with_override(over)),
        }
    }

    /// Where it is, and the handle of the stream that it queues work on, as a [`Call`] has them.
    pub(crate) fn queue(&self) -> (Place, usize) {
        match self {
            Self::Cpu(_) => (Place::Host, 0),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => (gpu.place(), gpu.stream().map_or(0, Stream::handle)),
        }
    }

    /// Whether `ask`, called with the override, says that an operator is done; `false` after a look at one pointer where
    /// there is none.
    pub(crate) fn overridden(&self, ask: impl FnOnce(&dyn Override) -> Result<bool>) -> Result<bool> {
        let over = match self {
            Self::Cpu(cpu) => cpu.over(),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.over(),
        };
        over.map_or(Ok(false), ask)
    }

    /// The CPU, for an operator that has no kernel elsewhere.
    pub(crate) fn cpu_only(&self, #[cfg_attr(not(feature = "cuda"), expect(unused))] op: &'static str) -> Result<&Cpu> {
        match self {
            Self::Cpu(cpu) => Ok(cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => {
                Err(crate::error::Error::Unsupported { op, why: vec!["there is no CUDA kernel for it yet".into()] })
            }
        }
    }
}
