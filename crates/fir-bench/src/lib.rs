//! Define, implement, benchmark and deploy kernels.
//!
//! A [`Definition`](schema::Definition) says what is computed, a [`Solution`](schema::Solution) how, a
//! [`Workload`](schema::Workload) on what, and a [`Trace`](schema::Trace) how that went. A [`TraceSet`] is a folder of them,
//! in the files of FlashInfer-Trace.
//!
//! ```
//! use fir_bench::schema::Definition;
//!
//! let definition = Definition::from_value(&serde_json::json!({
//!     "name": "double_n4", "op_type": "example",
//!     "axes": {"batch": {"type": "var"}, "n": {"type": "const", "value": 4}},
//!     "inputs": {"x": {"shape": ["batch", "n"], "dtype": "float32"}},
//!     "outputs": {"y": {"shape": ["batch", "n"], "dtype": "float32"}},
//!     "reference": "def run(x):\n    return x * 2\n",
//! }))?;
//! assert_eq!(definition.axes_of(&[Some(&[3, 4])])?["batch"], 3);
//! # Ok::<(), fir_bench::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`schema`] | the nouns: strict to read, byte-stable to write |
//! | [`traceset`] | a folder of them: queries, the best, merging |
//! | [`score`] | rankings of solutions and authors |
//! | [`mod@array`], [`inputs`] | tensors, and how a workload gets them |
//! | [`benchmark`] | solutions on workloads: right first, then timed |
//! | [`build`], [`ops`] | builders of solutions; the kernel library's operators as solutions |
//! | [`synth`] | small workloads for definitions that have none |
//! | [`worker`], [`evaluate`] | processes that run them; whether outputs are right |
//! | [`apply`] | the best solution for a call, by what was measured |
//! | [`record`], [`profile`] | workloads of a running program; profilers on one call |
//! | [`report`] | Markdown and HTML |
//! | [`validate`] | everything that is wrong or missing in a folder |
#![deny(unsafe_code, clippy::print_stdout, clippy::print_stderr)]

pub mod apply;
pub mod array;
pub mod benchmark;
pub mod build;
mod calls;
pub mod error;
pub mod evaluate;
pub mod inputs;
pub mod ops;
pub mod profile;
pub mod record;
pub mod report;
pub mod schema;
pub mod score;
pub mod synth;
pub mod traceset;
pub mod validate;
pub mod worker;

pub use crate::error::{Error, Result};
pub use crate::traceset::TraceSet;
