//! One binary for all integration tests: a file per operator, every implementation against the reference.

mod attention;
mod activation;
mod gemm;
mod norm;
mod sampling;
mod speculative;
mod page;
mod rope;
mod support;
mod variant;
mod topk;
