"""Attention variants given as CUDA text: their expressions become the library's, which run on every device.

A struct with ``REGISTER_LOGITS_TRANSFORM`` and ``REGISTER_LOGITS_MASK`` is read: a body is declarations and returns, an
expression is arithmetic, comparisons, ``?:``, calls of ``math::``, elements of tensors, and bits of packed masks. Hooks
that expressions cannot tell (``M_D_UPDATE``, ``QUERY_TRANSFORM``, writes to memory, loops) are refused by name.
"""

from __future__ import annotations

import math
import re

from .. import variant as va

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0x[0-9a-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)[fFuUlL]*|(?P<name>[A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)*)"
    r"|(?P<op><<|>>|<=|>=|==|!=|&&|\|\||->|[-+*/%<>=!&|^?:()\[\]{},;~]))")
_TYPES = {"float", "double", "half", "int", "int32_t", "int64_t", "uint32_t", "uint8_t", "bool", "unsigned", "auto"}
_LEVELS = (("||",), ("&&",), ("|",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_NAMES = {"qo_idx": va.q_idx, "kv_idx": va.kv_pos, "qo_head_idx": va.qo_head, "kv_head_idx": va.kv_head,
          "batch_idx": va.batch}
_LENGTHS = {"params.get_qo_len": va.q_len, "params.get_kv_len": va.kv_len}
_NUMBERS = {"math::log2e": math.log2(math.e), "math::loge2": math.log(2.0), "math::inf": math.inf, "true": 1, "false": 0}


def variant_name(name: str) -> str:
    """A name as the library wants them: ``flash_sigmoid`` is ``FlashSigmoid``."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    camel = "".join(w[0].upper() + w[1:] for w in words)
    return camel if camel[:1].isalpha() else f"V{camel}"


def _unsupported(name: str, what: str):
    raise NotImplementedError(
        f"variant {name}: {what} has no expression of the library's; give a fir.variant.Variant as variant_decl instead")


class _Parser:
    """Text to trees: ``(operator, operands...)``, names and numbers."""

    def __init__(self, variant: str, text: str) -> None:
        self.variant, self.tokens, at = variant, [], 0
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                _unsupported(variant, f"the text {text[at:at + 20].strip()!r}")
            self.tokens.append((found.lastgroup, found.group(found.lastgroup)))
            at = found.end()
        self.at = 0

    def peek(self, ahead=0):
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else None

    def next(self):
        token = self.tokens[self.at] if self.at < len(self.tokens) else (None, None)
        self.at += 1
        return token

    def take(self, want: str) -> None:
        got = self.next()[1]
        if got != want:
            _unsupported(self.variant, f"{got!r} where {want!r} belongs")

    def expression(self):
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take("?")
        then = self.expression()
        self.take(":")
        return ("?", condition, then, self.expression())

    def binary(self, level: int):
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            left = (self.next()[1], left, self.binary(level + 1))
        return left

    def unary(self):
        if self.peek() in ("-", "!", "+", "~"):
            op = self.next()[1]
            return self.unary() if op == "+" else ("neg" if op == "-" else op, self.unary())
        if self.peek() == "(" and self.peek(1) in _TYPES and self.peek(2) == ")":
            self.at += 3  # A cast: numbers are f32 and integers i32 whatever it says.
            return self.unary()
        return self.postfix(self.primary())

    def primary(self):
        kind, token = self.next()
        if kind == "number":
            return int(token, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", token) else float(token)
        if kind == "name":
            return ("name", token)
        if token == "(":
            inner = self.expression()
            self.take(")")
            return inner
        return _unsupported(self.variant, repr(token))

    def postfix(self, tree):
        while self.peek() in ("(", "[", "<"):
            if self.peek() == "<":
                # `static_cast<float>(x)`; anything else is a comparison.
                if tree != ("name", "static_cast"):
                    return tree
                while self.next()[1] != ">":
                    pass
                tree = ("name", "float")
                continue
            open_, close = (("(", ")") if self.peek() == "(" else ("[", "]"))
            self.take(open_)
            args = []
            while self.peek() != close:
                args.append(self.expression())
                if self.peek() == ",":
                    self.take(",")
            self.take(close)
            tree = ("call", tree, *args) if open_ == "(" else ("index", tree, *args)
        return tree

    def body(self):
        """The value of statements: declarations, ``if (..) return ..``, and a return."""
        if self.peek() == "{":
            self.take("{")
            value = self.body()
            self.take("}")
            return value
        if self.peek() == "return":
            self.take("return")
            value = self.expression()
            self.take(";")
            return value
        if self.peek() == "if":
            self.take("if")
            self.take("(")
            condition = self.expression()
            self.take(")")
            then = self.body()
            if self.peek() == "else":
                self.take("else")
            return ("?", condition, then, self.body())
        while self.peek() in ("const", "constexpr", "static", *_TYPES):
            self.next()
        kind, name = self.next()
        if kind != "name" or self.peek() != "=":
            _unsupported(self.variant, f"the statement at {name!r}")
        self.take("=")
        value = self.expression()
        self.take(";")
        return ("let", name, value, self.body())


def _braces(text: str, at: int) -> str:
    """What is between the brace at or after ``at`` and its own."""
    start, depth = text.index("{", at), 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1:i]
    raise ValueError("braces of the variant's text do not match")


class _Translator:
    def __init__(self, name: str, text: str, tensors, tensor_dtypes, scalars, scalar_dtypes) -> None:
        self.name, self.text = name, text
        self.tensors = dict(zip(tensors, tensor_dtypes))
        self.scalars = dict(zip(scalars, scalar_dtypes))
        self.members, self.bits = {}, set()
        found = re.search(rf"\b{name}\s*\(", text)
        if found is not None:
            for member, value in re.findall(r"(?:this->)?\b(\w+)\s*=\s*([^;=]+);", _braces(text, text.index(")", found.end()))):
                self.members[member] = value

    def variant(self) -> va.Variant:
        for hook in re.findall(r"REGISTER_(\w+)", self.text):
            if hook not in ("LOGITS_TRANSFORM", "LOGITS_MASK", "OUTPUT_TRANSFORM"):
                _unsupported(self.name, f"the hook {hook}")
        softmax = "DefaultUpdater" not in self.text and not re.search(r"use_softmax\s*=\s*false", self.text)
        self.check_output(softmax)
        logits = va.score
        body = self.hook("LOGITS_TRANSFORM")
        if body is not None:
            logits = self.value(body, {"logits": va.score})
        if softmax:
            logits = logits * self.value(("name", "sm_scale_log2"), {}) * math.log(2.0)
        body = self.hook("LOGITS_MASK")
        mask = None if body is None else self.truth(body, {})
        return va.variant(variant_name(self.name), logits=logits, mask=mask, softmax=softmax)

    def hook(self, name: str):
        found = re.search(rf"REGISTER_{name}\s*\(", self.text)
        return None if found is None else _Parser(self.name, "{" + _braces(self.text, found.end()) + "}").body()

    def check_output(self, softmax: bool) -> None:
        """The library divides by the sum itself; another output than that is not read."""
        body = self.hook("OUTPUT_TRANSFORM")
        if body is None:
            return
        lets = {}
        while body[0] == "let":
            lets[body[1]], body = body[2], body[3]
        plain = body == ("name", "output")
        factors = [part for part in body[1:] if part != ("name", "output")]
        scaled = body[0] == "*" and len(factors) == 1 and "rcp" in repr(
            lets.get(factors[0][1], factors[0]) if isinstance(factors[0], tuple) else factors[0])
        if not (scaled if softmax else plain):
            _unsupported(self.name, "this OUTPUT_TRANSFORM")

    def parameter(self, name: str):
        if name in self.scalars:
            return va.i32(name) if "int" in self.scalars[name] else va.f32(name)
        if name in self.tensors:
            return ("tensor", name)
        return _unsupported(self.name, f"params.{name}, which is among neither the tensors nor the scalars,")

    def value(self, tree, local):
        """An expression, or a number, or ``("tensor", name)``."""
        if not isinstance(tree, tuple):
            return tree
        op, *args = tree
        if op == "let":
            return self.value(args[2], {**local, args[0]: self.value(args[1], local)})
        if op == "name":
            return self.named(args[0], local)
        if op == "call":
            return self.call(args, local)
        if op == "index":
            return self.element(args, local)
        if op == "?":
            return va.where(self.truth(args[0], local), self.value(args[1], local), self.value(args[2], local))
        if op in ("==", "!=", "<", "<=", ">", ">=", "&&", "||", "!", "&"):
            return self.truth(tree, local)
        if op == "neg":
            return -self.value(args[0], local)
        if op not in ("+", "-", "*", "/", "%"):
            return _unsupported(self.name, f"the operator {op}")
        a, b = (self.value(arg, local) for arg in args)
        if op == "/" and self.whole(a) and self.whole(b):
            return a // b
        return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b, "%": lambda: a % b}[op]()

    def whole(self, x) -> bool:
        return isinstance(x, int) or (isinstance(x, va.Expr) and repr(x).endswith("i32>"))

    def named(self, name: str, local):
        if name in local:
            return local[name]
        if name in _NAMES:
            return _NAMES[name]
        if name in _NUMBERS:
            return _NUMBERS[name]
        if name.startswith("params."):
            return self.parameter(name.removeprefix("params.").removeprefix("additional_params."))
        name = name.removeprefix("this->")
        if name in self.members:
            return self.value(_Parser(self.name, self.members[name]).expression(), {})
        return _unsupported(self.name, f"the name {name}")

    def call(self, args, local):
        name = args[0][1] if args[0][0] == "name" else ""
        if name in _LENGTHS:
            return _LENGTHS[name]
        values = [self.value(a, local) for a in args[1:]]
        name = name.removeprefix("math::").removeprefix("ptx_").removeprefix("__").removesuffix("f")
        if name in _TYPES or name in ("floa", "hal"):
            return values[0]
        known = {"rcp": lambda x: 1.0 / x, "exp2": lambda x: va.exp(x * math.log(2.0)), "exp": va.exp, "tanh": va.tanh,
                 "log2": lambda x: va.log(x) * math.log2(math.e), "log": va.log, "sqrt": va.sqrt, "max": va.maximum,
                 "min": va.minimum, "abs": abs, "fabs": abs}
        if name not in known:
            return _unsupported(self.name, f"the function {args[0]}")
        return known[name](*values)

    def element(self, args, local):
        base = self.value(args[0], local)
        if not (isinstance(base, tuple) and base[0] == "tensor") or len(args) != 2:
            return _unsupported(self.name, "an element of what is no tensor")
        index, kind = self.value(args[1], local), self.tensors[base[1]]
        if "float" in kind:
            return va.f32_tensor(base[1])[index]
        if kind.startswith("int32") or kind == "int":
            return va.i32_tensor(base[1])[index]
        return _unsupported(self.name, f"an element of type {kind}")

    def truth(self, tree, local):
        if isinstance(tree, tuple):
            op, *args = tree
            if op == "let":
                return self.truth(args[2], {**local, args[0]: self.value(args[1], local), f"&{args[0]}": args[1]})
            if op in ("&&", "||"):
                a, b = (self.truth(arg, local) for arg in args)
                return a & b if op == "&&" else a | b
            if op == "!":
                return ~self.truth(args[0], local)
            if op == "&" and args[1] == 1:
                return self.bit(args[0], local)
            if op in ("==", "!=", "<", "<=", ">", ">="):
                a, b = (self.value(arg, local) for arg in args)
                return {"==": lambda: a == b, "!=": lambda: a != b, "<": lambda: a < b, "<=": lambda: a <= b,
                        ">": lambda: a > b, ">=": lambda: a >= b}[op]()
            if op == "?":
                c, a, b = (self.truth(arg, local) for arg in args)
                return (c & a) | (~c & b)
        x = self.value(tree, local)
        if isinstance(x, int):
            return va.kv_pos >= 0 if x else va.kv_pos < 0
        return x

    def bit(self, tree, local):
        """``mask[i / 8] >> (i % 8)``: bit ``i`` of packed bytes."""
        if tree[0] == ">>" and tree[1][0] == "index":
            base, at, shift = self.value(tree[1][1], local), tree[1][2], tree[2]
            known = at[0] in ("/", ">>") and shift[0] in ("%", "&") and at[1] == shift[1]
            if known and (at[2], shift[2]) in ((8, 8), (3, 7), (8, 7), (3, 8)) and base[0] == "tensor":
                self.bits.add(base[1])
                return va.bits(base[1]).at(0, self.value(at[1], local), 1)
        return _unsupported(self.name, "this use of &")


def translate(name: str, text: str, tensors, tensor_dtypes, scalars, scalar_dtypes) -> tuple[va.Variant, frozenset]:
    """The variant of a text, and which of its tensors are packed bits. It wants scores without a scale."""
    translator = _Translator(name, text, tensors, tensor_dtypes, scalars, scalar_dtypes)
    return translator.variant(), frozenset(translator.bits)
