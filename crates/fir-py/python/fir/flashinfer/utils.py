"""Enumerations, errors and questions about devices."""

from __future__ import annotations

from enum import Enum
from typing import Optional

import torch

from ._core import get_alibi_slopes as _slopes

__all__ = [
    "BackendSupportedError", "FP4Tensor", "GPUArchitectureError", "LibraryError", "MaskMode", "PosEncodingMode",
    "TensorLayout", "determine_attention_backend", "device_support_pdl", "get_alibi_slopes", "get_compute_capability",
    "is_fa3_backend_supported", "is_sm90a_supported", "is_sm100a_supported", "is_sm120a_supported",
    "next_positive_power_of_2",
]


class PosEncodingMode(Enum):
    """How positions enter attention."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """Which keys a query sees."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """Order of the axes of a page."""

    NHD = 0
    HND = 1


class GPUArchitectureError(Exception):
    """The device is of another generation than the operator."""


class LibraryError(Exception):
    """A library is missing."""


class BackendSupportedError(Exception):
    """The backend does not serve this operator or device."""


class FP4Tensor:
    """Packed fp4 data and its scales, as a name to import; the operators that return one are Blackwell's."""

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, scale_start_index: int = 0,
                 original_shape: Optional[tuple] = None) -> None:
        self.data, self.scale = data, scale
        self.scale_start_index, self.original_shape, self.dtype = scale_start_index, original_shape, "nvfp4"


def get_alibi_slopes(n_heads: int, device=None) -> torch.Tensor:
    """``[n_heads]``, f32: the slopes of ALiBi."""
    return torch.tensor(_slopes(n_heads), dtype=torch.float32, device=device)


def next_positive_power_of_2(x: int) -> int:
    """The least power of two that is not below ``x``."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """``(major, minor)`` of a CUDA device."""
    if device.type != "cuda":
        raise ValueError("device must be a cuda device")
    return torch.cuda.get_device_capability(device.index)


def _major(device) -> int:
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 0


def is_sm90a_supported(device=None) -> bool:
    """Whether the device is a Hopper GPU."""
    return _major(device) == 9


def is_sm100a_supported(device=None) -> bool:
    """Whether the device is a Blackwell data-centre GPU."""
    return _major(device) == 10


def is_sm120a_supported(device=None) -> bool:
    """Whether the device is a Blackwell consumer GPU."""
    return _major(device) == 12


def device_support_pdl(device=None) -> bool:
    """Whether kernels of the device may start before their predecessor ends."""
    return _major(device) >= 9


def is_fa3_backend_supported(*args, **kwargs) -> bool:
    """Every problem goes to the kernel that serves it; there is nothing to choose."""
    return True


def determine_attention_backend(*args, **kwargs) -> str:
    """One library serves every problem; its name where FlashInfer would answer ``fa2`` or ``fa3``."""
    return "fa2"
