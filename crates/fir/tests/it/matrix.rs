//! The support matrix: which operator takes which types. The snapshot is the promise; a cell that is lost or gained
//! fails here until the snapshot says so too. What [`PROMISED`] names may not be lost even so.

use fir::attention::{
    self, BatchArgs, BatchPlan, BlockMask, CascadeArgs, CascadeLevel, CascadePlan, DecodeArgs, DecodePlan, MlaArgs,
    MlaPlan, MlaProblem, Problem, SingleArgs, SparseArgs, SparsePlan, Split, VariableSparsePlan,
};
use fir::exec::Level;
use fir::gemm::GroupedArgs;
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedKvMut, PagedMla, PagedMlaMut, Ragged, RaggedKv};
use fir::lora::{self, AdaptArgs, RowOf};
use fir::moe::{self, FfnArgs, Gate, RouteArgs, Routing, TableRouteArgs};
use fir::norm::{ModulatedArgs, Modulation};
use fir::page::{self, Slots};
use fir::quantize::{self, Block};
use fir::rope::{self, Positions, Roped, RopedKv, RopedMla};
use fir::sampling::{self, Draw, FilterOrder, Filters, RngState};
use fir::speculative::{self, ChainArgs, Coins, Tree, TreeArgs, TreeOut};
use fir::tensor::Bool;
use fir::topk::{self, TopKOrder, TopKPages, TopKRagged};
use fir::variant::{self, Params, Rope};
use fir::{DType, Error, Exec, Result, Tensor, TensorMut, TensorRef, activation, gemm, norm};

/// Files of tests whose operators have no CUDA kernel yet, or not all of them: `every_exec` leaves the GPU out there. The
/// snapshot of [`cuda_matrix_is_as_recorded`] shows which cells are missing.
#[cfg(feature = "cuda")]
pub(crate) const NOT_ON_CUDA: &[&str] = &["variant"];

/// Types in the order of the columns.
const DTYPES: [DType; 9] =
    [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::E2M1x2, DType::I8, DType::I32, DType::I64];

/// f32, f16 and bf16, fp8 with them, and NVFP4 with those: how many leading columns.
const FLOAT: usize = 3;
const FP8: usize = 5;
const FP4: usize = 6;

/// Rows, by the start of their names, with the number of leading columns that must be there.
const PROMISED: &[(&str, usize)] = &[
    ("activation::", FLOAT),
    ("attention::BatchPlan q", FP8),
    ("attention::BatchPlan kv", FP4),
    ("attention::BatchPlan out", FLOAT),
    ("attention::BatchPlan ragged kv", FP8),
    ("attention::CascadePlan kv", FP4),
    ("attention::DecodePlan kv", FP4),
    ("attention::MlaPlan q", FP8),
    ("attention::MlaPlan kv", FP8),
    ("attention::MlaPlan out", FLOAT),
    ("attention::SparsePlan kv", FP8),
    ("attention::VariableSparsePlan kv", FP8),
    ("attention::merge", FLOAT),
    ("attention::single", FP8),
    ("gemm::", FLOAT),
    ("gemm::scaled_gemm w", 0),
    ("gemm::scaled_gemm x", FP8),
    ("lora::adapt of", FLOAT),
    ("moe::", FLOAT),
    ("moe::moe_ffn weights", FP8),
    ("norm::", FLOAT),
    ("norm::rms_norm_quant out", 0),
    ("page::append_paged_kv into", FP4),
    ("page::append_paged_mla into", FP8),
    ("quantize::quantize_fp8 of", FLOAT),
    ("quantize::quantize_mxfp8 of", FLOAT),
    ("quantize::quantize_mxfp4 of", FLOAT),
    ("quantize::quantize_nvfp4 of", FLOAT),
    ("rope::apply_rope", FLOAT),
    ("rope::apply_rope positions", 0),
    ("rope::rope_quantize into", FP8),
    ("sampling::sample from", FLOAT),
    ("topk::top_k of", FLOAT),
];

type Row = fn(&Exec, DType) -> Result<()>;

