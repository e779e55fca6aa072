#![doc = include_str!("../../docs/plans.md")]

mod schedule;
mod workspace;

#[cfg(feature = "cuda")]
pub(crate) use self::workspace::DeviceSizes;
pub(crate) use self::{
    schedule::{Cut, Entry, Token},
    workspace::Tile,
};
pub use self::{
    schedule::{Item, Merge, Schedule, Split, TILE_KV},
    workspace::Scratch,
};
