//! The dry lane of products and of experts: which tiles are launched, with which arguments.

use std::fmt::Write as _;

use fir::gemm::{Block, BlockFormat, BlockWeights, GroupedArgs, Scaled};
use fir::moe::{self, FfnArgs, Gate, RouteArgs, Routing};
use fir::{DType, Ragged, gemm};

use crate::dry::{launches, zeros};

#[test]
fn the_number_of_rows_chooses_the_tile() {
    let mut text = String::new();
    for ([m, n, k], dtype) in [
        ([1, 4096, 4096], DType::BF16),
        ([16, 14336, 4096], DType::F16),
        ([40, 4096, 512], DType::BF16),
        ([100, 512, 512], DType::BF16),
        ([4096, 4096, 64], DType::BF16),
        ([64, 28672, 4096], DType::BF16),
        ([256, 4096, 512], DType::F16),
        // Rows that do not begin on 16 bytes; f32.
        ([3, 40, 77], DType::BF16),
        ([3, 40, 80], DType::F32),
        ([300, 40, 80], DType::F32),
    ] {
        let (x, w, mut out) = (zeros(dtype, &[m, k]), zeros(dtype, &[n, k]), zeros(dtype, &[m, n]));
        writeln!(text, "# {dtype} {m} x {n} x {k}").unwrap();
        text += &launches(|exec| gemm::gemm(exec, x.view(), w.view(), out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn every_product_passes_its_arguments_on() {
    let (x, w, mut out) = (zeros(DType::BF16, &[5, 256]), zeros(DType::BF16, &[64, 256]), zeros(DType::BF16, &[5, 64]));
    let (bias, norm) = (zeros(DType::F32, &[64]), zeros(DType::BF16, &[64]));
    let (x, w) = (x.view(), w.view());
    let (q, qs) = (zeros(DType::E4M3, &[2, 130, 256]), zeros(DType::F32, &[2, 2, 2]));
    let (a, a_scales) = (zeros(DType::E5M2, &[5, 256]), zeros(DType::F32, &[5, 2]));
    let weights = Scaled::new(q.view(), qs.view(), Block::TILE);
    let text = launches(|exec| {
        gemm::gemm_bias(exec, x, w, bias.view(), out.view_mut())?;
        gemm::gemm_add(exec, x, w, out.view_mut())?;
        gemm::gemm_silu_mul(exec, x, w, zeros(DType::F32, &[5, 32]).view_mut())?;
        let mut residual = zeros(DType::BF16, &[5, 64]);
        let args = gemm::GemmAddNormArgs {
            x,
            w: w.into(),
            residual: residual.view_mut(),
            weight: norm.view(),
            eps: 1e-6,
            out: out.view_mut(),
        };
        gemm::gemm_add_rms_norm(exec, args)?;
        let x_scaled = Scaled::new(a.view(), a_scales.view(), Block::GROUP);
        let mut wide = zeros(DType::BF16, &[5, 130]);
        let one = Scaled::new(q.view().select(0, 1)?, qs.view().select(0, 1)?, Block::TILE);
        gemm::scaled_gemm(exec, x_scaled, one, wide.view_mut())?;
        let indptr = Ragged::from_lens(&[3, 2])?;
        let args = GroupedArgs { x: x.into(), indptr: &indptr, w: weights, weight_indices: None, out: wide.view_mut() };
        gemm::grouped_gemm(exec, args)?;
        let (xb, mut ob) = (zeros(DType::BF16, &[2, 70, 256]), zeros(DType::BF16, &[2, 70, 130]));
        gemm::batched_gemm(exec, xb.view().into(), weights, ob.view_mut())
    });
    insta::assert_snapshot!(text);
}

#[test]
fn hopper_has_tiles_of_its_own() {
    let (x, w, mut out) =
        (zeros(DType::BF16, &[300, 64]), zeros(DType::BF16, &[3, 96, 64]), zeros(DType::BF16, &[300, 96]));
    let (a, b) = (zeros(DType::E4M3, &[5, 256]), zeros(DType::E4M3, &[130, 256]));
    let (a_scales, b_scales) = (zeros(DType::F32, &[5, 2]), zeros(DType::F32, &[2, 2]));
    let text = launches(|exec| {
        // Gates; an output of f32; groups; fp8 of few rows.
        gemm::gemm_silu_mul(exec, x.view(), w.view().select(0, 0)?, zeros(DType::BF16, &[300, 48]).view_mut())?;
        gemm::gemm(exec, x.view(), w.view().select(0, 0)?, zeros(DType::F32, &[300, 96]).view_mut())?;
        let indptr = Ragged::from_lens(&[200, 0, 100])?;
        let (x, w, out) = (x.view().into(), w.view().into(), out.view_mut());
        gemm::grouped_gemm(exec, GroupedArgs { x, indptr: &indptr, w, weight_indices: None, out })?;
        let a = Scaled::new(a.view(), a_scales.view(), Block::GROUP);
        let b = Scaled::new(b.view(), b_scales.view(), Block::TILE);
        gemm::scaled_gemm(exec, a, b, zeros(DType::BF16, &[5, 130]).view_mut())
    });
    insta::assert_snapshot!(text);
}

#[test]
fn block_formats_quantize_rows_and_multiply() {
    let mut text = String::new();
    for format in [BlockFormat::Q4_0, BlockFormat::Q6K, BlockFormat::Q8_0] {
        for m in [1, 100] {
            let data = vec![0; 40 * 512 / format.elements() * format.bytes()];
            let (x, mut out) = (zeros(DType::BF16, &[m, 512]), zeros(DType::BF16, &[m, 40]));
            text += &launches(|exec| {
                let w = BlockWeights::pack(exec, format, &data, 40, 512)?;
                gemm::block_gemm(exec, x.view(), &w, out.view_mut())
            });
        }
        let data = vec![0; 2 * 512 / format.elements() * format.bytes()];
        let mut out = zeros(DType::F16, &[2, 512]);
        text += &launches(|exec| gemm::dequantize_blocks(exec, format, &data, out.view_mut()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn experts_are_four_launches() {
    let (tokens, experts, top_k, hidden, inter) = (20, 8, 2, 256, 128);
    let (x, mut out) = (zeros(DType::BF16, &[tokens, hidden]), zeros(DType::BF16, &[tokens, hidden]));
    let (logits, bias) = (zeros(DType::F32, &[tokens, experts]), zeros(DType::BF16, &[experts]));
    let (mut ids, mut weights) = (zeros(DType::I32, &[tokens, top_k]), zeros(DType::F32, &[tokens, top_k]));
    let (up, down) = (zeros(DType::BF16, &[experts, 2 * inter, hidden]), zeros(DType::BF16, &[experts, hidden, inter]));
    let text = launches(|exec| {
        let bias = Some(bias.view());
        let args = RouteArgs { logits: logits.view(), bias, ids: ids.view_mut(), weights: weights.view_mut() };
        moe::route(exec, Routing::deepseek_v3(), args)?;
        moe::moe_ffn(
            exec,
            FfnArgs {
                x: x.view(),
                ids: ids.view(),
                weights: weights.view(),
                w_gate_up: up.view().into(),
                w_down: down.view().into(),
                gate: Gate::Gelu,
                out: out.view_mut(),
            },
        )
    });
    insta::assert_snapshot!(text);
}
