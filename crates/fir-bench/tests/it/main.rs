//! Tests of the crate's files, workers and benchmark.

mod apply;
mod benchmark;
mod builders;
mod cheats;
mod operators;
mod schema;
mod support;
mod traceset;
