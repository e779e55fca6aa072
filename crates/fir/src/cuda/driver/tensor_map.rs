//! Tensors as the copy engine of sm_90 takes them: boxes of them go to shared memory by one instruction.

use super::api::{api, call};
use crate::error::Result;
use crate::tensor::DType;

/// `CUtensorMap`.
#[repr(C, align(64))]
struct Encoded([u64; 16]);

/// A tensor of 16-bit elements, its dense axis first, and the boxes that are copied of it. Rows of 128 bytes in shared memory
/// are swizzled: chunk `c` of 16 bytes of row `r` is at `c ^ r % 8`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap<'a> {
    /// Address, a multiple of 16.
    pub(crate) data: u64,
    /// f16 or bf16.
    pub(crate) dtype: DType,
    /// Elements along each axis.
    pub(crate) dims: &'a [u64],
    /// Bytes from one to the next along each axis but the first, multiples of 16.
    pub(crate) strides: &'a [u64],
    /// Elements of a box along each axis.
    pub(crate) sizes: &'a [u32],
}

impl TensorMap<'_> {
    /// The words that a kernel's parameter holds.
    pub(crate) fn encode(&self) -> Result<[u64; 16]> {
        const F16: u32 = 6;
        const BF16: u32 = 9;
        const SWIZZLE_128: u32 = 3;
        const L2_128: u32 = 2;
        let dtype = if self.dtype == DType::BF16 { BF16 } else { F16 };
        let (rank, steps, mut map) = (self.dims.len(), [1u32; 5], Encoded([0; 16]));
        debug_assert!(rank <= 5 && self.strides.len() + 1 == rank && self.sizes.len() == rank);
        call!(
            api()?,
            cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                dtype,
                rank as u32,
                self.data as *mut _,
                self.dims.as_ptr(),
                self.strides.as_ptr(),
                self.sizes.as_ptr(),
                steps.as_ptr(),
                0,
                SWIZZLE_128,
                L2_128,
                0
            )
        )?;
        Ok(map.0)
    }

    /// What a dry run shows in its place: address, axes, strides and boxes.
    pub(crate) fn describe(&self) -> [u64; 16] {
        let mut words = [0; 16];
        let boxes = self.sizes.iter().map(|&n| u64::from(n));
        let all = std::iter::once(self.data).chain(self.dims.iter().copied()).chain(self.strides.iter().copied());
        words.iter_mut().zip(all.chain(boxes)).for_each(|(word, x)| *word = x);
        words
    }
}
