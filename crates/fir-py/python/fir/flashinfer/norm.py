"""Norms of rows. ``enable_pdl`` is ignored."""

from __future__ import annotations

import functools
from typing import Optional, Union

import torch

from .. import _fir
from . import _native
from ._core import F32, number, refuse

__all__ = [
    "fused_add_rmsnorm", "fused_add_rmsnorm_quant", "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift", "fused_dit_residual_layernorm_scale_shift", "fused_qk_rmsnorm_rope",
    "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "layernorm", "layernorm_quant", "rmsnorm", "rmsnorm_quant",
]


def _rows(norm, x: torch.Tensor, weight: torch.Tensor, eps: float, out: Optional[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(x) if out is None else out
    if x.dim() == 2:
        norm(x, weight, eps, out)
    elif x.is_contiguous() and out.is_contiguous():
        norm(x.view(-1, x.shape[-1]), weight, eps, out.view(-1, x.shape[-1]))
    elif x.dim() == 3:
        for head in range(x.shape[1]):
            norm(x[:, head], weight, eps, out[:, head])
    else:
        raise ValueError(f"input has shape {tuple(x.shape)}, expected 2 or 3 axes, or contiguous memory")
    return out


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Optional[torch.Tensor] = None,
            enable_pdl: Optional[bool] = None) -> torch.Tensor:
    """``out = input / rms(input) * weight`` of each row: ``[batch, hidden]`` or ``[batch, heads, hidden]``."""
    return _rows(_native.rms_norm, input, weight, eps, out)


def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Optional[torch.Tensor] = None,
                  enable_pdl: Optional[bool] = None) -> torch.Tensor:
    """As ``rmsnorm``, with ``weight + 1``."""
    return _rows(_native.gemma_rms_norm, input, weight, eps, out)


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
                      enable_pdl: Optional[bool] = None) -> None:
    """``residual += input``, then ``input = rmsnorm(residual)``, both in place."""
    _native.fused_add_rms_norm(input, residual, weight, eps)


def gemma_fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
                            enable_pdl: Optional[bool] = None) -> None:
    """As ``fused_add_rmsnorm``, with ``weight + 1``."""
    _native.gemma_fused_add_rms_norm(input, residual, weight, eps)


def rmsnorm_quant(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, scale: Union[float, torch.Tensor],
                  eps: float = 1e-6, enable_pdl: Optional[bool] = None) -> None:
    """``out = fp8(rmsnorm(input) / scale)``; a ``scale`` on a device costs one copy and one wait."""
    _native.rms_norm_quant(input, weight, number(scale), eps, out)


def fused_add_rmsnorm_quant(out: torch.Tensor, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                            scale: Union[float, torch.Tensor], eps: float = 1e-6,
                            enable_pdl: Optional[bool] = None) -> None:
    """``residual += input``, then ``out = fp8(rmsnorm(residual) / scale)``."""
    _native.fused_add_rms_norm_quant(input, residual, weight, number(scale), eps, out)


