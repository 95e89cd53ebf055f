"""Starts and ends the demo's processes, with all processes that they have started.

Each leads a session of its own, apart from the terminal's, so that Ctrl-C reaches the demo alone, which then ends them
in order. The processes of a session are read from /proc: Spark's Java and its Python workers change their process
groups, but not their session.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

GRACE_S = 10.0
"""How long they have to end by themselves before they are killed."""


def remove_settings() -> None:
    """Remove the caller's settings, which are for another database, from the environment of this process, and so from
    that of all it starts."""
    for name in [name for name in os.environ if name.startswith("SUBLET_")]:
        del os.environ[name]


class ChildProcesses:
    """Processes by name, each with a log file in `home`; all are gone when the context ends."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self._home, self._environment = home, environment
        self._started: dict[str, subprocess.Popen[str]] = {}

    def __getitem__(self, name: str) -> subprocess.Popen[str]:
        return self._started[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Run a Python module, and return its process; its input is a pipe, its output goes to the log."""
        with (self._home / f"{name}.log").open("w") as log:
            self._started[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        return self._started[name]

    def kill(self, name: str) -> None:
        """Kill it and all that it has started with SIGKILL, and wait."""
        _kill(self._started[name])
        self._started[name].wait()

    def tail_log(self, name: str, line_count: int = 30) -> str:
        """Return the last `line_count` lines of its output."""
        return "\n".join((self._home / f"{name}.log").read_text(errors="replace").splitlines()[-line_count:])

    def stop(self) -> None:
        """Terminate them, the last one first, so that consumers find a leader to hand over to.

        What has not ended within `GRACE_S` is killed, with its workers. Ctrl-C in the meantime changes nothing.
        """
        previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._end()
        finally:
            signal.signal(signal.SIGINT, previous_handler)

    def _end(self) -> None:
        for process in reversed(self._started.values()):
            process.terminate()
            if not _wait_until(GRACE_S, partial(_is_over, process)):
                _kill(process)
            process.wait()


def _kill(leader: subprocess.Popen[str]) -> None:
    for pid in _list_live_processes(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _list_live_processes(leader: subprocess.Popen[str]) -> list[int]:
    """Return the live processes of its session. It has to be reaped here, or it would stay a zombie."""
    leader.poll()
    return [pid for pid, session in _list_sessions() if session == leader.pid]


def _is_over(leader: subprocess.Popen[str]) -> bool:
    return not _list_live_processes(leader)


def _list_sessions() -> Iterator[tuple[int, int]]:
    """Yield (process, session) of all live processes."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX":
                    yield int(entry.name), int(session)


def _wait_until(seconds: float, fact: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
