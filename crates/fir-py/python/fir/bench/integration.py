"""Calls of ``flashinfer`` that ask ``apply`` first; what does not fit goes to the function that was there."""

import functools
import importlib

from .apply import apply, get_apply_runtime

_patched = {}


def _rmsnorm(original):
    @functools.wraps(original)
    def rmsnorm(input, weight, eps=1e-6, out=None, *args, **kwargs):
        runtime = get_apply_runtime()
        name = f"rmsnorm_h{weight.shape[-1]}"
        if runtime is None or name not in runtime.entries or args or kwargs or eps != 1e-6 or input.dim() != 2:
            return original(input, weight, eps, out, *args, **kwargs)
        result = apply(name, args=(input, weight), fallback=lambda x, w: original(x, w, eps))
        return result if out is None else out.copy_(result)
    return rmsnorm


def _fused_add_rmsnorm(original):
    @functools.wraps(original)
    def fused_add_rmsnorm(input, residual, weight, eps=1e-6, *args, **kwargs):
        runtime = get_apply_runtime()
        name = f"fused_add_rmsnorm_h{weight.shape[-1]}"
        if runtime is None or name not in runtime.entries or args or kwargs or eps != 1e-6 or input.dim() != 2:
            return original(input, residual, weight, eps, *args, **kwargs)
        missed = object()
        result = apply(name, args=(input, residual, weight), fallback=lambda *_: missed)
        if result is missed:
            return original(input, residual, weight, eps)
        # The function works in place and definitions do not.
        residual.add_(input)
        input.copy_(result)
        return None
    return fused_add_rmsnorm


_ADAPTERS = {("flashinfer.norm", "rmsnorm"): _rmsnorm, ("flashinfer.norm", "fused_add_rmsnorm"): _fused_add_rmsnorm}


def install_flashinfer_integrations():
    """Patches what is there of ``flashinfer``; idempotent. Names of what is patched."""
    for (module, name), adapter in _ADAPTERS.items():
        try:
            target = importlib.import_module(module)
        except ImportError:
            continue
        original = getattr(target, name, None)
        if original is not None and (module, name) not in _patched:
            wrapper = adapter(original)
            _patched[module, name] = (target, original)
            setattr(target, name, wrapper)
            root = importlib.import_module(module.split(".")[0])
            if getattr(root, name, None) is original:
                setattr(root, name, wrapper)
    return sorted(".".join(key) for key in _patched)


def uninstall_flashinfer_integrations():
    """Puts back what was there."""
    for (module, name), (target, original) in list(_patched.items()):
        wrapper = getattr(target, name)
        setattr(target, name, original)
        root = importlib.import_module(module.split(".")[0])
        if getattr(root, name, None) is wrapper:
            setattr(root, name, original)
        del _patched[module, name]
