//! The levels' vectors and the tokens that prove this CPU has them.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(all(feature = "testing", target_arch = "x86_64", target_os = "linux"))]
mod emulate;
#[cfg(target_arch = "x86_64")]
mod fp8;
mod integers;
mod portable;
#[cfg(target_arch = "x86_64")]
mod stream;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{Ahead, Amx, Left, PAIR, Right, Sums, TILE, TileKernel, Tiles};
#[cfg(target_arch = "x86_64")]
pub(crate) use fp8::{Chunks, Fp8};
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, PairKernel};

/// Asks for the lines `ahead` bytes behind those of `x`, wherever that is.
#[inline(always)]
pub(crate) fn prefetch_ahead(x: &[u8], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..x.len()).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().wrapping_add(at + ahead).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, ahead);
}

/// Asks for the lines of `len` elements from `x` on, wherever that is.
#[inline(always)]
pub(crate) fn prefetch_at<T>(x: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..len * size_of::<T>()).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.cast::<i8>().wrapping_add(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, len);
}

/// Asks for the lines of `x`, into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_far<T>(x: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..size_of_val(x)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(x.as_ptr().cast::<i8>().wrapping_add(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// From the first byte of a cache line on: a vector of 64 bytes across two lines is two accesses, and arrays begin anywhere.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Aligned<T>(pub(crate) T);

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
