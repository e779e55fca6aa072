//! The endpoints of OpenAI's interface, and the few that all local engines add.

pub(crate) mod chat;
pub(crate) mod completions;
mod items;
mod messages;
pub(crate) mod plain;
pub(crate) mod responses;
pub(crate) mod types;
