"""Several query tokens per request: ``single_prefill_with_kv_cache`` and the batch wrappers."""

from __future__ import annotations

import functools
import math
from typing import Optional, Union

import torch

from .. import _fir
from . import _native
from ._core import (
    F32, Attention, base_e, check_backend, check_layout, check_pos_encoding, dtype_of, host, host_i32, is_captured, number,
    packed_mask, refuse, split_of, stored, unpack_kv,
)
from ._wrapper import Paged, Wrapper, block_scales, items_of
from .utils import MaskMode

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]


def _single(q, k, v, out, lse, mask, mask_indptr, causal, window, cap, encoding, rope_scale, rope_theta, sm_scale,
            k_scale, v_scale) -> None:
    (tokens, heads, dim), kv_len = q.shape, k.shape[0]
    attention = Attention(
        heads, q.device, causal=causal, window_left=window, logits_soft_cap=cap, pos_encoding_mode=encoding,
        rope_scale=rope_scale, rope_theta=rope_theta, mask=None if mask is None else (mask, mask_indptr))
    shape = (heads, k.shape[1], dim, v.shape[2], q.dtype, k.dtype, out.dtype)
    plan = _fir.BatchPlan(shape, attention.variant, q, requests=1)
    plan.plan_ragged(host_i32([0, tokens]), host_i32([0, kv_len]))
    plan.run(q, k, v, out, lse, sm_scale, attention.params, k_scale, v_scale)


#: Attention of one request whose keys and values are plain tensors.
single_request = _native.operator(
    "single_request", "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? mask, Tensor? mask_indptr, "
    "bool causal, int window, float cap, str encoding, float rope_scale, float rope_theta, float sm_scale, "
    "float k_scale, float v_scale", _single)


