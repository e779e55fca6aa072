//! The subcommands.

pub(crate) mod demo;