/// Operators by row; each runs once on a tiny input, with the type in the place that the name says, or everywhere.
const ROWS: &[(&str, Row)] = &[
    ("activation::silu_and_mul", |exec, d| gated(activation::silu_and_mul, exec, d)),
    ("activation::gelu_and_mul", |exec, d| gated(activation::gelu_and_mul, exec, d)),
    ("activation::gelu_tanh_and_mul", |exec, d| gated(activation::gelu_tanh_and_mul, exec, d)),
    ("attention::BatchPlan q", |exec, d| batch(exec, [d, DType::BF16, DType::BF16])),
    ("attention::BatchPlan kv", |exec, d| batch(exec, [DType::BF16, d, DType::BF16])),
    ("attention::BatchPlan out", |exec, d| batch(exec, [DType::BF16, DType::BF16, d])),
    ("attention::BatchPlan ragged kv", |exec, d| {
        let (indptr, kv) = (Ragged::from_lens(&[5, 3])?, zeros(d, &[8, 2, 16])?);
        let kv = RaggedKv::new(kv.view(), kv.view(), &indptr)?;
        run_batch(exec, [DType::BF16, d, DType::BF16], Kv::Ragged(kv))
    }),
    ("attention::CascadePlan kv", cascade),
    ("attention::DecodePlan kv", decode),
    ("attention::MlaPlan q", |exec, d| mla(exec, [d, DType::BF16, DType::BF16])),
    ("attention::MlaPlan kv", |exec, d| mla(exec, [DType::BF16, d, DType::BF16])),
    ("attention::MlaPlan out", |exec, d| mla(exec, [DType::BF16, DType::BF16, d])),
    ("attention::SparsePlan kv", sparse),
    ("attention::VariableSparsePlan kv", variable_sparse),
    ("attention::single_decode kv", |exec, d| single(exec, d, true)),
    ("attention::single_prefill kv", |exec, d| single(exec, d, false)),
    ("attention::merge_state", |exec, d| {
        let (o, lse, mut out, mut lse_out) =
            (zeros(d, &[3, 2, 8])?, f32s(&[3, 2]), zeros(d, &[3, 2, 8])?, f32s(&[3, 2]));
        let state = (o.view(), lse.view());
        attention::merge_state(exec, state, state, (out.view_mut(), lse_out.view_mut()))
    }),
    ("attention::merge_state_in_place", |exec, d| {
        let (o, lse, mut out, mut lse_out) =
            (zeros(d, &[3, 2, 8])?, f32s(&[3, 2]), zeros(d, &[3, 2, 8])?, f32s(&[3, 2]));
        let into = (out.view_mut(), lse_out.view_mut());
        attention::merge_state_in_place(exec, into, (o.view(), lse.view()), None)
    }),
    ("attention::merge_states", |exec, d| {
        let (o, lse) = (zeros(d, &[3, 4, 2, 8])?, f32s(&[3, 4, 2]));
        let (mut out, mut lse_out) = (zeros(d, &[3, 2, 8])?, f32s(&[3, 2]));
        attention::merge_states(exec, (o.view(), lse.view()), (out.view_mut(), lse_out.view_mut()))
    }),
    ("gemm::gemm", |exec, d| gemm::gemm(exec, square(d).view(), square(d).view(), square(d).view_mut())),
    ("gemm::gemm_bias", |exec, d| {
        gemm::gemm_bias(exec, square(d).view(), square(d).view(), row().view(), square(d).view_mut())
    }),
    ("gemm::gemm_add", |exec, d| gemm::gemm_add(exec, square(d).view(), square(d).view(), square(d).view_mut())),
    ("gemm::block_gemm x", |exec, d| block_gemm(exec, d, DType::F32)),
    ("gemm::block_gemm out", |exec, d| block_gemm(exec, DType::F32, d)),
    ("gemm::dequantize_blocks", |exec, d| {
        let mut out = Tensor::zeros(d, &[1, 32])?;
        gemm::dequantize_blocks(exec, gemm::BlockFormat::Q8_0, &[0; 34], out.view_mut())
    }),
    ("gemm::scaled_gemm x", |exec, d| scaled_gemm(exec, [d, DType::E4M3, DType::BF16])),
    ("gemm::scaled_gemm w", |exec, d| scaled_gemm(exec, [DType::BF16, d, DType::BF16])),
    ("gemm::scaled_gemm out", |exec, d| scaled_gemm(exec, [DType::E4M3, DType::E4M3, d])),
    ("gemm::grouped_gemm", |exec, d| {
        let (x, w, mut out, indptr) =
            (square(d), zeros(d, &[2, 8, 8])?, square(DType::F32), Ragged::from_lens(&[3, 5])?);
        let (x, w, out) = (x.view().into(), w.view().into(), out.view_mut());
        gemm::grouped_gemm(exec, GroupedArgs { x, indptr: &indptr, w, weight_indices: None, out })
    }),
    ("gemm::batched_gemm", |exec, d| {
        let (x, w, mut out) = (zeros(d, &[2, 3, 8])?, zeros(d, &[2, 5, 8])?, f32s(&[2, 3, 5]));
        gemm::batched_gemm(exec, x.view().into(), w.view().into(), out.view_mut())
    }),
    ("lora::adapt of", |exec, d| adapt(exec, [d, d, DType::F32], DType::I32)),
    ("lora::adapt into", |exec, d| adapt(exec, [DType::BF16, DType::BF16, d], DType::I32)),
    ("lora::adapt ids", |exec, d| adapt(exec, [DType::BF16, DType::BF16, DType::F32], d)),
    ("moe::route of", |exec, d| {
        let (mut ids, mut weights, logits) = (ints(&[8, 2]), f32s(&[8, 2]), square(d));
        let (ids, weights, logits) = (ids.view_mut(), weights.view_mut(), logits.view());
        moe::route(exec, Routing::default(), RouteArgs { logits, bias: None, ids, weights })
    }),
    ("moe::route_by_table of", |exec, d| {
        let (mut ids, mut weights, logits, tokens) = (ints(&[8, 2]), f32s(&[8, 2]), square(d), ints(&[8]));
        let (ids, weights, table) = (ids.view_mut(), weights.view_mut(), ints(&[5, 2]));
        let (logits, tokens, table) = (logits.view(), tokens.view(), table.view());
        moe::route_by_table(exec, TableRouteArgs { logits, tokens, table, shared: None, ids, weights })
    }),
    ("moe::moe_ffn x", |exec, d| moe_ffn(exec, d, DType::BF16)),
    ("moe::moe_ffn weights", |exec, d| moe_ffn(exec, DType::BF16, d)),
    ("norm::rms_norm", |exec, d| norm::rms_norm(exec, square(d).view(), row().view(), 1e-6, square(d).view_mut())),
    ("norm::gemma_rms_norm", |exec, d| {
        norm::gemma_rms_norm(exec, square(d).view(), row().view(), 1e-6, square(d).view_mut())
    }),
    ("norm::fused_add_rms_norm", |exec, d| {
        norm::fused_add_rms_norm(exec, square(d).view_mut(), square(d).view_mut(), row().view(), 1e-6)
    }),
    ("norm::gemma_fused_add_rms_norm", |exec, d| {
        norm::gemma_fused_add_rms_norm(exec, square(d).view_mut(), square(d).view_mut(), row().view(), 1e-6)
    }),
    ("norm::layer_norm", |exec, d| {
        norm::layer_norm(exec, square(d).view(), row().view(), row().view(), 1e-6, square(d).view_mut())
    }),
    ("norm::modulated_layer_norm", |exec, d| {
        let (x, mut sum, mut out, term) = (square(d), square(d), square(d), Modulation::default());
        let (x, residual_out, out) = (x.view(), sum.view_mut(), out.view_mut());
        let (gate, scale, shift) = (Modulation { rows: Some(x), ..term }, term, term);
        let args = ModulatedArgs { x, x_scale: None, residual: None, gate, scale, shift, eps: 1e-6, residual_out, out };
        norm::modulated_layer_norm(exec, args)
    }),
    ("norm::qk_rms_norm", |exec, d| {
        let [mut q, mut k] = [(); 2].map(|()| square(d).reshaped(&[2, 4, 8]).unwrap());
        norm::qk_rms_norm(exec, q.view_mut(), k.view_mut(), row().view(), row().view(), 1e-6)
    }),
    ("norm::rms_norm_quant", |exec, d| rms_norm_quant(exec, d, DType::E4M3)),
    ("norm::rms_norm_quant out", |exec, d| rms_norm_quant(exec, DType::BF16, d)),
    ("norm::fused_add_rms_norm_quant", |exec, d| {
        let (x, mut residual, mut out) = (square(d), square(d), square(DType::E4M3));
        let (sum, out) = (residual.view_mut(), out.view_mut());
        norm::fused_add_rms_norm_quant(exec, x.view(), sum, row().view(), 1.0, 1e-6, out)
    }),
    ("norm::layer_norm_quant", |exec, d| {
        let (x, mut out) = (square(d), square(DType::E5M2));
        norm::layer_norm_quant(exec, x.view(), row().view(), row().view(), 1.0, 1e-6, out.view_mut())
    }),
    ("page::append_paged_kv of", |exec, d| append(exec, d, DType::BF16)),
    ("page::append_paged_kv into", |exec, d| append(exec, DType::BF16, d)),
    ("page::append_paged_mla of", |exec, d| append_mla(exec, d, DType::BF16)),
    ("page::append_paged_mla into", |exec, d| append_mla(exec, DType::BF16, d)),
    ("page::batch_indices_positions lens", |exec, d| {
        let (indptr, lens) = (Ragged::from_lens(&[1, 2])?, filled(d, 9, &[2])?);
        let (mut requests, mut positions) = (ints(&[3]), ints(&[3]));
        page::batch_indices_positions(exec, &indptr, lens.view(), requests.view_mut(), positions.view_mut())
    }),
    ("page::seq_lens last_page_len", |exec, d| {
        let (indptr, last) = (Ragged::from_lens(&[1, 2])?, filled(d, 1, &[2])?);
        page::seq_lens(exec, &indptr, last.view(), 4, ints(&[2]).view_mut())
    }),
    ("quantize::quantize_fp8 of", |exec, d| quantize_fp8(exec, d, DType::E4M3)),
    ("quantize::quantize_fp8 into", |exec, d| quantize_fp8(exec, DType::BF16, d)),
    ("quantize::quantize_fp8_with_scales of", |exec, d| {
        let (scales, mut out) = (f32s(&[1, 1]), square(DType::E4M3));
        quantize::quantize_fp8_with_scales(exec, square(d).view(), scales.view(), Block::TENSOR, out.view_mut())
    }),
    ("quantize::dequantize_fp8 of", |exec, d| dequantize_fp8(exec, d, DType::BF16)),
    ("quantize::dequantize_fp8 into", |exec, d| dequantize_fp8(exec, DType::E4M3, d)),
    ("quantize::quantize_mxfp8 of", |exec, d| mxfp8(exec, d, DType::E4M3)),
    ("quantize::quantize_mxfp8 into", |exec, d| mxfp8(exec, DType::BF16, d)),
    ("quantize::dequantize_mxfp8 of", |exec, d| {
        let (x, scales, mut out) = (zeros(d, &[2, 64])?, zeros(DType::E8M0, &[2, 2])?, zeros(DType::F16, &[2, 64])?);
        quantize::dequantize_mxfp8(exec, x.view(), scales.view(), out.view_mut())
    }),
    ("quantize::quantize_mxfp4 of", |exec, d| fp4(exec, d, DType::E2M1x2, DType::E8M0)),
    ("quantize::quantize_mxfp4 into", |exec, d| fp4(exec, DType::BF16, d, DType::E8M0)),
    ("quantize::quantize_nvfp4 of", |exec, d| fp4(exec, d, DType::E2M1x2, DType::E4M3)),
    ("quantize::quantize_nvfp4 into", |exec, d| fp4(exec, DType::BF16, d, DType::E4M3)),
    ("quantize::nvfp4_scale", |exec, d| quantize::nvfp4_scale(exec, square(d).view()).map(drop)),
    ("rope::apply_rope", |exec, d| {
        let (x, at, mut q, mut k) = (zeros(d, &[3, 2, 8])?, ints(&[3]), zeros(d, &[3, 2, 8])?, zeros(d, &[3, 2, 8])?);
        let (at, x) = (Positions::Ids(at.view()), x.view());
        rope::apply_rope(exec, x, x, at, Rope::default(), q.view_mut(), k.view_mut())
    }),
    ("rope::apply_rope_in_place", |exec, d| {
        let (at, mut q, mut k) = (ints(&[3]), zeros(d, &[3, 2, 8])?, zeros(d, &[3, 2, 8])?);
        let at = Positions::Ids(at.view());
        rope::apply_rope_in_place(exec, at, Rope::default(), q.view_mut(), k.view_mut())
    }),
    ("rope::apply_rope positions", |exec, d| {
        let (at, mut q, mut k) = (filled(d, 1, &[3])?, f32s(&[3, 2, 8]), f32s(&[3, 2, 8]));
        let at = Positions::Ids(at.view());
        rope::apply_rope_in_place(exec, at, Rope::default(), q.view_mut(), k.view_mut())
    }),
    ("rope::cos_sin_cache", |exec, d| rope::cos_sin_cache(exec, &Rope::default(), square(d).view_mut())),
    ("rope::rope_quantize of", |exec, d| rope_quantize(exec, d, DType::E4M3)),
    ("rope::rope_quantize into", |exec, d| rope_quantize(exec, DType::BF16, d)),
    ("rope::rope_quantize_append_paged_kv into", rope_append),
    ("rope::rope_quantize_append_paged_mla into", rope_append_mla),
    ("sampling::softmax", |exec, d| {
        sampling::softmax(exec, square(d).view(), 1.0.into(), square(DType::F32).view_mut())
    }),
    ("sampling::sample from", |exec, d| {
        draw(d, DType::I32, |x, draw| sampling::sample(exec, x, Filters::default(), draw))
    }),
    ("sampling::sample into", |exec, d| {
        draw(DType::F32, d, |x, draw| sampling::sample(exec, x, Filters::default(), draw))
    }),
    ("sampling::sample_from_logits", |exec, d| {
        draw(d, DType::I32, |x, draw| sampling::sample_from_logits(exec, x, 1.0.into(), draw))
    }),
    ("sampling::sample_from_probs", |exec, d| {
        draw(d, DType::I32, |x, draw| sampling::sample_from_probs(exec, x, draw))
    }),
    ("sampling::top_k_sample", |exec, d| {
        draw(d, DType::I32, |x, draw| sampling::top_k_sample(exec, x, 2.into(), draw))
    }),
    ("sampling::top_p_sample", |exec, d| {
        draw(d, DType::I32, |x, draw| sampling::top_p_sample(exec, x, 0.5.into(), draw))
    }),
    ("sampling::min_p_sample", |exec, d| {
        draw(d, DType::I32, |x, draw| sampling::min_p_sample(exec, x, 0.5.into(), draw))
    }),
    ("sampling::top_k_top_p_sample", |exec, d| {
        let (k, p, order) = (2.into(), 0.5.into(), FilterOrder::Joint);
        draw(d, DType::I32, |x, draw| sampling::top_k_top_p_sample(exec, x, k, p, order, draw))
    }),
    ("sampling::top_k_top_p_sample_from_logits", |exec, d| {
        let (k, p, order) = (2.into(), 0.5.into(), FilterOrder::Joint);
        draw(d, DType::I32, |x, draw| sampling::top_k_top_p_sample_from_logits(exec, x, k, p, order, draw))
    }),
    ("sampling::top_k_mask_logits", |exec, d| {
        sampling::top_k_mask_logits(exec, square(d).view(), 2.into(), square(d).view_mut())
    }),
    ("sampling::top_k_renorm", |exec, d| {
        sampling::top_k_renorm(exec, square(d).view(), 2.into(), square(d).view_mut())
    }),
    ("sampling::top_p_renorm", |exec, d| {
        sampling::top_p_renorm(exec, square(d).view(), 0.5.into(), square(d).view_mut())
    }),
    ("speculative::chain tokens", chain),
    ("speculative::tree tokens", |exec, d| tree(exec, d, true)),
    ("speculative::tree greedy tokens", |exec, d| tree(exec, d, false)),
    ("topk::top_k of", |exec, d| {
        let (mut values, mut places) = (zeros(d, &[8, 3])?, ints(&[8, 3]));
        topk::top_k(exec, square(d).view(), TopKOrder::Value, values.view_mut(), places.view_mut())
    }),
    ("topk::top_k indices", |exec, d| {
        let (mut values, mut places) = (f32s(&[8, 3]), zeros(d, &[8, 3])?);
        topk::top_k(exec, square(DType::F32).view(), TopKOrder::Place, values.view_mut(), places.view_mut())
    }),
    ("topk::top_k_page_table_transform", |exec, d| {
        let (scores, lens, pages, mut out) = (square(d), ints(&[8]), ints(&[8, 2]), ints(&[8, 3]));
        topk::top_k_page_table_transform(
            exec,
            TopKPages {
                scores: scores.view(),
                lens: lens.view(),
                starts: None,
                page_table: pages.view(),
                requests: None,
                page_starts: None,
                page_size: 4,
                out: out.view_mut(),
                raw: None,
            },
        )
    }),
    ("topk::top_k_ragged_transform", |exec, d| {
        let (scores, ids, mut out) = (square(d), ints(&[8]), ints(&[8, 3]));
        let (scores, lens, offsets) = (scores.view(), ids.view(), ids.view());
        topk::top_k_ragged_transform(exec, TopKRagged { scores, lens, starts: None, offsets, out: out.view_mut() })
    }),
];

