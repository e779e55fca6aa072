"""Plans: made once per step, run once per layer.

    >>> plan = fir.DecodePlan(q, page_size=16, indptr=indptr, indices=indices, last_page_len=last, kv_heads=8)
    >>> out = plan.run(q, k_cache, v_cache)
"""

from __future__ import annotations

from typing import Any, Optional

from . import _fir
from ._new import empty
from .variant import Variant, standard

__all__ = ["BatchPlan", "CascadePlan", "DecodePlan", "MlaPlan", "SparsePlan", "single_decode", "single_prefill"]


def _lse(q, wanted: bool, axes: int = 2):
    return empty(q, tuple(q.shape[:axes]), "float32") if wanted else None


class BatchPlan:
    """Requests with any number of query tokens each: prefill, decode and append alike.

    ``like`` is a tensor on the device (``q`` will do); element types are torch's dtypes or names such as ``"bf16"``.
    """

    def __init__(
        self, like, *, qo_heads: int, kv_heads: int, head_dim: int, dtype, head_dim_vo: Optional[int] = None,
        kv_dtype=None, out_dtype=None, variant: Optional[Variant] = None, requests: int = 0, split="balanced",
    ) -> None:
        self._like, self._variant = like, standard() if variant is None else variant
        self._shape = (qo_heads, kv_heads, head_dim, head_dim_vo or head_dim, dtype, kv_dtype or dtype, out_dtype or dtype)
        self._plan = _fir.BatchPlan(self._shape, self._variant, like, requests=requests, split=split)

    def plan_paged(self, qo, page_size: int, indptr, indices, *, last_page_len=None, kv_lens=None) -> "BatchPlan":
        """A batch over pages: ``qo`` is ``[batch + 1]`` offsets of query tokens, or how many each request has;
        ``last_page_len`` or ``kv_lens`` tells the lengths. All on the host; ``indices`` may be on the device."""
        if (last_page_len is None) == (kv_lens is None):
            raise ValueError("give one of last_page_len and kv_lens")
        lens = kv_lens if last_page_len is None else last_page_len
        self._plan.plan_paged(self._like, qo, page_size, indptr, indices, lens, last_page=kv_lens is None)
        return self

    def plan_ragged(self, qo, kv_indptr) -> "BatchPlan":
        """A batch whose keys and values lie one request after another."""
        self._plan.plan_ragged(qo, kv_indptr)
        return self

    def run(
        self, q, k, v=None, *, out=None, lse=None, return_lse: bool = False, sm_scale: Optional[float] = None,
        params: Optional[dict[str, Any]] = None, k_scale: float = 1.0, v_scale: float = 1.0, kv_layout: str = "NHD",
        block_scales=None,
    ):
        """One layer: ``q``: ``[tokens, qo_heads, head_dim]``; ``k``, ``v`` as planned (``v`` is None for one tensor
        ``[pages, 2, ...]``). Returns ``out``, or ``(out, lse)`` with ``return_lse`` (f32, base 2)."""
        if out is None:
            out = empty(q, (q.shape[0], self._shape[0], self._shape[3]), _name(self._shape[6], q))
        lse = _lse(q, return_lse) if lse is None else lse
        self._plan.run(q, k, v, out, lse, sm_scale, params, k_scale, v_scale, kv_layout, block_scales)
        return (out, lse) if return_lse else out

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a run needs besides its tensors."""
        return self._plan.scratch_bytes


def _name(dtype, like):
    return None if dtype == getattr(like, "dtype", None) else dtype


class DecodePlan(BatchPlan):
    """One query token per request, over pages."""

    def __init__(
        self, like, *, page_size: int, indptr, indices, last_page_len=None, kv_lens=None, qo_heads: int, kv_heads: int,
        head_dim: int, dtype, variant: Optional[Variant] = None, split="balanced", **types,
    ) -> None:
        super().__init__(like, qo_heads=qo_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, variant=variant,
                         split=split, **types)
        self.plan_paged(1, page_size, indptr, indices, last_page_len=last_page_len, kv_lens=kv_lens)


class CascadePlan:
    """Requests with shared prefixes. ``levels``: ``(qo_indptr, indptr, indices, last_page_len)`` each, the most shared
    first and the requests' own last. With ``split="balanced"`` few requests, which would not win back what a level costs,
    read their prefixes each for themselves."""

    def __init__(
        self, like, levels, *, page_size: int, qo_heads: int, kv_heads: int, head_dim: int, dtype, kv_dtype=None,
        variant: Optional[Variant] = None, split="balanced",
    ) -> None:
        shape = (qo_heads, kv_heads, head_dim, head_dim, dtype, kv_dtype or dtype, dtype)
        variant = standard() if variant is None else variant
        self._plan = _fir.CascadePlan(shape, variant, like, page_size, list(levels), split=split)

    def run(self, q, k, v=None, *, out=None, return_lse: bool = False, sm_scale: Optional[float] = None,
            params: Optional[dict[str, Any]] = None, kv_layout: str = "NHD"):
        """One layer, as :meth:`BatchPlan.run`."""
        out, lse = empty(q, q.shape) if out is None else out, _lse(q, return_lse)
        self._plan.run(q, k, v, out, lse, sm_scale, params, 1.0, 1.0, kv_layout)
        return (out, lse) if return_lse else out


class MlaPlan:
    """Latent attention over pages; ``qo`` as in :meth:`BatchPlan.plan_paged`."""

    def __init__(
        self, like, qo, *, page_size: int, indptr, indices, kv_lens, heads: int, head_dim_ckv: int, head_dim_kpe: int,
        dtype, kv_dtype=None, out_dtype=None, causal: bool = False, split="balanced",
    ) -> None:
        shape = (heads, head_dim_ckv, head_dim_kpe, dtype, kv_dtype or dtype, out_dtype or dtype)
        self._plan = _fir.MlaPlan(shape, like, requests=len(kv_lens), causal=causal, split=split)
        self._plan.plan(like, qo, page_size, indptr, indices, kv_lens)

    def run(self, q_nope, q_pe, ckv, kpe, sm_scale: float, *, out=None, return_lse: bool = False, ckv_scale: float = 1.0,
            kpe_scale: float = 1.0):
        """One layer: ``q_nope``: ``[tokens, heads, head_dim_ckv]``, ``ckv``: ``[pages, page_size, head_dim_ckv]``."""
        out, lse = empty(q_nope, q_nope.shape) if out is None else out, _lse(q_nope, return_lse)
        self._plan.run(q_nope, q_pe, ckv, kpe, sm_scale, out, lse, ckv_scale, kpe_scale)
        return (out, lse) if return_lse else out


class SparsePlan:
    """Attention under a mask of blocks: made by :meth:`fixed` or :meth:`variable`."""

    def __init__(self, plan) -> None:
        self._plan = plan

    @classmethod
    def fixed(cls, like, indptr, indices, *, rows: int, cols: int, block_rows: int, block_cols: int, qo_heads: int,
              kv_heads: int, head_dim: int, dtype, variant: Optional[Variant] = None) -> "SparsePlan":
        """Blocks of one size: column blocks ``indices[indptr[i]:indptr[i + 1]]`` of row block ``i``."""
        shape = (qo_heads, kv_heads, head_dim, head_dim, dtype, dtype, dtype)
        variant = standard() if variant is None else variant
        return cls(_fir.SparsePlan.fixed(shape, variant, like, indptr, indices, rows, cols, block_rows, block_cols))

    @classmethod
    def variable(cls, like, mask, row_sizes, col_sizes, *, qo_heads: int, kv_heads: int, head_dim: int, dtype,
                 variant: Optional[Variant] = None) -> "SparsePlan":
        """Blocks of any size per KV head: ``mask``: ``[kv_heads, row_blocks, col_blocks]``, bool; sizes i32."""
        shape = (qo_heads, kv_heads, head_dim, head_dim, dtype, dtype, dtype)
        variant = standard() if variant is None else variant
        return cls(_fir.SparsePlan.variable(shape, variant, like, mask, row_sizes, col_sizes))

    def run(self, q, k, v, *, out=None, return_lse: bool = False, sm_scale: Optional[float] = None,
            params: Optional[dict[str, Any]] = None):
        """One layer: ``[tokens, heads, head_dim]``, or heads first if blocks are variable."""
        out, lse = empty(q, q.shape) if out is None else out, _lse(q, return_lse)
        self._plan.run(q, k, v, out, lse, sm_scale, params)
        return (out, lse) if return_lse else out


def single_prefill(q, k, v, variant: Optional[Variant] = None, *, out=None, return_lse: bool = False,
                   sm_scale: Optional[float] = None, params: Optional[dict[str, Any]] = None, kv_layout: str = "NHD"):
    """Attention of one request: ``q``: ``[q_len, qo_heads, head_dim]``, ``k``, ``v``: ``[kv_len, kv_heads, head_dim]``."""
    out = empty(q, tuple(q.shape[:-1]) + (v.shape[-1],)) if out is None else out
    lse = _lse(q, return_lse)
    _fir.single(q, k, v, standard() if variant is None else variant, out, lse, sm_scale, params, kv_layout)
    return (out, lse) if return_lse else out


def single_decode(q, k, v, variant: Optional[Variant] = None, *, out=None, return_lse: bool = False,
                  sm_scale: Optional[float] = None, params: Optional[dict[str, Any]] = None, kv_layout: str = "NHD"):
    """As :func:`single_prefill`, of one query token: ``q``: ``[qo_heads, head_dim]``."""
    out = empty(q, (q.shape[0], v.shape[-1])) if out is None else out
    lse = _lse(q, return_lse, 1)
    _fir.single(q, k, v, standard() if variant is None else variant, out, lse, sm_scale, params, kv_layout, decode=True)
    return (out, lse) if return_lse else out
