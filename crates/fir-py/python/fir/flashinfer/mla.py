"""Latent attention over a paged cache."""

from __future__ import annotations

import weakref
from typing import Optional

import torch

from .. import _fir
from . import _native
from ._core import F32, base_e, check_backend, check_buffers, host, is_captured, keep, number, refuse
from .prefill import table_of

__all__ = ["BatchMLAPagedAttentionWrapper", "trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"]


class BatchMLAPagedAttentionWrapper:
    """Latent attention: ``plan()`` once per step, ``run()`` once per layer. The workspace only tells the device.

    With ``use_cuda_graph`` a run that was captured reads the buffers and the plan of the last ``plan()``; replay it on the
    stream that ``plan()`` was called on. A ``plan()`` that needs other launches than were captured warns."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False,
        qo_indptr: Optional[torch.Tensor] = None, kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None, kv_len_arr: Optional[torch.Tensor] = None, backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer, self._backend = float_workspace_buffer, check_backend(backend)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self.device, self._plan, self._planned_for = float_workspace_buffer.device, None, None
        if use_cuda_graph:
            check_buffers(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        self._number, self._cached_module = _native.register(self), _Module(self)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As it was given."""
        return self._use_cuda_graph

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, use_profiler: bool = False,
    ) -> None:
        """Plans a batch; lengths are in tokens. ``use_profiler`` is ignored."""
        if self._use_cuda_graph:
            keep("qo_indptr", self._qo_indptr_buf, qo_indptr)
            keep("kv_indptr", self._kv_indptr_buf, kv_indptr)
            keep("kv_len_arr", self._kv_len_arr_buf, kv_len_arr)
            keep("kv_indices", self._kv_indices_buf, kv_indices, fixed=False)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
            self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        out = q_data_type if q_data_type.itemsize > 1 else torch.bfloat16
        self._shape = (num_heads, head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type, out)
        self._causal, self._page_size, self._sm_scale, self._out_dtype = causal, page_size, sm_scale, out
        self._fill(host(qo_indptr), host(kv_indptr), host(kv_len_arr))

    def _fill(self, qo_indptr, kv_indptr, kv_lens) -> None:
        planned_for = (self._shape, self._causal, self._float_workspace_buffer.device)
        if self._planned_for != planned_for:
            self._plan = _fir.MlaPlan(
                self._shape, self._float_workspace_buffer, requests=len(kv_lens), causal=self._causal)
            self._planned_for = planned_for
        offsets = self._kv_indptr_buf if self._use_cuda_graph and self._kv_indptr_buf.is_cuda else None
        self._plan.plan(
            self._float_workspace_buffer, qo_indptr, self._page_size, kv_indptr, self._kv_indices_buf, kv_lens,
            offsets=offsets)

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
        out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None, return_lse: bool = False,
        profiler_buffer: Optional[torch.Tensor] = None, kv_len: Optional[torch.Tensor] = None,
        page_table: Optional[torch.Tensor] = None, return_lse_base_on_e: bool = False, o_scale: Optional[float] = None, *,
        ckv_scale: Optional[float] = None, ckv_scale_arr: Optional[torch.Tensor] = None,
        kpe_scale: Optional[float] = None,
    ):
        """One layer: ``q_nope``: ``[tokens, heads, head_dim_ckv]``, ``q_pe``: ``[tokens, heads, head_dim_kpe]``,
        ``ckv_cache``: ``[pages, page_size, head_dim_ckv]``. Returns ``out``, or ``(out, lse)`` with ``return_lse``, of base 2
        unless ``return_lse_base_on_e``.
        ``kv_len`` and ``page_table`` belong to a Blackwell kernel; ``profiler_buffer`` is ignored."""
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        if ckv_scale_arr is not None:
            refuse("ckv_scale_arr", "a tensor", "ckv_scale")
        if o_scale not in (None, 1.0):
            refuse("o_scale", o_scale, "1.0")
        if out is None:
            out = torch.empty(q_nope.shape, dtype=self._out_dtype, device=q_nope.device)
        if return_lse and lse is None:
            lse = torch.empty(q_nope.shape[:2], dtype=F32, device=q_nope.device)
        _run(self._number, q_nope, q_pe, ckv_cache, kpe_cache, out, lse if return_lse else None, number(ckv_scale),
             number(kpe_scale))
        if return_lse and return_lse_base_on_e:
            lse.copy_(base_e(lse))
        return (out, lse) if return_lse else out

    def _launch(self, q_nope, q_pe, ckv, kpe, out, lse, ckv_scale, kpe_scale) -> None:
        captured = self._use_cuda_graph and is_captured(q_nope)
        self._plan.run(q_nope, q_pe, ckv, kpe, self._sm_scale, out, lse, ckv_scale, kpe_scale, captured)


