"""The extension's functions, and each of them as a custom operator of torch: called directly, or traced by ``torch.compile``
as one node that writes the outputs it was given.

What a traced call cannot carry (a generator, a seed in a tensor) makes ``torch.compile`` break the graph, as it would
elsewhere. Numbers that vary from call to call (page tables, plans) are read when the node runs.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch

from .. import _fir
from ..variant import Rope

is_compiling = torch.compiler.is_compiling
_LIBRARY = torch.library.Library("fir", "DEF")


def _define(name: str, schema: str, run) -> None:
    _LIBRARY.define(f"{name}({schema}) -> ()")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fir::{name}", lambda *args: None, lib=_LIBRARY)


def operator(name: str, schema: str, run):
    """``run`` as a custom operator: itself, or its node when it is traced."""
    _define(name, schema, run)
    traced = getattr(torch.ops.fir, name).default

    def call(*args):
        return traced(*args) if is_compiling() else run(*args)

    return call


def _function(name: str, schema: str):
    """A function of the extension whose arguments a schema can tell as they are."""
    return operator(name, schema, getattr(_fir, name))


rms_norm = _function("rms_norm", "Tensor x, Tensor weight, float eps, Tensor(a!) out")
gemma_rms_norm = _function("gemma_rms_norm", "Tensor x, Tensor weight, float eps, Tensor(a!) out")
fused_add_rms_norm = _function("fused_add_rms_norm", "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps")
gemma_fused_add_rms_norm = _function(
    "gemma_fused_add_rms_norm", "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps")
layer_norm = _function("layer_norm", "Tensor x, Tensor gamma, Tensor beta, float eps, Tensor(a!) out")
rms_norm_quant = _function("rms_norm_quant", "Tensor x, Tensor weight, float scale, float eps, Tensor(a!) out")
fused_add_rms_norm_quant = _function(
    "fused_add_rms_norm_quant",
    "Tensor x, Tensor(a!) residual, Tensor weight, float scale, float eps, Tensor(b!) out")
layer_norm_quant = _function(
    "layer_norm_quant", "Tensor x, Tensor gamma, Tensor beta, float scale, float eps, Tensor(a!) out")
modulated_layer_norm = operator(
    "modulated_layer_norm",
    "Tensor x, Tensor? x_scale, Tensor? residual, float gate, Tensor? gate_rows, Tensor? gate_columns, float scale, "
    "Tensor? scale_rows, Tensor? scale_columns, float shift, Tensor? shift_rows, Tensor? shift_columns, float eps, "
    "Tensor(a!) residual_out, Tensor(b!) out",
    lambda x, x_scale, residual, g, gr, gc, a, ar, ac, b, br, bc, eps, residual_out, out: _fir.modulated_layer_norm(
        x, x_scale, residual, (g, gr, gc), (a, ar, ac), (b, br, bc), eps, residual_out, out))
silu_and_mul = _function("silu_and_mul", "Tensor x, Tensor(a!) out")
gelu_and_mul = _function("gelu_and_mul", "Tensor x, Tensor(a!) out")
gelu_tanh_and_mul = _function("gelu_tanh_and_mul", "Tensor x, Tensor(a!) out")
merge_state = _function(
    "merge_state", "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse_out")
merge_state_in_place = _function(
    "merge_state_in_place", "Tensor(a!) o, Tensor(b!) lse, Tensor o_other, Tensor lse_other, Tensor? mask=None")
merge_states = _function("merge_states", "Tensor o, Tensor lse, Tensor(a!) out, Tensor(b!) lse_out")
gemm = _function("gemm", "Tensor x, Tensor w, Tensor(a!) out, Tensor? bias=None")
packbits = _function("packbits", "Tensor x, str bitorder, Tensor(a!) out")
quantize_fp8 = operator("quantize_fp8", "Tensor x, int[] blocks, Tensor(a!) out, Tensor(b!) scales",
                        lambda x, blocks, out, scales: _fir.quantize_fp8(x, tuple(blocks), out, scales))
dequantize_fp8 = operator("dequantize_fp8", "Tensor x, Tensor scales, int[] blocks, Tensor(a!) out",
                          lambda x, scales, blocks, out: _fir.dequantize_fp8(x, scales, tuple(blocks), out))
quantize_blocks = _function(
    "quantize_blocks", "str format, Tensor x, Tensor(a!) out, Tensor(b!) scales, float scale=1.0")
dequantize_blocks = _function(
    "dequantize_blocks", "str format, Tensor x, Tensor scales, Tensor(a!) out, float scale=1.0")


# Products: a matrix is three arguments, its numbers, its scales or None, and which of them share one.

_MATRICES = "Tensor x, Tensor? x_scales, int[] x_block, Tensor w, Tensor? w_scales, int[] w_block, Tensor(a!) out"
_define("scaled_gemm", _MATRICES, lambda x, xs, xb, w, ws, wb, out: _fir.scaled_gemm(
    (x, xs, tuple(xb)), (w, ws, tuple(wb)), out))
_define("batched_gemm", _MATRICES, lambda x, xs, xb, w, ws, wb, out: _fir.batched_gemm(
    (x, xs, tuple(xb)), (w, ws, tuple(wb)), out))
_define("grouped_gemm", f"{_MATRICES}, Tensor indptr, Tensor? weight_indices", lambda x, xs, xb, w, ws, wb, out, i, n:
        _fir.grouped_gemm((x, xs, tuple(xb)), i.cpu(), (w, ws, tuple(wb)), out, n))


def scaled_gemm(x, w, out) -> None:
    """``x`` and ``w`` are ``(matrix, scales, block)``."""
    if is_compiling():
        return torch.ops.fir.scaled_gemm.default(*x, *w, out)
    _fir.scaled_gemm(x, w, out)


def batched_gemm(x, w, out) -> None:
    """As :func:`scaled_gemm`, of batches."""
    if is_compiling():
        return torch.ops.fir.batched_gemm.default(*x, *w, out)
    _fir.batched_gemm(x, w, out)


def grouped_gemm(x, indptr, w, out, weight_indices=None) -> None:
    """As :func:`scaled_gemm`, of rows in groups."""
    if is_compiling():
        return torch.ops.fir.grouped_gemm.default(*x, *w, out, indptr, weight_indices)
    _fir.grouped_gemm(x, indptr.cpu() if indptr.is_cuda else indptr, w, out, weight_indices)


# Rotary embedding: positions are ids, or offsets of requests with their starts; angles a table, or numbers.

@functools.lru_cache(maxsize=256)
def rope_of(interleave: bool, rotary_dim, scale: float, theta: float, low=None, high=4.0, old=8192.0) -> Rope:
    """The library's rule for these numbers."""
    dim = None if rotary_dim is None or rotary_dim <= 0 else int(rotary_dim)
    return Rope(theta, scale, interleave=interleave, rotary_dim=dim, low_freq_factor=low, high_freq_factor=high,
                old_context_len=float(old))


