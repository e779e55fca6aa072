#![doc = include_str!("../../docs/plans.md")]

mod schedule;
mod workspace;

pub(crate) use self::{
    schedule::{Cut, Entry},
    workspace::Tile,
};
pub use self::{
    schedule::{Item, Merge, Schedule, Split, TILE_KV},
    workspace::Scratch,
};
