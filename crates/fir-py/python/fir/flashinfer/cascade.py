"""Merging attention states, and attention over shared prefixes."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .. import _fir
from . import _native
from ._core import F32, Attention, check_buffers, check_layout, dtype_of, host, is_captured, keep, unpack_kv
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states",
]


def _lse(s: torch.Tensor) -> torch.Tensor:
    return s if s.dtype == F32 else s.to(F32)


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor):
    """Merges two states: outputs ``[tokens, heads, head_dim]`` and their log-sum-exps ``[tokens, heads]``, base 2."""
    out, lse = torch.empty_like(v_a), torch.empty(s_a.shape, dtype=F32, device=s_a.device)
    _native.merge_state(v_a, _lse(s_a), v_b, _lse(s_b), out, lse)
    return out, lse


def merge_state_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor,
                         mask: Optional[torch.Tensor] = None) -> None:
    """Merges another state into ``v`` and ``s``, for the tokens that ``mask`` selects."""
    _native.merge_state_in_place(v, s, v_other, _lse(s_other), mask)


def merge_states(v: torch.Tensor, s: torch.Tensor):
    """Merges the states of ``[tokens, states, heads, head_dim]`` and ``[tokens, states, heads]``."""
    tokens, _, heads, dim = v.shape
    out = torch.empty((tokens, heads, dim), dtype=v.dtype, device=v.device)
    lse = torch.empty((tokens, heads), dtype=F32, device=v.device)
    _native.merge_states(v, _lse(s), out, lse)
    return out, lse


class MultiLevelCascadeAttentionWrapper:
    """Attention over levels of shared pages: each level's groups of query tokens share its pages, the last level's are
    the requests' own. The workspace only tells the device.

    With ``use_cuda_graph`` a run that was captured reads the buffers and the plan of the last ``plan()``, of as many groups
    and query tokens; replay it on the stream that ``plan()`` was called on. A ``plan()`` that needs other launches than were
    captured warns."""

    _BUFFERS = ("qo_indptr_buf_arr", "paged_kv_indptr_buf_arr", "paged_kv_indices_buf_arr", "paged_kv_last_page_len_buf_arr")

    def __init__(self, num_levels, float_workspace_buffer: Optional[torch.Tensor] = None, kv_layout: str = "NHD",
                 use_cuda_graph: bool = False, qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None,
                 paged_kv_indices_buf_arr=None, paged_kv_last_page_len_buf_arr=None, *, workspace_buffer=None) -> None:
        self._num_levels = num_levels
        self._float_workspace_buffer = workspace_buffer if float_workspace_buffer is None else float_workspace_buffer
        if self._float_workspace_buffer is None:
            raise TypeError("float_workspace_buffer is missing")
        self._kv_layout, self._use_cuda_graph = check_layout(kv_layout), use_cuda_graph
        self._plan = self._planned_for = None
        if use_cuda_graph:
            self._buffers = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr,
                             paged_kv_last_page_len_buf_arr)
            for name, buffers in zip(self._BUFFERS, self._buffers):
                if buffers is None or len(buffers) != num_levels:
                    raise ValueError(f"{name} should have a tensor for each of {num_levels} levels in CUDA graph mode")
                check_buffers(**{f"{name}[{level}]": buffer for level, buffer in enumerate(buffers)})

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As it was given."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffers) -> None:
        """Takes another workspace."""
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None, window_left: int = -1,
        logits_soft_cap: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
        q_data_type="float16", kv_data_type=None,
    ) -> None:
        """Plans the levels, the most shared first. Masks and positions are those of the whole request, so windows and
        rotations are right across levels. Requests that are too few to win by it are planned flat; page ids on a device are
        then copied to the host, a copy and a wait for each level, and what is written to them later is not seen. In CUDA-graph
        mode the levels stay."""
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for name, array in zip(("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr",
                                "paged_kv_last_page_len"), arrays):
            if len(array) != self._num_levels:
                raise ValueError(f"{name} has {len(array)} levels, expected num_levels={self._num_levels}")
        like = self._float_workspace_buffer
        self._attention = Attention(
            num_qo_heads, like.device, causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        q_dtype = dtype_of(q_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim, head_dim, q_dtype, dtype_of(kv_data_type) or q_dtype, q_dtype)
        offsets, ids = None, paged_kv_indices_arr
        if self._use_cuda_graph:
            for name, buffers, given in zip(self._BUFFERS, self._buffers, arrays):
                for level, pair in enumerate(zip(buffers, given)):
                    keep(f"{name}[{level}]", *pair, fixed=name != "paged_kv_indices_buf_arr")
            if like.is_cuda:
                offsets, ids = list(self._buffers[1]), self._buffers[2]
        tables = zip(qo_indptr_arr, paged_kv_indptr_arr, ids, paged_kv_last_page_len)
        levels = [(host(qo), host(indptr), indices, host(last)) for qo, indptr, indices, last in tables]
        planned_for = (shape, self._attention.variant, like.device)
        if offsets is not None and self._planned_for == planned_for:
            self._plan.refill(like, page_size, levels, offsets)
        else:
            self._plan = _fir.CascadePlan(shape, self._attention.variant, like, page_size, levels, offsets=offsets)
            self._planned_for = planned_for
        self._sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache):
        """One layer: ``q``: ``[tokens, qo_heads, head_dim]``."""
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        k, v = unpack_kv(paged_kv_cache)
        out = torch.empty_like(q)
        captured = self._use_cuda_graph and is_captured(q)
        self._plan.run(q, k, v, out, None, self._sm_scale, self._attention.params, 1.0, 1.0, self._kv_layout, captured)
        return out

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Deprecated: a decode batch of which all requests share one prefix."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(self, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads,
                      head_dim, page_size, data_type="float16") -> None:
        """Plans what the requests do not share."""
        self._wrapper.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            q_data_type=data_type, kv_data_type=data_type,
        )

    def forward(self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache) -> torch.Tensor:
        """One layer: the shared prefix as one request of all query tokens, merged with the rest."""
        out, lse = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True)
        own, own_lse = self._wrapper.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(out, lse, own, own_lse)
        return out

    def end_forward(self) -> None:
        """Does nothing."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Deprecated: a prefill batch of which all requests share one prefix."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
                      num_kv_heads, head_dim, page_size) -> None:
        """Keeps the batch; ``forward`` plans it, as it brings the element types and the mask."""
        self._args = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                      head_dim, page_size)

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache, causal: bool = False,
        use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None, rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> torch.Tensor:
        """One layer."""
        k, _ = unpack_kv(unique_kv_cache)
        self._wrapper.plan(*self._args, causal=causal, sm_scale=sm_scale, q_data_type=q.dtype, kv_data_type=k.dtype)
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        own, own_lse = self._wrapper.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(out, lse, own, own_lse)
        return out

    def end_forward(self) -> None:
        """Does nothing."""
