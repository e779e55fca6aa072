//! Maps of tensors for the copy engine.

use super::super::params::TensorMap;
use super::Context;
use super::api::call;
use crate::error::Result;

/// `CUtensorMap`.
#[repr(C, align(64))]
pub(super) struct Aligned([u64; 16]);

/// Two bytes to an element, whatever they mean: zeros are read outside of the tensor.
const BFLOAT16: i32 = 9;
const SWIZZLE_128_BYTES: i32 = 3;
const PROMOTE_TO_128_BYTES: i32 = 2;

impl Context {
    /// The map of 16-bit elements at `address`: extents of the axes, the dense one first; bytes between elements of the others,
    /// multiples of 16; and extents of a box, whose first is 128 bytes, swizzled in shared memory. It is bytes alone: nothing on the device is touched.
    pub(crate) fn tensor_map<const N: usize>(
        &self,
        address: u64,
        shape: [u64; N],
        strides: &[u64],
        block: [u32; N],
    ) -> Result<TensorMap> {
        debug_assert_eq!(strides.len() + 1, N);
        let (_current, mut map, ones) = (self.enter()?, Aligned([0; 16]), [1; N]);
        call!(
            self.api,
            cuTensorMapEncodeTiled(
                &mut map,
                BFLOAT16,
                N as u32,
                std::ptr::with_exposed_provenance_mut(address as usize),
                shape.as_ptr(),
                strides.as_ptr(),
                block.as_ptr(),
                ones.as_ptr(),
                0,
                SWIZZLE_128_BYTES,
                PROMOTE_TO_128_BYTES,
                0
            )
        )?;
        Ok(TensorMap(map.0))
    }
}
