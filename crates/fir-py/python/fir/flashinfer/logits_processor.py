"""Pipelines of sampling steps: ``LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])``."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Callable, NamedTuple, Optional, Union

import torch

from . import sampling

__all__ = [
    "CompileError", "Compiler", "FusionRule", "LegalizationError", "LogitsPipe", "LogitsProcessor", "MinP", "Op",
    "ParameterizedOp", "Sample", "Softmax", "TaggedTensor", "Temperature", "TensorType", "TopK", "TopP", "ValidityCheck",
    "compile_pipeline", "legalize_processors",
]


class CompileError(Exception):
    """The steps do not make a pipeline."""


class LegalizationError(Exception):
    """A step does not take what the one before it gives."""


class TensorType(Enum):
    """What a tensor in a pipeline holds."""

    LOGITS = auto()
    PROBS = auto()
    INDICES = auto()


class TaggedTensor:
    """A tensor with what it holds."""

    def __init__(self, data: torch.Tensor, type: TensorType) -> None:
        self.data, self.type = data, type

    @classmethod
    def logits(cls, t: torch.Tensor) -> "TaggedTensor":
        """Logits."""
        return cls(t, TensorType.LOGITS)

    @classmethod
    def probs(cls, t: torch.Tensor) -> "TaggedTensor":
        """Probabilities."""
        return cls(t, TensorType.PROBS)

    @classmethod
    def indices(cls, t: torch.Tensor) -> "TaggedTensor":
        """Classes."""
        return cls(t, TensorType.INDICES)

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's element type."""
        return self.data.dtype

    def size(self, dim: Optional[int] = None):
        """The tensor's size."""
        return self.data.size() if dim is None else self.data.size(dim)


class Op:
    """A step on a tensor of one type."""

    IN = OUT = TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """Runs the step."""
        raise NotImplementedError


class ParameterizedOp(Op):
    """A step with parameters, of the constructor or of the call."""

    def __init__(self, **default_params: Any) -> None:
        self.default_params = default_params

    def param(self, name: str, kwargs: dict[str, Any], required: bool = False):
        """The call's value, else the constructor's."""
        value = kwargs.get(name)
        value = self.default_params.get(name) if value is None else value
        if required and value is None:
            raise ValueError(f"{name} must be given")
        return value


class LogitsProcessor:
    """A step as the user writes it; ``legalize`` chooses what runs for an input type."""

    NAME, TYPES = "", {}

    def __init__(self, **params: Any) -> None:
        self.params = params

    def legalize(self, input_type: TensorType) -> list[Op]:
        """The operators for this input."""
        try:
            run, out = self.TYPES[input_type]
        except KeyError:
            raise LegalizationError(f"{type(self).__name__} does not take {input_type.name}") from None
        return [_Step(run, input_type, out, self.params)]


class _Step(ParameterizedOp):
    def __init__(self, run, in_type: TensorType, out_type: TensorType, params: dict[str, Any]) -> None:
        super().__init__(**params)
        self._run, self.IN, self.OUT = run, in_type, out_type

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor(self._run(self, tensor.data, kwargs), self.OUT)


def _temperature(op, x, kw):
    t = op.param("temperature", kw, True)
    if not isinstance(t, torch.Tensor) and float(t) == 1.0:
        return x
    # Scaled logits are the logarithm of the softmax at that temperature, up to a constant of the row.
    raise NotImplementedError("Temperature without a Softmax right after it; put one there")


def _softmax(op, x, kw):
    return sampling.softmax(x, op.param("temperature", kw))


def _sample(draw):
    def run(op, x, kw):
        return draw(
            x, indices=op.param("indices", kw), generator=op.param("generator", kw), seed=op.param("seed", kw),
            offset=op.param("offset", kw),
        )

    return run


L, P, I = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES


class Temperature(LogitsProcessor):
    """Divides logits by ``temperature``."""

    TYPES = {L: (_temperature, L)}


class Softmax(LogitsProcessor):
    """Logits to probabilities."""

    TYPES = {L: (_softmax, P)}

    def __init__(self, enable_pdl: Optional[bool] = None, **params: Any) -> None:
        super().__init__(**params)


class TopK(LogitsProcessor):
    """Keeps the ``top_k`` likeliest."""

    TYPES = {
        L: (lambda op, x, kw: sampling.top_k_mask_logits(x, op.param("top_k", kw, True)), L),
        P: (lambda op, x, kw: sampling.top_k_renorm_probs(x, op.param("top_k", kw, True)), P),
    }

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(**params)
        self.joint_topk_topp = joint_topk_topp


class TopP(LogitsProcessor):
    """Keeps the fewest that hold a share ``top_p``."""

    TYPES = {P: (lambda op, x, kw: sampling.top_p_renorm_probs(x, op.param("top_p", kw, True)), P)}


class MinP(LogitsProcessor):
    """Draws among those at least ``min_p`` times as likely as the likeliest; the ``Sample`` after it is part of it."""

    TYPES = {P: (None, P)}


class Sample(LogitsProcessor):
    """Draws a class."""

    TYPES = {L: (_sample(sampling.sampling_from_logits), I), P: (_sample(sampling.sampling_from_probs), I)}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(**params)


def _min_p(op, x, kw):
    return sampling.min_p_sampling_from_probs(
        x, op.param("min_p", kw, True), indices=op.param("indices", kw), generator=op.param("generator", kw),
        seed=op.param("seed", kw), offset=op.param("offset", kw),
    )


