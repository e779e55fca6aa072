//! The CUDA backend: kernels are text under `kernels/`, compiled when they are first used.
//!
//! | file | holds |
//! |---|---|
//! | [`driver`] | the driver's functions: context, streams, memory, launches (unsafe code) |
//! | [`nvrtc`] | the compiler (unsafe code) |
//! | [`source`] | the kernels' text |
//! | [`jit`] | compiled kernels, from memory, disk or the compiler |
//! | [`params`] | structs that kernels take |
//! | [`exec`], [`call`] | a device with a stream; one operator's call on it |
//! | [`own`] | kernels of the caller's own (unsafe code) |
//! | [`put`] | small arrays of the host |
//! | [`dry`] | launches as text |
//! | the others | an operator each: which kernel, with which grid and parameters |

pub(crate) mod activation;
mod arch;
pub(crate) mod attention;
mod call;
pub(crate) mod driver;
pub(crate) mod dry;
pub(crate) mod exec;
pub(crate) mod gemm;
pub(crate) mod gemm_blocks;
pub mod jit;
pub(crate) mod lora;
pub(crate) mod modulate;
pub(crate) mod moe;
pub(crate) mod norm;
mod nvrtc;
pub(crate) mod own;
pub(crate) mod page;
mod params;
mod put;
pub(crate) mod quantize;
pub(crate) mod rope;
mod rows;
pub(crate) mod sampling;
mod sm90_gemm;
mod source;
pub(crate) mod speculative;
pub(crate) mod tokens;
pub(crate) mod topk;
