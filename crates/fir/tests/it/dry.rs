//! The dry lane: everything up to the launch, with no GPU and no compiler. What is launched is a snapshot.

use std::fmt::Write as _;

use fir::exec::{Arch, Gpu};
use fir::lora::{self, AdaptArgs, RowOf};
use fir::moe::{self, RouteArgs, Routing, TableRouteArgs};
use fir::norm::{ModulatedArgs, Modulation};
use fir::sampling::{self, Draw, FilterOrder, Filters, RngState};
use fir::speculative::{self, ChainArgs, Coins, Tree, TreeArgs, TreeOut};
use fir::topk::{self, TopKOrder, TopKPages, TopKRagged};
use fir::{DType, Exec, Result, Tensor, TensorMut, TensorRef, activation, jit, norm};

/// The launches of `work` on an H200 that is not there, each of a kernel that the JIT lane compiles.
pub(crate) fn launches(work: impl FnOnce(&Exec) -> Result<()>) -> String {
    let gpu = Gpu::dry(Arch::HOPPER);
    work(&Exec::Cuda(gpu.clone())).unwrap();
    let (mut text, kernels) = (String::new(), jit::kernels());
    for launch in gpu.launches() {
        assert!(kernels.iter().any(|k| k.name() == launch.kernel), "{} is not in jit::kernels()", launch.kernel);
        writeln!(text, "{launch}").unwrap();
    }
    assert!(gpu.launches().is_empty(), "they are taken once");
    text
}

pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

