"""``apply``: calls go to the solution that was measured to be best at their size."""

import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import pathlib
import sys
import tempfile
import threading

from .data import TraceSet

_stack, _lock, _asked = [], threading.RLock(), False


@dataclasses.dataclass(frozen=True)
class ApplyConfig:
    """What counts, and what is done for a size that was not measured.

    ``on_miss_policy``: ``fallback_only``, ``use_nearest`` (within ``nearest`` doublings of all axes together) or
    ``use_def_best``. Upstream's ``max_atol`` of 1e-2 and ``max_rtol`` of 1e-5 leave out nearly all of bf16; here what passed
    counts, and errors count when asked for.
    """

    max_atol: float = math.inf
    max_rtol: float = math.inf
    aot_ratio: float = 1.0
    on_miss_policy: str = "fallback_only"
    nearest: float = 1.0
    hardware: str | None = None

    def __post_init__(self):
        if not (self.max_atol > 0 and self.max_rtol > 0 and 0 <= self.aot_ratio <= 1):
            raise ValueError("ApplyConfig: max_atol and max_rtol must be over 0, aot_ratio in [0, 1]")
        if self.on_miss_policy not in ("fallback_only", "use_nearest", "use_def_best"):
            raise ValueError(f"ApplyConfig: on_miss_policy {self.on_miss_policy!r} is not known")


class ApplyConfigRegistry:
    """A configuration for all definitions, and others for some."""

    def __init__(self, default=ApplyConfig(), per_definition=None):
        self.default, self.per_definition = default, dict(per_definition or {})

    def get(self, definition):
        """The configuration of a definition; ``None`` leaves it alone."""
        return self.per_definition.get(definition, self.default)

    def register(self, definition, config, override=False):
        """Sets the configuration of a definition."""
        if definition in self.per_definition and not override:
            raise ValueError(f"`{definition}` has a configuration already")
        self.per_definition[definition] = config


class _Entry:
    """Best solutions of a definition, by the values of its variable axes."""

    def __init__(self, trace_set, definition, config):
        self.definition, self.config, self.by_key = definition, config, {}
        best = {}
        for t in trace_set.filter_traces(definition.name, config.max_atol, config.max_rtol):
            if config.hardware not in (None, t.evaluation.environment.hardware):
                continue
            key, ms = tuple(t.workload.axes.get(a, 0) for a in definition.var_axes), t.evaluation.performance.latency_ms
            if ms < best.get(key, (math.inf,))[0]:
                best[key] = (ms, t.solution)
        self.by_key = {key: solution for key, (_, solution) in best.items()}
        wins = list(self.by_key.values())
        self.best = max(sorted(set(wins)), key=wins.count, default=None)

    def choose(self, key):
        if key in self.by_key or not self.by_key:
            return self.by_key.get(key)
        if self.config.on_miss_policy == "use_def_best":
            return self.best
        if self.config.on_miss_policy == "use_nearest":
            far = lambda k: sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(k, key))
            near = min(sorted(self.by_key), key=far)
            return self.by_key[near] if far(near) <= self.config.nearest else None
        return None


