"""What the wrappers of batches have in common: a plan that is kept while the problem stays the same, the page table of
the batch, the deprecated calls, and what engines reach into."""

from __future__ import annotations

import math
import weakref
from typing import Optional

import torch

from . import _native
from ._core import (
    F32, Attention, Planned, check_backend, check_dtypes, check_layout, dtype_of, host, is_captured, number, packed_mask,
    split_of, stored, unpack_kv,
)


def block_scales(kv_cache_sf):
    """Scales of an NVFP4 cache as a pair."""
    if isinstance(kv_cache_sf, (tuple, list)):
        return tuple(kv_cache_sf)
    return kv_cache_sf[:, 0], kv_cache_sf[:, 1]


#: Stands for a sink that comes with `run`.
_NO_SINK = torch.empty(0, device="cpu")


class Wrapper:
    """A plan and how it is run. The workspace only tells the device; scratch is sized by the plan."""

    _plan_info = _block_tables = _max_total_num_rows = _told = _lse_like = _lse_rows = None

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs=None) -> None:
        self._kv_layout = check_layout(kv_layout)
        self._backend = check_backend(backend)
        self._jit_module = None
        if jit_args is not None:
            from .jit import module_of

            self._jit_module = module_of(jit_args, jit_kwargs)
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        # Engines hand these back to `_cached_module.plan`, which ignores them.
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._planned = Planned()
        self._sink = False
        self._number = _native.register(self)
        self._cached_module = _Module(self)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As it was given."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer) -> None:
        """Takes another workspace; ``int_workspace_buffer`` is ignored."""
        self._float_workspace_buffer = float_workspace_buffer

    def end_forward(self) -> None:
        """Deprecated: does nothing."""

    def _set(self, shape, batch, split, *, mask, items, sm_scale, **flags):
        """The plan of a problem; what engines read of it."""
        sink = _NO_SINK if self._sink else None
        own = None if self._jit_module is None else self._jit_module.variant
        attention = Attention(shape[0], self.device, mask=mask, items=items, sink=sink, own=own, **flags)
        plan = self._planned.prepare(shape, attention, self._float_workspace_buffer, batch, split)
        self._lse_rows = None
        self._flags, self._mask, self._item_args, self._batch_size = flags, mask, items, batch
        self._causal, self._window_left = flags["causal"], flags["window_left"]
        self._logits_soft_cap, self._pos_encoding_mode = flags["logits_soft_cap"], flags["pos_encoding_mode"]
        self._rope_scale, self._rope_theta = flags["rope_scale"], flags["rope_theta"]
        self._sm_scale = 1.0 / math.sqrt(shape[2]) if sm_scale is None else sm_scale
        self._like_q = shape[2] == shape[3] and shape[4] == shape[6]
        return plan

    def _types(self, q_data_type, kv_data_type, o_data_type):
        q_dtype = dtype_of(q_data_type) or torch.float16
        kv_dtype = dtype_of(kv_data_type) or q_dtype
        o_dtype = dtype_of(o_data_type) or (q_dtype if q_dtype.itemsize > 1 else torch.float16)
        self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = q_dtype, kv_dtype, o_dtype
        return q_dtype, stored(kv_dtype), o_dtype

    def _kept_mask(self, mask):
        """The mask; in CUDA-graph mode in the buffers that captured runs read."""
        if not self._use_cuda_graph:
            return mask
        names, buffers = ("custom_mask_buf", "mask_indptr_buf"), (self._custom_mask_buf, self._mask_indptr_buf)
        for name, buffer, given in zip(names, buffers, mask):
            if not torch.is_tensor(buffer):
                raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode if a mask is given")
            if len(given) > len(buffer):
                raise ValueError(f"The mask needs {len(given)} entries of {name}, expected at most {len(buffer)}, those of the "
                                 "allocated buffer")
            buffer[: len(given)].copy_(given)
        return buffers

    def _replan(self, sm_scale, **flags) -> None:
        """What the deprecated calls pass to ``forward`` instead of ``plan``."""
        if self._planned.plan is None:
            raise RuntimeError("plan() must be called before run()")
        scale = self._sm_scale if sm_scale is None else sm_scale
        if flags == self._flags:
            self._sm_scale = scale
            return
        self._told = None
        shape, _, _, split = self._planned.key
        before = self._planned.attention.variant
        plan = self._set(shape, self._batch_size, split, mask=self._mask, items=self._item_args, sm_scale=scale, **flags)
        if self._planned.attention.variant != before:
            self._fill(plan)

    def _fill(self, plan) -> None:
        raise NotImplementedError

    def _run(self, q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse, kv_cache_sf=None, sink=None):
        """Checks, makes what is missing, and runs one layer."""
        planned = self._planned
        if planned.plan is None:
            raise RuntimeError("plan() must be called before run()")
        if q.dtype is not self._cached_q_data_type or k.dtype is not self._cached_kv_data_type:
            check_dtypes(q, k, self._cached_q_data_type, self._cached_kv_data_type)
        compiling = _native.is_compiling()
        if out is None:
            # Like `q` costs 1 µs, of a shape of its own 3.
            if self._like_q:
                out = torch.empty_like(q)
            else:
                shape = planned.key[0]
                out = torch.empty((q.shape[0], shape[0], shape[3]), dtype=self._cached_o_data_type, device=q.device)
        if not return_lse:
            lse = None
        elif lse is None:
            if compiling:
                lse = torch.empty(q.shape[:2], dtype=F32, device=q.device)
            else:
                # Like one that is kept costs 1 µs, of a shape of its own 3.
                if self._lse_rows != q.shape[0]:
                    self._lse_rows, self._lse_like = q.shape[0], torch.empty(q.shape[:2], dtype=F32, device=q.device)
                lse = torch.empty_like(self._lse_like)
        if q_scale is not None or k_scale is not None or v_scale is not None:
            q_scale, k_scale, v_scale = number(q_scale), number(k_scale), number(v_scale)
        else:
            q_scale = k_scale = v_scale = 1.0
        scales = None if kv_cache_sf is None else block_scales(kv_cache_sf)
        if compiling and not args:
            _native.run_plan(self, q, k, v, out, lse, q_scale, k_scale, v_scale, scales, sink)
        elif args or sink is not None or self._use_cuda_graph:
            self._launch(q, k, v, out, lse, q_scale, k_scale, v_scale, scales, sink, args)
        else:
            # What `_launch` comes to, without a call between.
            planned.plan.run(q, k, v, out, lse, self._sm_scale * q_scale, planned.attention.params, k_scale, v_scale,
                             self._kv_layout, scales, False)
        return (out, lse) if return_lse else out

    def _launch(self, q, k, v, out, lse, q_scale, k_scale, v_scale, scales, sink, args=()) -> None:
        planned, scale = self._planned, self._sm_scale
        params = planned.attention.params
        if sink is not None:
            params = {**(params or {}), "sink": sink}
        if args:
            if self._jit_module is None:
                raise TypeError(f"run() got {len(args)} more positional arguments than it takes without jit_args")
            own, scale = self._jit_module.values(args, scale)
            params = {**(params or {}), **own}
        captured = self._use_cuda_graph and is_captured(q)
        if captured and self._item_args is not None:
            raise NotImplementedError("run() of items behind one prefix cannot be captured in a CUDA graph; run it eagerly")
        planned.plan.run(q, k, v, out, lse, scale * q_scale, params, k_scale, v_scale, self._kv_layout, scales, captured)


