"""Copies that join tensors."""

from __future__ import annotations

import torch

__all__ = ["concat_mla_k"]


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    """``k[..., :nope] = k_nope`` and ``k[..., nope:] = k_rope`` of all heads, in place: two copies."""
    nope = k_nope.shape[-1]
    k[..., :nope].copy_(k_nope)
    k[..., nope:].copy_(k_rope.expand(k[..., nope:].shape))
