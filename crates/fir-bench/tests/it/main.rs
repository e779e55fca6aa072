//! Tests of the crate's files, workers and benchmark.

mod schema;
mod support;
mod traceset;
