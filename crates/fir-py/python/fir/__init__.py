"""fir: attention over paged, ragged and sparse KV caches, with the token operators around it.

Tensors are torch's, or any with ``__dlpack__`` or ``__cuda_array_interface__``; they are used where they are, without a
copy: CPU tensors on all cores, CUDA tensors on their library's current stream. Outputs may be given (``out=``) or are made
like the inputs.

* operators: :func:`rms_norm`, :func:`silu_and_mul`, :func:`apply_rope`, :func:`softmax`, :func:`top_k`, ...
* plans: :class:`DecodePlan`, :class:`BatchPlan`, :class:`CascadePlan`, :class:`MlaPlan`, :class:`SparsePlan`
* variants: :mod:`fir.variant`
* models that answer: :class:`LLM`, :class:`AsyncLLM`, :class:`SamplingParams`
* FlashInfer's API: :mod:`fir.flashinfer`
"""

from __future__ import annotations

from . import variant
from ._fir import __version__
from .llm import (
    LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputsParams,
)
from .ops import *  # noqa: F403
from .ops import __all__ as _ops
from .plans import BatchPlan, CascadePlan, DecodePlan, MlaPlan, SparsePlan, single_decode, single_prefill

__all__ = [
    "AsyncLLM", "CompletionOutput", "LLM", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams",
    "BatchPlan", "CascadePlan", "DecodePlan", "MlaPlan", "SparsePlan", "__version__", "single_decode", "single_prefill",
    "variant", *_ops,
]