fn zeros(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(dtype, shape)
}

fn f32s(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape).unwrap()
}

fn ints(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::I32, shape).unwrap()
}

/// `[8, 8]`, which fits every argument that is not a row.
fn square(dtype: DType) -> Tensor {
    Tensor::zeros(dtype, &[8, 8]).unwrap()
}

fn row() -> Tensor {
    f32s(&[8])
}

/// An integer in every element, where the type is one of integers.
fn filled(dtype: DType, value: i32, shape: &[usize]) -> Result<Tensor> {
    let n = shape.iter().product();
    match dtype {
        DType::I32 => Tensor::from_slice(&vec![value; n], shape),
        DType::I64 => Tensor::from_slice(&vec![i64::from(value); n], shape),
        _ => zeros(dtype, shape),
    }
}

fn gated(op: fn(&Exec, TensorRef<'_>, TensorMut<'_>) -> Result<()>, exec: &Exec, dtype: DType) -> Result<()> {
    let mut out = Tensor::zeros(dtype, &[8, 4])?;
    op(exec, square(dtype).view(), out.view_mut())
}

fn rms_norm_quant(exec: &Exec, from: DType, to: DType) -> Result<()> {
    norm::rms_norm_quant(exec, square(from).view(), row().view(), 1.0, 1e-6, square(to).view_mut())
}

