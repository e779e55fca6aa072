//! The levels' vectors and the tokens that prove this CPU has them.
#![allow(unsafe_code)]

mod integers;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use integers::Vnni;
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};
