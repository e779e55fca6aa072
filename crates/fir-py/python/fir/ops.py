"""The operators. Shapes are in the docstrings; a missing output is made like the first input."""

from __future__ import annotations

from . import _fir
from ._new import empty
from .variant import Rope

__all__ = [
    "append_paged_kv", "append_paged_mla", "apply_rope", "apply_rope_in_place", "batched_gemm", "cos_sin_cache",
    "dequantize_fp8", "fused_add_rms_norm", "gelu_and_mul", "gelu_tanh_and_mul", "gemm", "gemma_fused_add_rms_norm",
    "gemma_rms_norm", "grouped_gemm", "layer_norm", "merge_state", "merge_state_in_place", "merge_states", "min_p_sample",
    "moe_ffn", "moe_route", "packbits", "qk_rms_norm", "quantize_fp8", "rms_norm", "sample_from_logits",
    "sample_from_probs", "scaled_gemm", "silu_and_mul", "softmax", "top_k", "top_k_mask_logits", "top_k_renorm",
    "top_k_sample", "top_k_top_p_sample", "top_p_renorm", "top_p_sample",
]


def rms_norm(x, weight, eps: float = 1e-6, *, out=None):
    """``x / sqrt(mean(x^2) + eps) * weight`` of each row of ``[tokens, hidden]``."""
    out = empty(x, x.shape) if out is None else out
    _fir.rms_norm(x, weight, eps, out)
    return out


def gemma_rms_norm(x, weight, eps: float = 1e-6, *, out=None):
    """As :func:`rms_norm`, with ``weight + 1``."""
    out = empty(x, x.shape) if out is None else out
    _fir.gemma_rms_norm(x, weight, eps, out)
    return out


def fused_add_rms_norm(x, residual, weight, eps: float = 1e-6) -> None:
    """``residual += x``, then ``x = rms_norm(residual)``, in place."""
    _fir.fused_add_rms_norm(x, residual, weight, eps)


def gemma_fused_add_rms_norm(x, residual, weight, eps: float = 1e-6) -> None:
    """As :func:`fused_add_rms_norm`, with ``weight + 1``."""
    _fir.gemma_fused_add_rms_norm(x, residual, weight, eps)