fn block_gemm(exec: &Exec, x: DType, out: DType) -> Result<()> {
    let w = gemm::BlockWeights::pack(exec, gemm::BlockFormat::Q8_0, &[0; 3 * 34], 3, 32)?;
    let (x, mut out) = (Tensor::zeros(x, &[2, 32])?, Tensor::zeros(out, &[2, 3])?);
    gemm::block_gemm(exec, x.view(), &w, out.view_mut())
}

fn scaled_gemm(exec: &Exec, [x, w, out]: [DType; 3]) -> Result<()> {
    gemm::scaled_gemm(exec, square(x).view().into(), square(w).view().into(), square(out).view_mut())
}

fn moe_ffn(exec: &Exec, x: DType, w: DType) -> Result<()> {
    let (up, down) = (zeros(w, &[2, 8, 8])?, zeros(w, &[2, 8, 4])?);
    let (x, ids, weights, mut out) = (square(x), ints(&[8, 2]), f32s(&[8, 2]), square(x));
    let (x, ids, weights, gate, out) = (x.view(), ids.view(), weights.view(), Gate::Silu, out.view_mut());
    let (w_gate_up, w_down) = (up.view().into(), down.view().into());
    moe::moe_ffn(exec, FfnArgs { x, ids, weights, w_gate_up, w_down, gate, out })
}

