//! Attention: every plan, level, type, layout and variant against the reference.

mod batch;
mod cascade;
mod case;
mod errors;
mod graph;
mod latent;
mod plans;
mod text;
