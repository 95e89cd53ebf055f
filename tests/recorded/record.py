"""Record of a process: lines of JSON in a file that survives kill -9."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Record:
    """Appends to one file, from any thread. `at` is a time of the monotonic clock, which all processes of a machine
    share, `wall` one of the wall clock, which Postgres uses too."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()

    def write(self, what: str, **facts: Any) -> None:
        """Write one line; when this returns it is in the kernel."""
        line = json.dumps({"what": what, "at": time.monotonic(), "wall": time.time(), **facts}, separators=(",", ":"))
        with self._lock:
            os.write(self._file, line.encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines: the last one of a killed process may be incomplete."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
