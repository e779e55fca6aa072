"""Packed bits, and numbers of 8 and 4 bits with scales.

Scales come in plain row order: what asks for Blackwell's swizzled order is refused by name.
"""

from __future__ import annotations

from typing import Optional

import torch

from .. import _fir
from . import _native
from ._core import F32, I32, check_layout, host, number, refuse

__all__ = [
    "dequantize_fp8", "mxfp4_dequantize", "mxfp4_dequantize_host", "mxfp4_quantize", "mxfp8_dequantize_host",
    "mxfp8_quantize", "nvfp4_kv_dequantize", "nvfp4_kv_dequantize_paged", "nvfp4_kv_quantize", "packbits", "per_token_group_quant_8bit",
    "quantize_fp8", "segment_packbits",
]


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Eight truth values to a byte, ``[ceil(n / 8)]``, uint8."""
    out = torch.empty(((x.shape[0] + 7) // 8,), dtype=torch.uint8, device=x.device)
    _native.packbits(_truth(x), bitorder, out)
    return out


def _truth(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.bool else x.to(torch.bool)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"):
    """As ``packbits``, each segment from a byte of its own; returns the bytes and their offsets."""
    indptr = host(indptr)
    packed = _fir.packed_indptr(indptr)
    out = torch.empty((packed[-1],), dtype=torch.uint8, device=x.device)
    _fir.segment_packbits(_truth(x), indptr, bitorder, out)
    return out, torch.tensor(packed, dtype=I32, device=x.device)


def quantize_fp8(x: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn):
    """fp8 and f32 scales of blocks of ``(rows, columns)``, 0 standing for all."""
    rows, columns = x.shape[-2:]
    counts = tuple(1 if b == 0 else -(-n // b) for n, b in zip((rows, columns), block))
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-2] + counts, dtype=F32, device=x.device)
    _native.quantize_fp8(x, block, out, scales)
    return out, scales


def dequantize_fp8(x: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = F32):
    """The numbers that fp8 and its scales stand for."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _native.dequantize_fp8(x, scales, block, out)
    return out


