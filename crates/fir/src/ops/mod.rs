//! The operators: public functions and plans with their docs, checks and dispatch.

pub mod activation;
pub mod attention;
pub mod gemm;
pub mod lora;
pub mod moe;
pub mod norm;
pub mod page;
pub mod quantize;
pub mod rope;
pub mod sampling;
pub mod speculative;
pub mod topk;