class Paged(Wrapper):
    """A batch over a paged cache. Page ids may stay on the device; the rest of the table is read by ``plan()``, at the
    cost of one copy and one wait for each part that is on a device.

    With ``use_cuda_graph`` a run that was captured reads the buffers and the plan of the last ``plan()``; replay it on the
    stream that ``plan()`` was called on. A ``plan()`` that needs other launches than were captured warns."""

    def _take_buffers(self, names, qo, indptr, indices, last) -> None:
        """Buffers of CUDA-graph mode, which fix the batch's size."""
        self._fixed_batch_size = 0
        if self._use_cuda_graph:
            buffers = (indptr, indices, last) if qo is None else (qo, indptr, indices, last)
            for name, buffer in zip(names, buffers):
                if not torch.is_tensor(buffer):
                    raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
            self._fixed_batch_size = len(last)
            for name, buffer in zip(names, (indptr,) if qo is None else (qo, indptr)):
                if len(buffer) != self._fixed_batch_size + 1:
                    raise ValueError(f"The size of {name} is {len(buffer)}, expected batch_size + 1 = {len(last) + 1}")
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo, indptr
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = indices, last

    def workspace_size(self, *args, **kwargs) -> tuple[int, int]:
        """Bytes of workspace that a plan of these arguments needs: none, as plans own their scratch."""
        return 0, 0

    def _plan_pages(
        self, qo, indptr, indices, last, page_size, heads, dims, types, split, sm_scale, *, custom_mask=None,
        packed_custom_mask=None, items=None, **flags,
    ) -> None:
        """Plans a batch; ``qo``: offsets of query tokens, or how many each request has."""
        batch = len(last)
        counted = isinstance(qo, int)
        if self._use_cuda_graph:
            if batch != self._fixed_batch_size:
                raise ValueError(
                    f"The batch size should be fixed in cudagraph mode, the runtime batch size {batch} mismatches the "
                    f"batch size set during initialization {self._fixed_batch_size}")
            if len(indices) > len(self._paged_kv_indices_buf):
                raise ValueError(f"The size of indices is {len(indices)}, expected at most that of the allocated buffer, "
                                 f"{len(self._paged_kv_indices_buf)}")
            if not counted:
                self._qo_indptr_buf.copy_(qo)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
            self._paged_kv_last_page_len_buf.copy_(last)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = None if counted else qo, indptr
            self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = indices, last
        qo, indptr, last = qo if counted else host(qo), host(indptr), host(last)
        self._table = (qo, page_size, indptr, last, True)
        # A step like the one before has another table and the same plan: 4 µs of 20 at 256 requests of 64 tokens.
        told = (batch, page_size, heads, dims, types, split, sm_scale, flags)
        plain = custom_mask is None and packed_custom_mask is None and items is None
        if plain and told == self._told:
            self._sm_scale = 1.0 / math.sqrt(dims[0]) if sm_scale is None else sm_scale
            self._fill(self._planned.plan)
            return
        self._told = None
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            pages, lasts = indptr.tolist(), last.tolist()
            lens = [max((b - a - 1) * page_size + n, 0) if b > a else 0 for a, b, n in zip(pages, pages[1:], lasts)]
            mask = self._kept_mask(packed_mask(custom_mask, packed_custom_mask, qo.tolist(), lens))
        self._page_size = page_size
        plan = self._set((*heads, *dims, *types), batch, split, mask=mask, items=items, sm_scale=sm_scale, **flags)
        self._fill(plan)
        if plain:
            self._told = told

    def _fill(self, plan) -> None:
        qo, page_size, indptr, lens, last_page = self._table
        offsets = self._paged_kv_indptr_buf if self._use_cuda_graph and self._paged_kv_indptr_buf.is_cuda else None
        plan.plan_paged(self._float_workspace_buffer, qo, page_size, indptr, self._paged_kv_indices_buf, lens,
                        last_page=last_page, offsets=offsets)

    def _run_paged(self, q, paged_kv_cache, args, q_scale, k_scale, v_scale, out, lse, return_lse, window_left,
                   kv_cache_sf, sink=None):
        # The plan checks the shape of a tensor itself.
        k, v = (paged_kv_cache, None) if type(paged_kv_cache) is torch.Tensor else unpack_kv(paged_kv_cache)
        if window_left is not None and window_left != self._window_left:
            raise ValueError(f"window_left {window_left} mismatches that of plan(), {self._window_left}")
        return self._run(q, k, v, args, q_scale, k_scale, v_scale, out, lse, return_lse, kv_cache_sf, sink)


