//! Maps of tensors, by which the copy engine (TMA) of sm_90 reads and writes boxes of them.

use std::ffi::c_void;

use bytemuck::{Pod, Zeroable};

use super::Context;
use super::api::call;
use crate::error::{Error, Result};
use crate::tensor::DType;

const SWIZZLE_128: i32 = 3;
const FETCH_128: i32 = 2;
const FETCH_256: i32 = 3;

/// `CUtensorMap`, as the driver encodes it; a kernel's parameter, by value. On a dry run, what it would be of.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

/// What a map is of: a tensor of up to five dimensions, the dense one first, that is copied box by box to shared memory with
/// the 128-byte swizzle. What lies outside of it reads as zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boxes<'a> {
    /// Address of the first element, a multiple of 16.
    pub(crate) start: u64,
    pub(crate) dtype: DType,
    /// Elements along each dimension.
    pub(crate) dims: &'a [u64],
    /// Bytes from one to the next along each dimension but the first, multiples of 16.
    pub(crate) strides: &'a [u64],
    /// Elements of a box along each dimension, at most 256; 128 bytes along the first.
    pub(crate) shape: &'a [u32],
    /// Whether what L2 lacks is fetched 256 bytes at a time and not 128: for what is read once, in order.
    pub(crate) in_order: bool,
}

impl Boxes<'_> {
    /// Words for the record of a dry run: address, number of dimensions, dims, strides, shape.
    pub(crate) fn described(&self) -> TensorMap {
        let mut words = [0; 16];
        (words[0], words[1]) = (self.start, self.dims.len() as u64);
        let all = self.dims.iter().chain(self.strides).copied().chain(self.shape.iter().map(|&n| u64::from(n)));
        words[2..].iter_mut().zip(all).for_each(|(word, n)| *word = n);
        TensorMap(words)
    }
}

/// The driver writes at addresses that are a multiple of 64.
#[repr(C, align(64))]
struct Aligned(TensorMap);

impl Context {
    /// The map that kernels take.
    pub(crate) fn tensor_map(&self, of: &Boxes<'_>) -> Result<TensorMap> {
        let Boxes { start, dtype, dims, strides, shape, in_order } = *of;
        let rank = dims.len();
        if !(1..=5).contains(&rank) || strides.len() + 1 != rank || shape.len() != rank {
            let got = format!("{rank} dimensions, {} strides, a box of {}", strides.len(), shape.len());
            return Err(Error::value("tensor map", "dims", got, "as many of each, 1 to 5 (strides one less)"));
        }
        let data_type = match dtype {
            DType::F16 => 6,
            DType::F32 => 7,
            DType::BF16 => 9,
            _ if dtype.size() == 1 => 0,
            _ => {
                let want = "f32, f16, bf16 or one of 8 bits".into();
                return Err(Error::DType { op: "tensor map", arg: "dtype", got: dtype.name(), want });
            }
        };
        let _current = self.enter()?;
        let mut map = Aligned(TensorMap([0; 16]));
        let ones = [1u32; 5];
        let address = std::ptr::with_exposed_provenance_mut::<c_void>(start as usize);
        call!(
            self.api,
            cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                data_type,
                rank as u32,
                address,
                dims.as_ptr(),
                strides.as_ptr(),
                shape.as_ptr(),
                ones.as_ptr(),
                0,
                SWIZZLE_128,
                if in_order { FETCH_256 } else { FETCH_128 },
                0,
            )
        )?;
        Ok(map.0)
    }
}
