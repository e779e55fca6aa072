"""Norms of rows. ``enable_pdl`` is ignored."""

from __future__ import annotations

from typing import Optional, Union

import torch

from . import _native
from ._core import number

__all__ = [
    "fused_add_rmsnorm", "fused_add_rmsnorm_quant", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "layernorm",
    "layernorm_quant", "rmsnorm", "rmsnorm_quant",
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
