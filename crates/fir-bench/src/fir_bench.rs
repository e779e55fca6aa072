//! What a compiled solution is called with. A solution is one function:
//!
//! `#[unsafe(no_mangle)] pub unsafe extern "C" fn run(args: *const Tensor, count: usize, message: *mut u8, room: usize) -> i32`
//!
//! `args` are the definition's inputs in order, then its outputs; a number is a tensor of rank 0. Tensors are row-major
//! and begin at a cache line. 0 says that it went well; anything else fails the run, with `message` for its log.
#![allow(dead_code)]

/// A tensor.
#[repr(C)]
pub struct Tensor {
    pub data: *mut u8,
    pub shape: *const i64,
    pub rank: i32,
    /// float32, float16, bfloat16, float8_e4m3, float8_e5m2, float4x2, int64, int32, int16, int8, bool: 0 to 10.
    pub dtype: i32,
}

impl Tensor {
    /// Its dimensions.
    ///
    /// # Safety
    /// It came from the benchmark's call, which is still running.
    pub unsafe fn shape(&self) -> &[i64] {
        if self.rank == 0 {
            return &[];
        }
        // SAFETY: the benchmark gives `rank` dimensions, which live as long as its call.
        unsafe { std::slice::from_raw_parts(self.shape, self.rank as usize) }
    }

    /// Its elements.
    ///
    /// # Safety
    /// As for `shape`; `T` is its element type, and nothing writes it meanwhile.
    pub unsafe fn get<T>(&self) -> &[T] {
        // SAFETY: as the caller promises.
        let len = unsafe { self.shape() }.iter().product::<i64>() as usize;
        // SAFETY: so many elements are there, of the type that the caller names.
        unsafe { std::slice::from_raw_parts(self.data.cast(), len) }
    }

    /// Its elements, to write: for outputs.
    ///
    /// # Safety
    /// As for `get`, and nothing else reads or writes it meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut<T>(&self) -> &mut [T] {
        // SAFETY: as the caller promises.
        let len = unsafe { self.shape() }.iter().product::<i64>() as usize;
        // SAFETY: so many elements are there, of the type that the caller names, and nobody else looks at them.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), len) }
    }
}