class ApplyRuntime:
    """A trace set's table and the solutions built for it; a context manager that enables it."""

    def __init__(self, trace_set=None, config=None):
        if not isinstance(trace_set, TraceSet):
            usual = "~/.cache/flashinfer_bench/dataset"
            trace_set = TraceSet.from_path(trace_set or os.environ.get("FIB_DATASET_PATH", os.path.expanduser(usual)))
        if not isinstance(config, ApplyConfigRegistry):
            config = ApplyConfigRegistry(config) if config else ApplyConfigRegistry()
        self.trace_set, self.entries, self.built = trace_set, {}, {}
        for name, definition in trace_set.definitions.items():
            of = config.get(name)
            if of is not None:
                self.entries[name] = _Entry(trace_set, definition, of)

    def start(self):
        """Enables it, over what is enabled already."""
        with _lock:
            if not _stack or _stack[-1] is not self:
                _stack.append(self)
        return self

    def stop(self):
        """Disables it; those enabled later must be disabled first."""
        with _lock:
            if self in _stack and _stack[-1] is not self:
                raise RuntimeError("another runtime was enabled later and is still enabled")
            if self in _stack:
                _stack.pop()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def dispatch(self, name, args, kwargs, fallback):
        """Runs the best solution, or the fallback where there is none."""
        own = lambda: _fall_back(name, args, kwargs, fallback)
        entry = self.entries.get(name)
        if entry is None:
            return own()
        names = [*entry.definition.inputs, *entry.definition.outputs]
        values = list(args)
        for n in names[len(values):]:
            if n not in kwargs:
                break
            values.append(kwargs[n])
        ins, outs = len(entry.definition.inputs), len(entry.definition.outputs)
        if len(values) not in (ins, ins + outs):
            return own()
        try:
            axes = entry.definition.get_axes_values([getattr(v, "shape", None) for v in values[:ins]])
        except ValueError:
            return own()
        chosen = entry.choose(tuple(axes.values()))
        call = self._build(chosen) if chosen else None
        if call is None:
            return own()
        return call(entry.definition, axes, values[:ins], values[ins:])

    def _build(self, name):
        if name not in self.built:
            solution = self.trace_set.get_solution(name)
            python = solution is not None and solution.spec.language.value in ("python", "triton", "tilelang")
            self.built[name] = _load(solution) if python else None
        return self.built[name]


def _load(solution):
    """A function of a definition, axes, inputs and outputs, from a solution's Python."""
    package = "fir_bench_" + hashlib.sha1(solution.model_dump_json().encode()).hexdigest()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fir-bench-")) / package
    for source in solution.sources:
        path = folder / source.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.content)
    file, symbol = solution.spec.entry_point.split("::")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"{package}.{pathlib.Path(file).stem}", folder / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    fn, destination = getattr(module, symbol), solution.spec.destination_passing_style

    def call(definition, axes, inputs, outputs):
        import torch

        if destination:
            made = list(outputs)
            if not made:
                device = next((x.device for x in inputs if hasattr(x, "device")), "cpu")
                for (name, shape), spec in zip(definition.get_output_shapes(axes).items(), definition.outputs.values()):
                    made.append(torch.empty(shape or (), dtype=getattr(torch, spec.dtype.value), device=device))
            fn(*inputs, *made)
            return None if outputs else made[0] if len(made) == 1 else tuple(made)
        result = fn(*inputs)
        if not outputs:
            return result
        for to, of in zip(outputs, result if isinstance(result, (tuple, list)) else [result]):
            to.copy_(of)
        return None

    return call


def _fall_back(name, args, kwargs, fallback):
    if fallback is None:
        raise RuntimeError(f"there is no solution of `{name}` for this call, and no fallback")
    return fallback(*args, **kwargs)


def get_apply_runtime():
    """The runtime on top; ``FIB_ENABLE_APPLY=1`` enables one when first asked."""
    global _asked
    with _lock:
        if not _asked:
            _asked = True
            if os.environ.get("FIB_ENABLE_APPLY") == "1":
                ApplyRuntime().start()
        return _stack[-1] if _stack else None


def enable_apply(dataset_path=None, apply_config=None):
    """Enables a trace set, given or by its folder; the runtime, which is also a context manager."""
    return ApplyRuntime(dataset_path, apply_config).start()


def disable_apply():
    """Disables what was enabled last."""
    with _lock:
        if get_apply_runtime() is not None:
            _stack.pop()


def apply(name_or_resolver, args=None, kwargs=None, fallback=None):
    """Runs the best solution of a definition; with a name alone, a decorator."""
    if args is None and kwargs is None and fallback is None:
        def decorate(fn):
            @functools.wraps(fn)
            def wrapped(*args, **kwargs):
                return _run(name_or_resolver, args, kwargs, fn)
            return wrapped
        return decorate
    return _run(name_or_resolver, tuple(args or ()), dict(kwargs or {}), fallback)


def _run(name, args, kwargs, fallback):
    runtime = _stack[-1] if _stack else get_apply_runtime()
    if callable(name):
        name = name(*args, **kwargs)
    if runtime is None:
        return _fall_back(name, args, kwargs, fallback)
    return runtime.dispatch(name, args, kwargs, fallback)
