"""What a process did and saw, a line of JSON each, in a file of its own that survives kill -9 of the process."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Record:
    """Appends to one file. `at` is a time of the monotonic clock, which all processes of a machine share, `wall` one of
    the wall clock, which Postgres has too. From any thread."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()

    def write(self, what: str, **facts: Any) -> None:
        """One line, in the kernel's hands when this returns."""
        line = json.dumps({"what": what, "at": time.monotonic(), "wall": time.time(), **facts}, separators=(",", ":"))
        with self._lock:
            os.write(self._file, line.encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole: the last of a process that was killed may be torn."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
