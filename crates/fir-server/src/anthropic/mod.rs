//! `/v1/messages`, as Anthropic's clients speak: the same conversations, in other words.

pub(crate) mod blocks;
pub(crate) mod messages;
