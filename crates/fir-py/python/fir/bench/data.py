"""The nouns: what they hold is checked where they are made, by the rules of the files."""

import datetime
import enum
import json
import os
import pathlib
import uuid as _uuid

from .. import _fir

__all__ = [
    "AxisConst", "AxisVar", "BuildSpec", "Correctness", "DType", "Definition", "Environment", "Evaluation",
    "EvaluationStatus", "Performance", "RandomInput", "SafetensorsInput", "ScalarInput", "Solution", "SourceFile",
    "SpeedupMetrics", "SupportedBindings", "SupportedLanguages", "TensorSpec", "Trace", "TraceSet", "TraceSetSummary", "Workload",
    "append_jsonl_file", "load_json_file", "load_jsonl_file", "save_json_file", "save_jsonl_file",
]


class DType(str, enum.Enum):
    """Element types."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT4_E2M1 = "float4_e2m1"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    BOOL = "bool"


class SupportedLanguages(str, enum.Enum):
    """What solutions are written in."""

    PYTHON = "python"
    TRITON = "triton"
    TILELANG = "tilelang"
    CPP = "cpp"
    CUDA = "cuda"
    RUST = "rust"
    FIR = "fir"


class SupportedBindings(str, enum.Enum):
    """How compiled code is called."""

    TVM_FFI = "tvm-ffi"
    TORCH = "torch"
    FIR = "fir"


class EvaluationStatus(str, enum.Enum):
    """How an evaluation ended."""

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"


def _plain(value):
    if isinstance(value, Model):
        return value.model_dump()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


class Model:
    """A noun: fields by keyword, in the order of its files. What was read keeps the fields that this package does not know, and
    the text that it was read from, which is what is written again."""

    _kind = None
    _fields: dict = {}
    _types: dict = {}
    _more: dict = {}
    _text = None

    def __init__(self, **fields):
        for name in fields:
            if name not in self._fields and name not in self._ignored():
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
        for name, usual in self._fields.items():
            if name not in fields and usual is ...:
                raise TypeError(f"{type(self).__name__} needs a field {name!r}")
            value = fields.get(name, usual() if callable(usual) and not isinstance(usual, type(...)) else usual)
            object.__setattr__(self, name, self._typed(name, value))
        object.__setattr__(self, "_set", {n for n in fields if n in self._fields})
        if self._kind:
            _fir.bench_check(self._kind, json.dumps(self.model_dump()))

    @classmethod
    def _ignored(cls):
        return ()

    def _typed(self, name, value):
        read = self._types.get(name)
        return read(value) if read and value is not None else value

    def __setattr__(self, name, value):
        raise AttributeError(f"{type(self).__name__} does not change; make another")

    @classmethod
    def model_validate(cls, value):
        """From plain dictionaries and lists."""
        if isinstance(value, cls):
            return value
        made = cls(**{k: v for k, v in value.items() if k in cls._fields})
        object.__setattr__(made, "_more", {k: v for k, v in value.items() if k not in cls._fields})
        return made

    @classmethod
    def model_validate_json(cls, text):
        """From JSON."""
        made = cls.model_validate(json.loads(text))
        object.__setattr__(made, "_text", text)
        return made

    def model_dump(self):
        """As plain dictionaries and lists; optional fields that were not given are left out."""
        out = {}
        for name, usual in self._fields.items():
            value = getattr(self, name)
            if usual is ... or name in getattr(self, "_set", self._fields) or value not in (None, [], {}):
                out[name] = _plain(value)
        return {**out, **self._more}

    def model_dump_json(self, indent=None):
        """As JSON."""
        return json.dumps(self.model_dump(), indent=indent)


    def __eq__(self, other):
        return type(self) is type(other) and self.model_dump() == other.model_dump()

    def __hash__(self):
        return hash(self.model_dump_json())

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{k}={getattr(self, k)!r}' for k in self._fields)})"


class AxisConst(Model):
    """A dimension with one value for all workloads."""

    _fields = {"type": "const", "value": ..., "description": None}


class AxisVar(Model):
    """A dimension with a value per workload."""

    _fields = {"type": "var", "description": None}


def _axis(value):
    if isinstance(value, Model):
        return value
    const = value.get("type", "const" if "value" in value else "var") == "const"
    return (AxisConst if const else AxisVar).model_validate(value)


class TensorSpec(Model):
    """A tensor, or with ``shape=None`` a number."""

    _fields = {"shape": ..., "dtype": ..., "description": None}
    _types = {"dtype": DType}


def _all(read):
    return lambda values: {name: read(value) for name, value in values.items()}


class Definition(Model):
    """What is computed."""

    _kind = "definition"
    _fields = {"name": ..., "op_type": ..., "tags": list, "description": None, "axes": ..., "inputs": ..., "outputs": ...,
               "reference": ..., "constraints": list}
    _types = {"axes": _all(_axis), "inputs": _all(TensorSpec.model_validate), "outputs": _all(TensorSpec.model_validate)}

    @property
    def const_axes(self):
        """Values of the constant axes."""
        return {n: a.value for n, a in self.axes.items() if isinstance(a, AxisConst)}

    @property
    def var_axes(self):
        """Names of the variable axes."""
        return [n for n, a in self.axes.items() if isinstance(a, AxisVar)]

    def get_axes_values(self, shapes):
        """Values of the variable axes, from the shapes of the inputs in order."""
        found, const = {}, self.const_axes
        for (name, spec), shape in zip(self.inputs.items(), shapes):
            if spec.shape is None:
                continue
            if shape is None or len(shape) != len(spec.shape):
                raise ValueError(f"`{name}` has shape {shape}, not {spec.shape}")
            for axis, size in zip(spec.shape, shape):
                want = const.get(axis, found.setdefault(axis, size) if axis not in const else None)
                if want != size:
                    raise ValueError(f"`{name}` has {axis} = {size}, not {want}")
        missing = [a for a in self.var_axes if a not in found]
        if missing:
            raise ValueError(f"no input has axis `{missing[0]}`")
        return {a: int(found[a]) for a in self.var_axes}

    def get_axes_values_from_inputs(self, inputs):
        """Values of the variable axes, from the inputs in order."""
        return self.get_axes_values([getattr(x, "shape", None) for x in inputs])

    def _shapes(self, specs, axes):
        values = {**self.const_axes, **axes}
        return {n: None if s.shape is None else tuple(values[a] for a in s.shape) for n, s in specs.items()}

    def get_input_shapes(self, axes):
        """Shapes of the inputs; ``None`` for numbers."""
        return self._shapes(self.inputs, axes)

    def get_output_shapes(self, axes):
        """Shapes of the outputs; ``None`` for numbers."""
        return self._shapes(self.outputs, axes)

    def merge_kwargs_to_args(self, args, kwargs):
        """Arguments in the order of inputs, then outputs, up to the first that is in neither ``args`` nor ``kwargs``."""
        merged = list(args)
        for name in [*self.inputs, *self.outputs][len(merged):]:
            if name not in kwargs:
                break
            merged.append(kwargs[name])
        return tuple(merged)


class SourceFile(Model):
    """A file of a solution."""

    _fields = {"path": ..., "content": ...}


class BuildSpec(Model):
    """How a solution is built and entered."""

    _fields = {"language": ..., "target_hardware": ..., "entry_point": ..., "dependencies": list,
               "destination_passing_style": True, "binding": None, "include_paths": list, "flags": list}
    _types = {"language": SupportedLanguages, "binding": SupportedBindings}


class Solution(Model):
    """How a definition is computed."""

    _kind = "solution"
    _fields = {"name": ..., "definition": ..., "author": ..., "spec": ..., "sources": ..., "description": None}
    _types = {"spec": BuildSpec.model_validate, "sources": lambda s: [SourceFile.model_validate(f) for f in s]}

    def hash(self):
        """The content hash of its files."""
        return _fir.bench_hash(self.model_dump_json())

    def with_unique_name(self):
        """The same with the beginning of its hash in its name."""
        return Solution.model_validate({**self.model_dump(), "name": f"{self.name}_{self.hash()[:8]}"})


class RandomInput(Model):
    """An input that is drawn."""

    _fields = {"type": "random"}

    @classmethod
    def _ignored(cls):
        return ("dtype", "seed")


class ScalarInput(Model):
    """A number."""

    _fields = {"type": "scalar", "value": ...}


class SafetensorsInput(Model):
    """A tensor in a file."""

    _fields = {"type": "safetensors", "path": ..., "tensor_key": ...}


def _input(value):
    kinds = {"random": RandomInput, "scalar": ScalarInput, "safetensors": SafetensorsInput}
    return value if isinstance(value, Model) else kinds[value["type"]].model_validate(value)


class Workload(Model):
    """On what a definition is computed."""

    _kind = "workload"
    _fields = {"axes": ..., "inputs": ..., "uuid": lambda: str(_uuid.uuid4())}
    _types = {"inputs": _all(_input)}


def _number(value):
    return float(value) if isinstance(value, str) else value


class Correctness(Model):
    """Errors of an evaluation."""

    _fields = {"max_relative_error": 0.0, "max_absolute_error": 0.0, "extra": None}
    _types = {"max_relative_error": _number, "max_absolute_error": _number}

    def model_dump(self):
        out = super().model_dump()
        for name in ("max_relative_error", "max_absolute_error"):
            x = out[name]
            out[name] = "NaN" if x != x else "Infinity" if x == float("inf") else x
        return out


class Performance(Model):
    """Times of an evaluation."""

    _fields = {"latency_ms": 0.0, "reference_latency_ms": 0.0, "speedup_factor": 0.0}


class Environment(Model):
    """Where an evaluation ran."""

    _fields = {"hardware": ..., "libs": dict}


class Evaluation(Model):
    """How a solution went; errors and times may also be given as fields of this."""

    _fields = {"status": ..., "environment": lambda: Environment(hardware="unknown"),
               "timestamp": lambda: datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None).isoformat(), "log": "",
               "correctness": None, "performance": None}
    _types = {"status": EvaluationStatus, "environment": Environment.model_validate,
              "correctness": Correctness.model_validate, "performance": Performance.model_validate}

    def __init__(self, **fields):
        for name, kind in (("correctness", Correctness), ("performance", Performance)):
            flat = {f: fields.pop(f) for f in list(fields) if f in kind._fields and f != "extra"}
            if flat:
                fields.setdefault(name, kind(**flat))
        super().__init__(**fields)


class Trace(Model):
    """A workload, alone or with a solution and how it went."""

    _kind = "trace"
    _fields = {"definition": ..., "workload": ..., "solution": None, "evaluation": None}
    _types = {"workload": Workload.model_validate, "evaluation": Evaluation.model_validate}

    def is_workload_trace(self):
        """Whether it is a workload alone."""
        return self.solution is None

    def is_successful(self):
        """Whether it passed."""
        return self.evaluation is not None and self.evaluation.status == EvaluationStatus.PASSED


class SpeedupMetrics(Model):
    """How much faster than the baseline a solution is, or the best ones of an author."""

    _fields = {"avg_speedup": ..., "definitions": ..., "workloads": ..., "success_rate": ..., "win_rate": ..., "best_solutions": None}


class TraceSetSummary(Model):
    """How many traces there are, and authors by their speed-up."""

    _fields = {"total": ..., "passed": ..., "failed": ..., "rankings": ...}


def _read(path):
    # Bytes: line ends and every other character stay what they are.
    return pathlib.Path(path).read_bytes().decode()


def _write(path, text, mode="wb"):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text.encode())


def load_json_file(model, path):
    """A noun from its file."""
    try:
        return model.model_validate_json(_read(path))
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{path}: {e}") from e


def save_json_file(value, path):
    """Writes a noun to its file: as it was read, or with two spaces to a level."""
    _write(path, value.model_dump_json(2) + "\n" if value._text is None else value._text)


def _line(value):
    """A noun on one line: as it was read, if it was on one."""
    text = value._text
    return (value.model_dump_json() if text is None or "\n" in text else text) + "\n"


def load_jsonl_file(model, path):
    """Nouns from the lines of a file."""
    found = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            try:
                found.append(model.model_validate_json(line))
            except (ValueError, TypeError, KeyError) as e:
                raise ValueError(f"{path}:{number}: {e}") from e
    return found


def save_jsonl_file(values, path):
    """Writes nouns, each on a line."""
    _write(path, "".join(map(_line, values)))


def append_jsonl_file(values, path):
    """Adds nouns to a file, each on a line of its own."""
    before = pathlib.Path(path).read_bytes()[-1:] if pathlib.Path(path).exists() else b""
    _write(path, ("" if before in (b"", b"\n") else "\n") + "".join(map(_line, values)), "ab")


#: Safetensors' names of element types.
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
           "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL"}


def _safetensors(tensors):
    """Bytes of a safetensors file."""
    import torch

    header, data = {}, b""
    for name, t in tensors.items():
        t, dtype = t.detach().cpu().contiguous(), str(t.dtype).removeprefix("torch.")
        if dtype not in _STORED:
            raise ValueError(f"`{name}` is of {dtype}, not of {', '.join(_STORED)}")
        text = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        header[name] = {"dtype": _STORED[dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(text)]}
        data += text
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def dataset_path():
    """Where sets are by default: ``FIB_DATASET_PATH``, or upstream's folder in the user's cache."""
    return pathlib.Path(os.environ.get("FIB_DATASET_PATH") or os.path.expanduser("~/.cache/flashinfer_bench/dataset"))


class TraceSet:
    """A folder of definitions, solutions, workloads and traces."""

    def __init__(self, root=None, definitions=None, solutions=None, workloads=None, traces=None):
        self.root = None if root is None else pathlib.Path(root)
        self.definitions = dict(definitions or {})
        self.solutions = {k: list(v) for k, v in (solutions or {}).items()}
        self.workloads = {k: list(v) for k, v in (workloads or {}).items()}
        self.traces = {k: list(v) for k, v in (traces or {}).items()}

    @classmethod
    def from_path(cls, path=None):
        """Reads a folder, ``FIB_DATASET_PATH`` unless given."""
        root = pathlib.Path(path) if path else dataset_path()
        made = cls(root)
        for file in sorted(root.glob("definitions/**/*.json")):
            d = load_json_file(Definition, file)
            if d.name in made.definitions:
                raise ValueError(f"{file}: definition `{d.name}` is there already")
            made.definitions[d.name] = d
        names = set()
        for file in sorted(root.glob("solutions/**/*.json")):
            s = load_json_file(Solution, file)
            if s.name in names:
                raise ValueError(f"{file}: solution `{s.name}` is there already")
            names.add(s.name)
            made.solutions.setdefault(s.definition, []).append(s)
        for folder, side in (("workloads", made.workloads), ("traces", made.traces)):
            for file in sorted(root.glob(f"{folder}/**/*.jsonl")):
                for t in load_jsonl_file(Trace, file):
                    if t.is_workload_trace() != (folder == "workloads"):
                        raise ValueError(f"{file}: `{t.workload.uuid}` of `{t.definition}` does not belong under {folder}")
                    side.setdefault(t.definition, []).append(t)
        return made

    load = from_path

    def to_dict(self):
        """As plain dictionaries and lists."""
        lists = lambda side: {name: [x.model_dump() for x in of] for name, of in side.items()}
        return {"definitions": {name: d.model_dump() for name, d in self.definitions.items()},
                "solutions": lists(self.solutions), "workload": lists(self.workloads), "traces": lists(self.traces)}

    def get_solution(self, name):
        """A solution by name."""
        return next((s for of in self.solutions.values() for s in of if s.name == name), None)

    def filter_traces(self, definition, atol=1e-2, rtol=1e-2):
        """Traces that passed within these errors."""
        return [t for t in self.traces.get(definition, []) if t.is_successful()
                and t.evaluation.correctness.max_absolute_error <= atol
                and t.evaluation.correctness.max_relative_error <= rtol]

    def get_best_trace(self, definition, axes=None, max_abs_error=1e-2, max_rel_error=1e-2):
        """The trace of the largest speed-up on workloads with these axes."""
        found = [t for t in self.filter_traces(definition, max_abs_error, max_rel_error)
                 if all(t.workload.axes.get(n) == v for n, v in (axes or {}).items())]
        return max(found, key=lambda t: t.evaluation.performance.speedup_factor, default=None)

    def _latencies(self, solution):
        """Lowest latency by workload, ``None`` where none passed; and whether every trace passed."""
        of, found = [t for t in self.traces.get(solution.definition, []) if t.solution == solution.name], {}
        for t in of:
            ms, uuid = t.evaluation.performance.latency_ms if t.is_successful() else None, t.workload.uuid
            if ms is not None and ms <= 0:
                raise ValueError(f"`{solution.name}` passed in {ms} ms on {uuid}")
            found[uuid] = min((x for x in (found.get(uuid), ms) if x is not None), default=None)
        return found, all(t.is_successful() for t in of)

    def get_solution_score(self, solution_name, baseline_author="baseline"):
        """How a solution compares with the baseline's; ``None`` for the baseline, and for one with no workload in common."""
        solution = self.get_solution(solution_name)
        if solution is None:
            return None
        base = [s for s in self.solutions[solution.definition] if s.author == baseline_author]
        if len(base) != 1:
            raise ValueError(f"`{solution.definition}` has {len(base)} solutions by `{baseline_author}`, not 1")
        (theirs, _), (own, passed) = self._latencies(base[0]), self._latencies(solution)
        common = [uuid for uuid in own if theirs.get(uuid) is not None]
        if solution.name == base[0].name or not common:
            return None
        ratios = [theirs[uuid] / own[uuid] for uuid in common] if passed else [0.0]
        return SpeedupMetrics(avg_speedup=sum(ratios) / len(ratios), definitions=1, workloads=len(common), success_rate=float(passed),
                              win_rate=sum(r > 1 for r in ratios) / len(ratios))

    def _scope(self, op_type, definition_name):
        if op_type is not None and definition_name is not None:
            raise ValueError("one of `op_type` and `definition_name` may be given, not both")
        if definition_name is not None and definition_name not in self.definitions:
            raise KeyError(f"definition `{definition_name}` is not in the set")
        return [n for n, d in self.definitions.items() if definition_name in (None, n) and op_type in (None, d.op_type)]

    def get_author_score(self, author, baseline_author="baseline", op_type=None, definition_name=None):
        """The mean over definitions of an author's best solutions; ``None`` without one."""
        best = {}
        for name in self._scope(op_type, definition_name):
            scored = [(s.name, self.get_solution_score(s.name, baseline_author)) for s in self.solutions.get(name, []) if s.author == author]
            scored = [(n, m) for n, m in scored if m is not None]
            if scored:
                best[name] = max(scored, key=lambda x: x[1].avg_speedup)
        if not best:
            return None
        mean = lambda field: sum(getattr(m, field) for _, m in best.values()) / len(best)
        return SpeedupMetrics(
            avg_speedup=mean("avg_speedup"), definitions=len(best), workloads=sum(m.workloads for _, m in best.values()),
            success_rate=mean("success_rate"), win_rate=mean("win_rate"), best_solutions={d: n for d, (n, _) in best.items()})

    def rank_authors(self, baseline_author="baseline", op_type=None, definition_name=None):
        """Authors with their scores, the best first."""
        authors = {s.author for name in self._scope(op_type, definition_name) for s in self.solutions.get(name, [])}
        scores = [(a, self.get_author_score(a, baseline_author, op_type, definition_name)) for a in sorted(authors)]
        return sorted(((a, s) for a, s in scores if s is not None), key=lambda x: -x[1].avg_speedup)

    def summary(self, baseline_author="baseline", op_type=None, definition_name=None):
        """How many traces passed, and authors by their speed-up."""
        traces = [t for of in self.traces.values() for t in of]
        passed = sum(t.is_successful() for t in traces)
        rankings = self.rank_authors(baseline_author, op_type, definition_name) if traces else []
        return TraceSetSummary(total=len(traces), passed=passed, failed=len(traces) - passed, rankings=rankings)

    def _file(self, trace):
        """The file, from the root, that a trace belongs in."""
        if trace.definition not in self.definitions:
            raise ValueError(f"definition `{trace.definition}` is not in the set")
        folder = pathlib.Path("workloads")
        if not trace.is_workload_trace():
            solution = self.get_solution(trace.solution)
            if solution is None:
                raise ValueError(f"solution `{trace.solution}` is not in the set")
            folder = pathlib.Path("traces", solution.author)
        return folder / self.definitions[trace.definition].op_type / f"{trace.definition}.jsonl"

    def _add(self, traces, workloads):
        for t in traces:
            if t.is_workload_trace() != workloads:
                raise ValueError(f"a trace of `{t.definition}` {'has a' if workloads else 'has no'} solution")
            path = self._file(t)
            if self.root is not None:
                append_jsonl_file([t], self.root / path)
            (self.workloads if workloads else self.traces).setdefault(t.definition, []).append(t)

    def add_traces(self, traces):
        """Adds traces, also to their files if the set has a root."""
        self._add(traces, False)

    def add_workload_traces(self, traces):
        """Adds workloads, also to their files if the set has a root."""
        self._add(traces, True)

    def add_workload_blob_tensor(self, definition, workload_uuid, tensors):
        """Writes tensors of a workload to a new file; its path from the root."""
        if self.root is None:
            raise ValueError("a set needs a root for the files of its workloads")
        op_type = self.definitions[definition].op_type
        path = pathlib.Path("blob/workloads", op_type, definition, f"{definition}_{workload_uuid}.safetensors")
        file = self.root / path
        if file.exists():
            raise ValueError(f"{file} is there already")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_safetensors(tensors))
        return str(path)

    def backup_traces(self):
        """Moves the traces' folder aside and begins an empty one."""
        if self.root is None:
            raise ValueError("a set needs a root for a backup of its traces")
        traces = self.root / "traces"
        if traces.exists():
            traces.rename(self.root / f"traces_bak_{datetime.datetime.now():%Y%m%d_%H%M%S}")
        traces.mkdir(parents=True)

    def save(self, root=None):
        """Writes the set in its layout; what is there under the same names is replaced. What was read is written as it was."""
        root = pathlib.Path(root or self.root)
        for d in self.definitions.values():
            save_json_file(d, root / "definitions" / d.op_type / f"{d.name}.json")
        for s in (s for of in self.solutions.values() for s in of):
            op_type = self.definitions[s.definition].op_type
            save_json_file(s, root / "solutions" / s.author / op_type / s.definition / f"{s.name}.json")
        files = {}
        for t in (t for side in (self.workloads, self.traces) for of in side.values() for t in of):
            files.setdefault(root / self._file(t), []).append(t)
        for path, of in files.items():
            save_jsonl_file(of, path)
