//! What a model's layers are made of: products, the embedding, experts.

pub(crate) mod embed;
pub(crate) mod linear;
pub(crate) mod moe;
