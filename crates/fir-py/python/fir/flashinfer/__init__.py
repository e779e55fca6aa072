"""FlashInfer's API over fir. Modules and names are FlashInfer's.

CPU tensors work as CUDA tensors do. ``install()`` makes ``import flashinfer`` find this package; ``python -m
fir.flashinfer.check`` lists which of FlashInfer's names are here.

What only Blackwell GPUs have is a name that raises ``NotImplementedError``. Arguments that choose among FlashInfer's kernels
(``backend``, ``use_tensor_cores``, ``enable_pdl``, workspace buffers, ...) are taken and ignored; each docstring says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from . import _upstream

#: The version of FlashInfer whose API this is; consumers check it.
__version__ = "0.6.17"

_MODULES = (
    "activation", "attention", "cascade", "concat_ops", "decode", "fused_moe", "gemm", "logits_processor", "mla", "norm",
    "page", "pod", "prefill", "quantization", "rope", "sampling", "sparse", "topk", "utils",
)
#: Where FlashInfer has more than one module for what is one here.
_ALIASES = {"fp4_quantization": "quantization", "fp8_quantization": "quantization"}


def _blackwell(name: str):
    def raises(*args, **kwargs):
        raise NotImplementedError(f"{name} is for Blackwell GPUs; see fir.flashinfer.check for what is here")

    raises.__name__, raises.__doc__ = name, "For Blackwell GPUs: raises NotImplementedError."
    return raises


def _load() -> None:
    for name in _MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        for public in _upstream.blackwell_only(name):
            setattr(module, public, _blackwell(public))
        names = (*module.__all__, *_upstream.blackwell_only(name))
        globals().update({public: getattr(module, public) for public in names})
    # As in FlashInfer, `topk` is the function; its module is found by `import flashinfer.topk`.
    globals()["topk"] = top_k  # noqa: F821


# `python -m fir.flashinfer.check` needs no torch; everything else does.
if importlib.util.find_spec("torch") is not None:
    _load()


def install() -> None:
    """Makes ``import flashinfer`` and its submodules resolve to this package, in this process."""
    this = sys.modules[__name__]
    present = sys.modules.get("flashinfer")
    if present is not None and present is not this:
        raise RuntimeError(f"flashinfer is imported already, from {getattr(present, '__file__', '?')}")
    sys.modules["flashinfer"] = this
    for name in _MODULES:
        sys.modules[f"flashinfer.{name}"] = sys.modules[f"{__name__}.{name}"]
    for alias, name in _ALIASES.items():
        sys.modules[f"flashinfer.{alias}"] = sys.modules[f"{__name__}.{name}"]
