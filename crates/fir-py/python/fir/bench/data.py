"""The nouns: what they hold is checked where they are made, by the rules of the files."""

import datetime
import enum
import json
import pathlib
import uuid as _uuid

from .. import _fir

__all__ = [
    "AxisConst", "AxisVar", "BuildSpec", "Correctness", "DType", "Definition", "Environment", "Evaluation",
    "EvaluationStatus", "Performance", "RandomInput", "SafetensorsInput", "ScalarInput", "Solution", "SourceFile",
    "SupportedLanguages", "TensorSpec", "Trace", "TraceSet", "Workload",
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
    """A noun: fields by keyword, in the order of its files."""

    _kind = None
    _fields: dict = {}
    _types: dict = {}

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
        return value if isinstance(value, cls) else cls(**{k: v for k, v in value.items() if k in cls._fields})

    @classmethod
    def model_validate_json(cls, text):
        """From JSON."""
        return cls.model_validate(json.loads(text))

    def model_dump(self):
        """As plain dictionaries and lists; optional fields that were not given are left out."""
        out = {}
        for name, usual in self._fields.items():
            value = getattr(self, name)
            if usual is ... or name in getattr(self, "_set", self._fields) or value is not None:
                out[name] = _plain(value)
        return out

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

    def get_output_shapes(self, axes):
        """Shapes of the outputs; ``None`` for numbers."""
        values = {**self.const_axes, **axes}
        return {n: None if s.shape is None else tuple(values[a] for a in s.shape) for n, s in self.outputs.items()}


class SourceFile(Model):
    """A file of a solution."""

    _fields = {"path": ..., "content": ...}


class BuildSpec(Model):
    """How a solution is built and entered."""

    _fields = {"language": ..., "target_hardware": ..., "entry_point": ..., "dependencies": list,
               "destination_passing_style": True, "binding": None}
    _types = {"language": SupportedLanguages}


class Solution(Model):
    """How a definition is computed."""

    _kind = "solution"
    _fields = {"name": ..., "definition": ..., "author": ..., "spec": ..., "sources": ..., "description": None}
    _types = {"spec": BuildSpec.model_validate, "sources": lambda s: [SourceFile.model_validate(f) for f in s]}

    def hash(self):
        """The content hash of its files."""
        return _fir.bench_hash(self.model_dump_json())


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


class TraceSet:
    """A folder of definitions, solutions, workloads and traces."""

    def __init__(self, root=None, definitions=None, solutions=None, workloads=None, traces=None):
        self.root = None if root is None else pathlib.Path(root)
        self.definitions = dict(definitions or {})
        self.solutions = {k: list(v) for k, v in (solutions or {}).items()}
        self.workloads = {k: list(v) for k, v in (workloads or {}).items()}
        self.traces = {k: list(v) for k, v in (traces or {}).items()}

    @classmethod
    def from_path(cls, path):
        """Reads a folder."""
        root, made = pathlib.Path(path), cls(path)
        for file in sorted(root.glob("definitions/**/*.json")):
            d = Definition.model_validate_json(file.read_text())
            if d.name in made.definitions:
                raise ValueError(f"{file}: definition `{d.name}` is there already")
            made.definitions[d.name] = d
        names = set()
        for file in sorted(root.glob("solutions/**/*.json")):
            s = Solution.model_validate_json(file.read_text())
            if s.name in names:
                raise ValueError(f"{file}: solution `{s.name}` is there already")
            names.add(s.name)
            made.solutions.setdefault(s.definition, []).append(s)
        for folder, side in (("workloads", made.workloads), ("traces", made.traces)):
            for file in sorted(root.glob(f"{folder}/**/*.jsonl")):
                for line in file.read_text().splitlines():
                    if line.strip():
                        t = Trace.model_validate_json(line)
                        side.setdefault(t.definition, []).append(t)
        return made

    load = from_path

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

    def save(self, root=None):
        """Writes the set in its layout; what is there under the same names is replaced."""
        root = pathlib.Path(root or self.root)

        def write(path, text):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        for d in self.definitions.values():
            write(root / "definitions" / d.op_type / f"{d.name}.json", d.model_dump_json(indent=2) + "\n")
        authors = {}
        for of in self.solutions.values():
            for s in of:
                authors[s.name] = s.author
                op_type = self.definitions[s.definition].op_type
                write(root / "solutions" / s.author / op_type / s.definition / f"{s.name}.json", s.model_dump_json(indent=2) + "\n")
        files = {}
        for side, folder in ((self.workloads, "workloads"), (self.traces, "traces")):
            for name, of in side.items():
                for t in of:
                    path = root / folder
                    path = path if t.is_workload_trace() else path / authors[t.solution]
                    files.setdefault(path / self.definitions[name].op_type / f"{name}.jsonl", []).append(t.model_dump_json())
        for path, lines in files.items():
            write(path, "\n".join(lines) + "\n")
