"""Routing of a mixture of experts."""

from __future__ import annotations

from typing import Optional

import torch

from .. import _fir
from ._core import F32, I32, refuse

__all__ = ["fused_topk_deepseek"]


def fused_topk_deepseek(
    scores: torch.Tensor, bias: torch.Tensor, n_group: int, topk_group: int, topk: int, routed_scaling_factor: float,
    topk_values: torch.Tensor, topk_indices: torch.Tensor, launch_with_pdl: bool = True,
    routing_replay_out: Optional[torch.Tensor] = None, *, backend: str = "default",
) -> None:
    """DeepSeek's routing: sigmoid scores, groups by the sum of their two best, weights that sum to the factor. Writes
    ``topk_values`` and ``topk_indices``, ``[tokens, topk]``."""
    if routing_replay_out is not None:
        refuse("routing_replay_out", "a tensor", "None")
    ids = topk_indices if topk_indices.dtype == I32 else torch.empty_like(topk_indices, dtype=I32)
    weights = topk_values if topk_values.dtype == F32 else torch.empty_like(topk_values, dtype=F32)
    _fir.moe_route(scores, bias, ids, weights, score="sigmoid", groups=(n_group, topk_group), scale=routed_scaling_factor)
    if ids is not topk_indices:
        topk_indices.copy_(ids)
    if weights is not topk_values:
        topk_values.copy_(weights)
