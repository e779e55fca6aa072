//! Plans: which worker does what. Pure data from pure functions, on lengths the host already has.

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
