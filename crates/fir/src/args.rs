//! Arguments that the backends take as the public functions do: `norm`, `moe` and `lora` show them.

use crate::tensor::{TensorMut, TensorRef};

/// A factor or a term of every element: `plus + rows[t, h] + columns[h]`, each tensor if it is there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Modulation<'a> {
    /// A number.
    pub plus: f32,
    /// Of the shape and type of what is normed; rows contiguous.
    pub rows: Option<TensorRef<'a>>,
    /// `[hidden]`, f32, contiguous.
    pub columns: Option<TensorRef<'a>>,
}

/// What [`modulated_layer_norm`](crate::norm::modulated_layer_norm) reads and writes.
#[derive(Debug)]
pub struct ModulatedArgs<'a> {
    /// `[tokens, hidden]` or `[tokens, heads, hidden]`, f32, f16 or bf16; rows contiguous.
    pub x: TensorRef<'a>,
    /// `[1]`, f32: a factor of all of `x`.
    pub x_scale: Option<TensorRef<'a>>,
    /// As `x`.
    pub residual: Option<TensorRef<'a>>,
    /// Factor of `x` before it is added.
    pub gate: Modulation<'a>,
    /// Factor of the norm.
    pub scale: Modulation<'a>,
    /// Added to it.
    pub shift: Modulation<'a>,
    /// Added to the variance.
    pub eps: f32,
    /// As `x`: the sum, rounded.
    pub residual_out: TensorMut<'a>,
    /// As `x`.
    pub out: TensorMut<'a>,
}

impl<'a> ModulatedArgs<'a> {
    /// The three modulations, with the names of their tensors in messages.
    pub(crate) fn terms(&self) -> [(Modulation<'a>, &'static str, &'static str); 3] {
        [
            (self.gate, "gate.rows", "gate.columns"),
            (self.scale, "scale.rows", "scale.columns"),
            (self.shift, "shift.rows", "shift.columns"),
        ]
    }
}

/// What [`route_by_table`](crate::moe::route_by_table) reads and writes.
#[derive(Debug)]
pub struct TableRouteArgs<'a> {
    /// `[tokens, experts]`, f32, f16 or bf16; rows contiguous.
    pub logits: TensorRef<'a>,
    /// `[tokens]`, i32 or i64: rows of the table.
    pub tokens: TensorRef<'a>,
    /// `[vocabulary, top_k]`, i32: experts; rows contiguous.
    pub table: TensorRef<'a>,
    /// The weight of an expert that every token has too, numbered after all others.
    pub shared: Option<f32>,
    /// `[tokens, top_k]`, one more with `shared`, i32; rows contiguous.
    pub ids: TensorMut<'a>,
    /// As `ids`, f32.
    pub weights: TensorMut<'a>,
}

/// Whose row of a tensor a pair of a token and an expert has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowOf {
    /// Its own: there is one for each pair.
    Pair,
    /// Its token's.
    Token,
}

/// What [`adapt`](crate::lora::adapt) reads and writes.
#[derive(Debug)]
pub struct AdaptArgs<'a> {
    /// `[rows, inputs]`, f32, f16 or bf16; rows contiguous.
    pub x: TensorRef<'a>,
    /// Whose rows they are.
    pub x_of: RowOf,
    /// `[adapters, experts, outputs, inputs]`, of the type of `x`; rows contiguous.
    pub weights: TensorRef<'a>,
    /// `[pairs]`, i32 or i64: the token of each pair; one that is none of `adapters`' leaves the pair out.
    pub tokens: TensorRef<'a>,
    /// `[pairs]`, i32 or i64: its expert.
    pub experts: TensorRef<'a>,
    /// `[tokens]`, i32 or i64: the adapter of each token; a negative one leaves its pairs out.
    pub adapters: TensorRef<'a>,
    /// `[pairs]`, f32: factors of the results.
    pub factors: Option<TensorRef<'a>>,
    /// Whether results are added to what is in `out`; with rows of tokens they are in any case.
    pub add: bool,
    /// `[rows, outputs]`, f32 or of the type of `x`, f32 if rows are of tokens; rows contiguous.
    pub out: TensorMut<'a>,
    /// Whose rows they are.
    pub out_of: RowOf,
}
