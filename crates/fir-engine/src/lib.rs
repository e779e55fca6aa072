//! The serving engine: models, paged KV with a prefix tree, a scheduler and a sampler, on one thread of its own.
#![forbid(unsafe_code)]

mod backend;
pub mod error;
mod grammar;
mod kv;
pub mod request;
mod sampler;
mod sched;
pub mod stats;
mod text;

pub use crate::{
    error::{Error, Result},
    request::{Event, Finish, Grammar, Logprob, Request, Sampling, TokenLogprobs, Usage},
};
