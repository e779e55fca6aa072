//! An OpenAI-compatible server over the engine, which understands Anthropic's clients too.
//!
//! | path | does |
//! |---|---|
//! | `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` | generate, at once or as server-sent events |
//! | `/v1/embeddings`, `/v1/models`, `/tokenize`, `/detokenize`, `/v1/messages/count_tokens` | vectors, names, tokens |
//! | `/health`, `/ready`, `/ping`, `/load`, `/metrics`, `/version`, `/openapi.json`, `/reset_prefix_cache` | for those who run it |
//! | `/` | a chat page |
//!
//! A request's road: [`Server`] accepts, `asked` checks key, type and size, the endpoint in `openai` or `anthropic`
//! makes it a request of the engine, `generation` hands back its events (and ends it when nobody listens), `parse` takes the text apart,
//! `stream` writes it as it comes. An unknown field is an error, as a misspelt one would else be ignored in silence.
//!
//! An engine is a [`Backend`] ([`EngineBackend`] is the one of `fir-engine`); [`Server::bind`] listens before there is one and answers 503 until it is installed.
#![forbid(unsafe_code)]

mod anthropic;
mod asked;
mod auth;
mod backend;
mod config;
mod conversation;
mod engine;
mod error;
mod generation;
mod metrics;
mod openai;
mod openapi;
mod params;
mod parse;
mod routes;
mod serve;
mod state;
mod stream;

pub use crate::{
    backend::{Abort, Backend, ModelInfo, Sink, ToolFormat},
    config::{Config, Limits},
    engine::EngineBackend,
    serve::{Installer, Server},
};
