"""Gated activations. ``enable_pdl`` is ignored."""

from __future__ import annotations

from typing import Optional

import torch

from . import _native

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]


def _gated(op, input: torch.Tensor, out: Optional[torch.Tensor]) -> torch.Tensor:
    half = input.shape[-1] // 2
    if input.shape[-1] * input.element_size() % 16 != 0:
        raise ValueError(f"The last dimension must be a multiple of 16 bytes, got {input.shape[-1]} of {input.dtype}")
    if out is None:
        out = torch.empty(input.shape[:-1] + (half,), dtype=input.dtype, device=input.device)
    elif out.shape != input.shape[:-1] + (half,):
        raise ValueError(f"out has shape {tuple(out.shape)}, expected {tuple(input.shape[:-1]) + (half,)}")
    op(input.view(-1, 2 * half), out.view(-1, half))
    return out


def silu_and_mul(input: torch.Tensor, out: Optional[torch.Tensor] = None,
                 enable_pdl: Optional[bool] = None) -> torch.Tensor:
    """``silu(input[..., :d]) * input[..., d:]``."""
    return _gated(_native.silu_and_mul, input, out)


def gelu_tanh_and_mul(input: torch.Tensor, out: Optional[torch.Tensor] = None,
                      enable_pdl: Optional[bool] = None) -> torch.Tensor:
    """``gelu(input[..., :d], approximate="tanh") * input[..., d:]``."""
    return _gated(_native.gelu_tanh_and_mul, input, out)


def gelu_and_mul(input: torch.Tensor, out: Optional[torch.Tensor] = None,
                 enable_pdl: Optional[bool] = None) -> torch.Tensor:
    """``gelu(input[..., :d]) * input[..., d:]``."""
    return _gated(_native.gelu_and_mul, input, out)
