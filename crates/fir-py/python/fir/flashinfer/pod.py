"""Prefill and decode together. The two parts run one after another, each on all workers."""

from __future__ import annotations

from typing import Optional

import torch

from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper:
    """One prefill request over plain tensors, and a decode batch over pages."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
                 jit_args=None) -> None:
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer, jit_args=jit_args,
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As it was given."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode: str = "NONE", window_left: int = -1, q_data_type="float16", kv_data_type=None,
             data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking: bool = True) -> None:
        """Plans the decode batch."""
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
            window_left, q_data_type=q_data_type, kv_data_type=kv_data_type, data_type=data_type, sm_scale=sm_scale,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(
        self, q_p, k_p, v_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None,
        causal_p: bool = False, kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE",
        sm_scale_p: Optional[float] = None, window_left_p: int = -1, rope_scale_p: Optional[float] = None,
        rope_theta_p: Optional[float] = None, return_lse_p: bool = False, custom_mask_d=None, packed_custom_mask_d=None,
        causal_d: bool = False, kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE",
        sm_scale_d: Optional[float] = None, window_left_d: int = -1, rope_scale_d: Optional[float] = None,
        rope_theta_d: Optional[float] = None, q_scale: Optional[float] = None, k_scale: Optional[float] = None,
        v_scale: Optional[float] = None, return_lse_d: bool = False, use_fp16_qk_reduction: bool = False,
        enable_pdl: Optional[bool] = None, *args,
    ):
        """One layer; returns the prefill's and the decode's result. The decode's settings are ``plan``'s."""
        first = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
            kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p,
            window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p,
        )
        second = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse_d
        )
        return first, second

    def end_forward(self) -> None:
        """Deprecated: does nothing."""


class BatchPODWithPagedKVCacheWrapper:
    """A prefill batch and a decode batch over pages."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Never."""
        return False

    def plan(self, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, qo_indptr_d, kv_indptr_d, kv_indices_d,
             last_page_len_d, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode: str = "NONE",
             window_left: int = -1, q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None,
             rope_scale=None, rope_theta=None, non_blocking: bool = True) -> None:
        """Plans both batches; the prefill's mask comes with ``run``."""
        rest = (num_qo_heads, num_kv_heads, head_dim, page_size)
        types = dict(q_data_type=data_type or q_data_type, kv_data_type=kv_data_type or data_type, sm_scale=sm_scale)
        self._flags = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, rope_scale=rope_scale,
                           rope_theta=rope_theta)
        self._first = ((qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *rest), {**types, **self._flags})
        self._decode.plan(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *rest, **types, **self._flags)
        self._causal = None

    begin_forward = plan

    def run(self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None,
            causal_p: bool = False, q_scale=None, k_scale=None, v_scale=None, return_lse: bool = False,
            use_fp16_qk_reduction: bool = False, enable_pdl: Optional[bool] = None):
        """One layer; returns the prefill's and the decode's result."""
        key = (causal_p, custom_mask_p, packed_custom_mask_p)
        if self._causal is None or any(a is not b for a, b in zip(self._causal, key)):
            args, kwargs = self._first
            self._prefill.plan(*args, **kwargs, causal=causal_p, custom_mask=custom_mask_p,
                               packed_custom_mask=packed_custom_mask_p)
            self._causal = key
        scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
        return self._prefill.run(q_p, paged_kv_cache_p, **scales), self._decode.run(q_d, paged_kv_cache_d, **scales)

    def end_forward(self) -> None:
        """Deprecated: does nothing."""
