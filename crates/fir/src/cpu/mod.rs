//! The CPU backend: algorithms written once over [`vector::Vector`], compiled for each level.

pub(crate) mod activation;
mod arch;
pub(crate) mod exec;
pub(crate) mod gemm;
pub(crate) mod level;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod pool;
pub(crate) mod rows;
pub(crate) mod vector;
