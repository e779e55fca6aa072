//! Norms, activations and products.

use super::Bytes;
use crate::error::Result;
use crate::exec::Exec;
use crate::ops::{activation, gemm, norm};
use crate::tensor::{BlockFormat, DType};

/// `[tokens, hidden]` or `[tokens, heads, hidden]`.
fn rows(b: &mut Bytes<'_>, hidden: usize) -> Vec<usize> {
    if b.byte() < 128 { vec![b.size(), hidden] } else { vec![b.size() % 8, b.size() % 8, hidden] }
}

pub(super) fn rms_norm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, weight_dtype, hidden) = (b.float(), b.float(), b.size());
    let shape = rows(b, hidden);
    let (x, weight, mut out) = (b.tensor(dtype, &shape), b.tensor(weight_dtype, &[hidden]), b.tensor(dtype, &shape));
    let result = norm::rms_norm(exec, x.view()?, weight.view()?, b.f32(), out.view_mut()?);
    out.assert_only_elements_written();
    result
}

pub(super) fn fused_add_rms_norm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, hidden) = (b.float(), b.size());
    let shape = rows(b, hidden);
    let (mut x, mut residual, weight) = (b.tensor(dtype, &shape), b.tensor(dtype, &shape), b.tensor(dtype, &[hidden]));
    let result = norm::fused_add_rms_norm(exec, x.view_mut()?, residual.view_mut()?, weight.view()?, b.f32());
    x.assert_only_elements_written();
    residual.assert_only_elements_written();
    result
}

pub(super) fn fused_add_rms_norm_quant(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, hidden) = (b.float(), b.size());
    let shape = rows(b, hidden);
    let (x, mut residual, weight) = (b.tensor(dtype, &shape), b.tensor(dtype, &shape), b.tensor(dtype, &[hidden]));
    let fp8 = [DType::E4M3, DType::E5M2][b.below(2)];
    let mut out = b.tensor(fp8, &shape);
    let (scale, eps) = (b.f32(), b.f32());
    let (into, sum) = (out.view_mut()?, residual.view_mut()?);
    let result = norm::fused_add_rms_norm_quant(exec, x.view()?, sum, weight.view()?, scale, eps, into);
    out.assert_only_elements_written();
    residual.assert_only_elements_written();
    result
}

pub(super) fn layer_norm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, hidden) = (b.float(), b.size());
    let shape = rows(b, hidden);
    let (x, gamma, beta) = (b.tensor(dtype, &shape), b.tensor(dtype, &[hidden]), b.tensor(DType::F32, &[hidden]));
    let mut out = b.tensor(dtype, &shape);
    let result = norm::layer_norm(exec, x.view()?, gamma.view()?, beta.view()?, b.f32(), out.view_mut()?);
    out.assert_only_elements_written();
    result
}

pub(super) fn layer_norm_quant(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, hidden) = (b.float(), b.size());
    let shape = rows(b, hidden);
    let (x, gamma, beta) = (b.tensor(dtype, &shape), b.tensor(dtype, &[hidden]), b.tensor(DType::F32, &[hidden]));
    let fp8 = [DType::E4M3, DType::E5M2][b.below(2)];
    let mut out = b.tensor(fp8, &shape);
    let (scale, eps) = (b.f32(), b.f32());
    let result = norm::layer_norm_quant(exec, x.view()?, gamma.view()?, beta.view()?, scale, eps, out.view_mut()?);
    out.assert_only_elements_written();
    result
}

pub(super) fn modulated_layer_norm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, hidden) = (b.float(), b.size());
    let shape = rows(b, hidden);
    let (x, residual, x_scale) = (b.tensor(dtype, &shape), b.tensor(dtype, &shape), b.tensor(DType::F32, &[1]));
    let (terms, columns) = ([(); 3].map(|()| b.tensor(dtype, &shape)), b.tensor(DType::F32, &[hidden]));
    let mut given = |x| if b.byte() < 128 { Some(x) } else { None };
    let (residual, x_scale) = (given(residual.view()?), given(x_scale.view()?));
    let mut term = |i: usize| -> Result<norm::Modulation<'_>> {
        Ok(norm::Modulation { plus: i as f32, rows: given(terms[i].view()?), columns: given(columns.view()?) })
    };
    let (gate, scale, shift) = (term(0)?, term(1)?, term(2)?);
    let (mut sum, mut out, eps) = (b.tensor(dtype, &shape), b.tensor(dtype, &shape), b.f32());
    let (x, residual_out, to) = (x.view()?, sum.view_mut()?, out.view_mut()?);
    let args = norm::ModulatedArgs { x, x_scale, residual, gate, scale, shift, eps, residual_out, out: to };
    let result = norm::modulated_layer_norm(exec, args);
    sum.assert_only_elements_written();
    out.assert_only_elements_written();
    result
}

