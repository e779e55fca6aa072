//! One binary for all integration tests: a file per operator, every implementation against the reference.

mod norm;
mod sampling;
mod speculative;
mod support;
mod topk;
