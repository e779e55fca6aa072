"""Memory for outputs, of the kind that the inputs are."""

from __future__ import annotations

_TORCH = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def empty(like, shape, dtype=None):
    """An uninitialised tensor on the device of ``like``, of its type unless ``dtype`` (a name or a dtype) is given."""
    if hasattr(like, "new_empty"):
        import torch

        if isinstance(dtype, str):
            dtype = getattr(torch, _TORCH.get(dtype, dtype))
        return like.new_empty(shape, dtype=dtype)
    module = like.__array_namespace__() if hasattr(like, "__array_namespace__") else None
    if module is None:
        raise TypeError(f"{type(like).__name__} cannot make tensors like itself: give the outputs")
    return module.empty(shape, dtype=like.dtype if dtype is None else getattr(module, dtype))
