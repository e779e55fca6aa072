//! One binary for all integration tests: a file per operator, every implementation against the reference.

mod activation;
mod gemm;
mod hostile;
mod layers;
mod matrix;
mod norm;
mod sources;
mod support;
