//! The subcommands.

pub(crate) mod demo;
pub(crate) mod generate;
pub(crate) mod jit;
pub(crate) mod pull;
pub(crate) mod tune;