def layer_norm(x, gamma, beta, eps: float = 1e-6, *, out=None):
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` of each row of ``[tokens, hidden]``."""
    out = empty(x, x.shape) if out is None else out
    _fir.layer_norm(x, gamma, beta, eps, out)
    return out


def qk_rms_norm(q, k, q_weight, k_weight, eps: float = 1e-6) -> None:
    """Norms each head of ``q`` and ``k``, ``[tokens, heads, head_dim]``, in place."""
    _fir.qk_rms_norm(q, k, q_weight, k_weight, eps)


def _half(x):
    return tuple(x.shape[:-1]) + (x.shape[-1] // 2,)


def silu_and_mul(x, *, out=None):
    """``silu(x[..., :d]) * x[..., d:]`` of ``[tokens, 2 * d]``."""
    out = empty(x, _half(x)) if out is None else out
    _fir.silu_and_mul(x, out)
    return out


def gelu_and_mul(x, *, out=None):
    """``gelu(x[..., :d]) * x[..., d:]`` of ``[tokens, 2 * d]``."""
    out = empty(x, _half(x)) if out is None else out
    _fir.gelu_and_mul(x, out)
    return out


def gelu_tanh_and_mul(x, *, out=None):
    """As :func:`gelu_and_mul`, by the tangent."""
    out = empty(x, _half(x)) if out is None else out
    _fir.gelu_tanh_and_mul(x, out)
    return out


def merge_state(o_a, lse_a, o_b, lse_b):
    """Merges two states ``[tokens, heads, head_dim]`` and ``[tokens, heads]`` (f32, base 2) to ``(o, lse)``."""
    out, lse = empty(o_a, o_a.shape), empty(lse_a, lse_a.shape)
    _fir.merge_state(o_a, lse_a, o_b, lse_b, out, lse)
    return out, lse


def merge_state_in_place(o, lse, o_other, lse_other, mask=None) -> None:
    """Merges another state into ``o`` and ``lse``, for the tokens that ``mask`` (``[tokens]``, bool) selects."""
    _fir.merge_state_in_place(o, lse, o_other, lse_other, mask)


def merge_states(o, lse):
    """Merges ``[tokens, states, heads, head_dim]`` and ``[tokens, states, heads]`` to ``(o, lse)``."""
    tokens, _, heads, dim = o.shape
    out, lse_out = empty(o, (tokens, heads, dim)), empty(lse, (tokens, heads))
    _fir.merge_states(o, lse, out, lse_out)
    return out, lse_out


def append_paged_kv(k, v, k_cache, v_cache, slots, *, kv_layout="NHD", k_scale=1.0, v_scale=1.0, block_scales=None):
    """Writes ``[tokens, kv_heads, head_dim]`` into pages.

    ``slots``: ``[tokens]`` integers ``page * page_size + offset``, or ``(page_size, indptr, indices, last_page_len,
    batch_indices, positions)``.
    """
    _fir.append_paged_kv(k, v, k_cache, v_cache, slots, kv_layout, k_scale, v_scale, block_scales)


def append_paged_mla(ckv, kpe, ckv_cache, kpe_cache, slots, *, ckv_scale=1.0, kpe_scale=1.0) -> None:
    """Writes ``[tokens, ckv_dim]`` and ``[tokens, kpe_dim]`` into pages; ``slots`` as in :func:`append_paged_kv`."""
    _fir.append_paged_mla(ckv, kpe, ckv_cache, kpe_cache, slots, ckv_scale, kpe_scale)


def apply_rope(q, k, positions, angles=None, *, q_out=None, k_out=None):
    """Rotates ``[tokens, heads, head_dim]`` by ``positions`` (``[tokens]``, or ``(indptr, offsets)`` of requests).

    ``angles``: a :class:`~fir.variant.Rope`, or ``(table, interleave)`` with a table of :func:`cos_sin_cache`.
    """
    q_out = empty(q, q.shape) if q_out is None else q_out
    k_out = empty(k, k.shape) if k_out is None else k_out
    _fir.apply_rope(q, k, positions, Rope() if angles is None else angles, (q_out, k_out))
    return q_out, k_out


def apply_rope_in_place(q, k, positions, angles=None) -> None:
    """As :func:`apply_rope`, in place."""
    _fir.apply_rope(q, k, positions, Rope() if angles is None else angles)


def cos_sin_cache(rope: Rope, out):
    """Fills a table ``[max_position, rotary_dim]``, f32, of cosines and sines."""
    _fir.cos_sin_cache(rope, out)
    return out


def softmax(logits, temperature=1.0, *, out=None):
    """Probabilities of ``[batch, classes]``, f32; ``temperature``: a number, or one per row on the host."""
    out = empty(logits, logits.shape) if out is None else out
    _fir.softmax(logits, temperature, out)
    return out


def _draw(op, x, args, seed, offset, indices, out, **kwargs):
    rows = (x if indices is None else indices).shape[0]
    out = empty(x, (rows,), "int32") if out is None else out
    op(x, *args, ((seed, offset), indices, out, None), **kwargs)
    return out


def sample_from_probs(probs, *, seed: int, offset: int = 0, indices=None, out=None):
    """A class of each row, ``[batch]``: the same for the same ``(seed, offset)`` on every device."""
    return _draw(_fir.sample_from_probs, probs, (), seed, offset, indices, out)


def sample_from_logits(logits, temperature=1.0, *, seed: int, offset: int = 0, indices=None, out=None):
    """As :func:`sample_from_probs`, of logits."""
    return _draw(_fir.sample_from_logits, logits, (temperature,), seed, offset, indices, out)


def top_k_sample(probs, top_k, *, seed: int, offset: int = 0, indices=None, out=None):
    """A class among the ``top_k`` (a number, or one per row on the host) likeliest."""
    return _draw(_fir.top_k_sample, probs, (top_k,), seed, offset, indices, out)


def top_p_sample(probs, top_p, *, seed: int, offset: int = 0, indices=None, out=None):
    """A class among the fewest that hold a share ``top_p`` of the mass."""
    return _draw(_fir.top_p_sample, probs, (top_p,), seed, offset, indices, out)


def min_p_sample(probs, min_p, *, seed: int, offset: int = 0, indices=None, out=None):
    """A class among those at least ``min_p`` times as likely as the likeliest."""
    return _draw(_fir.min_p_sample, probs, (min_p,), seed, offset, indices, out)


def top_k_top_p_sample(x, top_k, top_p, *, seed: int, offset: int = 0, order="top_k_first", logits=False, indices=None,
                       out=None):
    """A class that passes both filters, of probabilities or ``logits``."""
    return _draw(_fir.top_k_top_p_sample, x, (top_k, top_p, order), seed, offset, indices, out, logits=logits)


def top_k_renorm(probs, top_k, *, out=None):
    """What ``top_k`` leaves of the probabilities, made to sum to 1."""
    out = empty(probs, probs.shape) if out is None else out
    _fir.top_k_renorm(probs, top_k, out)
    return out


def top_p_renorm(probs, top_p, *, out=None):
    """What ``top_p`` leaves of the probabilities, made to sum to 1."""
    out = empty(probs, probs.shape) if out is None else out
    _fir.top_p_renorm(probs, top_p, out)
    return out


def top_k_mask_logits(logits, top_k, *, out=None):
    """The logits, with -inf for all but the ``top_k`` largest."""
    out = empty(logits, logits.shape) if out is None else out
    _fir.top_k_mask_logits(logits, top_k, out)
    return out


def top_k(x, k: int, *, sorted=False):
    """``(values, indices)`` of the ``k`` largest of each row; of equal ones the first. Indices are i64."""
    shape = (x.shape[0], k)
    values, indices = empty(x, shape), empty(x, shape, "int64")
    _fir.top_k(x, values, indices, sorted=sorted)
    return values, indices


def packbits(x, bitorder="big", *, out=None):
    """Eight truth values to a byte."""
    out = empty(x, ((x.shape[0] + 7) // 8,), "uint8") if out is None else out
    _fir.packbits(x, bitorder, out)
    return out


def quantize_fp8(x, block=(1, 128), dtype="e4m3"):
    """``(fp8, scales)``; a scale stands for ``block = (rows, columns)`` elements, 0 for all of them."""
    rows, columns = x.shape[-2:]
    counts = tuple(1 if b == 0 else -(-n // b) for n, b in zip((rows, columns), block))
    out, scales = empty(x, x.shape, dtype), empty(x, tuple(x.shape[:-2]) + counts, "float32")
    _fir.quantize_fp8(x, block, out, scales)
    return out, scales


def dequantize_fp8(x, scales, block=(1, 128), *, out=None):
    """The numbers that fp8 and its scales stand for; f32 unless ``out`` is given."""
    out = empty(x, x.shape, "float32") if out is None else out
    _fir.dequantize_fp8(x, scales, block, out)
    return out


def gemm(x, w, bias=None, *, out=None):
    """``x @ w.T (+ bias)``: ``x``: ``[m, k]``, ``w``: ``[n, k]``."""
    out = empty(x, (x.shape[0], w.shape[0])) if out is None else out
    _fir.gemm(x, w, out, bias)
    return out


def scaled_gemm(x, w, out, *, x_scales=None, w_scales=None, x_block=(1, 128), w_block=(128, 128)):
    """As :func:`gemm`, of quantized matrices and their scales."""
    _fir.scaled_gemm((x, x_scales, x_block), (w, w_scales, w_block), out)
    return out


def batched_gemm(x, w, *, out=None):
    """``x[b] @ w[b].T``: ``x``: ``[batch, m, k]``, ``w``: ``[batch, n, k]``."""
    out = empty(x, (x.shape[0], x.shape[1], w.shape[1])) if out is None else out
    _fir.batched_gemm((x, None, (0, 0)), (w, None, (0, 0)), out)
    return out


def grouped_gemm(x, indptr, w, *, weight_indices=None, out=None):
    """Rows ``indptr[g]:indptr[g + 1]`` of ``x`` times ``w[weight_indices[g]].T``."""
    out = empty(x, (x.shape[0], w.shape[1])) if out is None else out
    _fir.grouped_gemm((x, None, (0, 0)), indptr, (w, None, (0, 0)), out, weight_indices)
    return out


def moe_route(logits, k: int, bias=None, *, score="softmax", renormalize=True, groups=None, scale=1.0):
    """``(ids, weights)``, ``[tokens, k]``: each token's experts, the best first."""
    shape = (logits.shape[0], k)
    ids, weights = empty(logits, shape, "int32"), empty(logits, shape, "float32")
    _fir.moe_route(logits, bias, ids, weights, score=score, renormalize=renormalize, groups=groups, scale=scale)
    return ids, weights


def moe_ffn(x, ids, weights, w_gate_up, w_down, *, gate="silu", out=None):
    """The weighted sum of what a token's experts make of it: ``w_gate_up``: ``[experts, 2 * inter, hidden]``, gates first,
    ``w_down``: ``[experts, hidden, inter]``."""
    out = empty(x, x.shape) if out is None else out
    _fir.moe_ffn(x, ids, weights, (w_gate_up, None, (0, 0)), (w_down, None, (0, 0)), out, gate)
    return out
