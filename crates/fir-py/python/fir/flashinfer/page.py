"""Writing keys and values into a paged cache."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .. import _fir
from . import _native
from ._core import I32, host, number, unpack_kv

__all__ = [
    "append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, batch_indices: Optional[torch.Tensor] = None,
    positions: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each appended token, ``[nnz]``, i32. Of ``nnz`` larger than the tokens there are the rest is
    filled with -1 and 0."""
    device = append_indptr.device
    indptr = host(append_indptr)
    tokens = int(indptr[-1])
    if nnz < tokens:
        raise ValueError(f"nnz is {nnz}, expected at least the {tokens} tokens of append_indptr")
    if batch_indices is None:
        batch_indices = torch.empty((nnz,), dtype=I32, device=device)
    if positions is None:
        positions = torch.empty((nnz,), dtype=I32, device=device)
    if nnz > tokens:
        batch_indices[tokens:].fill_(-1)
        positions[tokens:].zero_()
    _fir.batch_indices_positions(indptr, seq_lens, batch_indices[:tokens], positions[:tokens])
    return batch_indices, positions


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request, ``[batch]``, i32."""
    out = torch.empty(kv_last_page_len.shape, dtype=I32, device=kv_last_page_len.device)
    _fir.seq_lens(host(kv_indptr), kv_last_page_len, page_size, out)
    return out


def _split(paged_kv_cache):
    k, v = unpack_kv(paged_kv_cache)
    return (k[:, 0], k[:, 1]) if v is None else (k, v)


def _slots(page_size, kv_indptr, kv_indices, kv_last_page_len, batch_indices, positions):
    return page_size, host(kv_indptr), kv_indices, host(kv_last_page_len), batch_indices, positions


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes ``[nnz, kv_heads, head_dim]`` keys and values to the positions of their requests. The page table is read on
    the host: ``kv_indptr`` and ``kv_last_page_len`` on a device cost one copy and one wait each."""
    k, v = _split(paged_kv_cache)
    _native.append_paged_kv(append_key, append_value, k, v, kv_indptr, kv_indices, kv_last_page_len, batch_indices,
                            positions, kv_layout)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor, append_kpe: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    ckv_cache: Optional[torch.Tensor], kpe_cache: Optional[torch.Tensor], kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
) -> None:
    """Writes latent vectors ``[nnz, ckv_dim]`` and rotary parts ``[nnz, kpe_dim]`` to their pages."""
    slots = _slots(ckv_cache.shape[1], kv_indptr, kv_indices, kv_last_page_len, batch_indices, positions)
    _fir.append_paged_mla(append_ckv, append_kpe, ckv_cache, kpe_cache, slots)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache, kv_cache_sf, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    k_scale: float, v_scale: float, kv_layout: str = "NHD",
) -> None:
    """As ``append_paged_kv_cache``, into an NVFP4 cache: packed codes, and a scale per 16 elements."""
    k, v = _split(paged_kv_cache)
    page_size = k.shape[1 if kv_layout == "NHD" else 2]
    slots = _slots(page_size, kv_indptr, kv_indices, kv_last_page_len, batch_indices, positions)
    scales = tuple(kv_cache_sf) if isinstance(kv_cache_sf, (tuple, list)) else (kv_cache_sf[:, 0], kv_cache_sf[:, 1])
    _fir.append_paged_kv(append_key, append_value, k, v, slots, kv_layout, number(k_scale), number(v_scale), scales)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor, append_value: torch.Tensor, slot_mapping: torch.Tensor, paged_kv_cache, kv_cache_sf,
    k_scale: Union[float, torch.Tensor], v_scale: Union[float, torch.Tensor], kv_layout: str = "NHD",
) -> None:
    """As above, with a slot ``page * page_size + offset`` for each token; tokens of negative slots are left out."""
    k, v = _split(paged_kv_cache)
    scales = tuple(kv_cache_sf) if isinstance(kv_cache_sf, (tuple, list)) else (kv_cache_sf[:, 0], kv_cache_sf[:, 1])
    n = slot_mapping.shape[0]
    _fir.append_paged_kv(
        append_key[:n], append_value[:n], k, v, slot_mapping, kv_layout, number(k_scale), number(v_scale), scales
    )
