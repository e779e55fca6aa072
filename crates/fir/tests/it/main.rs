//! One binary for all integration tests: a file per operator, every implementation against the reference.

mod activation;
mod attention;
#[cfg(feature = "cuda")]
mod dry;
mod gemm;
mod hostile;
#[cfg(feature = "cuda")]
mod jit;
mod layers;
mod matrix;
mod moe;
mod norm;
mod page;
mod quantize;
mod rope;
mod sampling;
mod sources;
mod speculative;
mod support;
mod topk;
mod variant;
