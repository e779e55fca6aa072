"""One query token per request: ``single_decode_with_kv_cache`` and the batch wrappers."""

from __future__ import annotations

import functools
import math
from typing import Optional, Union

import torch

from .. import _fir
from ._core import (
    F32, Attention, check_backend, check_buffers, check_layout, dtype_of, host, is_captured, keep, number, refuse, split_of,
    stored, unpack_kv,
)
from ._wrapper import Paged, block_scales, planned_types
from .prefill import (
    cudnn_batch_prefill_with_kv_cache, single_prefill_with_kv_cache_with_jit_module, single_request, table_of,
)

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "cudnn_batch_decode_with_kv_cache", "fast_decode_plan",
    "single_decode_with_kv_cache", "single_decode_with_kv_cache_with_jit_module", "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: Optional[float] = None, k_scale: Optional[float] = None,
    v_scale: Optional[float] = None, window_left: int = -1, logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
    return_lse: bool = False,
):
    """Attention of one query token; ``q``: ``[qo_heads, head_dim]``, ``k``, ``v``: ``[kv_len, kv_heads, head_dim]``
    (NHD) or ``[kv_heads, kv_len, head_dim]`` (HND). Returns ``[qo_heads, head_dim]``, and with ``return_lse`` also
    ``[qo_heads]``, f32, base 2. ``use_tensor_cores`` is ignored."""
    check_layout(kv_layout)
    heads, dim = q.shape
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    out = torch.empty((1, heads, v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((1, heads), dtype=F32, device=q.device) if return_lse else None
    scale = (1.0 / math.sqrt(dim) if sm_scale is None else sm_scale) * number(q_scale)
    single_request(
        q.unsqueeze(0), k, v, out, lse, None, None, False, window_left, logits_soft_cap or 0.0, pos_encoding_mode,
        1.0 if rope_scale is None else rope_scale, 1e4 if rope_theta is None else rope_theta, scale, number(k_scale),
        number(v_scale))
    return (out[0], lse[0]) if return_lse else out[0]


def single_decode_with_kv_cache_with_jit_module(
    jit_module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: str = "NHD", window_left: int = -1,
    return_lse: bool = False,
):
    """Attention of one query token by a module of ``flashinfer.jit``; ``args`` are its tensors, then its scalars."""
    result = single_prefill_with_kv_cache_with_jit_module(
        jit_module, q.unsqueeze(0), k, v, *args, kv_layout=kv_layout, window_left=window_left, return_lse=return_lse)
    return (result[0][0], result[1][0]) if return_lse else result[0]


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    """A decode batch over a paged cache: ``plan()`` once per step, ``run()`` once per layer.

    The workspace only tells the device; scratch is sized by the plan. ``use_tensor_cores`` and ``backend`` choose among
    kernels of FlashInfer's and change nothing here. The page table is read by ``plan()``: on the host it costs no
    copy; ``indptr`` and ``last_page_len`` on a device cost one copy and one wait each, ``indices`` stay there.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Optional[torch.Tensor] = None,
        paged_kv_indices_buffer: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[torch.Tensor] = None, backend: str = "auto", jit_args=None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._use_tensor_cores = use_tensor_cores
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        self._take_buffers(names, None, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given."""
        return self._use_tensor_cores

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: Optional[float] = None, q_data_type: Union[str, torch.dtype, None] = "float16",
        kv_data_type: Union[str, torch.dtype, None] = None, o_data_type: Union[str, torch.dtype, None] = None,
        data_type: Union[str, torch.dtype, None] = None, sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None, rope_theta: Optional[float] = None, non_blocking: bool = True,
        block_tables: Optional[torch.Tensor] = None, seq_lens: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
        window_right: int = 0,
    ) -> None:
        """Plans a batch: pages ``indices[indptr[r]:indptr[r + 1]]`` of each request, ``last_page_len[r]`` tokens in the
        last. ``non_blocking``, ``block_tables`` and ``seq_lens`` are ignored."""
        if window_right != 0:
            refuse("window_right", window_right, "0")
        q_data_type, kv_data_type = planned_types(data_type, q_data_type, kv_data_type)
        self._q_len_per_req = q_len_per_req
        self._plan_pages(
            q_len_per_req, indptr, indices, last_page_len, page_size, (num_qo_heads, num_kv_heads),
            (head_dim, head_dim), self._types(q_data_type, kv_data_type, o_data_type),
            split_of(page_size, fixed_split_size, disable_split_kv), sm_scale, causal=q_len_per_req > 1,
            window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache, *args, q_scale: Optional[float] = None, k_scale: Optional[float] = None,
        v_scale: Optional[float] = None, out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None,
        return_lse: bool = False, enable_pdl: Optional[bool] = None, window_left: Optional[int] = None,
        sinks: Optional[torch.Tensor] = None, q_len_per_req: Optional[int] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None, kv_cache_sf=None,
    ):
        """One layer: ``q``: ``[batch * q_len_per_req, qo_heads, head_dim]``. Returns ``out``, or ``(out, lse)`` with
        ``return_lse``; ``args`` are the values of a variant of ``jit_args``. ``enable_pdl``, ``sinks`` and
        ``skip_softmax_threshold_scale_factor`` are ignored."""
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise ValueError(f"q_len_per_req {q_len_per_req} mismatches that of plan(), {self._q_len_per_req}")
        return self._run_paged(q, paged_kv_cache, args, q_scale, k_scale, v_scale, out, lse, return_lse, window_left,
                               kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q: torch.Tensor, paged_kv_cache, pos_encoding_mode: str = "NONE", q_scale: Optional[float] = None,
        k_scale: Optional[float] = None, v_scale: Optional[float] = None, window_left: int = -1,
        logits_soft_cap: Optional[float] = None, sm_scale: Optional[float] = None, rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None, return_lse: bool = False,
    ):
        """Deprecated: ``run``, with what ``plan`` takes nowadays."""
        self._replan(
            sm_scale, causal=self._q_len_per_req > 1, window_left=window_left, logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with ``use_cuda_graph=True``."""

    def __init__(
        self, workspace_buffer: torch.Tensor, indptr_buffer: torch.Tensor, indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, use_cuda_graph=True, use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer, paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
    window_left: int = -1, logits_soft_cap: Optional[float] = None, q_data_type=None, kv_data_type=None,
    data_type=None, sm_scale: Optional[float] = None, rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None, non_blocking: bool = True, fixed_split_size: Optional[int] = None,
    disable_split_kv: bool = False, q_len_per_req: int = 1, global_override_indptr_cpu: Optional[torch.Tensor] = None,
) -> None:
    """``plan``, to be bound over a wrapper's own; ``global_override_indptr_cpu`` is ``indptr`` on the host."""
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, indptr if global_override_indptr_cpu is None else global_override_indptr_cpu, indices, last_page_len,
        num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap,
        q_data_type, kv_data_type, None, data_type, sm_scale, rope_scale, rope_theta, non_blocking,
        fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req,
    )


class BatchDecodeMlaWithPagedKVCacheWrapper:
    """A decode batch of latent attention; the older one of two wrappers (see ``flashinfer.mla``), whose rules for CUDA graphs
    it has."""

    def __init__(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False,
                 use_tensor_cores: bool = False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
                 paged_kv_last_page_len_buffer=None) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._use_cuda_graph, self._use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._plan = self._planned_for = self._shown = None
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            check_buffers(paged_kv_indptr_buffer=paged_kv_indptr_buffer, paged_kv_indices_buffer=paged_kv_indices_buffer,
                          paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As it was given."""
        return self._use_cuda_graph

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given."""
        return self._use_tensor_cores

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer) -> None:
        """Takes another workspace."""
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        head_dim_compressed_kv: int, page_size: int, sm_scale: float, window_left: int = -1,
        logits_soft_cap: Optional[float] = None, data_type="float16", q_data_type=None,
        rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
    ) -> None:
        """Plans a batch. Rotation is the caller's (``q_pe`` and ``kpe`` come rotated); its part of a head is an eighth of
        ``head_dim_compressed_kv`` until a run shows another."""
        if window_left >= 0:
            refuse("window_left", window_left, "-1")
        if logits_soft_cap:
            refuse("logits_soft_cap", logits_soft_cap, "None")
        self._data_type = dtype_of(data_type)
        self._q_data_type = dtype_of(q_data_type) or self._data_type
        offsets = None
        if self._use_cuda_graph:
            keep("indptr", self._buffers[0], indptr)
            keep("indices", self._buffers[1], indices, fixed=False)
            keep("last_page_len", self._buffers[2], last_page_len)
            if self._buffers[0].is_cuda:
                offsets, indices = self._buffers[:2]
        self._table, self._offsets = (page_size, host(indptr), indices, host(last_page_len)), offsets
        self._heads, self._head_dim, self._sm_scale = num_qo_heads, head_dim_compressed_kv, sm_scale
        # What runs were captured with stays what it is.
        heads = (num_qo_heads, head_dim_compressed_kv, self._q_data_type, self._data_type)
        shown = self._shown is not None and self._shown[0] == heads
        self._fill(*(self._shown[1] if shown else (max(head_dim_compressed_kv // 8, 1), self._q_data_type)))

    def _fill(self, rotated, out_dtype) -> None:
        shape = (self._heads, self._head_dim, rotated, self._q_data_type, self._data_type, out_dtype)
        like = self._float_workspace_buffer
        if self._planned_for != (shape, like.device):
            self._plan = _fir.MlaPlan(shape, like, requests=len(self._table[-1]))
            self._planned_for = (shape, like.device)
        self._plan.plan(like, 1, *self._table, last_page=True, offsets=self._offsets)

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, paged_ckv_cache: torch.Tensor, paged_kpe_cache: torch.Tensor,
        q_scale: Optional[float] = None, k_scale: Optional[float] = None, v_scale: Optional[float] = None,
        out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None, return_lse: bool = False,
        enable_pdl: bool = False,
    ):
        """One layer: ``q_nope``: ``[batch, heads, head_dim_ckv]``, ``q_pe``: ``[batch, heads, head_dim_kpe]``."""
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        captured = self._use_cuda_graph and is_captured(q_nope)
        shape, shows = self._planned_for[0], (q_pe.shape[-1], q_nope.dtype)
        if (shape[2], shape[5]) != shows:
            if captured:
                raise RuntimeError(f"run() with {q_pe.shape[-1]} rotated numbers to a head of {q_nope.dtype}, planned were "
                                   f"{shape[2]} of {shape[5]}: run once before it is captured")
            self._shown = ((*shape[:2], *shape[3:5]), shows)
            self._fill(*shows)
        if v_scale is not None and k_scale is not None and number(v_scale) != number(k_scale):
            refuse("v_scale", v_scale, "k_scale, as keys and values are the same numbers")
        out = torch.empty_like(q_nope) if out is None else out
        if return_lse and lse is None:
            lse = torch.empty(q_nope.shape[:2], dtype=F32, device=q_nope.device)
        scale = number(k_scale if k_scale is not None else v_scale)
        self._plan.run(
            q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, self._sm_scale * number(q_scale), out,
            lse if return_lse else None, scale, scale, captured,
        )
        return (out, lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_seq_len: int, bmm1_scale=1.0, bmm2_scale=1.0, window_left: int = -1, out: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None, kv_layout: str = "NHD", enable_pdl: Optional[bool] = None,
    q_len_per_req: Optional[int] = 1, o_scale: Optional[float] = 1.0, mask: Optional[torch.Tensor] = None,
    kv_cache_sf=None, q_cu_seq_lens: Optional[torch.Tensor] = None,
):
    """Decode over padded ``block_tables`` ``[batch, pages]`` and ``seq_lens`` ``[batch]``: ``bmm1_scale`` is the factor of
    the scores, ``bmm2_scale`` that of the output. Plans anew each time: wrappers are faster. ``workspace_buffer``,
    ``max_seq_len`` and ``enable_pdl`` are ignored."""
    if mask is not None:
        refuse("mask", "a tensor", "None")
    if o_scale not in (None, 1.0):
        refuse("o_scale", o_scale, "1.0")
    k, v = unpack_kv(kv_cache)
    heads, dim = query.shape[-2:]
    tokens = query.reshape(-1, heads, dim)
    axis = 1 if v is not None else 2
    page_size = k.shape[axis if kv_layout == "NHD" else axis + 1]
    kv_heads = k.shape[axis + 1 if kv_layout == "NHD" else axis]
    indptr, indices, lens = table_of(block_tables, seq_lens, page_size)
    q_len = host(q_cu_seq_lens) if q_cu_seq_lens is not None else (q_len_per_req or 1)
    packed = k.dtype == torch.uint8
    o_dtype = out.dtype if out is not None else (tokens.dtype if tokens.dtype.itemsize > 1 else torch.bfloat16)
    attention = Attention(
        heads, query.device, causal=q_cu_seq_lens is not None or (q_len_per_req or 1) > 1, window_left=window_left,
        sink=sinks,
    )
    shape = (heads, kv_heads, dim, v.shape[-1] * (2 if packed else 1) if v is not None else dim, tokens.dtype,
             stored(k.dtype), o_dtype)
    plan = _fir.BatchPlan(shape, attention.variant, tokens, requests=len(lens))
    plan.plan_paged(tokens, q_len, page_size, indptr, indices, lens, last_page=False)
    result = torch.empty(tokens.shape[:2] + (shape[3],), dtype=o_dtype, device=query.device) if out is None else out
    plan.run(
        tokens, k, v, result.view(tokens.shape[:2] + (shape[3],)), None, number(bmm1_scale), attention.params, 1.0,
        number(bmm2_scale), kv_layout, None if kv_cache_sf is None else block_scales(kv_cache_sf),
    )
    return result.view(query.shape[:-1] + (shape[3],)) if out is None else out


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_seq_len: int, bmm1_scale=1.0, bmm2_scale=1.0, window_left: int = -1, out=None, out_dtype=None,
    o_sf_scale: Optional[float] = None, o_sf_vec_size: Optional[int] = None, sinks=None, kv_layout: str = "HND",
    enable_pdl: Optional[bool] = None, backend: str = "auto", q_len_per_req: Optional[int] = 1,
    o_scale: Optional[float] = 1.0, mask: Optional[torch.Tensor] = None, max_q_len: Optional[int] = None,
    cum_seq_lens_q: Optional[torch.Tensor] = None, skip_softmax_threshold_scale_factor: Optional[float] = None,
    kv_cache_sf=None, uses_shared_paged_kv_idx: bool = True, lse: Optional[torch.Tensor] = None,
    return_lse: bool = False, bmm1_scale_log2: Optional[torch.Tensor] = None,
    multi_ctas_kv_counter_buffer: Optional[torch.Tensor] = None, enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode=None,
):
    """As ``xqa_batch_decode_with_kv_cache``, which is what FlashInfer runs on Hopper; what only its Blackwell kernels
    have is refused by name."""
    check_backend(backend)
    for name, got, want in (
        ("o_sf_scale", o_sf_scale, None), ("return_lse", return_lse, False),
        ("bmm1_scale_log2", bmm1_scale_log2, None), ("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx, True),
        ("enable_block_sparse_attention", enable_block_sparse_attention, False),
    ):
        if got is not want and got != want:
            refuse(name, got, repr(want))
    if isinstance(sinks, (list, tuple)):
        sinks = sinks[0]
    if out is None and out_dtype is not None:
        out = torch.empty(query.shape, dtype=dtype_of(out_dtype), device=query.device)
    return xqa_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, out,
        sinks, kv_layout, enable_pdl, q_len_per_req, o_scale, mask, kv_cache_sf, cum_seq_lens_q,
    )


def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, workspace_buffer: torch.Tensor, *,
    max_sequence_kv: int, actual_seq_lens_kv: Optional[torch.Tensor] = None, block_tables: Optional[torch.Tensor] = None,
    is_cuda_graph_compatible: bool = False, batch_offsets_q: Optional[torch.Tensor] = None,
    batch_offsets_o: Optional[torch.Tensor] = None, batch_offsets_k: Optional[torch.Tensor] = None,
    batch_offsets_v: Optional[torch.Tensor] = None, out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Decode of one token each: ``q``: ``[batch, qo_heads, head_dim]``, the rest as of ``cudnn_batch_prefill_with_kv_cache``."""
    ones = torch.full((q.shape[0],), 1, dtype=torch.int32, device="cpu")
    return cudnn_batch_prefill_with_kv_cache(
        q, k_cache, v_cache, scale, workspace_buffer, max_token_per_sequence=1, max_sequence_kv=max_sequence_kv,
        actual_seq_lens_q=ones, actual_seq_lens_kv=actual_seq_lens_kv, block_tables=block_tables, causal=False,
        return_lse=False, batch_offsets_q=batch_offsets_q, batch_offsets_o=batch_offsets_o, batch_offsets_k=batch_offsets_k,
        batch_offsets_v=batch_offsets_v, out=out, is_cuda_graph_compatible=is_cuda_graph_compatible,
    )[0]
