"""``BatchAttention`` and attention with sinks."""

from __future__ import annotations

import functools
from typing import Optional

import torch

from ._core import host, host_i32, number
from .prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention:
    """Prefill and decode in one batch; as the paged prefill wrapper, with lengths in tokens."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty((1,), device=device), kv_layout)

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int, causal: bool = False,
        sm_scale: Optional[float] = None, logits_soft_cap: Optional[float] = None,
        q_data_type: torch.dtype = torch.bfloat16, kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch; ``use_profiler`` is ignored."""
        last = host_i32([(n - 1) % page_size + 1 if n > 0 else 0 for n in host(kv_len_arr).tolist()])
        self._wrapper.plan(
            qo_indptr, kv_indptr, kv_indices, last, num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo,
            causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self, q: torch.Tensor, kv_cache, out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None,
        k_scale=None, v_scale=None, logits_soft_cap: float = 0.0, profiler_buffer: Optional[torch.Tensor] = None,
        kv_cache_sf=None,
    ):
        """One layer; returns ``(out, lse)``. A soft cap is ``plan``'s; ``profiler_buffer`` is ignored."""
        planned = self._wrapper._logits_soft_cap or 0.0
        if logits_soft_cap and logits_soft_cap != planned:
            raise ValueError(f"logits_soft_cap {logits_soft_cap} mismatches that of plan(), {planned}")
        return self._wrapper.run(
            q, kv_cache, k_scale=number(k_scale), v_scale=number(v_scale), out=out, lse=lse, return_lse=True,
            kv_cache_sf=kv_cache_sf,
        )


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Paged prefill with a sink: one more key in every row, of logit ``sink[head]`` and value 0.
    ``run(q, kv_cache, sink, sm_scale)``."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None, paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None, paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None, mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16, kv_data_type: torch.dtype = torch.bfloat16, head_dim_qk: int = 128,
        head_dim_vo: int = 128, window_left: int = -1,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
                         paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend)
        self._sink, self._own_window, self._own_encoding = True, window_left, pos_encoding_mode

    def plan(self, *args, **kwargs) -> None:
        """As the paged prefill wrapper's; the window and the encoding of positions are the constructor's unless given."""
        if self._own_window >= 0:
            kwargs.setdefault("window_left", self._own_window)
        if self._own_encoding != "NONE":
            kwargs.setdefault("pos_encoding_mode", self._own_encoding)
        super().plan(*args, **kwargs)

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache, sink: torch.Tensor, sm_scale: Optional[float] = None, *, q_scale=None,
        k_scale=None, v_scale=None, out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None,
        return_lse: bool = False, enable_pdl: Optional[bool] = None, window_left: Optional[int] = None, kv_cache_sf=None,
    ):
        """One layer; ``sink``: ``[qo_heads]``, f32. ``enable_pdl`` is ignored."""
        scale = number(q_scale)
        if sm_scale is not None:
            scale *= sm_scale / self._sm_scale
        return self._run_paged(q, paged_kv_cache, (), scale, k_scale, v_scale, out, lse, return_lse, window_left,
                               kv_cache_sf, sink)

    run_return_lse = functools.partialmethod(run, return_lse=True)