def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: Optional[torch.Tensor] = None,
    scale_k: Optional[torch.Tensor] = None, scale_v: Optional[torch.Tensor] = None,
    o_dtype: Optional[torch.dtype] = None, custom_mask: Optional[torch.Tensor] = None,
    packed_custom_mask: Optional[torch.Tensor] = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None,
    window_left: int = -1, logits_soft_cap: Optional[float] = None, rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None, backend: str = "auto", return_lse: bool = False, kv_cache_sf=None,
    k_scale: Optional[float] = None, v_scale: Optional[float] = None,
):
    """Attention of one request: ``q``: ``[qo_len, qo_heads, head_dim_qk]``, ``k``, ``v``: ``[kv_len, kv_heads, ...]``
    (NHD) or heads first (HND), ``custom_mask``: ``[qo_len, kv_len]``, bool. Sums are f32 whatever
    ``use_fp16_qk_reduction`` says. ``scale_q``, ``scale_k`` and ``scale_v`` of one value each are taken, one per head is not.
    """
    check_layout(kv_layout)
    check_backend(backend)
    if kv_cache_sf is not None:
        refuse("kv_cache_sf", "tensors", "None: NVFP4 caches are paged")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    (tokens, heads, dim), kv_len = q.shape, k.shape[0]
    mask = (None, None)
    if custom_mask is not None or packed_custom_mask is not None:
        mask = packed_mask(custom_mask, packed_custom_mask, [0, tokens], [kv_len])
    check_pos_encoding(pos_encoding_mode)
    dtype = o_dtype or (q.dtype if q.dtype.itemsize > 1 else torch.float16)
    out = torch.empty((tokens, heads, v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=F32, device=q.device) if return_lse else None
    scale = (1.0 / math.sqrt(dim) if sm_scale is None else sm_scale) * number(scale_q)
    single_request(
        q, k, v, out, lse, *mask, causal, window_left, logits_soft_cap or 0.0, pos_encoding_mode,
        1.0 if rope_scale is None else rope_scale, 1e4 if rope_theta is None else rope_theta, scale,
        number(k_scale) * number(scale_k), number(v_scale) * number(scale_v))
    return (out, lse) if return_lse else out


def single_prefill_with_kv_cache_with_jit_module(
    jit_module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: str = "NHD",
    mask_mode: int = MaskMode.NON_CAUSAL.value, window_left: int = -1, return_lse: bool = False,
):
    """Attention of one request by a module of ``flashinfer.jit``; ``args`` are its tensors, then its scalars."""
    check_layout(kv_layout)
    if mask_mode not in (MaskMode.NON_CAUSAL.value, MaskMode.CAUSAL.value):
        refuse("mask_mode", mask_mode, "NON_CAUSAL or CAUSAL: another mask is for the module's variant to tell")
    params, scale = jit_module.values(args, 1.0 / math.sqrt(q.shape[-1]))
    attention = Attention(q.shape[1], q.device, causal=mask_mode == MaskMode.CAUSAL.value, window_left=window_left,
                          own=jit_module.variant)
    out = torch.empty(q.shape[:2] + (v.shape[-1],), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=F32, device=q.device) if return_lse else None
    _fir.single(q, k, v, attention.variant, out, lse, scale, {**(attention.params or {}), **params}, kv_layout)
    return (out, lse) if return_lse else out


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    """Prefill, append or decode over a paged cache: ``plan()`` once per step, ``run()`` once per layer.

    The workspace only tells the device; scratch is sized by the plan. A mask given to ``plan()`` takes the place of
    ``causal``.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None, paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None, paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None, mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto", jit_args=None, jit_kwargs=None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        if use_cuda_graph and qo_indptr_buf is None:
            raise ValueError("qo_indptr_buf should be a torch.Tensor in CUDA graph mode")
        self._take_buffers(names, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        head_dim_vo: Optional[int] = None, custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None, window_left: int = -1,
        logits_soft_cap: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16", kv_data_type: Union[str, torch.dtype, None] = None,
        o_data_type: Union[str, torch.dtype, None] = None, non_blocking: bool = True,
        prefix_len_ptr: Optional[torch.Tensor] = None, token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None, seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None, max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None, fixed_split_size: Optional[int] = None, disable_split_kv: bool = False,
    ) -> None:
        """Plans a batch. Ignored, as they tell what the page table does or choose a kernel: ``use_fp16_qk_reduction``,
        ``non_blocking``, ``max_item_len_ptr``, ``seq_lens``, ``seq_lens_q``, ``block_tables``,
        ``max_token_per_sequence``, ``max_sequence_kv``."""
        self._plan_pages(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size,
            (num_qo_heads, num_kv_heads), (head_dim_qk, head_dim_vo or head_dim_qk),
            self._types(q_data_type, kv_data_type, o_data_type),
            split_of(page_size, fixed_split_size, disable_split_kv), sm_scale, custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            items=items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len), causal=causal,
            window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None,
        out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None, return_lse: bool = False,
        enable_pdl: Optional[bool] = None, window_left: Optional[int] = None, sinks: Optional[torch.Tensor] = None,
        kv_cache_sf=None, skip_softmax_threshold_scale_factor: Optional[float] = None,
        use_fp16_softmax: Optional[bool] = None, uses_spcompress: Optional[bool] = None,
    ):
        """One layer: ``q``: ``[tokens, qo_heads, head_dim_qk]``. Returns ``out``, or ``(out, lse)`` with ``return_lse``.
        ``enable_pdl``, ``sinks``, ``skip_softmax_threshold_scale_factor``, ``use_fp16_softmax`` and ``uses_spcompress`` are
        ignored."""
        return self._run_paged(q, paged_kv_cache, args, q_scale, k_scale, v_scale, out, lse, return_lse, window_left,
                               kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q: torch.Tensor, paged_kv_cache, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, k_scale: Optional[float] = None, v_scale: Optional[float] = None,
        window_left: int = -1, logits_soft_cap: Optional[float] = None, sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None, rope_theta: Optional[float] = None, return_lse: bool = False,
    ):
        """Deprecated: ``run``, with what ``plan`` takes nowadays."""
        self._replan(
            sm_scale, causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Prefill over keys and values that lie one request after another.

    With ``use_cuda_graph`` a run that was captured does the batch of the last ``plan()``, of as many tokens as the captured
    tensors have at most; replay it on the stream that ``plan()`` was called on."""

    _captured_rows = None

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None, kv_indptr_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None, mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto", jit_args=None, jit_kwargs=None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        if use_cuda_graph:
            for name, buffer in (("qo_indptr_buf", qo_indptr_buf), ("kv_indptr_buf", kv_indptr_buf)):
                if not torch.is_tensor(buffer):
                    raise ValueError(f"{name} should be a torch.Tensor in cuda graph mode")
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        head_dim_vo: Optional[int] = None, custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16", kv_data_type: Union[str, torch.dtype, None] = None,
        o_data_type: Union[str, torch.dtype, None] = None, non_blocking: bool = True,
        prefix_len_ptr: Optional[torch.Tensor] = None, token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None, disable_split_kv: bool = False, seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None, max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None, v_indptr: Optional[torch.Tensor] = None,
        o_indptr: Optional[torch.Tensor] = None,
    ) -> None:
        """Plans a batch. Ignored: ``use_fp16_qk_reduction``, ``non_blocking``, ``max_item_len_ptr``, ``seq_lens``,
        ``seq_lens_q``, ``max_token_per_sequence``, ``max_sequence_kv``."""
        if v_indptr is not None or o_indptr is not None:
            refuse("v_indptr, o_indptr", "tensors", "None")
        qo, kv = host(qo_indptr), host(kv_indptr)
        if len(qo) != len(kv):
            raise ValueError("The kv_indptr length should be equal to qo_indptr length.")
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            ends = kv.tolist()
            lens = [b - a for a, b in zip(ends, ends[1:])]
            mask = self._kept_mask(packed_mask(custom_mask, packed_custom_mask, qo.tolist(), lens))
        if self._use_cuda_graph:
            rows = (int(qo[-1]), int(kv[-1]))
            if self._captured_rows is not None and any(n > most for n, most in zip(rows, self._captured_rows)):
                raise ValueError(f"{rows} rows of queries and of keys, expected at most {self._captured_rows}, as were captured")
            for name, buffer in (("qo_indptr", self._qo_indptr_buf), ("kv_indptr", self._kv_indptr_buf)):
                if len(buffer) != len(qo):
                    raise ValueError(f"The size of {name} is {len(qo)}, expected {len(buffer)}, that of the buffer: the batch "
                                     "size is fixed in CUDA graph mode")
            self._qo_indptr_buf.copy_(qo_indptr)
            self._kv_indptr_buf.copy_(kv_indptr)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._host_indptr = (qo, kv)
        types = self._types(q_data_type, kv_data_type, o_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, *types)
        plan = self._set(
            shape, len(qo) - 1, split_of(1, fixed_split_size, disable_split_kv), mask=mask,
            items=items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len), sm_scale=sm_scale,
            causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        self._fill(plan)

    begin_forward = plan

    def _fill(self, plan) -> None:
        if self._use_cuda_graph:
            plan.plan_ragged(*self._host_indptr, graphs=self._float_workspace_buffer)
        else:
            plan.plan_ragged(*self._host_indptr)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, q_scale: Optional[float] = None,
        k_scale: Optional[float] = None, v_scale: Optional[float] = None, o_scale: Optional[float] = None,
        out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None, return_lse: bool = False,
        enable_pdl: Optional[bool] = None, kv_cache_sf=None,
    ):
        """One layer: ``q``: ``[tokens, qo_heads, head_dim_qk]``, ``k``, ``v``: ``[kv_tokens, kv_heads, ...]``. Returns
        ``out``, or ``(out, lse)`` with ``return_lse``. ``enable_pdl`` is ignored."""
        if kv_cache_sf is not None:
            refuse("kv_cache_sf", "tensors", "None: NVFP4 caches are paged")
        if o_scale not in (None, 1.0):
            refuse("o_scale", o_scale, "1.0, as outputs are not fp8")
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if self._use_cuda_graph and is_captured(q):
            self._captured_rows = (q.shape[0], k.shape[0])
        return self._run(q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None,
        return_lse: bool = False,
    ):
        """Deprecated: ``run``, with what ``plan`` takes nowadays."""
        self._replan(
            sm_scale, causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
        )
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def fmha_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor, plan_info=None, max_qo_len: Optional[int] = None,
    out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None, causal: bool = False,
    sm_scale: Optional[float] = None, q_scale: Optional[float] = None, k_scale: Optional[float] = None,
    v_scale: Optional[float] = None, o_scale: Optional[float] = None, return_lse: bool = False,
):
    """Ragged prefill in one call. ``plan_info`` and ``max_qo_len`` are ignored."""
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(q)
    wrapper.plan(
        qo_segment_offsets, kv_segment_offsets, q.shape[1], k.shape[1], q.shape[2], v.shape[2], causal=causal,
        sm_scale=sm_scale, q_data_type=q.dtype, kv_data_type=k.dtype, o_data_type=None if out is None else out.dtype,
    )
    return wrapper.run(
        q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, o_scale=o_scale, out=out, lse=lse,
        return_lse=return_lse,
    )


