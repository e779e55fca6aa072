//! [`Cpu`]: a level and a pool.

use std::sync::Arc;

#[cfg(target_arch = "x86_64")]
use super::arch::{Amx, Avx512};
use super::integers::IntKernel;
use super::level::{Level, Token};
use super::pool::Pool;
use super::tuning::Tuning;
use super::vector::Kernel;
use crate::env;
use crate::error::{Error, Result};
use crate::overrides::Override;

/// A CPU executor: an instruction level and a pool of threads. Cheap to clone; clones share the threads.
#[derive(Clone, Debug)]
pub struct Cpu {
    token: Token,
    tuning: Tuning,
    pool: Arc<Pool>,
    over: Option<Arc<dyn Override>>,
}

impl Cpu {
    /// The highest level and all cores, unless [`env::FIR_CPU_LEVEL`] or [`env::FIR_CPU_THREADS`] say otherwise, with the
    /// sizes that were saved for this machine: see [`Tuning::saved`].
    pub fn new() -> Result<Self> {
        let level = env::read(env::FIR_CPU_LEVEL, "portable, avx2, avx512 or amx")?.unwrap_or_else(Level::best);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cpu = Self::with(level, env::read(env::FIR_CPU_THREADS, "a number from 1 to 1024")?.unwrap_or(cores))?;
        let tuning = Tuning::saved(level, cpu.workers())?;
        cpu.tuned(tuning)
    }

    /// A given level and number of threads, with the default sizes.
    pub fn with(level: Level, threads: usize) -> Result<Self> {
        let token = Token::of(level).ok_or_else(|| Error::Unsupported {
            op: "Cpu::with",
            why: vec![format!("level {level}: this CPU has {:?}", Level::available())],
        })?;
        if !(1..=1024).contains(&threads) {
            return Err(Error::value("Cpu::with", "threads", threads, "1 to 1024"));
        }
        Ok(Self { token, tuning: Tuning::default(), pool: Arc::new(Pool::new(threads)), over: None })
    }

    /// The same threads with other sizes of blocks.
    pub fn tuned(&self, tuning: Tuning) -> Result<Self> {
        Ok(Self { tuning: tuning.check()?, ..self.clone() })
    }

    pub(crate) fn with_override(&self, over: Arc<dyn Override>) -> Self {
        Self { over: Some(over), ..self.clone() }
    }

    pub(crate) fn over(&self) -> Option<&dyn Override> {
        self.over.as_deref()
    }

    /// Sizes of the kernels' blocks.
    pub fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// Instruction level of the kernels.
    pub fn level(&self) -> Level {
        self.token.level()
    }

    /// Number of workers that share the work.
    pub fn workers(&self) -> usize {
        self.pool.workers()
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// AMX tiles, at that level.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn amx(&self) -> Option<Amx> {
        self.token.amx()
    }

    /// Vectors that add up products of pairs of bf16, where there are no tiles.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn pairs(&self) -> Option<Avx512<true>> {
        self.token.pairs()
    }

    /// Runs `kernel` at this level, on the calling thread.
    pub(crate) fn run<K: Kernel>(&self, kernel: K) -> K::Out {
        self.token.run(kernel)
    }
    /// Runs `kernel`, on sixteen lanes, at this level, on the calling thread.
    pub(crate) fn run_ints<K: IntKernel>(&self, kernel: K) -> K::Out {
        self.token.run_ints(kernel)
    }
}