def per_token_group_quant_8bit(
    x: torch.Tensor, group_size: int, eps: float = 1e-10, dst_dtype: Optional[torch.dtype] = None,
    column_major_scales: bool = False, scale_tma_aligned: bool = False, scale_ue8m0: bool = False,
    backend: str = "cutile",
):
    """fp8 with a scale per ``group_size`` elements of a row. ``eps`` is ignored: scales are at least 2^-126; so is
    ``backend``. ``column_major_scales`` gives the same scales with the rows next to each other in memory."""
    dtype = dst_dtype or torch.float8_e4m3fn
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        refuse("dst_dtype", dtype, "float8_e4m3fn or float8_e5m2")
    for name, got in (("scale_tma_aligned", scale_tma_aligned), ("scale_ue8m0", scale_ue8m0)):
        if got:
            refuse(name, got, "False")
    q, s = quantize_fp8(x.reshape(-1, x.shape[-1]), (1, group_size), dtype)
    s = s.view(x.shape[:-1] + (x.shape[-1] // group_size,))
    return q.view(x.shape), s.transpose(-1, -2).contiguous().transpose(-1, -2) if column_major_scales else s


def _plain(is_sf_swizzled_layout: bool) -> None:
    if is_sf_swizzled_layout:
        refuse("is_sf_swizzled_layout", True, "False: the swizzled order is Blackwell's")


def mxfp8_quantize(input: torch.Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32,
                   enable_pdl: Optional[bool] = None, backend: str = "cuda", sf_swizzle_layout=None):
    """``[m, k]`` to e4m3 with a power of two per 32 elements, ``[m, k / 32]``, uint8, plain order."""
    _plain(is_sf_swizzled_layout or sf_swizzle_layout is not None)
    out = torch.empty(input.shape, dtype=torch.float8_e4m3fn, device=input.device)
    scales = torch.empty((input.shape[0], input.shape[1] // 32), dtype=torch.uint8, device=input.device)
    _native.quantize_blocks("mxfp8", input, out, scales)
    return out, scales


def mxfp8_dequantize_host(input: torch.Tensor, scale_tensor: torch.Tensor, is_sf_swizzled_layout: bool = True,
                          sf_swizzle_layout=None) -> torch.Tensor:
    """The numbers of ``mxfp8_quantize``, f32."""
    _plain(is_sf_swizzled_layout or sf_swizzle_layout is not None)
    out = torch.empty(input.shape, dtype=F32, device=input.device)
    _native.dequantize_blocks("mxfp8", input, scale_tensor.view(input.shape[0], -1), out)
    return out


def mxfp4_quantize(a: torch.Tensor, backend: str = "cuda", enable_pdl: Optional[bool] = None, sfLayout=None):
    """``[m, k]`` to packed e2m1, ``[m, k / 2]``, uint8, and a power of two per 32 elements, uint8; pass
    ``sfLayout="linear"``."""
    if sfLayout != "linear":
        refuse("sfLayout", sfLayout, "'linear': the swizzled order is Blackwell's")
    out = torch.empty((a.shape[0], a.shape[1] // 2), dtype=torch.uint8, device=a.device)
    scales = torch.empty((a.shape[0], a.shape[1] // 32), dtype=torch.uint8, device=a.device)
    _native.quantize_blocks("mxfp4", a, out, scales)
    return out, scales


def mxfp4_dequantize(a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout=None) -> torch.Tensor:
    """The numbers of ``mxfp4_quantize``, f32; pass ``sfLayout="linear"``."""
    if sfLayout != "linear":
        refuse("sfLayout", sfLayout, "'linear': the swizzled order is Blackwell's")
    return mxfp4_dequantize_host(a_fp4, a_sf)


def mxfp4_dequantize_host(weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """The numbers of packed e2m1 ``[m, k / 2]`` and scales ``[m, k / 32]``, f32."""
    if group_size != 32:
        refuse("group_size", group_size, "32")
    out = torch.empty((weight.shape[0], weight.shape[1] * 2), dtype=F32, device=weight.device)
    _native.dequantize_blocks("mxfp4", weight, scale, out)
    return out


def nvfp4_kv_quantize(input: torch.Tensor, global_scale: torch.Tensor):
    """``[m, k]`` to packed e2m1 ``[m, k / 2]`` and e4m3 scales ``[m, k / 16]``, both uint8;
    ``value = e2m1 * scale * global_scale``."""
    out = torch.empty((input.shape[0], input.shape[1] // 2), dtype=torch.uint8, device=input.device)
    scales = torch.empty((input.shape[0], input.shape[1] // 16), dtype=torch.uint8, device=input.device)
    _native.quantize_blocks("nvfp4", input, out, scales, number(global_scale))
    return out, scales


def nvfp4_kv_dequantize(fp4_data: torch.Tensor, block_scales: torch.Tensor, global_scale: torch.Tensor,
                        output_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The numbers of ``nvfp4_kv_quantize``."""
    out = torch.empty((fp4_data.shape[0], fp4_data.shape[1] * 2), dtype=output_dtype, device=fp4_data.device)
    _native.dequantize_blocks("nvfp4", fp4_data, block_scales, out, number(global_scale))
    return out


def nvfp4_kv_dequantize_paged(
    paged_kv_cache, kv_cache_sf, block_tables: torch.Tensor, seq_lens: torch.Tensor, k_scale: torch.Tensor,
    v_scale: torch.Tensor, output_k: torch.Tensor, output_v: torch.Tensor, kv_layout: str = "NHD",
) -> None:
    """The numbers of a paged NVFP4 cache in ``[batch, max_seq_len, kv_heads, head_dim]``; tokens past ``seq_lens`` are left
    as they are. Pages of one request after another are gathered, then dequantized."""
    check_layout(kv_layout)
    halves = lambda x: x if isinstance(x, (tuple, list)) else (x[:, 0], x[:, 1])
    tables, lens = host(block_tables), host(seq_lens).tolist()
    sides = zip(halves(paged_kv_cache), halves(kv_cache_sf), (k_scale, v_scale), (output_k, output_v))
    for codes, scales, scale, out in sides:
        page_size, factor = codes.shape[1 if kv_layout == "NHD" else 2], number(scale)
        for r, tokens in enumerate(lens):
            ids = tables[r, : -(-tokens // page_size)].to(device=codes.device, dtype=torch.int64)
            pages = [t.view(torch.uint8).index_select(0, ids) for t in (codes, scales)]
            if kv_layout == "HND":
                pages = [p.transpose(1, 2) for p in pages]
            pages = [p.reshape(-1, p.shape[-1]) for p in pages]
            rows = torch.empty((pages[0].shape[0], out.shape[-1]), dtype=out.dtype, device=out.device)
            _native.dequantize_blocks("nvfp4", *pages, rows, factor)
            out[r, :tokens].copy_(rows.view(-1, *out.shape[2:])[:tokens])
