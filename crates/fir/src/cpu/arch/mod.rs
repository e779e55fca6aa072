//! The levels' vectors and the tokens that prove this CPU has them.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod integers;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{Amx, Left, Right, Sums, TILE, TileKernel, Tiles, aligned};
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};