fn adapt(exec: &Exec, [x, weights, out]: [DType; 3], ids: DType) -> Result<()> {
    let (x, weights, mut out) = (square(x), zeros(weights, &[1, 1, 8, 8])?, square(out));
    let ids = zeros(ids, &[8])?;
    let (tokens, experts, adapters) = (ids.view(), ids.view(), ids.view());
    let (x, weights, out, x_of, out_of) = (x.view(), weights.view(), out.view_mut(), RowOf::Token, RowOf::Pair);
    let (factors, add) = (None, true);
    lora::adapt(exec, AdaptArgs { x, x_of, weights, tokens, experts, adapters, factors, add, out, out_of })
}

fn quantize_fp8(exec: &Exec, from: DType, to: DType) -> Result<()> {
    let (mut out, mut scales) = (square(to), f32s(&[8, 1]));
    quantize::quantize_fp8(exec, square(from).view(), Block::GROUP, out.view_mut(), scales.view_mut())
}

fn dequantize_fp8(exec: &Exec, from: DType, to: DType) -> Result<()> {
    let (scales, mut out) = (f32s(&[8, 1]), square(to));
    quantize::dequantize_fp8(exec, square(from).view(), scales.view(), Block::ROW, out.view_mut())
}

fn mxfp8(exec: &Exec, from: DType, to: DType) -> Result<()> {
    let (x, mut out, mut scales) = (zeros(from, &[2, 64])?, zeros(to, &[2, 64])?, zeros(DType::E8M0, &[2, 2])?);
    quantize::quantize_mxfp8(exec, x.view(), out.view_mut(), scales.view_mut())
}

/// MXFP4 or NVFP4, by the type of the scales.
fn fp4(exec: &Exec, from: DType, to: DType, scale: DType) -> Result<()> {
    let blocks = if scale == DType::E8M0 { 2 } else { 4 };
    let (x, mut out, mut scales) = (zeros(from, &[2, 64])?, zeros(to, &[2, 32])?, zeros(scale, &[2, blocks])?);
    let (x, out, scales) = (x.view(), out.view_mut(), scales.view_mut());
    if blocks == 2 {
        quantize::quantize_mxfp4(exec, x, out, scales)
    } else {
        quantize::quantize_nvfp4(exec, x, 1.0, out, scales)
    }
}

/// A pool of 4 pages of 4 tokens, 2 heads of 16, of any type; calls `run` with it.
fn with_pool(dtype: DType, run: impl FnOnce(PagedKv<'_>) -> Result<()>) -> Result<()> {
    if dtype == DType::E2M1x2 {
        let (kv, scales) = (zeros(dtype, &[4, 4, 2, 8])?, zeros(DType::E4M3, &[4, 4, 2, 1])?);
        let (kv, scales) = (kv.view(), scales.view());
        return run(PagedKv::nvfp4(kv, kv, scales, scales, KvLayout::Nhd)?);
    }
    let kv = zeros(dtype, &[4, 4, 2, 16])?;
    run(PagedKv::new(kv.view(), kv.view(), KvLayout::Nhd)?)
}

/// Requests of 5 and 3 tokens.
fn table() -> PageTable<'static> {
    PageTable::with_lens(4, 4, vec![0, 2, 3], vec![3, 1, 0], &[5, 3]).unwrap()
}

