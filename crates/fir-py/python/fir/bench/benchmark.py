"""Running solutions on workloads."""

import dataclasses
import json
import sys

from .. import _fir
from .data import Trace, TraceSet

_WORKER = "import sys; from fir import _fir; _fir.bench_worker(sys.argv[1])"


@dataclasses.dataclass
class EvalConfig:
    """How an op type or a definition is evaluated; ``None`` is what the layer below says."""

    warmup_runs: int | None = None
    iterations: int | None = None
    num_trials: int | None = None
    rtol: float | None = None
    atol: float | None = None
    required_matched_ratio: float | None = None
    sampling_draws: int | None = None


@dataclasses.dataclass
class BenchmarkConfig:
    """What is run and how; ``None`` is the usual. The fields that ``EvalConfig`` has go over ``definition_config``, and that over
    ``op_type_config``, which are dictionaries of it by name."""

    use_isolated_runner: bool = False
    definitions: list | None = None
    solutions: list | None = None
    timeout_seconds: int = 300
    profile_baseline: bool = True
    warmup_runs: int | None = None
    iterations: int | None = None
    num_trials: int | None = None
    rtol: float | None = None
    atol: float | None = None
    required_matched_ratio: float | None = None
    sampling_draws: int | None = None
    op_type_config: dict = dataclasses.field(default_factory=dict)
    definition_config: dict = dataclasses.field(default_factory=dict)
    device: str = "cpu"
    python: str = sys.executable


class Benchmark:
    """A benchmark of a trace set on disk."""

    def __init__(self, trace_set, config=None):
        if trace_set.root is None:
            raise ValueError("a benchmark needs a trace set with a root; save it first")
        self.trace_set, self.config = trace_set, config or BenchmarkConfig()

    def run_all(self, dump_traces=True, resume=False):
        """Runs everything; the trace set with the new traces."""
        options = {**dataclasses.asdict(self.config), "save": dump_traces, "resume": resume}
        lines = _fir.bench_run(self.trace_set.root, [sys.executable, "-c", _WORKER], json.dumps(options))
        made = TraceSet(self.trace_set.root, self.trace_set.definitions, self.trace_set.solutions,
                        self.trace_set.workloads, self.trace_set.traces)
        for line in lines:
            trace = Trace.model_validate_json(line)
            made.traces.setdefault(trace.definition, []).append(trace)
        return made
