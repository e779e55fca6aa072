//! The operators: public functions and plans with their docs, checks and dispatch.

pub mod activation;
pub mod gemm;
pub mod norm;
