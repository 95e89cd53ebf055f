"""A call that an exception of a signal handler breaks off, at each place in turn."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Broken(Exception):
    """Out of a signal handler."""


def broken_off(
    call: Callable[[], T], place: int, *where: Path, leave_out: Collection[str] = ()
) -> tuple[T | None, str]:
    """The call, with an exception before the `place`th line that is run of those below `where`, from 1; and which line
    that was, empty if there are not so many. Not at a `try:`, nor where a `finally:` begins or a `with` ends: no signal
    is seen there.
    """
    left, broken = place, ""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(tuple(map(str, where))) or frame.f_code.co_name in leave_out:
            return None
        inside: set[int] = set()  # the lines of `with` that have begun and not ended

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
                    raise Broken
            return trace_lines

        return trace_lines

    sys.settrace(trace)
    try:
        return call(), broken
    except Broken:
        return None, broken
    finally:
        sys.settrace(None)


def _line(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()
