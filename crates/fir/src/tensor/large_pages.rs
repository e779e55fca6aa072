//! Memory in pages of 2 MiB. Heads of a cache are read in stretches of 256 bytes, KiB apart: with pages of 4 KiB each
//! stretch is another entry of the address translation.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// Asks the system for such pages under memory that nobody has touched yet; in vain where it has none.
pub(super) fn ask<T>(memory: &mut [MaybeUninit<T>]) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        const LARGE: usize = 2 << 20;
        const MADV_HUGEPAGE: i32 = 14;
        unsafe extern "C" {
            fn madvise(address: *mut std::ffi::c_void, len: usize, advice: i32) -> i32;
        }
        let (start, len) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
        let skip = start.align_offset(LARGE);
        if len >= 2 * LARGE && skip < len {
            let len = (len - skip) / LARGE * LARGE;
            // SAFETY: whole pages inside of `memory`; the advice changes what lies behind the addresses, not what they hold.
            unsafe { madvise(start.wrapping_add(skip).cast(), len, MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = memory;
}
