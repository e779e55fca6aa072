"""Rotary position embedding of queries and keys. ``enable_pdl`` and ``backend`` are ignored."""

from __future__ import annotations

from typing import Optional

import torch

from .. import _fir
from . import _native
from ._core import host, host_i32, refuse

__all__ = [
    "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids", "apply_llama31_rope_pos_ids_inplace",
    "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids", "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace", "mla_rope_quantize_fp8",
    "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache",
]


def _apply(q, k, positions, offsets, interleave, numbers):
    """Rotates into new tensors; ``numbers``: rotary_dim, scale, theta, and Llama 3.1's three."""
    outs = torch.empty_like(q), torch.empty_like(k)
    _native.apply_rope(q, k, positions, offsets, None, interleave, numbers, outs)
    return outs


def apply_rope_inplace(q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor,
                       rotary_dim: Optional[int] = None, interleave: bool = False, rope_scale: float = 1,
                       rope_theta: float = 1e4) -> None:
    """Rotates ``[nnz, heads, head_dim]`` in place; token ``t`` of request ``r`` stands at ``offsets[r] + t - indptr[r]``."""
    _native.apply_rope(q, k, indptr, offsets, None, interleave, (rotary_dim or 0, rope_scale, rope_theta))


def apply_rope_pos_ids_inplace(q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: Optional[int] = None,
                               interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4) -> None:
    """Rotates in place, by ``pos_ids`` ``[nnz]``."""
    _native.apply_rope(q, k, pos_ids, None, None, interleave, (rotary_dim or 0, rope_scale, rope_theta))


