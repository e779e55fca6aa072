//! The contract with clients, point by point, over a double of the engine.
#![allow(missing_docs, reason = "tests")]

mod answers;
mod double;
mod http;
mod life;
mod refusals;