pub(super) fn qk_rms_norm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, tokens, dim) = (b.float(), b.size(), b.size());
    let (mut q, mut k) = (b.tensor(dtype, &[tokens, 4, dim]), b.tensor(dtype, &[tokens, 2, dim]));
    let (qw, kw) = (b.tensor(dtype, &[dim]), b.tensor(DType::F32, &[dim]));
    let result = norm::qk_rms_norm(exec, q.view_mut()?, k.view_mut()?, qw.view()?, kw.view()?, b.f32());
    q.assert_only_elements_written();
    k.assert_only_elements_written();
    result
}

pub(super) fn activation(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let op = [activation::silu_and_mul, activation::gelu_and_mul, activation::gelu_tanh_and_mul][b.below(3)];
    let (dtype, tokens, d) = (b.float(), b.size(), b.size());
    let (x, mut out) = (b.tensor(dtype, &[tokens, d.wrapping_mul(2)]), b.tensor(dtype, &[tokens, d]));
    let result = op(exec, x.view()?, out.view_mut()?);
    out.assert_only_elements_written();
    result
}

pub(super) fn gemm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, m, n, k) = (b.float(), b.size(), b.size(), b.size());
    let (x, w, mut out) = (b.tensor(dtype, &[m, k]), b.tensor(dtype, &[n, k]), b.tensor(dtype, &[m, n]));
    let packed = if b.rarely() { gemm::DenseWeights::pack(exec, w.view()?)? } else { None };
    let result = match &packed {
        Some(w) => gemm::gemm(exec, x.view()?, w, out.view_mut()?),
        None => gemm::gemm(exec, x.view()?, w.view()?, out.view_mut()?),
    };
    out.assert_only_elements_written();
    result
}

pub(super) fn block_gemm(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let format = BlockFormat::ALL[b.below(BlockFormat::ALL.len())];
    let (m, n, blocks) = (b.size(), b.size(), b.size() % 6);
    let k = if b.rarely() { b.size() } else { blocks * format.elements() };
    let bytes = n.saturating_mul(blocks * format.bytes()).min(200_000);
    let (bytes, seed) = (if b.rarely() { bytes / 2 } else { bytes }, b.byte());
    let data: Vec<u8> = (0..bytes).map(|i| ((i * 131) >> 3) as u8 ^ seed).collect();
    let w = gemm::BlockWeights::pack(exec, format, &data, n, k)?;
    let (dtype, out_dtype) = (b.float(), b.float());
    let then = b.below(4);
    let (x, mut out) = (b.tensor(dtype, &[m, k]), b.tensor(out_dtype, &[m, if then == 0 { n / 2 } else { n }]));
    let result = match then {
        0 => gemm::gemm_silu_mul(exec, x.view()?, &w, out.view_mut()?),
        1 => gemm::gemm_add(exec, x.view()?, &w, out.view_mut()?),
        _ => gemm::block_gemm(exec, x.view()?, &w, out.view_mut()?),
    };
    out.assert_only_elements_written();
    result
}

pub(super) fn dequantize_blocks(exec: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let format = BlockFormat::ALL[b.below(BlockFormat::ALL.len())];
    let (rows, blocks) = (b.size(), b.size() % 6);
    let bytes = rows.saturating_mul(blocks * format.bytes()).min(200_000);
    let data = vec![b.byte(); if b.rarely() { bytes / 2 } else { bytes }];
    let dtype = b.float();
    let mut out = b.tensor(dtype, &[rows, blocks * format.elements()]);
    let result = gemm::dequantize_blocks(exec, format, &data, out.view_mut()?);
    out.assert_only_elements_written();
    result
}
