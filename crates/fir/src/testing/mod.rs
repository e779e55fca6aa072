#![doc = include_str!("../../docs/testing.md")]

mod compare;
mod generate;
pub mod hostile;

pub use self::{
    compare::{Compare, compare},
    generate::Rng,
};
