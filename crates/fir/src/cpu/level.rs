//! Which instructions the kernels use: found once, or forced.

#[cfg(target_arch = "x86_64")]
use super::arch::{Amx, Avx2, Avx512};
use super::{arch::Portable, integers::IntKernel, vector::Kernel};
use crate::error::{Error, Result};

/// An instruction level, by name. [`Level::available`] says which this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// Plain Rust for the target's baseline.
    Portable,
    /// AVX2, FMA and F16C: 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes. Products of bf16 and fp8 are pairs of BF16 where the CPU has it, and VBMI, and take its subnormals for zeros; those of
    /// block formats use VNNI, with the same bits.
    Avx512,
    /// AVX-512 with VBMI, and AMX tiles for products of bf16 and of 8-bit integers.
    Amx,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// Its name, as `FIR_CPU_LEVEL` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// The levels this CPU has, lowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|l| Token::of(*l).is_some()).collect()
    }

    /// The highest that this CPU has, not emulated.
    pub(crate) fn best() -> Self {
        let here = |l: &Self| Token::of(*l).is_some_and(|t| !t.emulated());
        Self::ALL.into_iter().rfind(here).unwrap_or(Self::Portable)
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Level {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|l| l.name() == s)
            .ok_or_else(|| Error::value("Level", "name", format!("{s:?}"), Self::ALL.map(Self::name).join(", ")))
    }
}

/// A level with the proof that this CPU has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Token {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
}

impl Token {
    pub(crate) fn of(level: Level) -> Option<Self> {
        match level {
            Level::Portable => Some(Self::Portable(Portable)),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Avx512::detect().map(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Amx::detect().map(Self::Amx),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }

    pub(crate) fn level(self) -> Level {
        match self {
            Self::Portable(_) => Level::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Level::Avx512,
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => Level::Amx,
        }
    }

    /// Runs `kernel` compiled for this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            Self::Portable(v) => kernel.run(v),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(v) => v.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(v) => v.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(v) => v.vectors().run(kernel),
        }
    }

    fn emulated(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => Amx::emulated(),
            _ => false,
        }
    }

    /// AMX, at that level.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn amx(self) -> Option<Amx> {
        match self {
            Self::Amx(amx) => Some(amx),
            _ => None,
        }
    }

    /// Vectors that add up products of pairs of bf16, where the CPU has them and no tiles.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn pairs(self) -> Option<Avx512<true>> {
        match self {
            Self::Avx512(v) => v.pairs(),
            _ => None,
        }
    }

    /// Runs `kernel`, on sixteen lanes, compiled for this level.
    pub(crate) fn run_ints<K: IntKernel>(self, kernel: K) -> K::Out {
        match self {
            Self::Portable(v) => kernel.run(v),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(v) => v.run_ints(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(v) => v.run_ints(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(v) => v.vectors().run_ints(kernel),
        }
    }
}
