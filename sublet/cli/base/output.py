"""Output of commands: answers to stdout, everything else to stderr, colours only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from sublet_protocol.domain.errors import SubletError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

MAX_DRESSED = 500
"""Rows of a table that a terminal's width is looked at for: of more, the time it takes is felt."""
BROKEN = frozenset({"GROUP", "LEADER", "ADDRESS", "STARTED", "FOUND", "OWNER", "REASON", "FILTER", "PAYLOADS", "SPACE"})
"""Columns that are wrapped where a terminal is narrow: the others are numbers, times and words."""
MIN_BROKEN = 8
"""So narrow they may become; where that does not do either, the terminal breaks the lines."""


class CliOutput:
    """`json`: objects instead of text on stdout. What dresses text is loaded when there is some to dress."""

    def __init__(self, json: bool) -> None:
        self.json = json

    @cached_property
    def stderr_console(self) -> Console:
        """Where stderr goes."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

    @property
    def is_coloured(self) -> bool:
        """Whether stdout is a terminal with colours."""
        from rich.console import Console

        return Console().is_terminal and not Console().no_color

    def print_info(self, text: str) -> None:
        """A sentence to the person, on stderr. What could move a cursor is escaped."""
        self.stderr_console.print("\n".join(map(escape_control_characters, text.split("\n"))), markup=False)

    def print_error(self, text: str, code: int) -> None:
        """An error on stderr, as a sentence or, for programs, as an object in one line."""
        if self.json:
            self.stderr_console.print(json.dumps({"error": text, "exit_code": code}), markup=False)
        else:
            self.print_info(f"sublet: {text}")

    def confirm(self, question: str, otherwise: str) -> None:
        """Ask on stderr; the answer is a line of stdin, and its end is no. Raises `SubletError`, which begins with
        `otherwise`, unless it is yes; `UsageError` for programs, which cannot be asked."""
        if self.json and not (sys.stdin is not None and sys.stdin.isatty()):
            raise UsageError(f"{otherwise} With --json it is asked at a terminal only. Give --yes.")
        self.print_info(f"{question} [y/N]")
        if sys.stdin is None or sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise SubletError(f"{otherwise} Answer y, or give --yes.")

    def print_json(self, value: Any) -> None:
        """An object on stdout, in a line of its own."""
        self.write_lines([to_json_line(value)])

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write lines to stdout and flush. Raises `BrokenPipeError` when the reader has gone."""
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()

    def print_lines(self, lines: Iterable[str]) -> None:
        """Lines for people to stdout. What could move a cursor is escaped."""
        self.write_lines(map(escape_control_characters, lines))

    def print_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table on stdout; columns whose name ends with `>` are numbers, set right. It fits a terminal, or is as wide
        as it needs to be elsewhere. Of what is too wide only prose, addresses and names of groups are broken."""
        cells = [[format_cell(cell) for cell in row] for row in rows]
        if len(cells) > MAX_DRESSED or not _dressed(columns, cells):
            self.write_lines(_aligned(columns, cells))


def to_json_line(value: Any) -> str:
    """Compact JSON, in the characters it is about; what could move a cursor, or turn a line around, is escaped."""
    return escape_json(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def escape_json(text: str) -> str:
    """JSON, in which what cannot be printed is escaped as JSON has it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _dressed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Show a table that fits the terminal; False if stdout is none, or one too narrow for it."""
    from rich.console import Console, JustifyMethod
    from rich.markup import escape
    from rich.table import Table

    wide = zip(columns, _widths(columns, rows), strict=True)
    least = [min(width, MIN_BROKEN) if column in BROKEN else width for column, width in wide]
    if not Console().is_terminal or sum(least) + len(least) - 1 > Console().width:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: JustifyMethod = "right" if column.endswith(">") else "left"
        table.add_column(column.rstrip(">"), justify=justify, overflow="fold", no_wrap=column not in BROKEN)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)
    sys.stdout.flush()
    return True


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the header and the rows, as plain lines."""
    header, widths = [column.rstrip(">") for column in columns], _widths(columns, rows)
    for row in (header, *rows):
        cells = zip(columns, widths, row, strict=True)
        padded = [(" " * (width - _width(cell)), cell, column) for column, width, cell in cells]
        yield " ".join(gap + cell if column.endswith(">") else cell + gap for gap, cell, column in padded).rstrip()


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return how wide each column is."""
    header = [column.rstrip(">") for column in columns]
    return [max(map(_width, found)) for found in zip(header, *rows, strict=True)]


def _width(text: str) -> int:
    """In columns of a terminal."""
    return len(text) if text.isascii() else cell_len(text)


def format_cell(cell: object) -> str:
    """Return a cell of a table; an unknown value is shown as such. What could move a cursor is escaped."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return escape_control_characters(str(cell))


def escape_control_characters(text: str) -> str:
    """Return the text without what could move a cursor, which is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