def table_of(block_tables: torch.Tensor, seq_lens: torch.Tensor, page_size: int):
    """CSR form of a padded table: every row keeps its width, lengths tell what is used."""
    batch, width = block_tables.shape
    indptr = host_i32(range(0, batch * width + 1, width) if width else [0] * (batch + 1))
    return indptr, block_tables.reshape(-1), host(seq_lens)


def _context(query, k, v, block_tables, seq_lens, bmm1_scale, bmm2_scale, cum_seq_lens_q, window_left, out, kv_layout,
             sinks, kv_cache_sf, causal, lse, return_lse, logits_soft_cap=None):
    heads, dim = query.shape[-2:]
    axis = 1 if v is not None else 2
    page_size = k.shape[axis if kv_layout == "NHD" else axis + 1]
    kv_heads = k.shape[axis + 1 if kv_layout == "NHD" else axis]
    indptr, indices, lens = table_of(block_tables, seq_lens, page_size)
    sinks = sinks[0] if isinstance(sinks, (list, tuple)) else sinks
    attention = Attention(
        heads, query.device, causal=causal, window_left=window_left, sink=sinks, logits_soft_cap=logits_soft_cap
    )
    shape = (heads, kv_heads, dim, dim, query.dtype, stored(k.dtype), out.dtype)
    plan = _fir.BatchPlan(shape, attention.variant, query, requests=len(lens))
    plan.plan_paged(query, host(cum_seq_lens_q), page_size, indptr, indices, lens, last_page=False)
    if return_lse and lse is None:
        lse = torch.empty(query.shape[:2], dtype=F32, device=query.device)
    plan.run(
        query, k, v, out, lse if return_lse else None, number(bmm1_scale), attention.params, 1.0, number(bmm2_scale),
        kv_layout, None if kv_cache_sf is None else block_scales(kv_cache_sf),
    )
    return (out, lse) if return_lse else out


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale, bmm2_scale, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor, window_left: int = -1, out=None, out_dtype=None, o_sf_scale: Optional[float] = None,
    o_sf_vec_size: Optional[int] = None, kv_layout: str = "HND", enable_pdl: Optional[bool] = None, sinks=None,
    kv_cache_sf=None, skip_softmax_threshold_scale_factor: Optional[float] = None,
    uses_shared_paged_kv_idx: bool = True, causal: bool = True, lse: Optional[torch.Tensor] = None,
    return_lse: bool = False, multi_ctas_kv_counter_buffer: Optional[torch.Tensor] = None,
    use_fp16_softmax: Optional[bool] = None, uses_spcompress: Optional[bool] = None,
):
    """Prefill over padded ``block_tables`` and ``seq_lens``, planned anew each time. Ignored: ``workspace_buffer``,
    ``max_q_len``, ``max_kv_len``, ``batch_size``, ``cum_seq_lens_kv``, ``enable_pdl`` and what tunes Blackwell's kernels."""
    if o_sf_scale is not None:
        refuse("o_sf_scale", o_sf_scale, "None")
    if not uses_shared_paged_kv_idx:
        refuse("uses_shared_paged_kv_idx", False, "True")
    if out is None:
        out = torch.empty(query.shape, dtype=dtype_of(out_dtype) or query.dtype, device=query.device)
    k, v = unpack_kv(kv_cache)
    return _context(query, k, v, block_tables, seq_lens, bmm1_scale, bmm2_scale, cum_seq_lens_q, window_left, out,
                    kv_layout, sinks, kv_cache_sf, causal, lse, return_lse)


