//! The serving engine: models, paged KV with a prefix tree, a scheduler and a sampler, on one thread of its own.
#![deny(unsafe_code)]

mod backend;
pub mod chat;
pub mod error;
mod grammar;
mod kv;
mod layers;
pub mod models;
pub mod pull;
pub mod request;
pub mod runner;
mod sampler;
mod sched;
pub mod stats;
mod text;
pub mod tokenizer;
mod weights;

pub use crate::{
    chat::ChatTemplate,
    error::{Error, Result},
    models::{KvLayout, Model, ModelConfig},
    request::{Event, Finish, Grammar, Logprob, Request, Sampling, TokenLogprobs, Usage},
    runner::{Batch, KvCache, KvType, Limits, Runner, Seq, Shared},
    tokenizer::{Detokenizer, Tokenizer},
};
