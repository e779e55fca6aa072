//! Attention over paged, ragged and sparse KV caches, with the token operators around it.
//!
//! An operator is a function: the executor first, then inputs, scalars, and the output last, in memory of yours.
//!
//! ```
//! use fir::{Exec, TensorMut, TensorRef, norm};
//!
//! let exec = Exec::cpu()?;
//! let (x, weight, mut out) = ([3.0f32, 4.0], [1.0f32; 2], [0f32; 2]);
//! norm::rms_norm(
//!     &exec,
//!     TensorRef::new(&x, &[1, 2])?,
//!     TensorRef::new(&weight, &[2])?,
//!     0.0,
//!     TensorMut::new(&mut out, &[1, 2])?,
//! )?;
//! assert!((out[0] / out[1] - 0.75).abs() < 1e-6);
//! # Ok::<(), fir::Error>(())
//! ```
//!
//! # Map
//!
//! | module | holds |
//! |---|---|
//! | [`attention`] | plans and single requests: paged, ragged, cascade, latent, sparse |
//! | [`activation`], [`gemm`], [`lora`], [`moe`], [`norm`], [`page`], [`quantize`], [`rope`], [`sampling`], [`speculative`], [`topk`] | the other operators |
//! | [`variant`] | what is done to a score between `q · k` and softmax |
//! | [`exec`] | where they run: [`Exec`], CPU levels, CUDA devices |
//! | `jit` | the kernels of CUDA devices, compiled when first used; a guide |
//! | [`kv`] | page tables, pools of pages, ragged offsets; a guide to the layouts |
//! | [`plan`] | schedules: which worker does what; a guide to planning |
//! | [`tune`] | measuring the sizes of blocks for this machine |
//! | [`philox`], [`filters`] | random numbers as a function; what a sampler may draw |
//! | [`routing`] | how a mixture of experts chooses |
//! | [`tensor`] | element types, shapes and strides, owned and borrowed tensors |
//! | [`mod@reference`] | every operator in plain f64 loops: the definition of right |
//! | [`error`] | the one [`Error`] |
//! | [`mod@env`] | every environment variable |
//! | `testing` | generators, the comparer, hostile arguments |
//!
//! Nouns are at the root ([`Tensor`], [`Exec`], [`Error`]), verbs in their modules ([`norm::rms_norm`]).
//!
//! # Features
//!
//! | feature | default | what |
//! |---|---|---|
//! | `cuda` | yes | CUDA devices; loads their driver and compiler when asked for one, needs neither to build |
//! | `testing` | no | the module `testing`, for tests of crates built on this one |
//!
//! Instruction sets and element types are no features: every build has them all, and the CPU decides when it runs.
#![deny(unsafe_code, clippy::print_stdout, clippy::print_stderr)]

mod args;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod env;
pub mod error;
pub mod exec;
pub mod filters;
pub mod kv;
mod ops;
mod overrides;
pub mod philox;
pub mod plan;
pub mod reference;
pub mod routing;
pub mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tune;
pub mod variant;

#[cfg(feature = "cuda")]
pub use crate::cuda::jit;
pub use crate::ops::{activation, attention, gemm, lora, moe, norm, page, quantize, rope, sampling, speculative, topk};
pub use crate::{
    error::{Error, Result},
    exec::Exec,
    kv::{PageTable, PagedKv, Ragged},
    tensor::{DType, Tensor, TensorMut, TensorRef},
};