def apply_llama31_rope_inplace(q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor,
                               rotary_dim: Optional[int] = None, interleave: bool = False, rope_scale: float = 8,
                               rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
                               old_context_len: int = 8192) -> None:
    """As ``apply_rope_inplace``, with Llama 3.1's frequencies."""
    numbers = (rotary_dim or 0, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _native.apply_rope(q, k, indptr, offsets, None, interleave, numbers)


def apply_llama31_rope_pos_ids_inplace(q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor,
                                       rotary_dim: Optional[int] = None, interleave: bool = False,
                                       rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1,
                                       high_freq_factor: float = 4, old_context_len: int = 8192) -> None:
    """As ``apply_rope_pos_ids_inplace``, with Llama 3.1's frequencies."""
    numbers = (rotary_dim or 0, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _native.apply_rope(q, k, pos_ids, None, None, interleave, numbers)


def apply_rope(q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor,
               rotary_dim: Optional[int] = None, interleave: bool = False, rope_scale: float = 1,
               rope_theta: float = 1e4):
    """As ``apply_rope_inplace``, into new tensors."""
    return _apply(q, k, indptr, offsets, interleave, (rotary_dim or 0, rope_scale, rope_theta))


def apply_rope_pos_ids(q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: Optional[int] = None,
                       interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4):
    """As ``apply_rope_pos_ids_inplace``, into new tensors."""
    return _apply(q, k, pos_ids, None, interleave, (rotary_dim or 0, rope_scale, rope_theta))


def apply_llama31_rope(q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor,
                       rotary_dim: Optional[int] = None, interleave: bool = False, rope_scale: float = 8,
                       rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
                       old_context_len: int = 8192):
    """As ``apply_llama31_rope_inplace``, into new tensors."""
    numbers = (rotary_dim or 0, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, indptr, offsets, interleave, numbers)


def apply_llama31_rope_pos_ids(q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: Optional[int] = None,
                               interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
                               low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192):
    """As ``apply_llama31_rope_pos_ids_inplace``, into new tensors."""
    numbers = (rotary_dim or 0, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, pos_ids, None, interleave, numbers)


def _heads(x: torch.Tensor, head_size: int) -> torch.Tensor:
    if x.dim() == 3:
        return x
    if x.shape[-1] % head_size:
        raise ValueError(f"last axis of {x.shape[-1]}, expected a multiple of head_size={head_size}")
    return x.view(*x.shape[:-1], -1, head_size)


def apply_rope_with_cos_sin_cache(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int,
                                  cos_sin_cache: torch.Tensor, is_neox: bool = True):
    """Rotates ``[nnz, heads * head_size]`` by the rows of ``cos_sin_cache`` (``[max_position, rotary_dim]``, f32), into
    new tensors; ``is_neox``: pairs are halves apart."""
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    q_out, k_out = torch.empty_like(query), torch.empty_like(key)
    _native.apply_rope(_heads(query, head_size), _heads(key, head_size), positions, None, cos_sin_cache, not is_neox, (),
                       (_heads(q_out, head_size), _heads(k_out, head_size)))
    return q_out, k_out


def apply_rope_with_cos_sin_cache_inplace(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
                                          head_size: int, cos_sin_cache: torch.Tensor, is_neox: bool = True) -> None:
    """As ``apply_rope_with_cos_sin_cache``, in place."""
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    _native.apply_rope(_heads(query, head_size), _heads(key, head_size), positions, None, cos_sin_cache, not is_neox)


def _quantized(q_rope, k_rope, q_nope, k_nope, quantize_dtype, outs):
    q_rope_out, k_rope_out, q_nope_out, k_nope_out = outs
    if quantize_dtype is None:
        given = [o for o in outs if o is not None]
        quantize_dtype = given[0].dtype if given else torch.float8_e4m3fn
    new = lambda t, o: o if o is not None or t is None else torch.empty(t.shape, dtype=quantize_dtype, device=t.device)
    return (new(q_rope, q_rope_out), new(k_rope, k_rope_out), new(q_nope, q_nope_out), new(k_nope, k_nope_out))


def rope_quantize_fp8(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: Optional[torch.Tensor], k_nope: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, is_neox: bool = True,
    quantize_dtype: Optional[torch.dtype] = None, quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0,
    q_rope_out: Optional[torch.Tensor] = None, k_rope_out: Optional[torch.Tensor] = None,
    q_nope_out: Optional[torch.Tensor] = None, k_nope_out: Optional[torch.Tensor] = None, enable_pdl: bool = False,
    backend: str = "cuda",
):
    """Rotates, multiplies by ``quant_scale_*`` and rounds to fp8; returns ``(q_rope_out, k_rope_out, q_nope_out,
    k_nope_out)``."""
    outs = _quantized(q_rope, k_rope, q_nope, k_nope, quantize_dtype, (q_rope_out, k_rope_out, q_nope_out, k_nope_out))
    _fir.rope_quantize(
        (q_rope, outs[0], q_nope, outs[2], 1.0 / quant_scale_q), (k_rope, outs[1], k_nope, outs[3], 1.0 / quant_scale_kv),
        pos_ids, (cos_sin_cache, not is_neox),
    )
    return outs


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor, k_nope: torch.Tensor, cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor, is_neox: bool = True, quantize_dtype: Optional[torch.dtype] = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, q_rope_out: Optional[torch.Tensor] = None,
    k_rope_out: Optional[torch.Tensor] = None, q_nope_out: Optional[torch.Tensor] = None,
    k_nope_out: Optional[torch.Tensor] = None, enable_pdl: bool = False,
):
    """As ``rope_quantize_fp8``."""
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: Optional[torch.Tensor], k_nope: Optional[torch.Tensor],
    v: Optional[torch.Tensor], cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, paged_kv_cache,
    kv_indices: torch.Tensor, kv_indptr: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    is_neox: bool = True, quantize_dtype: Optional[torch.dtype] = None, quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0, page_size: int = 16, kv_layout: str = "NHD",
    q_rope_out: Optional[torch.Tensor] = None, q_nope_out: Optional[torch.Tensor] = None, enable_pdl: bool = False,
):
    """As ``rope_quantize_fp8``, with keys and values going into their pages: ``(k_cache, v_cache)``, or
    ``(ckv_cache, kpe_cache)`` when ``v`` is None. Returns ``(q_rope_out, q_nope_out)``."""
    cache = tuple(paged_kv_cache)
    if len(cache) != 2:
        refuse("paged_kv_cache", f"{len(cache)} tensors", "two")
    outs = _quantized(q_rope, None, q_nope, None, quantize_dtype or cache[0].dtype, (q_rope_out, None, q_nope_out, None))
    indptr = host(kv_indptr)
    full = host_i32([page_size] * (len(indptr) - 1))
    slots = (page_size, indptr, kv_indices, full, batch_indices, positions)
    scale = 1.0 / quant_scale_kv
    _fir.rope_quantize_append(
        (q_rope, outs[0], q_nope, outs[2], 1.0 / quant_scale_q), k_rope, k_nope, v, cache, slots, pos_ids,
        (cos_sin_cache, not is_neox), (scale, scale), kv_layout,
    )
    return outs[0], outs[2]
