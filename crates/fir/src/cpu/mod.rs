//! The CPU backend: algorithms written once over [`vector::Vector`], compiled for each level.

pub(crate) mod activation;
mod arch;
pub(crate) mod attention;
pub(crate) mod exec;
pub(crate) mod gemm;
pub(crate) mod integers;
pub(crate) mod level;
pub(crate) mod lora;
pub(crate) mod math;
pub(crate) mod modulate;
pub(crate) mod moe;
pub(crate) mod norm;
pub(crate) mod page;
pub(crate) mod pool;
pub(crate) mod quantize;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod sampling;
mod select;
pub(crate) mod speculative;
pub(crate) mod topk;
pub(crate) mod tuning;
pub(crate) mod variant;
pub(crate) mod vector;