def _packed(name: str, lens: Optional[torch.Tensor], offsets: Optional[torch.Tensor], width: int, what: str):
    """Offsets in tokens of requests that lie one after another, by their lengths or by ``offsets`` in multiples of ``width``
    elements; both, if given, must say the same of requests that have tokens."""
    starts = None if offsets is None else [n // width for n in host(offsets).flatten().tolist()]
    if lens is None:
        if starts is None:
            raise ValueError(f"{name} is missing, expected it or {what} in tokens")
        return host_i32(starts)
    ends = [0]
    for n in host(lens).flatten().tolist():
        ends.append(ends[-1] + n)
    if starts is not None and any(b > a and s != a for a, b, s in zip(ends, ends[1:], starts)):
        refuse(what, "gaps between requests", "those of requests that lie one after another")
    return host_i32(ends)


def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, workspace_buffer: torch.Tensor, *,
    max_token_per_sequence: int, max_sequence_kv: int, actual_seq_lens_q: Optional[torch.Tensor] = None,
    actual_seq_lens_kv: Optional[torch.Tensor] = None, block_tables: Optional[torch.Tensor] = None, causal: bool,
    return_lse: bool, q_scale=None, k_scale=None, v_scale=None, batch_offsets_q: Optional[torch.Tensor] = None,
    batch_offsets_o: Optional[torch.Tensor] = None, batch_offsets_k: Optional[torch.Tensor] = None,
    batch_offsets_v: Optional[torch.Tensor] = None, batch_offsets_stats: Optional[torch.Tensor] = None,
    batch_offsets_units: str = "elements", out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None,
    is_cuda_graph_compatible: bool = False, backend: Optional[str] = None, o_data_type=None,
):
    """Prefill over pages ``[pages, kv_heads, page_size, head_dim]`` with ``block_tables``, or over keys and values that lie one
    request after another; planned anew each time. Returns ``(out, lse)``, ``lse`` being of base e,
    ``[batch, max_token_per_sequence, qo_heads]``, or None. Lengths and offsets on a device cost a copy and a wait each.
    Ignored: ``workspace_buffer``, ``max_sequence_kv``, ``is_cuda_graph_compatible``, ``backend``, ``batch_offsets_stats``."""
    if batch_offsets_units not in ("elements", "tokens"):
        raise ValueError(f"batch_offsets_units is {batch_offsets_units!r}, expected 'elements' or 'tokens'")
    width = lambda t: t.shape[-2] * t.shape[-1] if batch_offsets_units == "elements" else 1
    heads = q.shape[1]
    dtype = dtype_of(o_data_type) or (q.dtype if q.dtype.itemsize > 1 else torch.bfloat16)
    if out is None:
        out = torch.empty((q.shape[0], heads, v_cache.shape[-1]), dtype=dtype, device=q.device)
    qo = _packed("actual_seq_lens_q", actual_seq_lens_q, batch_offsets_q, width(q), "batch_offsets_q")
    if batch_offsets_o is not None:
        _packed("actual_seq_lens_q", actual_seq_lens_q, batch_offsets_o, width(out), "batch_offsets_o")
    stats = torch.empty((q.shape[0], heads), dtype=F32, device=q.device) if return_lse else None
    variant = Attention(heads, q.device, causal=causal)
    kv_heads = k_cache.shape[1]
    shape = (heads, kv_heads, q.shape[2], v_cache.shape[-1], q.dtype, stored(k_cache.dtype), out.dtype)
    plan = _fir.BatchPlan(shape, variant.variant, q, requests=len(qo) - 1)
    if block_tables is None:
        kv = _packed("actual_seq_lens_kv", actual_seq_lens_kv, batch_offsets_k, width(k_cache), "batch_offsets_k")
        if batch_offsets_v is not None:
            _packed("actual_seq_lens_kv", actual_seq_lens_kv, batch_offsets_v, width(v_cache), "batch_offsets_v")
        plan.plan_ragged(qo, kv)
        layout = "NHD"
    else:
        if actual_seq_lens_kv is None:
            raise ValueError("actual_seq_lens_kv is missing, expected it with block_tables")
        indptr, indices, lens = table_of(block_tables, actual_seq_lens_kv.flatten(), k_cache.shape[2])
        plan.plan_paged(q, qo, k_cache.shape[2], indptr, indices, lens, last_page=False)
        layout = "HND"
    plan.run(q, k_cache, v_cache, out, stats, scale * number(q_scale), variant.params, number(k_scale), number(v_scale), layout)
    if not return_lse:
        return out, None
    natural, ends = base_e(stats), qo.tolist()
    if lse is None:
        lse = torch.empty((len(ends) - 1, max_token_per_sequence, heads), dtype=F32, device=q.device)
    for r, (a, b) in enumerate(zip(ends, ends[1:])):
        lse[r, : b - a].copy_(natural[a:b])
    return out, lse


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale, bmm2_scale, o_sf_scale: float, batch_size: int, window_left: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: Optional[bool], is_causal: bool,
    return_lse: bool, attention_sinks: Optional[torch.Tensor] = None,
    skip_softmax_threshold_scale_factor: Optional[float] = None, out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None, sage_attn_sfs=(None,) * 4, num_elts_per_sage_attn_blk=(0,) * 4,
    backend: str = "trtllm-gen", q_seq_lens_cpu: Optional[torch.Tensor] = None,
    kv_seq_lens_cpu: Optional[torch.Tensor] = None, use_fp16_softmax: Optional[bool] = None,
    uses_spcompress: Optional[bool] = None,
):
    """Ragged prefill with head dims of their own for keys and values, in one call. Ignored: ``workspace_buffer``,
    ``seq_lens``, ``max_q_len``, ``max_kv_len``, ``o_sf_scale``, ``batch_size``, ``enable_pdl``, ``backend``."""
    if any(s is not None for s in sage_attn_sfs):
        refuse("sage_attn_sfs", "tensors", "None")
    attention = Attention(
        query.shape[1], query.device, causal=is_causal, window_left=window_left, sink=attention_sinks
    )
    dtype = query.dtype if out is None else out.dtype
    shape = (query.shape[1], key.shape[1], query.shape[2], value.shape[2], query.dtype, key.dtype, dtype)
    if out is None:
        out = torch.empty(query.shape[:2] + (value.shape[2],), dtype=dtype, device=query.device)
    if return_lse and lse is None:
        lse = torch.empty(query.shape[:2], dtype=F32, device=query.device)
    qo = host(cum_seq_lens_q)
    plan = _fir.BatchPlan(shape, attention.variant, query, requests=len(qo) - 1)
    plan.plan_ragged(qo, host(cum_seq_lens_kv))
    plan.run(query, key, value, out, lse if return_lse else None, number(bmm1_scale), attention.params, 1.0,
             number(bmm2_scale))
    return (out, lse) if return_lse else out


