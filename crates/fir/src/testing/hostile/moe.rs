//! Grouped and scaled products, and mixtures of experts.

use super::Bytes;
use super::quantize::{block, fp8_type};
use crate::error::Result;
use crate::exec::Exec;
use crate::kv::Ragged;
use crate::ops::gemm::{self, GroupedArgs};
use crate::ops::lora::{self, AdaptArgs, RowOf};
use crate::ops::moe::{self, FfnArgs, Gate, Groups, RouteArgs, Routing, Score, TableRouteArgs};
use crate::tensor::{DType, Scaled};

/// A matrix (or a batch of them), with scales or without.
struct Operand {
    data: super::Arg,
    scales: Option<(super::Arg, crate::tensor::Block)>,
}

impl Operand {
    fn new(b: &mut Bytes<'_>, dtype: DType, shape: &[usize]) -> Self {
        let (batch, matrix) = shape.split_at(shape.len() - 2);
        let scaled = dtype.size() == 1 && b.byte() < 200 || b.rarely();
        let scales = scaled.then(|| {
            let block = block(b);
            (b.tensor(DType::F32, &[batch, &block.counts(matrix[0], matrix[1])].concat()), block)
        });
        Self { data: b.tensor(dtype, shape), scales }
    }

    fn view(&self) -> Result<Scaled<'_>> {
        match &self.scales {
            Some((scales, block)) => Ok(Scaled::new(self.data.view()?, scales.view()?, *block)),
            None => Ok(self.data.view()?.into()),
        }
    }
}

/// fp8, or a float with a float.
fn types(b: &mut Bytes<'_>) -> [DType; 2] {
    match b.below(3) {
        0 => [b.float(), b.float()],
        1 => [b.float(), fp8_type(b)],
        _ => [fp8_type(b), fp8_type(b)],
    }
}

pub(super) fn scaled_gemm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (m, n, k) = (b.size(), b.size(), b.size());
    let x_type = if b.byte() < 128 { b.float() } else { fp8_type(b) };
    let w_type = fp8_type(b);
    let (x, w) = (Operand::new(b, x_type, &[m, k]), Operand::new(b, w_type, &[n, k]));
    let to = b.float();
    let mut out = b.tensor(to, &[m, n]);
    let result = gemm::scaled_gemm(exec, x.view()?, w.view()?, out.view_mut()?);
    out.assert_only_elements_written();
    result
}

pub(super) fn grouped_gemm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let ([x, w], to, n, k) = (types(b), b.float(), b.size(), b.size());
    if b.byte() < 64 {
        let (batch, m) = (b.size() % 6, b.size());
        let (x, w) = (Operand::new(b, x, &[batch, m, k]), Operand::new(b, w, &[batch, n, k]));
        let mut out = b.tensor(to, &[batch, m, n]);
        let result = gemm::batched_gemm(exec, x.view()?, w.view()?, out.view_mut()?);
        out.assert_only_elements_written();
        return result;
    }
    let indptr = Ragged::new(&b.indptr(40))?;
    let named = b.byte() < 128;
    let weights = if named { b.below(4) + 1 } else { indptr.batch() };
    let (x, w) = (Operand::new(b, x, &[indptr.rows(), k]), Operand::new(b, w, &[weights, n, k]));
    let dtype = b.int();
    let ids = b.ids(dtype, &[indptr.batch()], |b, _| b.below(weights) as i64);
    let weight_indices = if named { Some(ids.view()?) } else { None };
    let mut out = b.tensor(to, &[indptr.rows(), n]);
    let args = GroupedArgs { x: x.view()?, indptr: &indptr, w: w.view()?, weight_indices, out: out.view_mut()? };
    let result = gemm::grouped_gemm(exec, args);
    out.assert_only_elements_written();
    result
}

pub(super) fn route(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, tokens, top_k) = (b.float(), b.size(), b.below(6));
    let count = [1, 1, 2, 4, 8][b.below(5)];
    let experts = if b.rarely() { b.size() } else { count * (b.below(9) + 1) };
    let groups = (b.byte() < 128).then(|| Groups { count, chosen: b.below(count) + 1 });
    let score = [Score::Softmax, Score::Sigmoid][b.below(2)];
    let routing = Routing { score, renormalize: b.byte() < 128, groups, scale: b.f32() };
    let (logits, bias) = (b.tensor(dtype, &[tokens, experts]), b.tensor(DType::F32, &[experts]));
    let bias = if b.byte() < 128 { Some(bias.view()?) } else { None };
    let (mut ids, mut weights) = (b.tensor(DType::I32, &[tokens, top_k]), b.tensor(DType::F32, &[tokens, top_k]));
    let args = RouteArgs { logits: logits.view()?, bias, ids: ids.view_mut()?, weights: weights.view_mut()? };
    let result = moe::route(exec, routing, args);
    ids.assert_only_elements_written();
    weights.assert_only_elements_written();
    #[cfg(feature = "cuda")]
    let ran = !matches!(exec, Exec::Cuda(gpu) if gpu.stream().is_none());
    #[cfg(not(feature = "cuda"))]
    let ran = true;
    if ran && result.is_ok() && tokens.saturating_mul(top_k) < 1 << 16 {
        // What was chosen can be dispatched; a dry run chose nothing. Logits may have another shape than was meant.
        let dispatch = moe::Dispatch::new(ids.view()?, logits.view()?.shape()[1])?;
        assert_eq!(dispatch.pairs().len(), tokens * top_k);
    }
    result
}