def _rope(q, k, positions, offsets, table, interleave, numbers, outs=None) -> None:
    where = positions if offsets is None else (positions.cpu() if positions.is_cuda else positions, offsets)
    angles = rope_of(interleave, *numbers) if table is None else (table, interleave)
    _fir.apply_rope(q, k, where, angles, outs)


_ROPE = "Tensor positions, Tensor? offsets, Tensor? table, bool interleave, float[] numbers"
_define("rope", f"Tensor(a!) q, Tensor(b!) k, {_ROPE}", _rope)
_define("rope_out", f"Tensor q, Tensor k, {_ROPE}, Tensor(a!) q_out, Tensor(b!) k_out",
        lambda q, k, p, o, t, i, n, q_out, k_out: _rope(q, k, p, o, t, i, n, (q_out, k_out)))


def apply_rope(q, k, positions, offsets, table, interleave, numbers=(), outs=None) -> None:
    """Rotates into ``outs``, or in place; ``numbers``: rotary_dim (0 for all), scale, theta, and Llama 3.1's three."""
    if is_compiling():
        args = (positions, offsets, table, interleave, numbers)
        if outs is None:
            return torch.ops.fir.rope.default(q, k, *args)
        return torch.ops.fir.rope_out.default(q, k, *args, *outs)
    _rope(q, k, positions, offsets, table, interleave, numbers, outs)


