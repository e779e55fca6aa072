//! One binary for all integration tests: a file per operator, every implementation against the reference.

mod activation;
mod attention;
#[cfg(feature = "cuda")]
mod dry;
#[cfg(feature = "cuda")]
mod dry_attention;
#[cfg(feature = "cuda")]
mod dry_gemm;
#[cfg(feature = "cuda")]
mod dry_tokens;
mod gemm;
#[cfg(feature = "cuda")]
mod graph;
mod hostile;
#[cfg(feature = "cuda")]
mod jit;
mod layers;
mod lora;
mod matrix;
mod moe;
mod norm;
mod overrides;
mod page;
mod quantize;
mod rope;
mod sampling;
mod sources;
mod speculative;
mod support;
mod topk;
mod variant;
