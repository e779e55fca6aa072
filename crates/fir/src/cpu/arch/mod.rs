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
pub(crate) use x86::{Avx2, Avx512, PairKernel, first_level_bytes};

/// Asks for the lines of `bytes` from `x` on, wherever that is.
#[inline(always)]
fn prefetch<const HINT: i32>(x: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(LINE) {
        let x = x.wrapping_add(at);
        // SAFETY: both are in the x86-64 baseline (a CPU without the second does nothing), and change nothing, wherever they point.
        unsafe {
            match HINT {
                // The compiler has it for CPUs that it is told of alone.
                OWN => std::arch::asm!("prefetchw [{}]", in(reg) x, options(nostack, preserves_flags, readonly)),
                _ => std::arch::x86_64::_mm_prefetch::<HINT>(x.cast()),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, bytes);
}

/// `_MM_HINT_T0`.
const NEAR: i32 = 3;
/// `_MM_HINT_T1`.
const FAR: i32 = 2;
/// `_MM_HINT_ET0`.
const OWN: i32 = 7;

/// Asks for the lines `ahead` bytes behind those of `x`, wherever that is.
#[inline(always)]
pub(crate) fn prefetch_ahead(x: &[u8], ahead: usize) {
    prefetch::<NEAR>(x.as_ptr().wrapping_add(ahead), x.len());
}

/// Asks for the lines of `len` elements from `x` on, wherever that is.
#[inline(always)]
pub(crate) fn prefetch_at<T>(x: *const T, len: usize) {
    prefetch::<NEAR>(x.cast(), len * size_of::<T>());
}

/// Asks for the lines of `x`, which will be written, as this core's own.
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(x: &mut [T]) {
    prefetch::<OWN>(x.as_ptr().cast(), size_of_val(x));
}

/// Asks for the lines of `x`, into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_far<T>(x: &[T]) {
    prefetch::<FAR>(x.as_ptr().cast(), size_of_val(x));
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
