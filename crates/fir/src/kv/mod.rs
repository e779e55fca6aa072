#![doc = include_str!("../../docs/layouts.md")]

mod page_table;
mod paged;
mod ragged;

#[cfg(feature = "cuda")]
pub(crate) use self::page_table::{Ints, OnDevice};
pub(crate) use self::paged::NVFP4_BLOCK;

pub use self::{
    page_table::PageTable,
    paged::{KvLayout, KvPool, PagedKv, PagedKvMut, PagedMla, PagedMlaMut},
    ragged::{Ragged, RaggedKv},
};

/// Keys and values of a batch of requests.
#[derive(Clone, Copy, Debug)]
pub enum Kv<'a> {
    /// Pages named by a table.
    Paged(PagedKv<'a>, &'a PageTable<'a>),
    /// One request after another.
    Ragged(RaggedKv<'a>),
}

impl<'a> Kv<'a> {
    /// The memory, however it is indexed.
    pub fn pool(&self) -> &KvPool<'a> {
        match self {
            Self::Paged(kv, _) => kv.pool(),
            Self::Ragged(kv) => kv.pool(),
        }
    }

    /// Tokens of each request.
    pub fn lens(&self) -> &[u32] {
        match self {
            Self::Paged(_, table) => table.lens(),
            Self::Ragged(kv) => kv.indptr().lens(),
        }
    }
}
