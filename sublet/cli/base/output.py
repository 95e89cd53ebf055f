"""Output of commands: answers to stdout, everything else to stderr, colours only on a terminal."""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sublet_protocol.domain.errors import SubletError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

MAX_FITTED_ROWS = 500
"""Maximum number of rows of a table that is fitted to the terminal: with more, the delay is noticeable."""
WRAPPED_COLUMNS = frozenset(
    {"GROUP", "LEADER", "ADDRESS", "STARTED", "FOUND", "OWNER", "REASON", "FILTER", "PAYLOADS", "SPACE"}
)
"""Columns that are wrapped in a narrow terminal: the others are numbers, times and words."""
MIN_WRAPPED_WIDTH = 8
"""Minimum width of these columns; in a narrower terminal the terminal itself wraps the lines."""

_BLANK = frozenset("\u2800\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0") | frozenset(map(chr, range(0xFE00, 0xFE10)))
"""Printable characters that are not seen."""


class CliOutput:
    """Writes a command's output. `json`: objects instead of text on stdout. Rich is imported on demand."""

    def __init__(self, json: bool) -> None:
        self.json = json

    @cached_property
    def stderr_console(self) -> Console:
        """Return the console of stderr."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

    @property
    def is_coloured(self) -> bool:
        """Return whether stdout is a terminal with colours."""
        from rich.console import Console

        return Console().is_terminal and not Console().no_color

    def print_info(self, text: str) -> None:
        """Print a sentence to stderr. Characters that could move a cursor are escaped."""
        self.stderr_console.print("\n".join(map(escape_control_characters, text.split("\n"))), markup=False)

    def print_error(self, text: str, code: int) -> None:
        """Print an error to stderr, as a sentence or, for programs, as an object in one line."""
        if self.json:
            self.stderr_console.print(json.dumps({"error": text, "exit_code": code}), markup=False)
        else:
            self.print_info(f"sublet: {text}")

    def confirm(self, question: str, otherwise: str) -> None:
        """Ask on stderr; the answer is a line of stdin, and its end means no. Raise `SubletError`, which begins with
        `otherwise`, unless the answer is yes; `UsageError` for programs, which cannot answer."""
        if self.json and not (sys.stdin is not None and sys.stdin.isatty()):
            raise UsageError(f"{otherwise} With --json it is asked at a terminal only. Give --yes.")
        self.print_info(f"{question} [y/N]")
        if sys.stdin is None or sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise SubletError(f"{otherwise} Answer y, or give --yes.")

    def print_json(self, value: Any) -> None:
        """Print an object to stdout, in a line of its own."""
        self.write_lines([to_json_line(value)])

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write lines to stdout and flush. Raise `BrokenPipeError` if the reader has gone."""
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()

    def wait_for_reader_to_leave(self, timeout_s: float = 0.0) -> None:
        """Wait, and raise `BrokenPipeError` as soon as the reader of stdout has gone: it would not be noticed without
        anything to write."""
        poll = select.poll()
        try:
            poll.register(sys.stdout, 0)  # of a pipe POLLERR, of a socket POLLHUP: both come without being asked for
        except (OSError, io.UnsupportedOperation):
            time.sleep(timeout_s)
            return
        if poll.poll(timeout_s * 1000):
            raise BrokenPipeError

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print lines for people to stdout. Characters that could move a cursor are escaped."""
        self.write_lines(map(escape_control_characters, lines))

    def print_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table to stdout; columns whose name ends with `>` are numbers, aligned right. It fits a terminal, or
        is as wide as needed elsewhere. If it is too wide only prose, addresses and names of groups are wrapped."""
        cells = [[format_cell(cell) for cell in row] for row in rows]
        if len(cells) > MAX_FITTED_ROWS or not _print_fitting_table(columns, cells):
            self.write_lines(_format_aligned(columns, cells))


def to_json_line(value: Any) -> str:
    """Return compact JSON, not limited to ASCII; characters that could move a cursor, or reverse a line, are
    escaped."""
    return escape_json(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def escape_json(text: str) -> str:
    """Return the JSON with unprintable characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _print_fitting_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Print a table that fits the terminal; return False if stdout is none, or one too narrow for it."""
    if not (sys.stdout.isatty() or "FORCE_COLOR" in os.environ):  # Rich takes a tenth of a short command to load
        return False
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

    wide = zip(columns, _measure_columns(columns, rows), strict=True)
    min_widths = [min(width, MIN_WRAPPED_WIDTH) if column in WRAPPED_COLUMNS else width for column, width in wide]
    if not Console().is_terminal or sum(min_widths) + len(min_widths) - 1 > Console().width:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: JustifyMethod = "right" if column.endswith(">") else "left"
        table.add_column(column.rstrip(">"), justify=justify, overflow="fold", no_wrap=column not in WRAPPED_COLUMNS)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
    sys.stdout.flush()
    return True


def _format_aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the header and the rows, as plain lines."""
    header, widths = [column.rstrip(">") for column in columns], _measure_columns(columns, rows)
    for row in (header, *rows):
        cells = zip(columns, widths, row, strict=True)
        padded = [(" " * (width - _measure_text(cell)), cell, column) for column, width, cell in cells]
        yield " ".join(gap + cell if column.endswith(">") else cell + gap for gap, cell, column in padded).rstrip()


def _measure_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column."""
    header = [column.rstrip(">") for column in columns]
    return [max(map(_measure_text, cells)) for cells in zip(header, *rows, strict=True)]


def _measure_text(text: str) -> int:
    """Return the width in columns of a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def format_cell(cell: object) -> str:
    """Return a cell of a table as text, `-` for None. Characters that could move a cursor are escaped."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return escape_control_characters(str(cell))


def escape_control_characters(text: str) -> str:
    """Return the text with characters escaped that could move a cursor, or are not seen."""
    if text.isprintable() and _BLANK.isdisjoint(text):
        return text
    return "".join(c if is_shown(c) else c.encode("unicode_escape").decode() for c in text)


def is_shown(character: str) -> bool:
    """Return whether the character is printed as it is."""
    return character.isprintable() and character not in _BLANK