fn problem([q_dtype, kv_dtype, out_dtype]: [DType; 3]) -> Problem {
    Problem { q_dtype, kv_dtype, out_dtype, ..Problem::new(4, 2, 16, DType::F32, variant::causal()) }
}

fn batch(exec: &Exec, dtypes: [DType; 3]) -> Result<()> {
    with_pool(dtypes[1], |kv| run_batch(exec, dtypes, Kv::Paged(kv, &table())))
}

fn run_batch(exec: &Exec, dtypes: [DType; 3], kv: Kv<'_>) -> Result<()> {
    let plan = BatchPlan::new(exec, problem(dtypes), &Ragged::from_lens(&[2, 1])?, &[5, 3], Split::Balanced)?;
    let (q, mut out, mut lse) = (zeros(dtypes[0], &[3, 4, 16])?, zeros(dtypes[2], &[3, 4, 16])?, f32s(&[3, 4]));
    let (params, scratch, out, lse) = (Params::new(), &mut plan.scratch(), out.view_mut(), Some(lse.view_mut()));
    plan.run(exec, BatchArgs { q: q.view(), kv, params: &params, sm_scale: None, scratch, out, lse })
}

fn decode(exec: &Exec, dtype: DType) -> Result<()> {
    with_pool(dtype, |kv| {
        let plan = DecodePlan::new(exec, problem([DType::F16, dtype, DType::F16]), &[5, 3], Split::Fixed(64))?;
        let (q, mut out, table) = (zeros(DType::F16, &[2, 4, 16])?, zeros(DType::F16, &[2, 4, 16])?, table());
        let (params, scratch, out) = (Params::new(), &mut plan.scratch(), out.view_mut());
        let (q, kv) = (q.view(), Kv::Paged(kv, &table));
        plan.run(exec, DecodeArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })
    })
}

fn cascade(exec: &Exec, dtype: DType) -> Result<()> {
    with_pool(dtype, |kv| {
        let (all, each) = (Ragged::from_lens(&[3])?, Ragged::from_lens(&[2, 1])?);
        let levels = [CascadeLevel { qo: &all, kv_lens: &[4] }, CascadeLevel { qo: &each, kv_lens: &[5, 3] }];
        let plan = CascadePlan::new(exec, problem([DType::F32, dtype, DType::F32]), &levels, Split::Off)?;
        let (prefix, own) = (PageTable::with_lens(4, 4, vec![0, 1], vec![2], &[4])?, table());
        let (q, mut out) = (f32s(&[3, 4, 16]), f32s(&[3, 4, 16]));
        let (params, scratch, out) = (Params::new(), &mut plan.scratch()[..], out.view_mut());
        let (q, kv) = (q.view(), &[Kv::Paged(kv, &prefix), Kv::Paged(kv, &own)]);
        plan.run(exec, CascadeArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })
    })
}

fn mla(exec: &Exec, [q_dtype, kv_dtype, out_dtype]: [DType; 3]) -> Result<()> {
    let problem =
        MlaProblem { heads: 3, head_dim_ckv: 16, head_dim_kpe: 8, q_dtype, kv_dtype, out_dtype, causal: true };
    let plan = MlaPlan::new(exec, problem, &Ragged::from_lens(&[2, 1])?, &[5, 3], Split::Balanced)?;
    let (ckv, kpe) = (zeros(kv_dtype, &[4, 4, 16])?, zeros(kv_dtype, &[4, 4, 8])?);
    let (q_nope, q_pe) = (zeros(q_dtype, &[3, 3, 16])?, zeros(q_dtype, &[3, 3, 8])?);
    let mut out = zeros(out_dtype, &[3, 3, 16])?;
    let kv = PagedMla::new(ckv.view(), kpe.view())?;
    let (q_nope, q_pe, out) = (q_nope.view(), q_pe.view(), out.view_mut());
    let scratch = &mut plan.scratch();
    plan.run(exec, MlaArgs { q_nope, q_pe, kv, table: &table(), sm_scale: 1.0, scratch, out, lse: None })
}

fn sparse(exec: &Exec, dtype: DType) -> Result<()> {
    let mask = BlockMask { indptr: &[0, 1, 3], indices: &[1, 0, 1], rows: 3, cols: 8, block_rows: 2, block_cols: 4 };
    let plan = SparsePlan::new(exec, problem([DType::F32, dtype, DType::F32]), mask, Split::Balanced)?;
    let (q, kv, mut out) = (f32s(&[3, 4, 16]), zeros(dtype, &[8, 2, 16])?, f32s(&[3, 4, 16]));
    let (params, scratch, out, q, kv) = (Params::new(), &mut plan.scratch(), out.view_mut(), q.view(), kv.view());
    plan.run(exec, SparseArgs { q, k: kv, v: kv, params: &params, sm_scale: None, scratch, out, lse: None })
}

fn variable_sparse(exec: &Exec, dtype: DType) -> Result<()> {
    let mask = Tensor::from_slice(&[Bool(1); 8], &[2, 2, 2])?;
    let (rows, cols) = (Tensor::from_slice(&[1, 2, 2, 1], &[2, 2])?, Tensor::from_slice(&[4, 4, 3, 5], &[2, 2])?);
    let problem = problem([DType::F32, dtype, DType::F32]);
    let plan = VariableSparsePlan::new(exec, problem, mask.view(), rows.view(), cols.view(), Split::Balanced)?;
    let (q, kv, mut out) = (f32s(&[4, 3, 16]), zeros(dtype, &[2, 8, 16])?, f32s(&[4, 3, 16]));
    let (params, scratch, out, q, kv) = (Params::new(), &mut plan.scratch(), out.view_mut(), q.view(), kv.view());
    plan.run(exec, SparseArgs { q, k: kv, v: kv, params: &params, sm_scale: None, scratch, out, lse: None })
}

