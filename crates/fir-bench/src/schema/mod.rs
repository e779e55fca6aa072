//! The nouns of FlashInfer-Trace: types that cannot hold wrong data.
//!
//! | noun | file | says |
//! |---|---|---|
//! | [`Definition`] | `definitions/<op_type>/<name>.json` | what is computed: axes, tensors, a reference in Python |
//! | [`Solution`] | `solutions/<author>/<op_type>/<definition>/<name>.json` | how: sources, language, entry point |
//! | [`Workload`] | a line of `workloads/<op_type>/<definition>.jsonl` | on what: values of the axes, where inputs come from |
//! | [`Trace`] | a line of `traces/<author>/<op_type>/<definition>.jsonl` | how it went: an [`Evaluation`] of a solution on a workload |
//!
//! Each is read by `parse(text, file)` or made by `from_value`, the one road through every rule; there is no other way
//! to get one and no way to change one. It keeps the text it was read from, so writing gives the same bytes: the order of
//! keys, the spelling of numbers and fields that this crate does not know stay.

/// An enum whose variants have names in files, with all of them and the names.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// Every one.
            pub const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            /// Its name in files.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

/// Functions that lend the fields of their names: a document is read, and does not change.
macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident: $t:ty,)*) => {
        $($(#[$doc])* pub fn $name(&self) -> &$t { &self.$name })*
    };
}

mod constraint;
mod definition;
mod import;
mod python;
mod read;
mod solution;
mod trace;
mod workload;

pub use self::{
    constraint::{Expr, Facts, Number},
    definition::{Axis, Constraint, DType, Definition, TensorSpec},
    import::import_definition,
    solution::{Language, Solution, Source},
    trace::{Correctness, Environment, Evaluation, Performance, Status, Trace},
    workload::{Input, Scalar, Workload},
};
pub(crate) use read::parse;
pub(crate) use workload::fresh_uuid;
