//! The subcommands.

pub(crate) mod demo;
pub(crate) mod jit;
pub(crate) mod tune;
