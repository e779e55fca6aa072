#![doc = include_str!("../../docs/testing.md")]

mod compare;
mod generate;
mod variant;
pub mod hostile;

pub use self::{
    compare::{Compare, compare},
    generate::Rng,
    variant::{Case, exact_variants, init_error, logit_error, output_error, scale_error},
};
