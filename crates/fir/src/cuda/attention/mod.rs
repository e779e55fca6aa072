//! Attention on CUDA.

pub(crate) mod merge;
