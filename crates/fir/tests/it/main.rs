//! One binary for all integration tests: a file per operator, every implementation against the reference.

mod norm;
mod page;
mod rope;
mod support;