fn single(exec: &Exec, dtype: DType, decode: bool) -> Result<()> {
    let shape: &[usize] = if decode { &[4, 16] } else { &[3, 4, 16] };
    let (q, kv, mut out) = (f32s(shape), zeros(dtype, &[8, 2, 16])?, f32s(shape));
    let (layout, variant, params) = (KvLayout::Nhd, &variant::causal(), &Params::new());
    let (q, kv, out) = (q.view(), kv.view(), out.view_mut());
    let args = SingleArgs { q, k: kv, v: kv, layout, variant, params, sm_scale: None, out, lse: None };
    if decode { attention::single_decode(exec, args) } else { attention::single_prefill(exec, args) }
}

/// As [`with_pool`], for writing.
fn with_cache(dtype: DType, run: impl FnOnce(PagedKvMut<'_>) -> Result<()>) -> Result<()> {
    if dtype == DType::E2M1x2 {
        let [mut k, mut v] = [zeros(dtype, &[4, 4, 2, 8])?, zeros(dtype, &[4, 4, 2, 8])?];
        let [mut ks, mut vs] = [zeros(DType::E4M3, &[4, 4, 2, 1])?, zeros(DType::E4M3, &[4, 4, 2, 1])?];
        let (k, v, ks, vs) = (k.view_mut(), v.view_mut(), ks.view_mut(), vs.view_mut());
        return run(PagedKvMut::nvfp4(k, v, ks, vs, KvLayout::Nhd)?);
    }
    let [mut k, mut v] = [zeros(dtype, &[4, 4, 2, 16])?, zeros(dtype, &[4, 4, 2, 16])?];
    run(PagedKvMut::new(k.view_mut(), v.view_mut(), KvLayout::Nhd)?)
}

/// Slots of two tokens.
fn slots() -> Tensor {
    Tensor::from_slice(&[7i32, 2], &[2]).unwrap()
}

fn append(exec: &Exec, from: DType, to: DType) -> Result<()> {
    let (kv, slots) = (zeros(from, &[2, 2, 16])?, slots());
    let slots = Slots::Mapping(slots.view());
    with_cache(to, |cache| page::append_paged_kv(exec, kv.view(), kv.view(), slots, cache))
}

fn append_mla(exec: &Exec, from: DType, to: DType) -> Result<()> {
    let [mut ckv, mut kpe] = [zeros(to, &[4, 4, 16])?, zeros(to, &[4, 4, 8])?];
    let (c, p, slots) = (zeros(from, &[2, 16])?, zeros(from, &[2, 8])?, slots());
    let cache = PagedMlaMut::new(ckv.view_mut(), kpe.view_mut())?;
    page::append_paged_mla(exec, c.view(), p.view(), Slots::Mapping(slots.view()), cache)
}

fn rope_quantize(exec: &Exec, from: DType, to: DType) -> Result<()> {
    let (x, at) = (zeros(from, &[3, 2, 8])?, ints(&[3]));
    let [mut q, mut k] = [zeros(to, &[3, 2, 8])?, zeros(to, &[3, 2, 8])?];
    let [q, k] = [&mut q, &mut k].map(|out| Roped { rope: x.view(), rope_out: out.view_mut(), nope: None, scale: 1.0 });
    rope::rope_quantize(exec, q, k, Positions::Ids(at.view()), Rope::default())
}

fn rope_append(exec: &Exec, to: DType) -> Result<()> {
    let (q, kv, at, slots) = (f32s(&[2, 3, 16]), f32s(&[2, 2, 16]), ints(&[2]), slots());
    let mut q_out = zeros(DType::E4M3, &[2, 3, 16])?;
    let (rope, v, slots) = (kv.view(), kv.view(), Slots::Mapping(slots.view()));
    with_cache(to, |cache| {
        let q = Roped { rope: q.view(), rope_out: q_out.view_mut(), nope: None, scale: 1.0 };
        let kv = RopedKv { rope, nope: None, v, slots, cache };
        rope::rope_quantize_append_paged_kv(exec, q, kv, Positions::Ids(at.view()), Rope::default())
    })
}

fn rope_append_mla(exec: &Exec, to: DType) -> Result<()> {
    let (q, ckv, kpe, at, slots) = (f32s(&[2, 3, 8]), f32s(&[2, 16]), f32s(&[2, 8]), ints(&[2]), slots());
    let mut q_out = zeros(DType::E4M3, &[2, 3, 8])?;
    let [mut to_ckv, mut to_kpe] = [zeros(to, &[4, 4, 16])?, zeros(to, &[4, 4, 8])?];
    let cache = PagedMlaMut::new(to_ckv.view_mut(), to_kpe.view_mut())?;
    let q = Roped { rope: q.view(), rope_out: q_out.view_mut(), nope: None, scale: 1.0 };
    let kv = RopedMla { kpe: kpe.view(), ckv: ckv.view(), slots: Slots::Mapping(slots.view()), cache };
    rope::rope_quantize_append_paged_mla(exec, q, kv, Positions::Ids(at.view()), Rope::default())
}

fn draw(from: DType, to: DType, call: impl FnOnce(TensorRef<'_>, Draw<'_>) -> Result<()>) -> Result<()> {
    let (x, mut out) = (square(from), zeros(to, &[8])?);
    call(x.view(), Draw::new(RngState { seed: 1, offset: 0 }, out.view_mut()))
}

fn chain(exec: &Exec, dtype: DType) -> Result<()> {
    let (draft_probs, draft_tokens, target_probs) = (f32s(&[2, 3, 8]), zeros(dtype, &[2, 3])?, f32s(&[2, 4, 8]));
    let mut out = zeros(dtype, &[2, 4])?;
    speculative::chain_speculative_sample(
        exec,
        ChainArgs {
            draft_probs: draft_probs.view(),
            draft_tokens: draft_tokens.view(),
            target_probs: target_probs.view(),
            rng: RngState { seed: 1, offset: 0 }.into(),
            out: out.view_mut(),
            accepted: None,
            emitted: None,
            valid: None,
        },
    )
}

/// Trees of a root alone.
fn tree(exec: &Exec, dtype: DType, sampled: bool) -> Result<()> {
    let (tokens, none, probs) = (zeros(dtype, &[1, 1])?, filled(dtype, -1, &[1, 1])?, f32s(&[1, 1, 8]));
    let [mut predicts, mut index, mut len] = [zeros(dtype, &[1])?, zeros(dtype, &[1, 2])?, zeros(dtype, &[1])?];
    let (tokens, next_token, next_sibling) = (tokens.view(), none.view(), none.view());
    let tree = Tree { tokens, retrieve_index: tokens, next_token, next_sibling };
    let out = TreeOut { predicts: predicts.view_mut(), accept_index: index.view_mut(), accept_len: len.view_mut() };
    if !sampled {
        return speculative::verify_tree_greedy(exec, tree, tokens, out);
    }
    let coins = Coins::Rng(RngState { seed: 1, offset: 0 }.into());
    let (target_probs, threshold_single, threshold_acc) = (probs.view(), 1.0, 1.0);
    let args = TreeArgs { tree, target_probs, threshold_single, threshold_acc, coins, out, valid: None };
    speculative::tree_speculative_sample(exec, args)
}

/// Whether `exec` takes `dtype` in a row's place.
fn takes(exec: &Exec, (name, run): &(&str, Row), dtype: DType) -> bool {
    match run(exec, dtype) {
        Ok(()) => true,
        Err(Error::DType { .. } | Error::Unsupported { .. }) => false,
        Err(e) => panic!("{name} {dtype}: {e}"),
    }
}

fn line(name: &str, taken: [bool; DTYPES.len()]) -> String {
    format!("{name:42}{}\n", taken.map(|t| format!("{:>8}", if t { "yes" } else { "-" })).concat())
}

/// The same table for CUDA, by a dry run: no GPU is needed. What a file outside of [`NOT_ON_CUDA`] tests is there for every
/// type that the CPU takes.
#[cfg(feature = "cuda")]
#[test]
fn cuda_matrix_is_as_recorded() {
    let (cuda, cpu) = (Exec::dry(fir::exec::Arch::HOPPER), Exec::cpu_with(Level::Portable, 1).unwrap());
    let mut table = format!("{:42}{}\n", "", DTYPES.map(|d| format!("{:>8}", d.name())).concat());
    let mut complete: Vec<_> = NOT_ON_CUDA.to_vec();
    for row in ROWS {
        let (name, taken) = (row.0, DTYPES.map(|d| takes(&cuda, row, d)));
        let missing: Vec<_> =
            DTYPES.iter().zip(taken).filter(|(d, t)| !t && takes(&cpu, row, **d)).map(|(d, _)| d.name()).collect();
        let family = name.split(':').next().unwrap();
        if !missing.is_empty() {
            assert!(NOT_ON_CUDA.contains(&family), "{name} has no CUDA kernel for {missing:?}");
            complete.retain(|f| *f != family);
        }
        if taken.contains(&true) {
            table += &line(name, taken);
        }
    }
    complete.retain(|f| *f != "variant");
    assert!(complete.is_empty(), "{complete:?} have all their CUDA kernels: take them out of NOT_ON_CUDA");
    insta::assert_snapshot!(table);
}

#[test]
fn support_matrix_is_as_promised() {
    let execs: Vec<Exec> = Level::available().into_iter().map(|level| Exec::cpu_with(level, 1).unwrap()).collect();
    let mut table = format!("{:42}{}\n", "", DTYPES.map(|d| format!("{:>8}", d.name())).concat());
    for row in ROWS {
        let name = row.0;
        let taken = DTYPES.map(|dtype| {
            // The answer may not depend on the level: the table is the same on every machine.
            let answers: Vec<bool> = execs.iter().map(|exec| takes(exec, row, dtype)).collect();
            assert!(answers.iter().all(|a| *a == answers[0]), "{name} {dtype}: levels differ: {answers:?}");
            answers[0]
        });
        // The longest start that fits is the row's own promise.
        let promise = PROMISED.iter().filter(|(start, _)| name.starts_with(start)).max_by_key(|(start, _)| start.len());
        if let Some((_, columns)) = promise {
            let lost: Vec<_> =
                DTYPES[..*columns].iter().zip(taken).filter(|(_, t)| !t).map(|(d, _)| d.name()).collect();
            assert!(lost.is_empty(), "{name} takes no {lost:?}");
        }
        if name == "norm::rms_norm_quant out" {
            assert!(taken[3] && taken[4], "{name} takes no e4m3 or no e5m2");
        }
        table += &line(name, taken);
    }
    for (start, _) in PROMISED {
        assert!(ROWS.iter().any(|(name, _)| name.starts_with(start)), "no row for {start}");
    }
    insta::assert_snapshot!(table);
}
