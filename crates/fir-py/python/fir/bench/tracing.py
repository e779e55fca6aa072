"""Workloads of a running program: calls are recorded in a trace set, by policies for what is written and which calls are kept.

=======================  ============================================================================
dump                     numbers that go into files; other tensors become ``random``, numbers stay
=======================  ============================================================================
``dump_none``            none
``dump_int``             integers and truth values: the structure of a batch
``dump_all``             all
a list of names          these
=======================  ============================================================================

=========================  ==========================================================================
filter                     calls of a definition that are kept
=========================  ==========================================================================
``keep_all``               all
``keep_none``              none
``keep_first``             the first
``keep_first_k``           the first ``k``
``keep_first_k_by_axes``   the first ``k`` (1) with the same axes
``attention``              the first ``k`` (1) with as many requests of the same average lengths; without lengths, by axes
=========================  ==========================================================================

What is kept is written at once. Nothing that goes wrong here fails the call: it is logged.
"""

import dataclasses
import logging
import uuid

from ._enabled import Enabled
from .data import RandomInput, SafetensorsInput, ScalarInput, Trace, TraceSet, Workload

_log = logging.getLogger(__name__)

_DUMPS = ("dump_none", "dump_int", "dump_all")
_FILTERS = ("keep_all", "keep_none", "keep_first", "keep_first_k", "keep_first_k_by_axes", "attention")
#: Axes that differ with every step of an engine.
_TOTALS = ("num_pages", "total_q", "total_kv", "len_indptr", "num_kv_indices")


@dataclasses.dataclass(frozen=True)
class TracingConfig:
    """What is written of a call, and which calls are kept."""

    input_dump_policy: str | list = "dump_none"
    input_dump_policy_kwargs: dict = dataclasses.field(default_factory=dict)
    filter_policy: str = "keep_all"
    filter_policy_kwargs: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.input_dump_policy, str) and self.input_dump_policy not in _DUMPS:
            raise ValueError(f"TracingConfig: input_dump_policy {self.input_dump_policy!r} is not one of {', '.join(_DUMPS)}")
        if self.filter_policy not in _FILTERS:
            raise ValueError(f"TracingConfig: filter_policy {self.filter_policy!r} is not one of {', '.join(_FILTERS)}")
        if self.filter_policy == "keep_first_k" and "k" not in self.filter_policy_kwargs:
            raise ValueError("TracingConfig: filter_policy 'keep_first_k' needs filter_policy_kwargs with 'k'")

    def _dumps(self, name, value):
        if not isinstance(self.input_dump_policy, str):
            return name in self.input_dump_policy
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
        return self.input_dump_policy == "dump_all" or (self.input_dump_policy == "dump_int" and whole)

    def _key(self, name, axes, inputs):
        """What calls must share to count as the same, and how many of the same are kept."""
        policy, k = self.filter_policy, self.filter_policy_kwargs.get("k", 1)
        if policy in ("keep_all", "keep_none"):
            return None, float("inf") if policy == "keep_all" else 0
        if policy in ("keep_first", "keep_first_k"):
            return name, k
        lengths = {}
        for indptr in ("qo_indptr", "kv_indptr") if policy == "attention" else ():
            if getattr(inputs.get(indptr), "ndim", 0) == 1 and len(inputs[indptr]) > 1:
                requests = len(inputs[indptr]) - 1
                lengths[indptr] = (requests, round(int(inputs[indptr][-1]) / requests))
        rest = {a: n for a, n in axes.items() if not lengths or a not in _TOTALS}
        return (name, tuple(rest.items()), tuple(lengths.items())), k


class TracingConfigRegistry:
    """A configuration for all definitions, ``None`` to leave them alone, and others for some."""

    def __init__(self, default=None, per_definition=None):
        self.default, self.per_definition = default, dict(per_definition or {})

    def get(self, definition):
        """The configuration of a definition; ``None`` leaves it alone."""
        return self.per_definition.get(definition, self.default)

    def register(self, definition, config, *, override=False):
        """Sets the configuration of a definition."""
        if definition in self.per_definition and not override:
            raise ValueError(f"`{definition}` has a configuration already")
        self.per_definition[definition] = config
        return self

    def register_many(self, configs, *, override=False):
        """Sets the configurations of several definitions."""
        for definition, config in configs.items():
            self.register(definition, config, override=override)
        return self


class TracingRuntime(Enabled, variable="FIB_ENABLE_TRACING"):
    """Records calls in a trace set; a context manager that enables it."""

    def __init__(self, trace_set=None, tracing_config=None):
        self.trace_set = trace_set if isinstance(trace_set, TraceSet) else TraceSet.from_path(trace_set)
        if tracing_config is None:
            tracing_config = TracingConfig(input_dump_policy="dump_int", filter_policy="attention")
        if isinstance(tracing_config, TracingConfig):
            tracing_config = TracingConfigRegistry(tracing_config)
        elif isinstance(tracing_config, dict):
            tracing_config = TracingConfigRegistry(None, tracing_config)
        self.config, self.seen = tracing_config, {}

    def collect(self, name, args, kwargs):
        """Looks at a call of a definition; whether it was kept."""
        definition, config = self.trace_set.definitions.get(name), self.config.get(name)
        if definition is None or config is None:
            return False
        try:
            with self._lock:
                return self._collect(definition, config, definition.merge_kwargs_to_args(args, kwargs))
        except Exception as e:  # a recorder must not fail what it looks at
            _log.warning("a call of `%s` was not recorded: %s", name, e)
            return False

    def _collect(self, definition, config, values):
        import torch

        if len(values) not in (len(definition.inputs), len(definition.inputs) + len(definition.outputs)):
            raise ValueError(f"{len(values)} arguments, not {len(definition.inputs)}, or with its outputs more")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # A graph that is being captured cannot be waited for, and its tensors hold nothing yet.
            return False
        inputs = dict(zip(definition.inputs, values))
        axes = definition.get_axes_values_from_inputs(inputs.values())
        key, most = config._key(definition.name, axes, inputs)
        seen = self.seen.get(key, 0)
        if seen >= most:
            return False
        name, dumped, sources = str(uuid.uuid4()), {}, {}
        for n, x in inputs.items():
            if not isinstance(x, torch.Tensor):
                sources[n] = ScalarInput(value=x)
            elif config._dumps(n, x):
                dumped[n] = x
            else:
                sources[n] = RandomInput()
        if dumped:
            path = self.trace_set.add_workload_blob_tensor(definition.name, name, dumped)
            sources.update({n: SafetensorsInput(path=path, tensor_key=n) for n in dumped})
        workload = Workload(axes=axes, inputs={n: sources[n] for n in inputs}, uuid=name)
        self.trace_set.add_workload_traces([Trace(definition=definition.name, workload=workload)])
        self.seen[key] = seen + 1
        return True


def get_tracing_runtime():
    """The runtime on top; ``FIB_ENABLE_TRACING=1`` enables one when first asked."""
    return TracingRuntime.top()


def enable_tracing(dataset_path=None, tracing_config=None):
    """Records calls in a trace set, given or by its folder; the runtime, which is also a context manager.

    ``tracing_config``: one for all definitions, a dictionary or registry of them by name; without it a call of each size, by the
    lengths of its requests, with its integers.
    """
    return TracingRuntime(dataset_path, tracing_config).start()


def disable_tracing():
    """Disables what was enabled last."""
    TracingRuntime.pop()
