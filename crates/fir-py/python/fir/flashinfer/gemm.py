"""Products of matrices. ``backend``, ``pdl`` and the like choose among FlashInfer's kernels and change nothing here."""

from __future__ import annotations

from typing import Optional

import torch

from . import _native
from ._core import host, refuse

__all__ = [
    "SegmentGEMMWrapper", "bmm_bf16", "bmm_fp8", "fp8_blockscale_gemm_sm90", "grouped_mm_bf16", "grouped_mm_fp8", "mm_bf16",
    "tinygemm_bf16",
]


def mm_bf16(a: torch.Tensor, b: torch.Tensor, bias: Optional[torch.Tensor] = None, pdl: bool = False,
            out: Optional[torch.Tensor] = None, out_dtype: torch.dtype = torch.bfloat16,
            backend: str = "cudnn") -> torch.Tensor:
    """``a @ b (+ bias)``: ``a``: ``[m, k]``, ``b``: ``[k, n]``, column-major."""
    if out is None:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    _native.gemm(a, _rows(b), out, bias)
    return out


def _rows(b: torch.Tensor) -> torch.Tensor:
    """``[.., k, n]`` as ``[.., n, k]`` with contiguous rows: a view of what is column-major, else a copy."""
    return b.transpose(-1, -2) if b.stride(-2) == 1 else b.transpose(-1, -2).contiguous()


def bmm_bf16(A: torch.Tensor, B: torch.Tensor, out: Optional[torch.Tensor] = None,
             out_dtype: torch.dtype = torch.bfloat16, backend: str = "cudnn") -> torch.Tensor:
    """``A[b] @ B[b]``: ``A``: ``[b, m, k]``, ``B``: ``[b, k, n]``, column-major."""
    if out is None:
        out = torch.empty((A.shape[0], A.shape[1], B.shape[2]), dtype=out_dtype, device=A.device)
    _native.batched_gemm((A, None, (0, 0)), (_rows(B), None, (0, 0)), out)
    return out


def bmm_fp8(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor, dtype: torch.dtype,
            out: Optional[torch.Tensor] = None, backend: str = "cublas") -> torch.Tensor:
    """``A[b] @ B[b] * A_scale * B_scale`` of fp8, with one scale each."""
    batch = A.shape[0]
    if out is None:
        out = torch.empty((batch, A.shape[1], B.shape[2]), dtype=dtype, device=A.device)
    scales = [s.reshape(1, 1, 1).expand(batch, 1, 1).contiguous() for s in (A_scale, B_scale)]
    _native.batched_gemm((A, scales[0], (0, 0)), (_rows(B), scales[1], (0, 0)), out)
    return out


def tinygemm_bf16(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: Optional[torch.Tensor] = None,
                  use_pdl: bool = False) -> None:
    """``out = input @ weight.T (+ bias)``."""
    _native.gemm(input, weight, out, bias)


def fp8_blockscale_gemm_sm90(
    input: torch.Tensor, weight: torch.Tensor, input_scale: Optional[torch.Tensor] = None,
    weight_scale: Optional[torch.Tensor] = None, out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """``input @ weight.T`` with a scale per 128 elements of a row of ``input`` and per 128 x 128 of ``weight``; a bf16
    ``input`` is not rounded to fp8."""
    if out is None:
        out = torch.empty((input.shape[0], weight.shape[0]), dtype=out_dtype or torch.bfloat16, device=input.device)
    _native.scaled_gemm((input, input_scale, (1, 128)), (weight, weight_scale, (128, 128)), out)
    return out


def grouped_mm_bf16(a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, out: Optional[torch.Tensor] = None,
                    out_dtype: torch.dtype = torch.bfloat16, *, backend: str = "cudnn",
                    tactic: int = -1) -> torch.Tensor:
    """Rows ``m_indptr[g]:m_indptr[g + 1]`` of ``a`` times ``b[g].T``; ``b``: ``[groups, n, k]``."""
    if out is None:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    _native.grouped_gemm((a, None, (0, 0)), m_indptr, (b, None, (0, 0)), out)
    return out


def grouped_mm_fp8(a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, alpha: Optional[torch.Tensor] = None,
                   out: Optional[torch.Tensor] = None, out_dtype: torch.dtype = torch.bfloat16, *,
                   backend: str = "cudnn", tactic: int = -1) -> torch.Tensor:
    """As ``grouped_mm_bf16``, of fp8, times ``alpha`` ``[1]``."""
    if out is None:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    scale = None if alpha is None else alpha.reshape(1, 1)
    _native.grouped_gemm((a, scale, (0, 0)), m_indptr, (b, None, (0, 0)), out)
    return out


class SegmentGEMMWrapper:
    """Segments of rows, each with its own weights. The workspace is ignored."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._float_workspace_buffer = float_workspace_buffer

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._float_workspace_buffer = float_workspace_buffer

    def run(
        self, x: torch.Tensor, weights: torch.Tensor, batch_size: int, weight_column_major: bool,
        out: Optional[torch.Tensor] = None, seg_lens: Optional[torch.Tensor] = None,
        seg_indptr: Optional[torch.Tensor] = None, weight_indices: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """``x[segment] @ weights[i]``: weights ``[n, d_in, d_out]``, or ``[n, d_out, d_in]`` if column-major; others are
        copied to that order."""
        if seg_lens is None and seg_indptr is None:
            raise ValueError("Either seg_lens or seg_indptr should be provided.")
        if seg_indptr is None:
            ends = [0]
            for n in host(seg_lens).tolist():
                ends.append(ends[-1] + n)
            seg_indptr = torch.tensor(ends, dtype=torch.int64, device="cpu")
        seg_indptr = host(seg_indptr)
        if len(seg_indptr) != batch_size + 1:
            refuse("batch_size", batch_size, f"{len(seg_indptr) - 1}, the number of segments")
        w = weights if weight_column_major else _rows(weights)
        if out is None:
            out = torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)
        _native.grouped_gemm((x, None, (0, 0)), seg_indptr, (w, None, (0, 0)), out, weight_indices)
        return out

    forward = run
