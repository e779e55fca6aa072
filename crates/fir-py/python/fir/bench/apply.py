"""``apply``: calls go to the solution that was measured to be best at their size."""

import atexit
import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import pathlib
import shutil
import sys
import tempfile

from ._enabled import Enabled
from .data import TraceSet
from .tracing import get_tracing_runtime

#: What can be called in this process.
_LANGUAGES = ("python", "triton", "tilelang")


@dataclasses.dataclass(frozen=True)
class ApplyConfig:
    """What counts, and what is done for a size that was not measured.

    ``on_miss_policy``: ``fallback_only``, ``use_nearest`` (within ``nearest`` doublings of all axes together) or
    ``use_def_best``. Upstream's ``max_atol`` of 1e-2 and ``max_rtol`` of 1e-5 leave out nearly all of bf16; here what passed
    counts, and errors count when asked for. ``hardware``: traces of this device count; without a name those of the device that
    the call's tensors are on, and those that do not say theirs.
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
        return self

    def register_many(self, configs, override=False):
        """Sets the configurations of several definitions."""
        for definition, config in configs.items():
            self.register(definition, config, override)
        return self


@functools.cache
def _cpu():
    """The CPU's name, as traces have it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or "CPU"


@functools.cache
def _gpu(index):
    import torch

    return torch.cuda.get_device_name(index)


def hardware_of(values):
    """Name of the device that a call's tensors are on."""
    device = next((v.device for v in values if hasattr(v, "device")), None)
    return _gpu(device.index) if getattr(device, "type", "cpu") == "cuda" else _cpu()


def _is_of(value, spec):
    """Whether a tensor has its definition's element type; a number is of any."""
    dtype = str(getattr(value, "dtype", spec.dtype.value)).removeprefix("torch.")
    return spec.shape is None or dtype.removesuffix("fn_x2") == spec.dtype.value


def _is_packed(value):
    return not hasattr(value, "is_contiguous") or value.is_contiguous()


class _Entry:
    """Best solutions of a definition, by hardware and by the values of its variable axes."""

    def __init__(self, trace_set, definition, config):
        self.definition, self.config, self.tables = definition, config, {}
        solutions = [s for s in trace_set.solutions.get(definition.name, []) if s.spec.language.value in _LANGUAGES]
        # Kernels were measured on packed tensors and may take them for granted; torch takes tensors as they lie.
        self.any_strides = {s.name: s.spec.language.value == "python" for s in solutions}
        self.rows = []
        for t in trace_set.filter_traces(definition.name, config.max_atol, config.max_rtol):
            if t.solution in self.any_strides:
                key = tuple(t.workload.axes.get(a, 0) for a in definition.var_axes)
                self.rows.append((t.evaluation.environment.hardware, key, t.evaluation.performance.latency_ms, t.solution))

    def table(self, hardware):
        """Solutions by axes, and the one that is best most often, on a device; on any without a name."""
        if hardware not in self.tables:
            best = {}
            for where, key, ms, solution in self.rows:
                if hardware in (None, where) or where == "unknown":
                    best[key] = min(best.get(key, (math.inf, "")), (ms, solution), key=lambda x: x[0])
            by_key = {key: solution for key, (_, solution) in best.items()}
            wins = list(by_key.values())
            self.tables[hardware] = by_key, max(sorted(set(wins)), key=wins.count, default=None)
        return self.tables[hardware]

    def choose(self, key, hardware=None):
        by_key, best = self.table(self.config.hardware or hardware)
        if key in by_key or not by_key:
            return by_key.get(key)
        if self.config.on_miss_policy == "use_def_best":
            return best
        if self.config.on_miss_policy == "use_nearest":
            far = lambda k: sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(k, key))
            near = min(sorted(by_key), key=far)
            return by_key[near] if far(near) <= self.config.nearest else None
        return None


class ApplyRuntime(Enabled, variable="FIB_ENABLE_APPLY"):
    """A trace set's table and the solutions built for it; a context manager that enables it."""

    def __init__(self, trace_set=None, config=None):
        if not isinstance(trace_set, TraceSet):
            trace_set = TraceSet.from_path(trace_set)
        if not isinstance(config, ApplyConfigRegistry):
            config = ApplyConfigRegistry(config) if config else ApplyConfigRegistry()
        self.trace_set, self.entries, self.built = trace_set, {}, {}
        for name, definition in trace_set.definitions.items():
            of = config.get(name)
            if of is not None:
                self.entries[name] = _Entry(trace_set, definition, of)

    def dispatch(self, name, args, kwargs, fallback):
        """Runs the best solution, or the fallback where there is none."""
        own = lambda: _fall_back(name, args, kwargs, fallback)
        entry = self.entries.get(name)
        if entry is None:
            return own()
        values = entry.definition.merge_kwargs_to_args(args, kwargs)
        specs = [*entry.definition.inputs.values(), *entry.definition.outputs.values()]
        ins = len(entry.definition.inputs)
        if len(values) not in (ins, len(specs)) or not all(map(_is_of, values, specs)):
            return own()
        try:
            axes = entry.definition.get_axes_values_from_inputs(values[:ins])
        except ValueError:
            return own()
        chosen = entry.choose(tuple(axes.values()), hardware_of(values))
        if chosen is None or not (entry.any_strides[chosen] or all(_is_packed(v) for v in values)):
            return own()
        return self._build(chosen)(entry.definition, axes, values[:ins], values[ins:])

    def _build(self, name):
        if name not in self.built:
            self.built[name] = _load(self.trace_set.get_solution(name))
        return self.built[name]


def _dtype(torch, spec):
    return getattr(torch, "float4_e2m1fn_x2" if spec.dtype.value == "float4_e2m1" else spec.dtype.value)


@functools.cache
def _folder():
    """Where this process puts sources of solutions, until it ends."""
    folder, owner = pathlib.Path(tempfile.mkdtemp(prefix="fir-bench-")), os.getpid()

    def remove():
        # A child of a fork has it too.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _load(solution):
    """A function of a definition, axes, inputs and outputs, from a solution's Python."""
    package = "fir_bench_" + hashlib.sha1(solution.model_dump_json().encode()).hexdigest()
    folder = _folder() / package
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
                    made.append(torch.empty(shape or (), dtype=_dtype(torch, spec), device=device))
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
    return ApplyRuntime.top()


def enable_apply(dataset_path=None, apply_config=None):
    """Enables a trace set, given or by its folder; the runtime, which is also a context manager."""
    return ApplyRuntime(dataset_path, apply_config).start()


def disable_apply():
    """Disables what was enabled last."""
    ApplyRuntime.pop()


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
    runtime, recorder = get_apply_runtime(), get_tracing_runtime()
    if callable(name):
        name = name(*args, **kwargs)
    if recorder is not None:
        recorder.collect(name, args, kwargs)
    if runtime is None:
        return _fall_back(name, args, kwargs, fallback)
    return runtime.dispatch(name, args, kwargs, fallback)
