//! The serving engine: models, paged KV with a prefix tree, a scheduler and a sampler, on one thread of its own.
#![forbid(unsafe_code)]

pub mod error;
pub mod request;

pub use crate::{
    error::{Error, Result},
    request::{Event, Finish, Grammar, Logprob, Request, Sampling, TokenLogprobs, Usage},
};
