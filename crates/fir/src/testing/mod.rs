//! Generators and comparers, for the tests of this crate and of those built on it (feature `testing`).

mod compare;
mod generate;
mod variant;

pub use self::{
    compare::{Compare, compare},
    generate::Rng,
    variant::{Case, init_error, logit_error, output_error, scale_error},
};
