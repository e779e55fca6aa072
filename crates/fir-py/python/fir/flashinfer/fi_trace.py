"""Definitions of operators in the form of flashinfer-bench: axes, tensors and a reference in torch, from the tensors of a
call. ``fi.rmsnorm.fi_trace(input=x, weight=w)`` returns one; ``FLASHINFER_TRACE_DUMP=1`` writes one for each new shape that
is called with, to ``FLASHINFER_TRACE_DUMP_DIR``.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any, Callable, Optional, Union

import torch

from ._traces import TRACES

__all__ = ["fi_trace"]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(given: dict, source: str) -> Optional[torch.Tensor]:
    name, _, part = source.partition(".")
    value = given.get(name)
    if part and isinstance(value, (tuple, list)):
        value = value[int(part)]
    elif part and isinstance(value, torch.Tensor):
        value = value[:, int(part)]
    return value if isinstance(value, torch.Tensor) else None


def _define(api: str, given: dict[str, Any]) -> dict[str, Any]:
    trace = TRACES[api]
    axes: dict[str, dict[str, Any]] = {}
    inputs: dict[str, Any] = {}
    for name, (source, shape, dtype) in trace["inputs"].items():
        tensor = _tensor(given, source)
        if tensor is None and dtype is None:
            raise ValueError(f"{api}.fi_trace: {source.partition('.')[0]} is missing, expected a tensor")
        names = [] if shape is None else shape.split()
        for i, axis in enumerate(names):
            axis, const = axis.rstrip("*"), axis.endswith("*")
            if tensor is None:
                axes.setdefault(axis, {"type": "var"})
                continue
            if tensor.dim() != len(names):
                raise ValueError(f"{api}.fi_trace: {source} has {tensor.dim()} axes, expected {len(names)}: {shape}")
            size = tensor.shape[i]
            known = axes.setdefault(axis, {"type": "const", "value": size} if const else {"type": "var"})
            if const and known.get("value") != size:
                raise ValueError(f"{api}.fi_trace: {source} has {axis}={size}, expected {known.get('value')}")
        inputs[name] = {"shape": None if shape is None else [n.rstrip("*") for n in names],
                        "dtype": dtype if tensor is None else _dtype(tensor.dtype)}
    outputs = {}
    for name, (shape, dtype) in trace["outputs"].items():
        outputs[name] = {"shape": shape.split(), "dtype": inputs[dtype]["dtype"] if dtype in inputs else dtype}
    values = {n: a.get("value") for n, a in axes.items()}
    return {
        "name": trace["name"].format(**values), "description": trace["description"], "op_type": trace["op_type"],
        "tags": [f"fi_api:flashinfer.{api}", *trace["tags"]], "axes": axes, "inputs": inputs, "outputs": outputs,
        "reference": trace["reference"],
    }


def _traced(api: str) -> Callable[..., dict[str, Any]]:
    def trace(save_dir: Union[str, Path, None] = None, **given) -> dict[str, Any]:
        definition = _define(api, given)
        if save_dir is not None:
            folder = Path(save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{definition['name']}.json").write_text(json.dumps(definition, indent=2))
        return definition

    trace.__doc__ = f"The definition of ``{api}`` for the tensors of a call; ``save_dir`` also writes it."
    return trace


def fi_trace(func_or_method: Callable, save_dir: Union[str, Path, None] = None, **kwargs) -> dict[str, Any]:
    """``func_or_method.fi_trace(...)``, of bound methods too."""
    trace = getattr(func_or_method, "fi_trace", None) or getattr(getattr(func_or_method, "__func__", None), "fi_trace", None)
    if trace is None:
        raise ValueError(f"{getattr(func_or_method, '__qualname__', func_or_method)} has no definition")
    return trace(save_dir=save_dir, **kwargs)


def _dumping(function: Callable, folder: str) -> Callable:
    signature, seen = inspect.signature(function), set()

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            definition = function.fi_trace(**signature.bind(*args, **kwargs).arguments)
            if definition["name"] not in seen:
                seen.add(definition["name"])
                function.fi_trace(save_dir=folder, **signature.bind(*args, **kwargs).arguments)
        except (ValueError, TypeError):
            pass  # A call that has no definition is made all the same.
        return function(*args, **kwargs)

    return call


def attach(package) -> None:
    """Gives each function that has a definition its ``fi_trace``."""
    dump = os.environ.get("FLASHINFER_TRACE_DUMP", "0") not in ("", "0")
    folder = os.environ.get("FLASHINFER_TRACE_DUMP_DIR", "fi_trace_out")
    for api in TRACES:
        module, *path = api.split(".")
        owner = package[module]
        for name in path[:-1]:
            owner = getattr(owner, name)
        function = inspect.getattr_static(owner, path[-1])
        function.fi_trace = _traced(api)
        if dump:
            setattr(owner, path[-1], _dumping(function, folder))
