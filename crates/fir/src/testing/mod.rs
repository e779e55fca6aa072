#![doc = include_str!("../../docs/testing.md")]

mod compare;
mod generate;
pub mod hostile;
mod variant;

pub use self::{
    compare::{Compare, compare},
    generate::Rng,
    variant::{Case, exact_variants, init_error, logit_error, output_error, scale_error},
};