def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``(input - mean) / sqrt(var + eps) * gemma + beta`` of each row."""
    out = torch.empty_like(input)
    _native.layer_norm(input, gemma, beta, eps, out)
    return out


def layernorm_quant(out: torch.Tensor, input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor,
                    scale: Union[float, torch.Tensor], eps: float = 1e-6) -> None:
    """``out = fp8(layernorm(input) / scale)``."""
    _native.layer_norm_quant(input, gemma, beta, number(scale), eps, out)


def _modulated(input, residual, gate, gate_bias, scale, shift, epsilon, use_nvfp4, use_mxfp8, global_scaling_factor,
               input_global_scaling_factor, residual_out, norm_out, sf_out):
    """``scale`` and ``shift``: a number, rows and columns each."""
    for name, used in (("use_nvfp4", use_nvfp4), ("use_mxfp8", use_mxfp8)):
        if used:
            raise NotImplementedError(f"{name}=True is for Blackwell GPUs; use {name}=False and quantize the result")
    if input.dim() != 3:
        raise ValueError(f"input has shape {tuple(input.shape)}, expected [batch, num_rows, hidden_dim]")
    rows = lambda t: t.view(input.shape) if t is not None and t.dim() == 2 else t
    columns = lambda t: t if t is None else t.view(-1)
    outs = [torch.empty_like(input) if out is None else out for out in (residual_out, norm_out)]
    # Without a gate the sum is of the input as it is.
    gates = (1.0, None, None) if gate is None else (0.0, rows(gate), columns(gate_bias))
    (a, a_rows, a_columns), (b, b_rows, b_columns) = scale, shift
    _native.modulated_layer_norm(
        input, input_global_scaling_factor, residual, *gates, a, rows(a_rows), columns(a_columns), b, rows(b_rows),
        columns(b_columns), epsilon, *outs)
    return tuple(outs)


def fused_dit_gate_residual_layernorm_gamma_beta(
    input: torch.Tensor, residual: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *,
    gate_bias: Optional[torch.Tensor] = None, epsilon: float = 1e-6, use_nvfp4: bool = False, use_mxfp8: bool = False,
    global_scaling_factor: Optional[torch.Tensor] = None, input_global_scaling_factor: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None, norm_out: Optional[torch.Tensor] = None,
    sf_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = residual + input * (gate + gate_bias)``, then ``layernorm(s) * gamma + beta``: returns ``(s, norm)``, both
    ``[batch, num_rows, hidden_dim]`` of the input's type. ``input_global_scaling_factor``: ``[1]``, a factor of ``input``.
    Of any hidden size and strides of rows. ``global_scaling_factor`` and ``sf_out`` belong to formats of Blackwell GPUs, and
    are ignored."""
    return _modulated(input, residual, gate, gate_bias, (0.0, None, gamma), (0.0, None, beta), epsilon, use_nvfp4,
                      use_mxfp8, global_scaling_factor, input_global_scaling_factor, residual_out, norm_out, sf_out)


