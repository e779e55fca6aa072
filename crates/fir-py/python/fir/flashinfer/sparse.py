"""Attention under masks of blocks."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .. import _fir
from ._core import F32, Attention, check_backend, dtype_of, host, host_i32, refuse

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """``[nnz, R, C]`` masks of blocks as rows of their row blocks, one after another: ``[nnz * R * C]``."""
    nnz, rows, cols = mask.shape
    out = torch.empty((nnz * rows * cols,), dtype=mask.dtype, device=mask.device)
    ends = host(indptr).tolist()
    for a, b in zip(ends, ends[1:]):
        block = out[a * rows * cols : b * rows * cols].view(rows, b - a, cols)
        block.copy_(mask[a:b].transpose(0, 1))
    return out


def check_planned(planned, *given) -> None:
    """Refuses what a deprecated ``forward`` is told if ``plan`` was told another; what it leaves out is ``plan``'s."""
    names = ("pos_encoding_mode", "logits_soft_cap", "rope_scale", "rope_theta")
    for name, now, before in zip(names, given, planned):
        if now not in (None, "NONE", before):
            raise ValueError(f"{name} {now!r} mismatches that of plan(), {before!r}")


class BlockSparseAttentionWrapper:
    """Row blocks of ``R`` queries see column blocks of ``C`` keys, in CSR form."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._float_workspace_buffer, self._backend = float_workspace_buffer, check_backend(backend)
        self._plan = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self, indptr: Optional[torch.Tensor], indices: Optional[torch.Tensor], M: int, N: int, R: int, C: int,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, mask: Optional[torch.Tensor] = None,
        packed_mask: Optional[torch.Tensor] = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: Optional[float] = None, sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None, rope_theta: Optional[float] = None, q_data_type="float16", kv_data_type=None,
        o_data_type="float16", non_blocking: bool = True, block_mask: Optional[torch.Tensor] = None,
    ) -> None:
        """Plans the mask. ``mask``: ``[nnz, R, C]``, bool, within the blocks; ``use_fp16_qk_reduction`` and
        ``non_blocking`` are ignored."""
        if block_mask is not None:
            refuse("block_mask", "a tensor", "indptr and indices (or VariableBlockSparseAttentionWrapper)")
        if causal:
            refuse("causal", True, "False: positions of gathered keys are places in the list")
        indptr, indices = host(indptr), host(indices)
        bits = None
        if mask is not None or packed_mask is not None:
            from .quantization import segment_packbits

            offsets = host_i32([n * R * C for n in indptr.tolist()])
            if packed_mask is None:
                bits = segment_packbits(convert_bsr_mask_layout(mask, indptr), offsets, bitorder="little")
            else:
                sizes = [0]
                for a, b in zip(offsets.tolist(), offsets.tolist()[1:]):
                    sizes.append(sizes[-1] + (b - a + 7) // 8)
                bits = (packed_mask, torch.tensor(sizes, dtype=torch.int32, device=packed_mask.device))
        like = self._float_workspace_buffer
        self._flags = (pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        self._attention = Attention(
            num_qo_heads, like.device, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale, rope_theta=rope_theta, mask=bits,
        )
        q_dtype = dtype_of(q_data_type)
        out = dtype_of(o_data_type)
        self._out_dtype = q_dtype if out == torch.float16 and q_dtype.itemsize > 1 else out
        shape = (num_qo_heads, num_kv_heads, head_dim, head_dim, q_dtype, dtype_of(kv_data_type) or q_dtype,
                 self._out_dtype)
        self._plan = _fir.SparsePlan.fixed(shape, self._attention.variant, like, indptr, indices, M, N, R, C)
        self._sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale

    begin_forward = plan

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: Optional[torch.Tensor] = None,
        scale_k: Optional[torch.Tensor] = None, scale_v: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None, return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ):
        """One layer: ``q``: ``[M, qo_heads, head_dim]``, ``k``, ``v``: ``[N, kv_heads, head_dim]``."""
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        if scale_q is not None or scale_k is not None or scale_v is not None:
            refuse("scale_q, scale_k, scale_v", "tensors", "None")
        out = torch.empty(q.shape, dtype=self._out_dtype, device=q.device) if out is None else out
        if return_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=F32, device=q.device)
        self._plan.run(q, k, v, out, lse if return_lse else None, self._sm_scale, self._attention.params)
        return (out, lse) if return_lse else out

    def forward(self, q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode: str = "NONE",
                use_fp16_qk_reduction: bool = False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
                rope_theta=None):
        """Deprecated: ``run``; what is given here must be what ``plan`` got."""
        check_planned(self._flags, pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        if sm_scale is not None:
            self._sm_scale = sm_scale
        return self.run(q, k, v, scale_q, scale_k, scale_v)

    def end_forward(self) -> None:
        """Deprecated: does nothing."""


class VariableBlockSparseAttentionWrapper:
    """Blocks of any size, with a mask of blocks per KV head; tensors have heads first."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._float_workspace_buffer, self._backend = float_workspace_buffer, check_backend(backend)
        self._plan = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self, block_mask_map: torch.Tensor, block_row_sz: torch.Tensor, block_col_sz: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: Optional[float] = None, sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None, rope_theta: Optional[float] = None, non_blocking: bool = True,
        q_data_type="float16", kv_data_type=None,
    ) -> None:
        """Plans the mask: ``[kv_heads, rows, cols]``, bool, and the sizes of its blocks."""
        if causal:
            refuse("causal", True, "False: positions of gathered keys are places in the list")
        if pos_encoding_mode == "ALIBI":
            refuse("pos_encoding_mode", "ALIBI", "NONE or ROPE_LLAMA: heads are planned in groups, which know no slopes")
        like = self._float_workspace_buffer
        self._flags = (pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        self._attention = Attention(
            num_qo_heads, like.device, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )
        q_dtype = dtype_of(q_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim, head_dim, q_dtype, dtype_of(kv_data_type) or q_dtype, q_dtype)
        sizes = [host(t).to(torch.int32) for t in (block_row_sz, block_col_sz)]
        self._plan = _fir.SparsePlan.variable(shape, self._attention.variant, like, host(block_mask_map), *sizes)
        self._sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Optional[torch.Tensor] = None,
            lse: Optional[torch.Tensor] = None, return_lse: bool = False, enable_pdl: Optional[bool] = None):
        """One layer: ``q``: ``[qo_heads, qo_len, head_dim]``, ``k``, ``v``: ``[kv_heads, kv_len, head_dim]``."""
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        out = torch.empty_like(q) if out is None else out
        if return_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=F32, device=q.device)
        self._plan.run(q, k, v, out, lse if return_lse else None, self._sm_scale, self._attention.params)
        return (out, lse) if return_lse else out

    def forward(self, q, k, v, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
                logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: ``run``; what is given here must be what ``plan`` got."""
        check_planned(self._flags, pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        if sm_scale is not None:
            self._sm_scale = sm_scale
        return self.run(q, k, v)
