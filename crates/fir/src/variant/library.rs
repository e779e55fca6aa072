//! The variants that models use, written in the public language alone.

use super::Declare;
use super::expr::{batch, kv_len, kv_pos, q_idx, q_len, q_pos, score};
use super::rope::{Llama31, Rope};
use super::spec::{Hooks, Variant, init, logits, mask, plain, query, rope, variant};

/// Library variants are well-formed: the tests build every one.
fn library(name: &str, build: impl FnOnce(&mut Declare) -> Hooks) -> Variant {
    variant(name, build).expect("a well-formed variant")
}

/// Plain attention: every query sees every key of its request.
pub fn standard() -> Variant {
    library("Standard", |_| plain())
}

/// A query sees the keys up to its own position.
pub fn causal() -> Variant {
    library("Causal", |_| mask(kv_pos().le(q_pos())))
}

/// A query sees the keys from `window_left` before its own position on: `kv_pos + window_left >= q_pos`. Negative:
/// all of them.
///
/// * `window_left`: i32
pub fn sliding_window() -> Variant {
    library("SlidingWindow", |p| {
        let left = p.i32("window_left");
        // A query before the first key (q_len > kv_len) sees all; the bound on q_pos keeps the difference from
        // wrapping around for every window.
        mask(left.clone().lt(0) | kv_pos().ge(q_pos().max(0) - left))
    })
}

/// Bounds logits: `soft_cap · tanh(score / soft_cap)`. Zero or less: off.
///
/// * `soft_cap`: f32
pub fn soft_cap() -> Variant {
    library("SoftCap", |p| {
        let cap = p.f32("soft_cap");
        logits(cap.clone().le(0.0).select(score(), cap.clone() * (score() / cap).tanh()))
    })
}

/// A bias that grows with the distance: `score + alibi_slopes[head] · (kv_pos − q_pos)`.
///
/// * `alibi_slopes`: f32, one per query head
pub fn alibi() -> Variant {
    library("Alibi", |p| {
        let slope = p.per_head("alibi_slopes");
        logits(score() + slope * (kv_pos() - q_pos()).to_f32())
    })
}

/// Rotates queries and keys on the fly; see [`Rope`].
///
/// # Errors
/// [`Error::Variant`](crate::Error::Variant) when `theta` or `rope_scale` is not a finite number above 0.
pub fn rope_llama(theta: f32, rope_scale: f32, interleave: bool) -> crate::error::Result<Variant> {
    let r = Rope { theta, scale: rope_scale, interleave, ..Rope::default() };
    variant("RopeLlama", |_| query(rope(r)).key(rope(r)))
}

/// As [`rope_llama`], with the smoothed frequencies of Llama 3.1.
///
/// # Errors
/// [`Error::Variant`](crate::Error::Variant) when a number is out of range; see [`Llama31`].
pub fn rope_llama31(theta: f32, rope_scale: f32, interleave: bool, smooth: Llama31) -> crate::error::Result<Variant> {
    let r = Rope { theta, scale: rope_scale, interleave, llama31: Some(smooth), ..Rope::default() };
    variant("RopeLlama31", |_| query(rope(r)).key(rope(r)))
}

/// An attention sink: every row has one more key, of logit `sink[head]` and value zero.
///
/// * `sink`: f32, one per query head
pub fn sink() -> Variant {
    library("Sink", |p| init(p.per_head("sink")))
}

/// A mask given bit by bit: query `i` sees key `j` when bit `i · kv_len + j` of the request is set.
///
/// * `mask`: bits, `q_len · kv_len` for each request, in whole bytes
pub fn custom_mask() -> Variant {
    library("CustomMask", |p| mask(p.bits("mask").at(q_idx(), kv_pos(), kv_len())))
}

/// A mask over the query tokens alone (speculative decoding): a query sees all keys before them, and of them the key
/// `j` when bit `i · q_len + j` of the request is set.
///
/// * `mask`: bits, `q_len · q_len` for each request, in whole bytes
pub fn tree_mask() -> Variant {
    library("TreeMask", |p| {
        let first = kv_len() - q_len();
        mask(kv_pos().lt(first.clone()) | p.bits("mask").at(q_idx(), kv_pos() - first, q_len()))
    })
}

/// Attention without softmax: the weight is `sigmoid(score + bias)`.
///
/// * `bias`: f32
pub fn sigmoid() -> Variant {
    library("Sigmoid", |p| logits((score() + p.f32("bias")).sigmoid()).normalize_none())
}

/// Several items scored behind one prefix, each blind to the others.
///
/// Causal; a query inside the prefix (`q_pos < prefix_len`) sees all keys up to itself. A later one sees the prefix,
/// and of the rest only the keys with `kv_pos > q_pos − t`, where `t = token_pos_in_items[batch ·
/// token_pos_in_items_len + q_pos − prefix_len]` counts the query's position in its item from 1 (so the item's first
/// token sees itself, its second two tokens, and so on) and is 0 for a delimiter (which sees the prefix alone).
///
/// * `prefix_len`: i32, `[batch]`
/// * `token_pos_in_items`: i32, `[batch · token_pos_in_items_len]`
/// * `token_pos_in_items_len`: i32, entries per request, padding included
pub fn multi_item() -> Variant {
    library("MultiItem", |p| {
        let prefix = p.i32_tensor("prefix_len").at(batch());
        let (items, len) = (p.i32_tensor("token_pos_in_items"), p.i32("token_pos_in_items_len"));
        let t = items.at(batch() * len + q_pos() - prefix.clone());
        let own = kv_pos().gt(q_pos() - t);
        mask(kv_pos().le(q_pos()) & (q_pos().lt(prefix.clone()) | kv_pos().lt(prefix) | own))
    })
}
