//! Where KV lives: a pool of pages, a tree of prefixes over it, and tiers below it.
//!
//! A page has one owner: a sequence that writes it, or a node of the tree, which nobody writes. Sequences that read a
//! node's page hold a lock on the node; that count is the only reference count there is.

pub(crate) mod pool;
pub(crate) mod radix;
pub(crate) mod tier;
