//! Attention variants.

mod rope;

pub(crate) use self::rope::frequencies;
pub use self::rope::{Llama31, Rope};
