"""The largest elements of rows. ``deterministic`` is ignored: results always are."""

from __future__ import annotations

from enum import IntEnum
from typing import Optional

import torch

from .. import _fir
from . import _native
from ._core import I32, refuse

__all__ = [
    "TopKTieBreak", "can_implement_filtered_topk", "top_k", "top_k_page_table_transform", "top_k_ragged_transform", "topk",
]


class TopKTieBreak(IntEnum):
    """Which of equal elements are taken; here always the first."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def can_implement_filtered_topk() -> bool:
    """One algorithm serves all."""
    return False


def _ties(tie_break: int) -> None:
    if tie_break == TopKTieBreak.LARGE:
        refuse("tie_break", TopKTieBreak.LARGE, "NONE or SMALL: of equal elements the first are taken")


def top_k(input: torch.Tensor, k: int, sorted: bool = False, deterministic: bool = False,
          tie_break: int = TopKTieBreak.NONE, dsa_graph_safe: bool = False):
    """``(values, indices)`` of the ``k`` largest of each row, ``[batch, k]``; indices are i64, and without ``sorted`` in
    the order of the row."""
    _ties(tie_break)
    values = torch.empty((input.shape[0], k), dtype=input.dtype, device=input.device)
    indices = torch.empty((input.shape[0], k), dtype=torch.int64, device=input.device)
    _native.top_k(input, values, indices, sorted)
    return values, indices


topk = top_k


def top_k_page_table_transform(
    input: torch.Tensor, src_page_table: torch.Tensor, lengths: torch.Tensor, k: int,
    row_to_batch: Optional[torch.Tensor] = None, deterministic: bool = False, tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False, row_starts: Optional[torch.Tensor] = None,
    page_table_row_starts: Optional[torch.Tensor] = None, *, page_size: int = 1, out: Optional[torch.Tensor] = None,
    out_raw_indices: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Places of the ``k`` largest of each row's first ``lengths``, looked up in a page table; -1 fills up."""
    _ties(tie_break)
    if out is None:
        out = torch.empty((input.shape[0], k), dtype=I32, device=input.device)
    _fir.top_k_page_table_transform(
        input, lengths, src_page_table, out, starts=row_starts, requests=row_to_batch,
        page_starts=page_table_row_starts, page_size=page_size, raw=out_raw_indices,
    )
    return out


def top_k_ragged_transform(
    input: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, k: int, deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE, dsa_graph_safe: bool = False, row_starts: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Places of the ``k`` largest of each row's first ``lengths``, plus ``offsets``; -1 fills up."""
    _ties(tie_break)
    out = torch.empty((input.shape[0], k), dtype=I32, device=input.device)
    _fir.top_k_ragged_transform(input, lengths, offsets, out, starts=row_starts)
    return out
