//! The subcommands.

mod answer;
pub(crate) mod bench_quality;
pub(crate) mod bench_serve;
pub(crate) mod chat;
pub(crate) mod demo;
mod engine;
pub(crate) mod generate;
pub(crate) mod jit;
pub(crate) mod pull;
pub(crate) mod serve;
mod settings;
pub(crate) mod trace;
pub(crate) mod tune;