class _Module:
    """Where engines call FlashInfer's compiled module: its ``plan`` takes lengths that the engine has on the host."""

    def __init__(self, wrapper) -> None:
        self._wrapper = weakref.ref(wrapper)

    def plan(self, float_workspace, int_workspace, pinned, *args):
        """Of a prefill wrapper: ``qo_indptr, kv_indptr, kv_lens, rows, batch, qo_heads, kv_heads, page_size, graph,
        head_dim_qk, head_dim_vo, causal, window_left, fixed_split_size, disable_split_kv, ...``; of a decode wrapper:
        ``indptr, batch, qo_heads, kv_heads, page_size, graph, window_left, logits_soft_cap, head_dim_qk, head_dim_vo,
        ...``. What is not among them stays as ``plan()`` was told."""
        wrapper = self._wrapper()
        wrapper._told, flags = None, dict(wrapper._flags)
        if isinstance(args[1], torch.Tensor):
            qo, indptr, lens, rows, batch, qo_heads, kv_heads, page_size, _, dim_qk, dim_vo, causal, window, *rest = args
            fixed, whole = (*rest, -1, False)[:2]
            flags.update(causal=causal, window_left=window)
            wrapper._table = (qo, page_size, indptr, lens, False)
        else:
            indptr, batch, qo_heads, kv_heads, page_size, _, window, cap, dim_qk, dim_vo, *_ = args
            fixed, whole = -1, False
            flags.update(window_left=window, logits_soft_cap=cap)
            qo, last = wrapper._table[0], host(wrapper._paged_kv_last_page_len_buf)
            wrapper._table = (qo, page_size, indptr, last, True)
            rows = batch
        types = wrapper._types(wrapper._cached_q_data_type, wrapper._cached_kv_data_type, wrapper._cached_o_data_type)
        plan = wrapper._set(
            (qo_heads, kv_heads, dim_qk, dim_vo, *types), batch, split_of(page_size, fixed, whole), mask=wrapper._mask,
            items=wrapper._item_args, sm_scale=wrapper._sm_scale, **flags)
        wrapper._page_size = page_size
        wrapper._fill(plan)
        return [batch, rows]


def planned_types(data_type, q_data_type, kv_data_type):
    """The older ``data_type`` stands for both where they were not given."""
    if data_type is not None:
        q_data_type = data_type if q_data_type is None or q_data_type == "float16" else q_data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
    return q_data_type, kv_data_type


def items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len) -> Optional[tuple]:
    """Multi-item scoring's arguments, or None."""
    if prefix_len_ptr is None:
        return None
    i32 = torch.int32
    return prefix_len_ptr.to(i32), token_pos_in_items_ptr.to(i32).reshape(-1), int(token_pos_in_items_len)
