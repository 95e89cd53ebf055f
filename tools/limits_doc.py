"""`python -m tools.limits_doc`: writes the table of docs/limits.md from `sublet_protocol.domain.limits`.

`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from sublet_protocol.domain import limits
from tools.generated import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"

_TABLE = "| --- | --- | --- |\n"


def rows() -> Iterator[str]:
    """Yield a table row for each constant, in the order of the module."""
    body = ast.parse(inspect.getsource(limits)).body
    for assigned, described in pairwise(body):
        if isinstance(assigned, ast.Assign) and isinstance(described, ast.Expr):
            names = [node.id for node in ast.walk(assigned.targets[0]) if isinstance(node, ast.Name)]
            values = " to ".join(format_number(getattr(limits, name)) for name in names)
            text = ast.literal_eval(described.value)
            yield f"| `{'`, `'.join(names)}` | {values} | {' '.join(text.split())} |\n"


def format_number(value: int | float) -> str:
    """Return the number with spaces between thousands, or as a power of two if it is a large one."""
    if isinstance(value, float):
        return f"{value:g}"
    for number, text in ((value, ""), (-value, "-")):
        for power in (32, 53, 63):
            if 0 <= 2**power - number <= 2:
                return f"{text}2^{power}" + (f" - {2**power - number}" if 2**power - number else "")
    return f"{value:,}".replace(",", " ")


def page() -> str:
    """Return the text of the page: its own, with the present rows."""
    return PAGE.read_text().partition(_TABLE)[0] + _TABLE + "".join(rows())


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with `--check` compare it; return 1 if it differs."""
    return write_or_check(__doc__, {PAGE: page()}, "limits_doc", arguments)


if __name__ == "__main__":
    sys.exit(main())
