"""``python -m fir.flashinfer.check``: which of FlashInfer's public names are here. Needs no torch."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path


def _load_names():
    path = Path(__file__).with_name("_upstream.py")
    spec = importlib.util.spec_from_file_location("_fir_upstream", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _public(module: str) -> set[str]:
    """``__all__`` of a module, from its text."""
    path = Path(__file__).with_name(f"{module}.py")
    if not path.exists():
        return set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def table() -> list[tuple[str, str, str]]:
    """``(module, name, status)`` of every name; status is implemented, Blackwell-only or missing."""
    names, rows = _load_names(), []
    for module in sorted({*names.OTHERS, *names.BLACKWELL}):
        here = _public(module)
        rows += [(module, n, "implemented" if n in here else "missing") for n in names.OTHERS.get(module, "").split()]
        rows += [(module, n, "Blackwell-only") for n in names.blackwell_only(module)]
    return rows


def main() -> int:
    """Prints the table; 1 if a name is missing."""
    rows = table()
    for module, name, status in rows:
        print(f"{module}.{name}: {status}")
    count = {s: sum(r[2] == s for r in rows) for s in ("implemented", "Blackwell-only", "missing")}
    print(", ".join(f"{n} {s}" for s, n in count.items()))
    return 1 if count["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
