"""Define, implement, benchmark and deploy kernels, with FlashInfer-Bench's names.

``fir.bench.install()`` makes ``import flashinfer_bench`` find this package.
"""

import importlib
import sys

from . import data
from .apply import (
    ApplyConfig, ApplyConfigRegistry, ApplyRuntime, apply, disable_apply, enable_apply, get_apply_runtime)
from .benchmark import Benchmark, BenchmarkConfig
from .data import *  # noqa: F403
from .data import TraceSet

__all__ = [
    *data.__all__, "ApplyConfig", "ApplyConfigRegistry", "ApplyRuntime", "Benchmark", "BenchmarkConfig", "apply",
    "disable_apply", "enable_apply", "get_apply_runtime", "install", "uninstall",
]

_NAMES = {
    "flashinfer_bench": "", "flashinfer_bench.data": ".data", "flashinfer_bench.apply": ".apply",
    "flashinfer_bench.bench": ".benchmark", "flashinfer_bench.integration": ".integration",
    "flashinfer_bench.integration.flashinfer": ".integration",
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
