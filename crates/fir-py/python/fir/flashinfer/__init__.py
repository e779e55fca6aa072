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

from .. import _as_flashinfer
from . import _upstream

#: The version of FlashInfer whose API this is; consumers check it.
__version__ = _as_flashinfer.VERSION
__git_version__ = "fir"

#: Modules whose names are this package's own too.
_FLAT = (
    "activation", "attention", "cascade", "concat_ops", "decode", "fused_moe", "gemm", "logits_processor", "mla", "norm",
    "page", "pod", "prefill", "quantization", "rope", "sampling", "sparse", "topk", "utils",
)
#: Modules that are not.
_OTHERS = ("autotuner", "fi_trace", "jit", "testing")
#: Where FlashInfer has more than one module for what is one here.
_ALIASES = {
    "cudnn": "decode", "cudnn.decode": "decode", "cudnn.prefill": "prefill", "diffusion_ops": "norm",
    "fp4_quantization": "quantization", "fp8_quantization": "quantization",
    "fused_moe.core": "fused_moe", "grouped_mm": "gemm", "testing.utils": "testing", "tllm_enums": "fused_moe",
    **{f"jit.{name}": "jit" for name in (
        "activation", "attention", "cascade", "core", "env", "gemm", "norm", "page", "quantization", "rope", "sampling",
        "topk", "xqa")},
}


def _blackwell(name: str):
    def raises(*args, **kwargs):
        raise NotImplementedError(f"{name} is for Blackwell GPUs; see fir.flashinfer.check for what is here")

    raises.__name__, raises.__doc__ = name, "For Blackwell GPUs: raises NotImplementedError."
    return raises


def _load() -> None:
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in (*_FLAT, *_OTHERS)}
    for name in _FLAT:
        module = modules[name]
        for public in _upstream.blackwell_only(name):
            setattr(module, public, _blackwell(public))
    # After the modules were read, as some wrap what others have.
    modules["fi_trace"].attach(modules)
    for name in _FLAT:
        module = modules[name]
        names = (*module.__all__, *_upstream.blackwell_only(name))
        globals().update({public: getattr(module, public) for public in names})
    # As in FlashInfer, `topk` is the function; its module is found by `import flashinfer.topk`.
    globals()["topk"] = top_k  # noqa: F821


# `python -m fir.flashinfer.check` needs no torch; everything else does.
if importlib.util.find_spec("torch") is not None:
    _load()


def install() -> None:
    """Makes ``import flashinfer`` and its submodules resolve to this package, in this process, and answers questions
    about the version of ``flashinfer-python`` and ``flashinfer-cubin``."""
    this = sys.modules[__name__]
    present = sys.modules.get("flashinfer")
    if present is not None and present is not this:
        raise RuntimeError(f"flashinfer is imported already, from {getattr(present, '__file__', '?')}")
    sys.modules["flashinfer"] = this
    for name in (*_FLAT, *_OTHERS):
        sys.modules[f"flashinfer.{name}"] = sys.modules[f"{__name__}.{name}"]
    for alias, name in _ALIASES.items():
        sys.modules[f"flashinfer.{alias}"] = sys.modules[f"{__name__}.{name}"]
    _as_flashinfer.hook()
