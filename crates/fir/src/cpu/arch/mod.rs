//! The levels' vectors and the tokens that prove this CPU has them.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod integers;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{Amx, Left, Right, Sums, TILE, TileKernel, Tiles};
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Bytes of a cache line.
const LINE: usize = 64;

/// `len` elements of `buffer`, from a cache line's first byte on; the buffer grows as needed. Rows across two lines take
/// a tile's load twice as long.
pub(crate) fn aligned<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    let spare = LINE / size_of::<T>();
    if buffer.len() < len + spare {
        buffer.resize(len + spare, T::default());
    }
    let at = buffer.as_ptr().align_offset(LINE).min(spare);
    &mut buffer[at..at + len]
}
