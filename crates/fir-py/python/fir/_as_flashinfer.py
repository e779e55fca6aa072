"""``import flashinfer`` and ``importlib.metadata.version("flashinfer-python")`` answered by this package, in this process.

``hook()`` is called by ``fir.flashinfer.install()``, and at the start of every interpreter when ``FIR_AS_FLASHINFER=1`` (by a
``.pth`` file of the wheel); torch is imported with the first ``import flashinfer``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys

#: The version of FlashInfer whose API this is; consumers check it.
VERSION = "0.6.17"
#: Engines take this package for FlashInfer's prebuilt kernels, and look for no compiler when it is there.
_PREBUILT = "flashinfer_cubin"
_DISTRIBUTIONS = ("flashinfer-python", "flashinfer-cubin")


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str):
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Loader(importlib.abc.Loader):
    """Gives a module that is there."""

    def __init__(self, module) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):
        return self._module

    def exec_module(self, module) -> None:
        module.__spec__ = self._spec


class _Empty(importlib.abc.Loader):
    def exec_module(self, module) -> None:
        module.__version__ = VERSION


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == _PREBUILT:
            return importlib.machinery.ModuleSpec(fullname, _Empty())
        if fullname.partition(".")[0] != "flashinfer" or fullname in sys.modules:
            return None
        importlib.import_module("fir.flashinfer").install()
        module = sys.modules.get(fullname)
        if module is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(module), is_package=hasattr(module, "__path__"))

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        wanted = None if context.name is None else context.name.replace("_", "-").lower()
        return [_Distribution(name) for name in _DISTRIBUTIONS if wanted in (None, name)]


def hook() -> None:
    """From now on ``flashinfer`` is this package; nothing happens a second time."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