# Sampling: a filter is one number, or a tensor with one per row.

def values(rows, value):
    """One number per row, on the host, or the number of all."""
    return value if rows is None else rows.cpu()


def _filtered(name: str):
    native = getattr(_fir, name)
    number = int if name.startswith("top_k") else float
    _define(name, "Tensor x, Tensor? rows, float value, Tensor(a!) out",
            lambda x, rows, value, out: native(x, values(rows, number(value)), out))
    traced = getattr(torch.ops.fir, name).default

    def call(x, value, out) -> None:
        per_row = isinstance(value, torch.Tensor)
        if is_compiling():
            return traced(x, value if per_row else None, 0.0 if per_row else float(value), out)
        native(x, value.cpu() if per_row and value.is_cuda else value, out)

    return call


softmax, top_k_renorm, top_p_renorm, top_k_mask_logits = (
    _filtered(n) for n in ("softmax", "top_k_renorm", "top_p_renorm", "top_k_mask_logits"))
top_k = operator("top_k", "Tensor x, Tensor(a!) values, Tensor(b!) indices, bool sorted",
                 lambda x, values, indices, sort: _fir.top_k(x, values, indices, sorted=sort))


# Pages.

def _append(k, v, k_cache, v_cache, indptr, indices, last, batch_indices, positions, layout) -> None:
    size = k_cache.shape[1 if layout == "NHD" else 2]
    slots = (size, indptr.cpu(), indices, last.cpu(), batch_indices, positions)
    _fir.append_paged_kv(k, v, k_cache, v_cache, slots, layout)


append_paged_kv = operator(
    "append_paged_kv", "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indptr, Tensor indices, "
    "Tensor last, Tensor batch_indices, Tensor positions, str layout", _append)


# Plans: a wrapper has a number, by which the node finds it when it runs.

_WRAPPERS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


def register(wrapper) -> int:
    """A number for a wrapper with a method ``_launch(q, k, v, out, lse, q_scale, k_scale, v_scale, scales, sink)``."""
    number = next(_NUMBERS)
    _WRAPPERS[number] = wrapper
    return number


def registered(number):
    """The wrapper of a number."""
    return _WRAPPERS[int(number)]


def _run(number, q, k, v, out, lse, q_scale, k_scale, v_scale, k_sf, v_sf, sink) -> None:
    scales = None if k_sf is None else (k_sf, v_sf)
    registered(number)._launch(q, k, v, out, lse, q_scale, k_scale, v_scale, scales, sink)


_define("run_plan", "SymInt plan, Tensor q, Tensor k, Tensor? v, Tensor(a!) out, Tensor(b!)? lse, float q_scale, "
        "float k_scale, float v_scale, Tensor? k_sf, Tensor? v_sf, Tensor? sink", _run)


def run_plan(wrapper, q, k, v, out, lse, q_scale, k_scale, v_scale, scales=None, sink=None) -> None:
    """One layer of a wrapper's plan."""
    if is_compiling():
        k_sf, v_sf = (None, None) if scales is None else scales
        return torch.ops.fir.run_plan.default(
            wrapper._number, q, k, v, out, lse, q_scale, k_scale, v_scale, k_sf, v_sf, sink)
    wrapper._launch(q, k, v, out, lse, q_scale, k_scale, v_scale, scales, sink)