def trtllm_fmha_v2_prefill(
    qkv, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int,
    bmm1_scale: float, bmm2_scale: float, batch_size: int, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor,
    block_tables: Optional[torch.Tensor] = None, out: Optional[torch.Tensor] = None, out_dtype=None, sinks=None,
    pos_encoding_mode: Optional[str] = None, logits_soft_cap_scale: Optional[float] = None, mask_mode: str = "causal",
    window_left: int = -1, chunked_attention_size: int = 0, save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
):
    """Prefill of layout ``Q_PAGED_KV_NHD``, ``Q_PAGED_KV_HND`` or ``SEPARATE_Q_K_V``, in one call."""
    if pos_encoding_mode not in (None, "NONE"):
        refuse("pos_encoding_mode", pos_encoding_mode, "None")
    if chunked_attention_size:
        refuse("chunked_attention_size", chunked_attention_size, "0")
    if mask_mode not in ("causal", "padding", "sliding_window"):
        refuse("mask_mode", mask_mode, "'causal', 'padding' or 'sliding_window'")
    causal = mask_mode != "padding"
    layout = input_layout.upper()
    if layout.startswith("Q_PAGED_KV"):
        query, cache = qkv
        if out is None:
            out = torch.empty(query.shape, dtype=dtype_of(out_dtype) or query.dtype, device=query.device)
        k, v = unpack_kv(cache)
        return _context(query, k, v, block_tables, seq_lens, bmm1_scale, bmm2_scale, cum_seq_lens_q, window_left, out,
                        "HND" if layout.endswith("HND") else "NHD", sinks, None, causal, None, save_softmax_stats,
                        logits_soft_cap_scale)
    if layout != "SEPARATE_Q_K_V":
        refuse("input_layout", input_layout, "Q_PAGED_KV_NHD, Q_PAGED_KV_HND or SEPARATE_Q_K_V")
    query, key, value = qkv
    sinks = sinks[0] if isinstance(sinks, (list, tuple)) else sinks
    if logits_soft_cap_scale:
        refuse("logits_soft_cap_scale", logits_soft_cap_scale, "None with SEPARATE_Q_K_V")
    if out is None and out_dtype is not None:
        out = torch.empty(query.shape[:2] + (value.shape[2],), dtype=dtype_of(out_dtype), device=query.device)
    return trtllm_ragged_attention_deepseek(
        query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, 1.0, batch_size,
        window_left, cum_seq_lens_q, cum_seq_lens_kv, None, causal, save_softmax_stats, sinks, out=out,
    )
