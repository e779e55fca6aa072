//! The operators: public functions and plans with their docs, checks and dispatch.

pub mod attention;
pub mod activation;
pub mod gemm;
pub mod norm;
pub mod sampling;
pub mod speculative;
pub mod topk;
pub mod page;
pub mod rope;
