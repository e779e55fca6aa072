#![doc = include_str!("../../docs/variants.md")]

pub mod cuda;
pub mod eval;
mod expr;
pub(crate) mod interval;
mod library;
mod params;
mod rope;
pub(crate) mod row;
mod spec;
mod text;

pub use self::cuda::cuda_source;
pub use self::eval::{RowCtx, Side};
pub use self::expr::{
    Bits, Bool, F32, F32Tensor, I32, I32Tensor, batch, d, kv_head, kv_len, kv_pos, m, o, q_idx, q_len, q_pos, qo_head,
    score,
};
pub use self::library::{
    alibi, causal, custom_mask, multi_item, rope_llama, rope_llama31, sigmoid, sink, sliding_window, soft_cap,
    standard, tree_mask,
};
pub use self::params::{Bound, ParamType, Params};
pub use self::rope::{Llama31, Rope};
pub use self::spec::{
    Declare, Hooks, Normalize, Transform, Variant, init, key, logits, mask, output, plain, query, rope, scale, value,
    variant,
};
pub(crate) use self::{
    expr::{Binary, Unary},
    interval::{Block, Visible},
    params::{bit, clamped},
    rope::frequencies,
    row::RowProgram,
};
#[cfg(feature = "cuda")]
pub(crate) use self::{params::Value, text::KNOWN};

/// What a variant's mask says of a whole block; all is visible without a mask.
pub(crate) fn visible_in(variant: &Variant, bound: Option<&Bound<'_>>, block: &Block) -> Visible {
    variant.0.mask.as_ref().map_or(Visible::All, |mask| interval::block(variant, mask, bound, block))
}