def fused_dit_gate_residual_layernorm_scale_shift(
    input: torch.Tensor, residual: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *,
    gate_bias: Optional[torch.Tensor] = None, scale_bias: Optional[torch.Tensor] = None,
    shift_bias: Optional[torch.Tensor] = None, epsilon: float = 1e-6, use_nvfp4: bool = False, use_mxfp8: bool = False,
    global_scaling_factor: Optional[torch.Tensor] = None, input_global_scaling_factor: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None, norm_out: Optional[torch.Tensor] = None,
    sf_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`fused_dit_gate_residual_layernorm_gamma_beta`, with ``layernorm(s) * (1 + scale + scale_bias) + shift +
    shift_bias``: ``scale`` and ``shift`` are of the input's shape, biases ``[hidden_dim]``, f32."""
    return _modulated(input, residual, gate, gate_bias, (1.0, scale, scale_bias), (0.0, shift, shift_bias), epsilon,
                      use_nvfp4, use_mxfp8, global_scaling_factor, input_global_scaling_factor, residual_out, norm_out,
                      sf_out)


def fused_dit_residual_layernorm_scale_shift(
    input: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, residual: Optional[torch.Tensor] = None,
    scale_bias: Optional[torch.Tensor] = None, shift_bias: Optional[torch.Tensor] = None, epsilon: float = 1e-6,
    use_nvfp4: bool = False, use_mxfp8: bool = False, global_scaling_factor: Optional[torch.Tensor] = None,
    input_global_scaling_factor: Optional[torch.Tensor] = None, residual_out: Optional[torch.Tensor] = None,
    norm_out: Optional[torch.Tensor] = None, sf_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`fused_dit_gate_residual_layernorm_scale_shift` without a gate, and perhaps without a residual."""
    return _modulated(input, residual, None, None, (1.0, scale, scale_bias), (0.0, shift, shift_bias), epsilon, use_nvfp4,
                      use_mxfp8, global_scaling_factor, input_global_scaling_factor, residual_out, norm_out, sf_out)


@functools.lru_cache(maxsize=16)
def _angles_3d(sizes: tuple[int, int, int], channels: tuple[int, int, int], base: float, device: torch.device):
    """Cosines and sines of every place of a grid, ``[places, head_dim]``: each axis turns channels of its own."""
    dim = sum(channels)
    table = torch.empty((*sizes, dim), dtype=F32, device=device)
    at = 0
    for axis, (size, count) in enumerate(zip(sizes, channels)):
        one = torch.empty((size, count), dtype=F32, device=device)
        _fir.cos_sin_cache(_native.rope_of(False, count, 1.0, base), one)
        one = one.view(*(size if i == axis else 1 for i in range(3)), count)
        half = count // 2
        table[..., at:at + half].copy_(one[..., :half].expand(*sizes, half))
        table[..., dim // 2 + at:dim // 2 + at + half].copy_(one[..., half:].expand(*sizes, half))
        at += half
    return table.view(-1, dim)


@functools.lru_cache(maxsize=16)
def _places(tokens: int, period: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([t % period for t in range(tokens)], dtype=torch.int32, device=device)


def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *, ppf: int, pph: int, ppw: int,
    num_frame_channels: int, num_height_channels: int, num_width_channels: int, num_heads_q: int, num_heads_k: int,
    num_heads_v: int, head_dim: int, eps: float = 1e-6, base: float = 1e4, interleave: bool = True, factor: float = 1.0,
    low: float = 0.0, high: float = 0.0, attention_factor: float = 1.0, is_qk_norm: bool = True,
    output_fp8: bool = False, output_quant_scale: float = 1.0, v_quant_scale: float = 1.0,
    q_out: Optional[torch.Tensor] = None, k_out: Optional[torch.Tensor] = None, v_out: Optional[torch.Tensor] = None,
):
    """Queries and keys normed over all their heads, then rotated by their place in a grid of ``ppf x pph x ppw``, and
    values copied: ``qkv``: ``[tokens, heads * head_dim]`` or ``[batch, seq_len, heads * head_dim]``. Three steps, rounded in
    between; ``output_fp8`` multiplies by the scales and rounds to e4m3."""
    if factor != 1.0 or attention_factor != 1.0:
        refuse("factor", factor, "1.0: YaRN is not applied")
    channels = (num_frame_channels, num_height_channels, num_width_channels)
    if sum(channels) != head_dim or any(n % 2 for n in channels):
        raise ValueError(f"channels {channels} of frame, height and width, expected even numbers that sum to {head_dim}")
    heads, period = (num_heads_q, num_heads_k, num_heads_v), ppf * pph * ppw
    rows = qkv.view(-1, qkv.shape[-1])
    if rows.shape[1] != sum(heads) * head_dim or rows.shape[0] % period or (qkv.dim() == 3 and qkv.shape[1] != period):
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}, expected rows of {sum(heads) * head_dim} and a multiple of "
                         f"ppf * pph * ppw = {period} of them")
    parts = rows.split([n * head_dim for n in heads], dim=1)
    shape = lambda n: (*qkv.shape[:-1], n, head_dim)
    fresh = [torch.empty(shape(n), dtype=qkv.dtype, device=qkv.device) for n in heads]
    for part, out, weight in zip(parts, fresh, (q_weight, k_weight, None)):
        flat = out.view(-1, part.shape[1])
        if weight is not None and is_qk_norm:
            _native.rms_norm(part, weight, eps, flat)
        else:
            flat.copy_(part)
    q, k = (t.view(-1, n, head_dim) for t, n in zip(fresh[:2], heads))
    table = _angles_3d((ppf, pph, ppw), channels, base, qkv.device)
    _native.apply_rope(q, k, _places(rows.shape[0], period, qkv.device), None, table, interleave)
    results = []
    for given, out, scale in zip((q_out, k_out, v_out), fresh, (output_quant_scale,) * 2 + (v_quant_scale,)):
        if given is None:
            given = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=qkv.device) if output_fp8 else out
        if output_fp8:
            scales = torch.full((1, 1), 1.0 / scale, dtype=F32, device=qkv.device)
            flat = out.view(-1, out.shape[-2] * head_dim)
            _fir.quantize_fp8_with_scales(flat, scales, (0, 0), given.view(flat.shape))
        elif given is not out:
            given.copy_(out)
        results.append(given)
    return tuple(results)
