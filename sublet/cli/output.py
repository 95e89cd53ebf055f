"""What the command line writes: answers to stdout, everything else to stderr, colours only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

MOST_DRESSED = 500
"""Rows of a table that a terminal's width is looked at for: of more, the time it takes is felt."""


class Output:
    """`json`: objects instead of text on stdout."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.prose = Console(stderr=True, highlight=False, soft_wrap=True)

    @property
    def coloured(self) -> bool:
        """Whether stdout is a terminal that wants colours."""
        return Console().is_terminal and not Console().no_color

    def say(self, text: str) -> None:
        """A sentence to the person, on stderr."""
        self.prose.print(text, markup=False)

    def agreed(self, question: str) -> bool:
        """Ask on stderr; the answer is a line of stdin, and its end is no."""
        self.say(f"{question} [y/N]")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def emit(self, thing: Any) -> None:
        """An object on stdout, in a line of its own."""
        self.write([dumps(thing)])

    def write(self, lines: Iterable[str]) -> None:
        """Lines to stdout, there when this returns. Raises `BrokenPipeError` when nobody reads any more."""
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table on stdout; columns whose name ends with `>` are numbers, set right. It fits a terminal, or is as wide
        as it needs to be elsewhere. Times (`AT`) are not broken."""
        cells = [[shown(cell) for cell in row] for row in rows]
        if not Console().is_terminal or len(cells) > MOST_DRESSED:
            self.write(_aligned(columns, cells))
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            justify: JustifyMethod = "right" if column.endswith(">") else "left"
            table.add_column(column.rstrip(">"), justify=justify, overflow="fold", no_wrap=column == "AT")
        for row in cells:
            table.add_row(*map(escape, row))
        Console(highlight=False).print(table)
        sys.stdout.flush()


def dumps(thing: Any) -> str:
    """Compact JSON, in the characters it is about."""
    return json.dumps(thing, ensure_ascii=False, separators=(",", ":"))


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The header and the rows, as plain lines."""
    header = [column.rstrip(">") for column in columns]
    widths = [max(map(cell_len, found)) for found in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        places = zip(columns, widths, row, strict=True)
        padded = [(" " * (width - cell_len(cell)), cell, column) for column, width, cell in places]
        yield " ".join(gap + cell if column.endswith(">") else cell + gap for gap, cell, column in padded).rstrip()


def shown(cell: object) -> str:
    """A cell of a table; what is unknown is said to be."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return str(cell)
