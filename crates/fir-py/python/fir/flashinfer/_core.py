"""What the modules of this package share: tensors on the host, variants by flags, plans that are kept."""

from __future__ import annotations

import functools
import math
from typing import Any, Optional

import torch

from .. import _fir
from .. import variant as va

F32 = torch.float32
I32 = torch.int32
_NAMES = {
    "float16": torch.float16, "half": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
}


def dtype_of(dtype) -> Optional[torch.dtype]:
    """A torch dtype from itself or its name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    try:
        return _NAMES[str(dtype).removeprefix("torch.")]
    except KeyError:
        raise ValueError(f"dtype {dtype!r}, expected one of {sorted(_NAMES)}") from None


def stored(dtype: torch.dtype):
    """The library's type for a cache of ``dtype``: ``uint8`` holds packed NVFP4."""
    return "e2m1x2" if dtype == torch.uint8 else dtype


def host(t: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory; one copy and one wait if it is on a device."""
    return t.cpu() if t.is_cuda else t


def host_i32(values) -> torch.Tensor:
    """Integers in host memory, whatever torch's default device is."""
    return torch.tensor(values, dtype=I32, device="cpu")


def number(x) -> float:
    """A float from a number or a tensor of one element, None being 1."""
    if x is None:
        return 1.0
    return x.item() if isinstance(x, torch.Tensor) else float(x)


@functools.lru_cache(maxsize=None)
def _ln_2(device: torch.device) -> torch.Tensor:
    return torch.full((1, 1), math.log(2), dtype=F32, device=device)


def base_e(lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps of base 2 as those of base e, in a tensor of their own: a product with one number."""
    from . import _native

    out = torch.empty(lse.shape, dtype=F32, device=lse.device)
    _native.gemm(lse.reshape(-1, 1), _ln_2(lse.device), out.view(-1, 1))
    return out


def refuse(what: str, got: Any, want: str):
    """The argument is understood and cannot be served."""
    raise NotImplementedError(f"{what}={got!r} is not supported, expected {want}")


_ON_SM90 = ("auto", "fa2", "fa3", "cudnn", "xqa", "cublas", "cutlass_sm90", "fa2_tc")
_BLACKWELL = ("trtllm-gen", "cute-dsl", "cutlass", "prims_ts", "tgv")


def check_backend(backend: str) -> str:
    """``backend=`` names that mean a kernel of a Hopper GPU all mean ours; those of Blackwell are refused by name."""
    if backend in _BLACKWELL:
        raise NotImplementedError(f"backend={backend!r} is for Blackwell GPUs; use backend='auto'")
    if backend not in _ON_SM90:
        raise ValueError(f"backend={backend!r}, expected one of {_ON_SM90}")
    return backend


def check_layout(kv_layout: str) -> str:
    """``NHD`` or ``HND``."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout!r}, expected 'NHD' or 'HND'")
    return kv_layout


def check_pos_encoding(mode: str) -> str:
    """``NONE``, ``ROPE_LLAMA`` or ``ALIBI``."""
    if mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise KeyError(f"Invalid pos_encoding_mode {mode!r}, expected 'NONE', 'ROPE_LLAMA' or 'ALIBI'")
    return mode


def unpack_kv(cache) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """``(k, v)``, or ``(kv, None)`` for one tensor of both."""
    if isinstance(cache, (tuple, list)):
        k, v = cache
        return k, v
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise ValueError(f"paged_kv_cache has shape {tuple(cache.shape)}, expected [pages, 2, ...] of 5 axes, or a tuple")
    return cache, None


@functools.lru_cache(maxsize=None)
def get_alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi: ``2^(-8 i / n)`` for the largest power of two, then those between."""
    n = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 / n * (i + 1)) for i in range(n)]
    slopes += [2.0 ** (-4.0 / n * (1 + 2 * i)) for i in range(n_heads - n)]
    return tuple(slopes)


@functools.lru_cache(maxsize=None)
def alibi_tensor(n_heads: int, device: torch.device) -> torch.Tensor:
    """The slopes as ``[n_heads]``, f32."""
    return torch.tensor(get_alibi_slopes(n_heads), dtype=F32, device=device)


@functools.lru_cache(maxsize=None)
def variant_for(
    causal: bool = False, window: bool = False, cap: bool = False, alibi: bool = False, mask: bool = False,
    sink: bool = False, items: bool = False, rope: Optional[tuple[float, float]] = None,
    own: Optional[va.Variant] = None,
) -> va.Variant:
    """The variant of these flags, and of the caller's; a custom mask takes the place of the causal one."""
    parts = []
    if rope is not None:
        parts.append(va.rope(rope[1], rope[0]))
    if mask:
        parts.append(va.custom_mask())
    elif items:
        parts.append(va.multi_item())
    elif causal:
        parts.append(va.causal())
    if window:
        parts.append(va.sliding_window())
    if alibi:
        # Distances count from the index of the query token, not its position: the output is the same, the
        # log-sum-exp is FlashInfer's.
        bias = va.per_head("alibi_slopes") * (va.kv_pos - va.q_idx)
        parts.append(va.variant("AlibiFromIndex", logits=va.score + bias))
    if cap:
        parts.append(va.soft_cap())
    if sink:
        parts.append(va.sink())
    if own is not None:
        parts.append(own)
    whole = parts[0] if parts else va.standard()
    for part in parts[1:]:
        whole = whole & part
    return whole


class Attention:
    """Flags of an attention as FlashInfer names them: a variant, and the values of its parameters."""

    __slots__ = ("variant", "params")

    def __init__(
        self, num_qo_heads: int, device: torch.device, *, causal=False, window_left=-1, logits_soft_cap=None,
        pos_encoding_mode="NONE", rope_scale=None, rope_theta=None, mask=None, sink=None, items=None,
        own=None,
    ) -> None:
        cap = 0.0 if logits_soft_cap is None else float(logits_soft_cap)
        check_pos_encoding(pos_encoding_mode)
        alibi, rope = pos_encoding_mode == "ALIBI", None
        if pos_encoding_mode == "ROPE_LLAMA":
            rope = (1.0 if rope_scale is None else float(rope_scale), 1e4 if rope_theta is None else float(rope_theta))
        self.variant = variant_for(
            bool(causal), window_left >= 0, cap > 0, alibi, mask is not None, sink is not None, items is not None, rope, own
        )
        params: dict[str, Any] = {}
        if window_left >= 0:
            params["window_left"] = int(window_left)
        if cap > 0:
            params["soft_cap"] = cap
        if alibi:
            params["alibi_slopes"] = alibi_tensor(num_qo_heads, device)
        if mask is not None:
            params["mask"] = mask
        if sink is not None:
            params["sink"] = sink
        if items is not None:
            params["prefix_len"], params["token_pos_in_items"], params["token_pos_in_items_len"] = items
        self.params = params or None


def split_of(page_size: int, fixed_split_size: Optional[int], disable_split_kv: bool):
    """How requests are cut: FlashInfer counts pages, the library tokens in multiples of 64."""
    if disable_split_kv:
        return "none"
    if fixed_split_size is None or fixed_split_size <= 0:
        return "balanced"
    return -(-fixed_split_size * page_size // 64) * 64


def packed_mask(custom_mask, packed_custom_mask, qo_indptr, kv_lens):
    """``(bytes, indptr)`` of a mask given by either argument; ``qo_indptr`` and ``kv_lens`` are lists."""
    from .quantization import segment_packbits

    bits = [0]
    for q0, q1, n in zip(qo_indptr, qo_indptr[1:], kv_lens):
        bits.append(bits[-1] + (q1 - q0) * n)
    device = (custom_mask if packed_custom_mask is None else packed_custom_mask).device
    if packed_custom_mask is None:
        indptr = host_i32(bits)
        return segment_packbits(custom_mask.reshape(-1), indptr, bitorder="little")
    bytes_ = [0]
    for a, b in zip(bits, bits[1:]):
        bytes_.append(bytes_[-1] + (b - a + 7) // 8)
    return packed_custom_mask, torch.tensor(bytes_, dtype=I32, device=device)


class Planned:
    """A plan that is kept from one batch to the next while the problem stays the same."""

    __slots__ = ("key", "plan", "attention")

    def __init__(self) -> None:
        self.key, self.plan, self.attention = None, None, None

    def prepare(self, shape, attention: Attention, like: torch.Tensor, requests: int, split):
        key = (shape, attention.variant, like.device, split)
        if self.key != key:
            self.plan = _fir.BatchPlan(shape, attention.variant, like, requests=requests, split=split)
            self.key = key
        self.attention = attention
        return self.plan


def check_dtypes(q, k, q_dtype, kv_dtype) -> None:
    """Refuses tensors of other types than were planned, in FlashInfer's words."""
    if q.dtype != q_dtype:
        raise ValueError(
            f"The dtype of q {q.dtype} does not match the q_data_type {q_dtype} specified in plan function."
        )
    if k.dtype != kv_dtype:
        raise ValueError(
            f"The dtype of k {k.dtype} does not match the kv_data_type {kv_dtype} specified in plan function."
        )


def is_captured(q: torch.Tensor) -> bool:
    """Whether what is queued now goes into a CUDA graph."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def check_buffers(**buffers) -> None:
    """Refuses CUDA-graph mode without its buffers."""
    for name, buffer in buffers.items():
        if not torch.is_tensor(buffer):
            raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")


def keep(name: str, buffer: torch.Tensor, given: torch.Tensor, *, fixed: bool = True) -> None:
    """Copies what a plan is given into the buffer that captured runs read; ``fixed``: one of the batch's size."""
    if fixed and len(given) != len(buffer):
        raise ValueError(f"The size of {name} is {len(given)}, expected {len(buffer)}, that of the buffer: the batch size is "
                         "fixed in CUDA graph mode")
    if len(given) > len(buffer):
        raise ValueError(f"The size of {name} is {len(given)}, expected at most that of the allocated buffer, {len(buffer)}")
    buffer[: len(given)].copy_(given)
