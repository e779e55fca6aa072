"""Which arguments of FlashInfer's implemented names the tests give more than one value: ``pytest --every-argument`` watches
every call of the run, and fails if an argument of one of them never varied.

An argument varies if two calls gave it different values, or one gave another than its default; of tensors, types, shapes,
strides and the first numbers are compared. What a function takes by ``**kwargs`` is looked at where it is passed on to.
"""

import ctypes
import functools
import inspect
import json
import sys
import zlib

import torch


def functions():
    """``(name, function)`` of everything implemented: functions, and the methods that classes define themselves."""
    import fir.flashinfer as fi
    from fir.flashinfer.check import table

    for module, name, status in table():
        found = getattr(sys.modules[f"{fi.__name__}.{module}"], name) if status == "implemented" else None
        if isinstance(found, functools.partial):
            found = found.func
        if inspect.isclass(found):
            for method, f in vars(found).items():
                f = f.fget if isinstance(f, property) else getattr(f, "__func__", f)
                own = inspect.isfunction(f) and f.__code__.co_filename == inspect.getsourcefile(found)
                if own and (not method.startswith("_") or method == "__init__"):
                    yield f"{module}.{name}.{method}", f
        elif callable(found) and inspect.isfunction(inspect.unwrap(found)):
            yield f"{module}.{name}", inspect.unwrap(found)


def key(value):
    """What tells values apart, without an operator of torch's."""
    if isinstance(value, torch.Tensor):
        start = ""
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.numel():
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride()))
            start = zlib.crc32(ctypes.string_at(value.data_ptr(), min((last + 1) * value.element_size(), 512)))
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{start}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(key, value))})"
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return repr(value)
    return f"{type(value).__qualname__} at {id(value)}"


class Watch:
    """Arguments of calls, seen by the interpreter's profile hook: nothing is wrapped."""

    def __init__(self) -> None:
        self.values, self.codes = {}, {}
        for name, function in functions():
            self.codes.setdefault(function.__code__, name)
            for parameter in list(inspect.signature(function).parameters.values()):
                if parameter.name in ("self", "cls") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    continue
                default = parameter.default
                argument = f"{self.codes[function.__code__]}.{parameter.name}"
                self.values[argument] = set() if default is parameter.empty else {key(default)}

    def __call__(self, frame, event, arg) -> None:
        name = self.codes.get(frame.f_code) if event == "call" else None
        if name is not None:
            local = frame.f_locals
            for argument in frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]:
                seen = self.values.get(f"{name}.{argument}")
                if seen is not None and len(seen) < 2:
                    seen.add(key(local[argument]))

    def merge(self, other: dict) -> None:
        """What another process saw."""
        for argument, seen in other.items():
            self.values[argument].update(seen)

    def once(self) -> list[str]:
        """Arguments that never varied."""
        return sorted(a for a, seen in self.values.items() if len(seen) < 2)


class Plugin:
    """Watches each test; with xdist, every worker its own, and the controller says what all of them saw."""

    def __init__(self) -> None:
        self.watch = None
        # What `torch.empty` finds in memory differs by chance, and must not count: so it is filled.
        torch.use_deterministic_algorithms(True, warn_only=True)

    def pytest_collection_finish(self, session):
        self.watch = Watch()

    def pytest_runtest_call(self, item):
        sys.setprofile(self.watch)

    def pytest_runtest_teardown(self, item):
        sys.setprofile(None)

    def pytest_testnodedown(self, node, error):
        self.watch = self.watch or Watch()
        self.watch.merge(json.loads(getattr(node, "workeroutput", {}).get("varied", "{}")))

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["varied"] = json.dumps({a: sorted(v) for a, v in self.watch.values.items()})

    def pytest_terminal_summary(self, terminalreporter, config):
        watch = self.watch or Watch()
        once = watch.once()
        terminalreporter.write_line(f"{len(watch.values)} arguments of {len(watch.codes)} functions, {len(once)} never varied")
        for argument in once:
            terminalreporter.write_line(f"never varied: {argument}")

    def failed(self) -> bool:
        """Whether an argument was not varied."""
        return bool((self.watch or Watch()).once())
