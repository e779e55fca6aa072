//! Attention over paged, ragged, dense and sparse KV.
//!
//! | what | how |
//! |---|---|
//! | one request | [`single_decode`], [`single_prefill`] |
//! | a batch, one query token each | [`DecodePlan`] |
//! | a batch, any number of query tokens each | [`PrefillPlan`]; mixed with decodes, [`BatchPlan`] |
//! | a batch that shares prefixes | [`CascadePlan`] |
//! | latent attention (MLA) | [`MlaPlan`] |
//! | block masks | [`SparsePlan`], [`VariableSparsePlan`] |
//! | results of two parts of the KV | [`merge_state`], [`merge_states`], [`merge_state_in_place`] |
//!
//! A [`Problem`] says what is computed (shapes, types, [variant](crate::variant)), a plan which worker does what, and
//! the arguments of `run` bring one layer's tensors. A plan is immutable and serves every layer of a step.
//!
//! For request `r` with `q_len` query tokens and `kv_len` cached tokens, query token `i`, head `h`, and `g` query
//! heads to a KV head:
//!
//! ```text
//! score_j = sm_scale * q[i, h] · k[j, h / g]            logit_j = variant(score_j), -inf where masked
//! o[i, h] = Σ_j exp(logit_j) v[j, h / g] / Σ_j exp(logit_j)
//! lse[i, h] = log2 Σ_j exp(logit_j)                      base 2, f32
//! ```
//!
//! The cached tokens include the query tokens: query `i` stands at position `kv_len - q_len + i`. A row that sees
//! nothing gives `o = 0`, `lse = -inf`.

mod asked;
mod batch;
mod cascade;
mod decode;
mod merge;
mod mla;
mod prefill;
mod single;
mod sparse;

pub use self::{
    batch::{BatchArgs, BatchPlan, Problem},
    cascade::{CascadeArgs, CascadeLevel, CascadePlan},
    decode::{DecodeArgs, DecodePlan},
    merge::{merge_state, merge_state_in_place, merge_states},
    mla::{MlaArgs, MlaPlan, MlaProblem},
    prefill::{PrefillArgs, PrefillPlan},
    single::{SingleArgs, single_decode, single_prefill},
    sparse::{BlockMask, SparseArgs, SparsePlan, VariableSparsePlan},
};
pub use crate::plan::{Item, Merge, Schedule, Scratch, Split};
