"""Attention variants: what is done to a score between ``q . k`` and softmax, as an expression.

    >>> from fir import variant as va
    >>> cap = va.f32("cap")
    >>> capped = va.variant("Capped", logits=cap * va.tanh(va.score / cap), mask=va.kv_pos <= va.q_pos)

The hooks are a closed set: ``query``, ``key`` and ``value`` (lists of rotations and factors), ``logits``, ``mask``,
``init`` (the logit of a key that is not there: a sink), ``output``, and ``softmax=False``. Parameters are named in the
expression and get their values with each run, so another value never compiles again.
"""

from __future__ import annotations

from . import _fir
from ._fir import Expr, Rope, Variant, cuda_source, variant, where

__all__ = [
    "Expr", "Rope", "Variant", "alibi", "batch", "bits", "causal", "cuda_source", "custom_mask", "d", "exp", "f32",
    "f32_tensor", "i32", "i32_tensor", "kv_head", "kv_len", "kv_pos", "log", "m", "maximum", "minimum", "multi_item", "o",
    "per_head", "q_idx", "q_len", "q_pos", "qo_head", "rope", "score", "sigmoid", "sigmoid_attention", "sink",
    "sliding_window", "soft_cap", "sqrt", "standard", "tanh", "tree_mask", "variant", "where",
]

#: The score ``sm_scale * (q . k)``; in ``logits`` only.
score: Expr = _fir.leaf("score")
#: Position of the query token in its request, aligned at the end: ``kv_len - q_len + q_idx``.
q_pos: Expr = _fir.leaf("q_pos")
#: Position of the key in its request.
kv_pos: Expr = _fir.leaf("kv_pos")
#: Index of the query token among its request's query tokens.
q_idx: Expr = _fir.leaf("q_idx")
#: Number of query tokens of the request.
q_len: Expr = _fir.leaf("q_len")
#: Number of keys of the request.
kv_len: Expr = _fir.leaf("kv_len")
#: Index of the request in the batch.
batch: Expr = _fir.leaf("batch")
#: Index of the query head.
qo_head: Expr = _fir.leaf("qo_head")
#: Index of the key and value head.
kv_head: Expr = _fir.leaf("kv_head")
#: An element of the row's result; in ``output`` only.
o: Expr = _fir.leaf("o")
#: The row's largest logit; in ``output`` only.
m: Expr = _fir.leaf("m")
#: The row's sum of ``exp(logit - m)``; in ``output`` only.
d: Expr = _fir.leaf("d")


def f32(name: str) -> Expr:
    """A number that each run gives."""
    return _fir.scalar_param(name, "f32")


def i32(name: str) -> Expr:
    """An integer that each run gives."""
    return _fir.scalar_param(name, "i32")


def per_head(name: str) -> Expr:
    """The value of this row's query head, of a tensor ``[qo_heads]``, f32."""
    return _fir.scalar_param(name, "per_head")


class _Tensor:
    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def __getitem__(self, index) -> Expr:
        return _fir.tensor_param_at(self._name, self._kind, index)


class _Bits:
    def __init__(self, name: str) -> None:
        self._name = name

    def at(self, row, col, stride) -> Expr:
        """Bit ``row * stride + col`` of this request's segment, lowest bit of a byte first; false outside of it."""
        return _fir.bit_param_at(self._name, row, col, stride)


def f32_tensor(name: str) -> _Tensor:
    """A tensor ``[n]``, f32; indexed by an integer expression, which is clamped to it."""
    return _Tensor(name, "f32")


def i32_tensor(name: str) -> _Tensor:
    """A tensor ``[n]``, i32; indexed by an integer expression, which is clamped to it."""
    return _Tensor(name, "i32")


def bits(name: str) -> _Bits:
    """Packed bits: each run gives ``(bytes, indptr)``, uint8 and int32."""
    return _Bits(name)


def tanh(x) -> Expr:
    """Hyperbolic tangent."""
    return _fir.function("tanh", x)


def exp(x) -> Expr:
    """``e`` to this power."""
    return _fir.function("exp", x)


def log(x) -> Expr:
    """Natural logarithm."""
    return _fir.function("log", x)


def sigmoid(x) -> Expr:
    """``1 / (1 + exp(-x))``."""
    return _fir.function("sigmoid", x)


def sqrt(x) -> Expr:
    """Square root."""
    return _fir.function("sqrt", x)


def minimum(a, b) -> Expr:
    """The smaller one."""
    return _fir.extremum(False, a, b)


def maximum(a, b) -> Expr:
    """The larger one."""
    return _fir.extremum(True, a, b)


def standard() -> Variant:
    """Every query sees every key of its request."""
    return _fir.library("standard")


def causal() -> Variant:
    """A query sees the keys up to its own position."""
    return _fir.library("causal")


def sliding_window() -> Variant:
    """A query sees ``window_left`` (int; negative: all) keys before its own."""
    return _fir.library("sliding_window")


def soft_cap() -> Variant:
    """Bounds logits by ``soft_cap`` (float; 0 or less: off)."""
    return _fir.library("soft_cap")


def alibi() -> Variant:
    """Adds ``alibi_slopes[head] * (kv_pos - q_pos)``."""
    return _fir.library("alibi")


def sink() -> Variant:
    """One more key in every row, of logit ``sink[head]`` and value 0."""
    return _fir.library("sink")


def custom_mask() -> Variant:
    """Query ``i`` sees key ``j`` when bit ``i * kv_len + j`` of ``mask`` is set."""
    return _fir.library("custom_mask")


def tree_mask() -> Variant:
    """As ``custom_mask`` among the query tokens alone; all keys before them are seen."""
    return _fir.library("tree_mask")


def sigmoid_attention() -> Variant:
    """Without softmax: the weight is ``sigmoid(score + bias)``."""
    return _fir.library("sigmoid")


def multi_item() -> Variant:
    """Items scored behind one prefix, each blind to the others."""
    return _fir.library("multi_item")


def rope(theta: float = 1e4, scale: float = 1.0, **options) -> Variant:
    """Rotates queries and keys on the fly; options are those of :class:`Rope`."""
    return _fir.rope_variant(Rope(theta, scale, **options))
