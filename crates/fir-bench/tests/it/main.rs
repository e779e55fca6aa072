//! Tests of the crate's files, workers and benchmark.

mod benchmark;
mod builders;
mod cheats;
mod operators;
mod schema;
mod support;
mod traceset;