def _joint(op, x, kw):
    return sampling.top_k_top_p_sampling_from_probs(
        x, op.param("top_k", kw, True), op.param("top_p", kw, True), filter_apply_order="joint",
        indices=op.param("indices", kw), generator=op.param("generator", kw), seed=op.param("seed", kw),
        offset=op.param("offset", kw),
    )


class FusionRule(NamedTuple):
    """Operators of these types, one after another, are replaced by one, if ``guard`` says so; larger ``prio`` first."""

    pattern: tuple[type, ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0


#: Looks at a pipeline's operators, and raises a :class:`CompileError` if they make none.
ValidityCheck = Callable[[list[Op]], None]


def legalize_processors(processors: list[LogitsProcessor], initial_type: TensorType = L) -> list[Op]:
    """The operators of steps. Those that one operator does together are joined: temperature and softmax, a joint top-k and
    top-p with its draw, min-p with its draw."""
    ops, at, i = [], initial_type, 0
    while i < len(processors):
        rest = [type(p) for p in processors[i : i + 3]]
        if at is I:
            raise CompileError(f"{rest[0].__name__} after a draw")
        if rest[:2] == [Temperature, Softmax]:
            new, n = [_Step(_softmax, L, P, {**processors[i].params, **processors[i + 1].params})], 2
        elif at is P and rest == [TopK, TopP, Sample] and processors[i].joint_topk_topp:
            new, n = [_Step(_joint, P, I, {k: v for p in processors[i : i + 3] for k, v in p.params.items()})], 3
        elif at is P and rest[:2] == [MinP, Sample]:
            new, n = [_Step(_min_p, P, I, {**processors[i].params, **processors[i + 1].params})], 2
        elif rest[0] is MinP:
            raise CompileError("MinP without a Sample right after it, of probabilities")
        else:
            new, n = list(processors[i].legalize(at)), 1
        ops += new
        at, i = new[-1].OUT if new else at, i + n
    return ops


class Compiler:
    """Checks operators and joins them by rules."""

    def __init__(self) -> None:
        self.fusion_rules: list[FusionRule] = []
        self.validity_checks: list[ValidityCheck] = []

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Adds a rule."""
        self.fusion_rules = sorted([*self.fusion_rules, rule], key=lambda r: -r.prio)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Adds a check."""
        self.validity_checks.append(check)

    def compile(self, ops: list[Op]) -> list[Op]:
        """The operators to run."""
        if not ops:
            raise CompileError("Cannot compile empty operator list")
        for before, after in zip(ops, ops[1:]):
            if before.OUT is not after.IN:
                raise CompileError(f"{type(after).__name__} takes {after.IN.name}, but {type(before).__name__} before it gives "
                                   f"{before.OUT.name}")
        for check in self.validity_checks:
            check(ops)
        ops, i = list(ops), 0
        while i < len(ops):
            for rule in self.fusion_rules:
                window = ops[i : i + len(rule.pattern)]
                if len(window) == len(rule.pattern) and all(map(isinstance, window, rule.pattern)) and rule.guard(window):
                    ops[i : i + len(window)] = [rule.build(window)]
                    i = max(i - 1, 0)
                    break
            else:
                i += 1
        return ops


def compile_pipeline(ops: list[Op], custom_fusion_rules: Optional[list[FusionRule]] = None,
                     custom_validity_checks: Optional[list[ValidityCheck]] = None) -> list[Op]:
    """:meth:`Compiler.compile` with these rules and checks."""
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)


def _taken(processor: LogitsProcessor, kind: TensorType) -> bool:
    try:
        processor.legalize(kind)
    except (ValueError, LegalizationError):
        return False
    return True


class LogitsPipe:
    """Steps one after another, as :func:`legalize_processors` and :func:`compile_pipeline` make them. ``compile=False``
    leaves custom rules and checks out."""

    def __init__(self, processors: list[LogitsProcessor], compile: bool = True, input_type: Optional[TensorType] = None,
                 custom_fusion_rules: Optional[list[FusionRule]] = None,
                 custom_validity_checks: Optional[list[ValidityCheck]] = None) -> None:
        if not processors:
            raise ValueError("Pipeline cannot be empty")
        self.processors = list(processors)
        if input_type is None:
            kinds = [kind for kind in (L, P) if _taken(self.processors[0], kind)]
            if len(kinds) != 1:
                name = type(self.processors[0]).__name__
                raise ValueError(f"{name} takes {'logits and probabilities: give input_type' if kinds else 'neither logits nor probabilities'}")
            input_type = kinds[0]
        self._initial_type = input_type
        self.ops = legalize_processors(self.processors, input_type)
        if compile:
            self.compile(custom_fusion_rules, custom_validity_checks)

    @property
    def initial_type(self) -> TensorType:
        """What the pipeline takes."""
        return self._initial_type

    def compile(self, custom_fusion_rules: Optional[list[FusionRule]] = None,
                custom_validity_checks: Optional[list[ValidityCheck]] = None) -> None:
        """Checks the operators and joins them by these rules."""
        self.ops = compile_pipeline(self.ops, custom_fusion_rules, custom_validity_checks)

    def __call__(self, x: Union[torch.Tensor, TaggedTensor], **kwargs: Any) -> torch.Tensor:
        """Runs the steps on logits or probabilities."""
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        if tensor.type is not self._initial_type:
            raise ValueError(f"the pipeline takes {self._initial_type.name}, got {tensor.type.name}")
        for op in self.ops:
            tensor = op(tensor, **kwargs)
        return tensor.data
