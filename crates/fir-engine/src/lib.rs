//! The serving engine: models, paged KV with a prefix tree, a scheduler and a sampler, on one thread of its own.
//!
//! [`Engine::start`] gives a [`Handle`]; [`Handle::submit`] takes a [`Request`] and a sink for its [`Event`]s. A request's
//! road:
//!
//! 1. `handle.rs` checks it, compiles its grammar and queues it, or says that the queue is full.
//! 2. `engine.rs`, on its thread: a step is *schedule, run, settle*.
//! 3. `sched/` chooses what the step runs. A sequence is a list of tokens of which the first so many have their KV in
//!    pages; prompt or answer makes no difference. It finds known prefixes in `kv/radix.rs`, brings back what lies in a
//!    tier (`kv/tier.rs`), takes pages from `kv/pool.rs`, cuts prompts to the time that `sched/cost.rs` has learned steps
//!    take, and lets sequences that share a prefix read it together (`sched/group.rs`).
//! 4. `runner/` computes logits; `sampler.rs` draws each row by its own request's rules and random numbers, so that an
//!    answer does not depend on the batch; `spec/` guesses ahead, and a guess is verified by drawing.
//! 5. `text.rs` holds back what may become a stop text; the rest goes to the sink.
#![deny(unsafe_code)]

mod backend;
pub mod chat;
pub mod config;
pub mod engine;
pub mod error;
mod grammar;
pub mod handle;
mod hub;
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
    request::{Attention, Event, Finish, Grammar, Logprob, Request, Sampling, TokenLogprobs, Usage},
    runner::{Batch, KvCache, KvType, Limits, Rule, Runner, Seq, Shared, Sparse},
    stats::{Histogram, Stats, TierStats},
    tokenizer::{Detokenizer, Tokenizer},
};