pub(super) fn ffn(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let [_, w] = types(b);
    let (x_type, gate) = (b.float(), [Gate::Silu, Gate::Gelu, Gate::GeluTanh][b.below(3)]);
    let (tokens, top_k, experts) = (b.size() % 40, b.below(4), b.below(5) + 1);
    let (hidden, inter) = (b.size() % 90, b.size() % 50);
    let (x, weights) = (b.tensor(x_type, &[tokens, hidden]), b.tensor(DType::F32, &[tokens, top_k]));
    let dtype = b.int();
    let ids = b.ids(dtype, &[tokens, top_k], |b, _| b.below(experts + 1) as i64 - 1);
    let up = Operand::new(b, w, &[experts, 2 * inter, hidden]);
    let down = Operand::new(b, w, &[experts, hidden, inter]);
    let mut out = b.tensor(x_type, &[tokens, hidden]);
    let (x, ids, weights, w_gate_up, w_down) = (x.view()?, ids.view()?, weights.view()?, up.view()?, down.view()?);
    let result = moe::moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate, out: out.view_mut()? });
    out.assert_only_elements_written();
    result
}

pub(super) fn route_by_table(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, id_type, tokens, top_k) = (b.float(), b.int(), b.size(), b.below(6));
    let (experts, vocabulary) = (b.below(9) + 1, b.below(30) + 1);
    let logits = b.tensor(dtype, &[tokens, experts]);
    let named = b.ids(id_type, &[tokens], |b, _| b.below(vocabulary) as i64);
    let table = b.ids(DType::I32, &[vocabulary, top_k], |b, _| b.below(experts) as i64);
    let shared = (b.byte() < 128).then(|| b.f32());
    let slots = top_k + usize::from(shared.is_some());
    let (mut ids, mut weights) = (b.tensor(DType::I32, &[tokens, slots]), b.tensor(DType::F32, &[tokens, slots]));
    let (logits, tokens, table) = (logits.view()?, named.view()?, table.view()?);
    let args = TableRouteArgs { logits, tokens, table, shared, ids: ids.view_mut()?, weights: weights.view_mut()? };
    let result = moe::route_by_table(exec, args);
    ids.assert_only_elements_written();
    weights.assert_only_elements_written();
    result
}

pub(super) fn adapt(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, id_type, pairs, tokens) = (b.float(), b.int(), b.size() % 40, b.below(9));
    let (adapters, experts, inputs, outputs) = (b.below(3) + 1, b.below(4) + 1, b.size() % 90, b.size() % 50);
    let [x_of, out_of] = [(); 2].map(|()| [RowOf::Pair, RowOf::Token][b.below(2)]);
    let count = |of| if of == RowOf::Pair { pairs } else { tokens };
    let x = b.tensor(dtype, &[count(x_of), inputs]);
    let weights = b.tensor(dtype, &[adapters, experts, outputs, inputs]);
    let of_tokens = b.ids(id_type, &[pairs], |b, _| b.below(tokens + 2) as i64 - 1);
    let of_experts = b.ids(id_type, &[pairs], |b, _| b.below(experts) as i64);
    let own = b.ids(id_type, &[tokens], |b, _| b.below(adapters + 1) as i64 - 1);
    let factors = b.tensor(DType::F32, &[pairs]);
    let factors = if b.byte() < 128 { Some(factors.view()?) } else { None };
    let (out_type, add) = (if b.byte() < 200 { DType::F32 } else { dtype }, b.byte() < 128);
    let mut out = b.tensor(out_type, &[count(out_of), outputs]);
    let (x, weights, tokens) = (x.view()?, weights.view()?, of_tokens.view()?);
    let (experts, adapters) = (of_experts.view()?, own.view()?);
    let args = AdaptArgs { x, x_of, weights, tokens, experts, adapters, factors, add, out: out.view_mut()?, out_of };
    let result = lora::adapt(exec, args);
    out.assert_only_elements_written();
    result
}
