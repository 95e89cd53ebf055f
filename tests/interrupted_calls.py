"""Interrupts a call by an exception of a signal handler, at each line in turn."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class _Interruption(Exception):
    """Exception of the signal handler."""


def run_interrupted(
    call: Callable[[], T], place: int, *where: Path, leave_out: Collection[str] = ()
) -> tuple[T | None, str]:
    """Run the call, and raise `_Interruption` before the `place`th executed line, from 1, of files below `where`.

    Return its result, None if it was interrupted, and the line, empty if fewer lines were executed. Lines that are
    `try:`, the first of a `finally:` or the end of a `with` are not counted: no signal is handled there.
    """
    left, broken = place, ""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(tuple(map(str, where))) or frame.f_code.co_name in leave_out:
            return None
        inside: set[int] = set()  # the lines of `with` statements that have begun and not ended

        def trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left, broken
            line = _line(name, frame.f_lineno)
            passes = event == "line" and line != "try:" and _line(name, frame.f_lineno - 1) != "finally:"
            if passes and line.startswith("with "):
                passes = frame.f_lineno not in inside
                (inside.add if passes else inside.discard)(frame.f_lineno)
            if passes:
                left -= 1
                if left == 0:
                    broken = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
                    raise _Interruption
            return trace_lines

        return trace_lines

    sys.settrace(trace)
    try:
        return call(), broken
    except _Interruption:
        return None, broken
    finally:
        sys.settrace(None)


def _line(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()
