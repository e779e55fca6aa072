//! The serving engine: models, paged KV with a prefix tree, a scheduler and a sampler, on one thread of its own.
#![deny(unsafe_code)]

mod backend;
pub mod chat;
pub mod config;
pub mod engine;
pub mod error;
mod grammar;
pub mod handle;
mod kv;
mod layers;
pub mod models;
pub mod pull;
pub mod request;
pub mod runner;
mod sampler;
mod sched;
mod spec;
pub mod stats;
mod text;
pub mod tokenizer;
mod weights;

pub use crate::{
    chat::ChatTemplate,
    config::{Config, MemoryPlan},
    engine::Engine,
    error::{Error, Result},
    handle::{Handle, Health, RequestId},
    models::{KvLayout, Model, ModelConfig},
    request::{Event, Finish, Grammar, Logprob, Request, Sampling, TokenLogprobs, Usage},
    runner::{Batch, KvCache, KvType, Limits, Runner, Seq, Shared},
    stats::{Histogram, Stats, TierStats},
    tokenizer::{Detokenizer, Tokenizer},
};