#[test]
fn norms_are_launched_by_the_length_of_their_rows() {
    let mut text = String::new();
    for (dtype, shape) in [
        (DType::BF16, [64, 4096]),
        (DType::BF16, [300, 8192]),
        (DType::F16, [1000, 128]),
        (DType::F32, [3, 30_000]),
        // Rows that do not end on 16 bytes.
        (DType::BF16, [3, 515]),
    ] {
        let (x, w, mut out) = (zeros(dtype, &shape), zeros(dtype, &shape[1..]), zeros(dtype, &shape));
        writeln!(text, "# {dtype} {shape:?}").unwrap();
        text += &launches(|exec| norm::rms_norm(exec, x.view(), w.view(), 1e-6, out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn every_norm_passes_its_arguments_on() {
    let (x, mut a, mut b) =
        (zeros(DType::BF16, &[6, 256]), zeros(DType::BF16, &[6, 256]), zeros(DType::BF16, &[6, 256]));
    let (w, g, mut q) = (zeros(DType::F32, &[256]), zeros(DType::BF16, &[256]), zeros(DType::E4M3, &[6, 256]));
    let (x, w, g, eps) = (x.view(), w.view(), g.view(), 1e-6);
    let text = launches(|exec| {
        norm::gemma_rms_norm(exec, x, w, eps, a.view_mut())?;
        norm::fused_add_rms_norm(exec, a.view_mut(), b.view_mut(), g, eps)?;
        norm::layer_norm(exec, x, g, w, eps, a.view_mut())?;
        norm::fused_add_rms_norm_quant(exec, x, b.view_mut(), g, 0.25, eps, q.view_mut())?;
        norm::layer_norm_quant(exec, x, g, w, 0.5, eps, q.view_mut())?;
        // Queries and keys in one tensor of three heads and two, with gaps.
        let (mut one, mut two) = (vec![0f32; 5 * 400], vec![0f32; 5 * 400]);
        let heads = TensorMut::strided(&mut one, &[5, 3, 64], &[400, 64, 1])?;
        let keys = TensorMut::strided(&mut two, &[5, 2, 64], &[400, 80, 1])?;
        let w = w.slice(0, 0..64)?;
        norm::qk_rms_norm(exec, heads, keys, w, w, eps)
    });
    insta::assert_snapshot!(text);
}

#[test]
fn adapters_and_modulations_pass_their_arguments_on() {
    let (x, columns, one) = (zeros(DType::BF16, &[6, 256]), zeros(DType::F32, &[256]), zeros(DType::F32, &[1]));
    let (parts, none) = (zeros(DType::BF16, &[6, 6, 256]), Modulation::default());
    let part = |i| Some(parts.view().select(1, i).unwrap());
    let (mut sum, mut out) = (zeros(DType::BF16, &[6, 256]), zeros(DType::BF16, &[6, 256]));
    let (weights, ids, wide) = (zeros(DType::BF16, &[2, 4, 16, 256]), zeros(DType::I32, &[6]), zeros(DType::I64, &[6]));
    let (mut shrunk, mut token_sums, factors) =
        (zeros(DType::BF16, &[6, 16]), zeros(DType::F32, &[6, 16]), zeros(DType::F32, &[6]));
    let (logits, table) = (zeros(DType::F32, &[6, 8]), zeros(DType::I32, &[50, 2]));
    let (mut chosen, mut chances) = (zeros(DType::I32, &[6, 3]), zeros(DType::F32, &[6, 3]));
    let text = launches(|exec| {
        let (x, columns) = (x.view(), Some(columns.view()));
        for (gate, scale, residual, x_scale) in [
            (Modulation { rows: part(0), ..none }, Modulation { plus: 1.0, rows: part(3), columns }, Some(x), None),
            (Modulation { plus: 1.0, ..none }, Modulation { columns, ..none }, None, Some(one.view())),
        ] {
            let (residual_out, out, shift) =
                (sum.view_mut(), out.view_mut(), Modulation { rows: part(5), columns, plus: 0.0 });
            let args = ModulatedArgs { x, x_scale, residual, gate, scale, shift, eps: 1e-6, residual_out, out };
            norm::modulated_layer_norm(exec, args)?;
        }
        let (weights, ids, wide) = (weights.view(), ids.view(), wide.view());
        for (factors, out, out_of) in
            [(None, shrunk.view_mut(), RowOf::Pair), (Some(factors.view()), token_sums.view_mut(), RowOf::Token)]
        {
            let (x_of, tokens, experts, adapters, add) = (RowOf::Token, ids, wide, ids, true);
            lora::adapt(exec, AdaptArgs { x, x_of, weights, tokens, experts, adapters, factors, add, out, out_of })?;
        }
        let (logits, tokens, table, shared) = (logits.view(), wide, table.view(), Some(0.5));
        let (ids, weights) = (chosen.view_mut(), chances.view_mut());
        moe::route_by_table(exec, TableRouteArgs { logits, tokens, table, shared, ids, weights })
    });
    insta::assert_snapshot!(text);
}

#[test]
fn activations_are_cut_into_parts() {
    let mut text = String::new();
    for (dtype, shape) in
        [(DType::BF16, [64, 8192]), (DType::F32, [7, 16]), (DType::F16, [2, 28_672]), (DType::BF16, [2, 30])]
    {
        let (x, mut out) = (zeros(dtype, &shape), zeros(dtype, &[shape[0], shape[1] / 2]));
        writeln!(text, "# {dtype} {shape:?}").unwrap();
        text += &launches(|exec| activation::silu_and_mul(exec, x.view(), out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn rows_are_shared_by_as_many_blocks_as_hold_them() {
    let mut text = String::new();
    for (dtype, shape) in [
        (DType::F32, [64, 128_256]),
        (DType::BF16, [3, 32_001]),
        (DType::F16, [1, 1000]),
        // Too long for the shared memory of eight blocks.
        (DType::F32, [1, 425_985]),
    ] {
        let (x, mut out) = (zeros(dtype, &shape), zeros(DType::F32, &shape));
        writeln!(text, "# {dtype} {shape:?}").unwrap();
        text += &launches(|exec| sampling::softmax(exec, x.view(), 0.5.into(), out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn every_sampler_passes_its_arguments_on() {
    let (x, h, mut out) = (zeros(DType::F32, &[2, 100]), zeros(DType::BF16, &[3, 100]), zeros(DType::F32, &[2, 100]));
    let (mut tokens, mut wide, mut valid) =
        (zeros(DType::I32, &[2]), zeros(DType::I64, &[2]), zeros(DType::Bool, &[2]));
    let indices = zeros(DType::I64, &[2]);
    let (x, h, rng) = (x.view(), h.view(), RngState { seed: 7, offset: 8 });
    let (states, ks, ps) = ([rng; 2], [1, 2], [0.25, 0.5]);
    let text = launches(|exec| {
        sampling::sample_from_probs(exec, x, Draw::new(rng, tokens.view_mut()))?;
        sampling::top_k_sample(exec, x, 5.into(), Draw::new(rng, tokens.view_mut()))?;
        sampling::top_p_sample(exec, x, (&ps[..]).into(), Draw::new(rng, tokens.view_mut()))?;
        sampling::min_p_sample(exec, x, 0.125.into(), Draw::new(rng, tokens.view_mut()))?;
        let draw = Draw::new(&states[..], tokens.view_mut());
        sampling::top_k_top_p_sample(exec, x, 5.into(), 0.5.into(), FilterOrder::Joint, draw)?;
        sampling::sample_from_logits(exec, x, 2.0.into(), Draw::new(rng, tokens.view_mut()))?;
        let filters = Filters { temperature: (&ps[..]).into(), top_k: (&ks[..]).into(), ..Filters::default() };
        let valid = Some(valid.view_mut());
        let draw = Draw { indices: Some(indices.view()), valid, ..Draw::new(rng, wide.view_mut()) };
        sampling::sample(exec, h, filters, draw)?;
        sampling::top_k_renorm(exec, x, 3.into(), out.view_mut())?;
        sampling::top_p_renorm(exec, x, 0.75.into(), out.view_mut())?;
        sampling::top_k_mask_logits(exec, x, (&ks[..]).into(), out.view_mut())
    });
    insta::assert_snapshot!(text);
}

#[test]
fn every_top_k_passes_its_arguments_on() {
    let (x, lens) = (zeros(DType::BF16, &[4, 5000]), zeros(DType::I32, &[4]));
    let (mut values, mut places, mut raw) =
        (zeros(DType::BF16, &[4, 300]), zeros(DType::I32, &[4, 300]), zeros(DType::I32, &[4, 300]));
    let (mut wide, table) = (zeros(DType::I64, &[4, 300]), zeros(DType::I32, &[9, 100]));
    let (scores, lens, page_table) = (x.view(), lens.view(), table.view());
    let text = launches(|exec| {
        topk::top_k(exec, scores, TopKOrder::Place, values.view_mut(), places.view_mut())?;
        topk::top_k(exec, scores, TopKOrder::Value, values.view_mut(), wide.view_mut())?;
        let out = places.view_mut();
        topk::top_k_ragged_transform(exec, TopKRagged { scores, lens, starts: None, offsets: lens, out })?;
        let (starts, requests, page_starts, page_size) = (Some(lens), Some(lens), Some(lens), 64);
        let (out, raw) = (places.view_mut(), Some(raw.view_mut()));
        let pages = TopKPages { scores, lens, starts, page_table, requests, page_starts, page_size, out, raw };
        topk::top_k_page_table_transform(exec, pages)
    });
    insta::assert_snapshot!(text);
}

#[test]
fn every_verification_passes_its_arguments_on() {
    let (p, q) = (zeros(DType::F32, &[2, 3, 50]), zeros(DType::F32, &[2, 4, 50]));
    let (drafts, links) = (zeros(DType::I64, &[2, 3]), Tensor::from_slice(&[-1i32; 8], &[2, 4]).unwrap());
    let (ids, coins, last) = (zeros(DType::I32, &[2, 4]), zeros(DType::F32, &[2, 4]), zeros(DType::F32, &[2]));
    let (mut out, mut sums, mut valid) =
        (zeros(DType::I32, &[2, 4]), zeros(DType::I64, &[2]), zeros(DType::Bool, &[2]));
    let (mut predicts, mut index, mut len) =
        (zeros(DType::I32, &[8]), zeros(DType::I64, &[2, 3]), zeros(DType::I32, &[2]));
    let tree =
        Tree { tokens: ids.view(), retrieve_index: ids.view(), next_token: links.view(), next_sibling: links.view() };
    let text = launches(|exec| {
        let args = ChainArgs {
            draft_probs: p.view(),
            draft_tokens: drafts.view(),
            target_probs: q.view(),
            rng: RngState { seed: 7, offset: 8 }.into(),
            out: out.view_mut(),
            accepted: None,
            emitted: Some(sums.view_mut()),
            valid: Some(valid.view_mut()),
        };
        speculative::chain_speculative_sample(exec, args)?;
        fn verdict<'a>(out: [&'a mut Tensor; 3]) -> TreeOut<'a> {
            let [predicts, accept_index, accept_len] = out.map(Tensor::view_mut);
            TreeOut { predicts, accept_index, accept_len }
        }
        let args = TreeArgs {
            tree,
            target_probs: q.view(),
            threshold_single: 0.75,
            threshold_acc: 0.5,
            coins: Coins::Given { nodes: coins.view(), last: last.view() },
            out: verdict([&mut predicts, &mut index, &mut len]),
            valid: None,
        };
        speculative::tree_speculative_sample(exec, args)?;
        let verdict = verdict([&mut predicts, &mut index, &mut len]);
        speculative::verify_tree_greedy(exec, tree, ids.view(), verdict)
    });
    insta::assert_snapshot!(text);
}

#[test]
fn tensors_without_elements_launch_nothing() {
    for shape in [[0, 8], [3, 0], [0, 0], [1 << 50, 0]] {
        let (x, w, mut out) = (zeros(DType::F16, &shape), zeros(DType::F16, &shape[1..]), zeros(DType::F16, &shape));
        assert_eq!(launches(|exec| norm::rms_norm(exec, x.view(), w.view(), 0.0, out.view_mut())), "");
        assert_eq!(launches(|exec| norm::layer_norm(exec, x.view(), w.view(), w.view(), 0.0, out.view_mut())), "");
        let mut half = zeros(DType::F16, &[shape[0], shape[1] / 2]);
        assert_eq!(launches(|exec| activation::gelu_and_mul(exec, x.view(), half.view_mut())), "");
    }
}

#[test]
fn refusals_are_the_same_as_on_the_cpu() {
    let data = vec![0f32; 4000];
    let exec = Exec::dry(Arch::HOPPER);
    let x = TensorRef::strided(&data, &[4, 8], &[100, 2]).unwrap();
    let (w, mut out) = (zeros(DType::F32, &[8]), zeros(DType::F32, &[4, 8]));
    let error = norm::rms_norm(&exec, x, w.view(), 0.0, out.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm: layout of `x`: stride 2 of the last axis, expected 1");
    let ints = zeros(DType::I32, &[8]);
    let error = norm::rms_norm(&exec, out.clone().view(), ints.view(), 0.0, out.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm: `weight` is i32, expected f32, f16 or bf16");
    let x = zeros(DType::I32, &[2, 8]);
    let error = activation::silu_and_mul(&exec, x.view(), zeros(DType::I32, &[2, 4]).view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "silu_and_mul: `x` is i32, expected f32, f16 or bf16");
    let probs = zeros(DType::F32, &[2, 8]);
    let (mut tokens, ids) = (zeros(DType::I32, &[1]), Tensor::from_slice(&[2i32], &[1]).unwrap());
    let draw = Draw { indices: Some(ids.view()), ..Draw::new(RngState::default(), tokens.view_mut()) };
    let error = sampling::sample_from_probs(&exec, probs.view(), draw).unwrap_err();
    assert_eq!(error.to_string(), "sample_from_probs: `indices` is 2 at 0, expected 0 or more and less than 2");
    let (mut ids, mut weights) = (zeros(DType::I32, &[4, 1]), zeros(DType::F32, &[4, 1]));
    let logits = zeros(DType::F32, &[4, 1 << 16]);
    let args = RouteArgs { logits: logits.view(), bias: None, ids: ids.view_mut(), weights: weights.view_mut() };
    let error = fir::moe::route(&exec, Routing::default(), args).unwrap_err().to_string();
    assert_eq!(error, "route: `experts` is 65536, expected at most 7264 with their groups on this device");
}

#[test]
fn a_missing_device_is_explained() {
    // Where there is one, this says nothing.
    if let Err(e) = Exec::cuda(0) {
        let text = e.to_string();
        assert!(text.contains("driver") || text.contains("NVRTC") || text.contains("sm_80"), "{text}");
    }
    assert!(zeros(DType::F32, &[4]).to_device(&Gpu::dry(Arch::HOPPER)).is_err());
}