_run = _native.operator(
    "run_mla", "SymInt plan, Tensor q_nope, Tensor q_pe, Tensor ckv, Tensor kpe, Tensor(a!) out, Tensor(b!)? lse, "
    "float ckv_scale, float kpe_scale", lambda number, *args: _native.registered(number)._launch(*args))


class _Module:
    """Where engines call FlashInfer's compiled module: its ``plan`` takes lengths that the engine has on the host."""

    def __init__(self, wrapper) -> None:
        self._wrapper = weakref.ref(wrapper)

    def plan(self, float_workspace, int_workspace, pinned, qo_indptr, kv_indptr, kv_lens, num_heads, head_dim_o, causal):
        """Plans the batch whose page ids are in the wrapper's buffer; the rest stays as ``plan()`` was told."""
        wrapper = self._wrapper()
        wrapper._shape, wrapper._causal = (num_heads, head_dim_o, *wrapper._shape[2:]), causal
        if wrapper._use_cuda_graph:
            # Engines leave the buffer of offsets as it was; captured runs read it.
            wrapper._kv_indptr_buf.copy_(kv_indptr)
        wrapper._fill(qo_indptr, kv_indptr, kv_lens)
        return [len(kv_lens)]


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    out: Optional[torch.Tensor] = None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl: Optional[bool] = None,
):
    """Latent decode over padded ``block_tables``, planned anew each time: ``query``:
    ``[batch, q_len, heads, kv_lora_rank + qk_rope_head_dim]``, ``kv_cache``: ``[pages, page_size, ...]``."""
    if sinks is not None:
        refuse("sinks", "tensors", "None")
    if number(bmm2_scale) != 1.0:
        refuse("bmm2_scale", bmm2_scale, "1.0")
    cache = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
    batch, q_len, heads, _ = query.shape
    flat = query.view(batch * q_len, heads, -1)
    indptr, indices, lens = table_of(block_tables, seq_lens, cache.shape[1])
    out_dtype = out.dtype if out is not None else (query.dtype if query.dtype.itemsize > 1 else torch.bfloat16)
    shape = (heads, kv_lora_rank, qk_rope_head_dim, query.dtype, cache.dtype, out_dtype)
    plan = _fir.MlaPlan(shape, flat, requests=batch, causal=q_len > 1)
    plan.plan(flat, q_len, cache.shape[1], indptr, indices, lens)
    result = torch.empty((batch, q_len, heads, kv_lora_rank), dtype=out_dtype, device=query.device) if out is None else out
    plan.run(
        flat[..., :kv_lora_rank], flat[..., kv_lora_rank:], cache[..., :kv_lora_rank], cache[..., kv_lora_rank:],
        number(bmm1_scale), result.view(batch * q_len, heads, kv_lora_rank),
    )
    return result


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: Optional[torch.Tensor],
    max_seq_len: int, sparse_mla_top_k: int = 0, out: Optional[torch.Tensor] = None, bmm1_scale=1.0, bmm2_scale=1.0,
    sinks=None, skip_softmax_threshold_scale_factor: Optional[float] = None, enable_pdl: Optional[bool] = None,
    backend: str = "auto", **blackwell,
):
    """As ``xqa_batch_decode_with_kv_cache_mla``; what only Blackwell's kernels have is refused by name."""
    check_backend(backend)
    if sparse_mla_top_k:
        refuse("sparse_mla_top_k", sparse_mla_top_k, "0")
    for name, value in blackwell.items():
        if value not in (None, False, True, "auto", 1, 0):
            refuse(name, value, "None")
    if blackwell.get("return_lse"):
        refuse("return_lse", True, "False")
    return xqa_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, out, bmm1_scale, bmm2_scale, sinks, enable_pdl,
    )
