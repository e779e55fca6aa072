"""Define, implement, benchmark and deploy kernels, with FlashInfer-Bench's names.

``fir.bench.install()`` makes ``import flashinfer_bench`` find this package.
"""

import importlib
import os
import sys

from . import data
from .apply import (
    ApplyConfig, ApplyConfigRegistry, ApplyRuntime, apply, disable_apply, enable_apply, get_apply_runtime)
from .benchmark import Benchmark, BenchmarkConfig, EvalConfig
from .data import *  # noqa: F403
from .data import TraceSet
from .tracing import (
    TracingConfig, TracingConfigRegistry, TracingRuntime, disable_tracing, enable_tracing, get_tracing_runtime)

__all__ = [
    *data.__all__, "ApplyConfig", "ApplyConfigRegistry", "ApplyRuntime", "Benchmark", "BenchmarkConfig", "EvalConfig",
    "TracingConfig", "TracingConfigRegistry", "TracingRuntime", "apply", "disable_apply", "disable_tracing", "enable_apply", "enable_tracing",
    "get_apply_runtime", "get_tracing_runtime", "install", "uninstall",
]

_NAMES = {
    "flashinfer_bench": "", "flashinfer_bench.data": ".data", "flashinfer_bench.apply": ".apply",
    "flashinfer_bench.bench": ".benchmark", "flashinfer_bench.integration": ".integration",
    "flashinfer_bench.integration.flashinfer": ".integration", "flashinfer_bench.tracing": ".tracing",
}


def install():
    """Lets ``import flashinfer_bench`` and its parts find this package; idempotent."""
    for name, ours in _NAMES.items():
        sys.modules[name] = importlib.import_module(__name__ + ours)


def uninstall():
    """Undoes ``install``."""
    for name, ours in _NAMES.items():
        if getattr(sys.modules.get(name), "__name__", None) == __name__ + ours:
            del sys.modules[name]


if "1" in (os.environ.get("FIB_ENABLE_APPLY"), os.environ.get("FIB_ENABLE_TRACING")):
    # Now and not with the first call: calls of `flashinfer` ask from here on.
    get_apply_runtime(), get_tracing_runtime()
