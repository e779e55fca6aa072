//! The DLPack ABI: the C structs by which array libraries lend each other memory, and the element types' codes.
//!
//! Plain data, no behaviour; [`super::Foreign`] reads it and [`super::Tensor::into_dlpack`] writes it.

use std::ffi::c_void;

use super::DType;
use crate::error::{Error, Result};

/// The ABI version of [`DlManagedTensorVersioned`] that this crate speaks; another major version is refused.
pub const DLPACK_MAJOR: u32 = 1;
/// Minor version written on export: the first with codes for fp8 and fp4.
pub const DLPACK_MINOR: u32 = 1;

/// [`DlDevice::device_type`] of ordinary memory.
pub const DEVICE_CPU: i32 = 1;
/// [`DlDevice::device_type`] of memory of a CUDA device.
pub const DEVICE_CUDA: i32 = 2;

/// Bit of [`DlManagedTensorVersioned::flags`]: the memory must not be written.
pub const FLAG_READ_ONLY: u64 = 1 << 0;
/// Bit of [`DlManagedTensorVersioned::flags`]: the producer made a copy, which the consumer alone holds.
pub const FLAG_COPIED: u64 = 1 << 1;
/// Bit of [`DlManagedTensorVersioned::flags`]: elements of less than a byte take a byte each.
pub const FLAG_SUBBYTE_PADDED: u64 = 1 << 2;

/// ABI version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DlVersion {
    /// Changes with the structs' layout.
    pub major: u32,
    /// Changes when codes are added.
    pub minor: u32,
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DlDevice {
    /// Kind of device; [`DEVICE_CPU`] and [`DEVICE_CUDA`] are taken.
    pub device_type: i32,
    /// Which of them.
    pub device_id: i32,
}

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DlDataType {
    /// Kind of number.
    pub code: u8,
    /// Bits of one number.
    pub bits: u8,
    /// Numbers per element.
    pub lanes: u16,
}

/// A tensor without an owner.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DlTensor {
    /// Start of the memory; null when there is no element.
    pub data: *mut c_void,
    /// Where it lies.
    pub device: DlDevice,
    /// Number of axes.
    pub ndim: i32,
    /// Element type.
    pub dtype: DlDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` strides in elements, or null for row-major order.
    pub strides: *mut i64,
    /// From `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor with its owner, before version 1.0.
#[derive(Debug)]
#[repr(C)]
pub struct DlManagedTensor {
    /// The tensor.
    pub dl_tensor: DlTensor,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this struct.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// A tensor with its owner, since version 1.0.
#[derive(Debug)]
#[repr(C)]
pub struct DlManagedTensorVersioned {
    /// Version of this struct. With another major version only this and the next two fields may be touched.
    pub version: DlVersion,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this struct.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// Any of the `FLAG_…` bits.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DlTensor,
}

// The C compiler's sizes on a 64-bit machine.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(
    size_of::<DlTensor>() == 48 && size_of::<DlManagedTensor>() == 64 && size_of::<DlManagedTensorVersioned>() == 80
);

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const BOOL: u8 = 6;
const FLOAT8_E4M3FN: u8 = 10;
const FLOAT8_E5M2: u8 = 12;
const FLOAT8_E8M0FNU: u8 = 14;
const FLOAT4_E2M1FN: u8 = 17;

impl From<DType> for DlDataType {
    fn from(dtype: DType) -> Self {
        let (code, bits, lanes) = match dtype {
            DType::F32 => (FLOAT, 32, 1),
            DType::F16 => (FLOAT, 16, 1),
            DType::BF16 => (BFLOAT, 16, 1),
            DType::E4M3 => (FLOAT8_E4M3FN, 8, 1),
            DType::E5M2 => (FLOAT8_E5M2, 8, 1),
            DType::E8M0 => (FLOAT8_E8M0FNU, 8, 1),
            DType::E2M1x2 => (FLOAT4_E2M1FN, 4, 2),
            DType::I8 => (INT, 8, 1),
            DType::I16 => (INT, 16, 1),
            DType::I32 => (INT, 32, 1),
            DType::I64 => (INT, 64, 1),
            DType::U8 => (UINT, 8, 1),
            DType::U32 => (UINT, 32, 1),
            DType::Bool => (BOOL, 8, 1),
        };
        Self { code, bits, lanes }
    }
}

impl DlDataType {
    /// The element type that this names; `op` is for the message when there is none.
    pub(super) fn to_dtype(self, op: &'static str) -> Result<DType> {
        Ok(match (self.code, self.bits, self.lanes) {
            (FLOAT, 32, 1) => DType::F32,
            (FLOAT, 16, 1) => DType::F16,
            (BFLOAT, 16, 1) => DType::BF16,
            (FLOAT8_E4M3FN, 8, 1) => DType::E4M3,
            (FLOAT8_E5M2, 8, 1) => DType::E5M2,
            (FLOAT8_E8M0FNU, 8, 1) => DType::E8M0,
            (FLOAT4_E2M1FN, 4, 2) => DType::E2M1x2,
            (INT, 8, 1) => DType::I8,
            (INT, 16, 1) => DType::I16,
            (INT, 32, 1) => DType::I32,
            (INT, 64, 1) => DType::I64,
            (UINT, 8, 1) => DType::U8,
            (UINT, 32, 1) => DType::U32,
            (BOOL, 8, 1) => DType::Bool,
            (code, bits, lanes) => {
                return Err(Error::value(
                    op,
                    "dtype",
                    format!("code {code}, {bits} bits, {lanes} lanes"),
                    "int8/16/32/64, uint8/32, float16/32, bfloat16, bool, float8_e4m3fn, float8_e5m2 or \
                     float8_e8m0fnu of 1 lane, or float4_e2m1fn of 2 lanes",
                ));
            }
        })
    }
}
