//! The subcommands.

pub(crate) mod demo;
pub(crate) mod tune;
