"""Processes of a bench, which always end with it; their output goes to a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench._report import ROOT
from tests.kit import eventually
from tools.source_path import source_path

START_S = 30.0
JOIN_TIMEOUT_S = 5.0
SHOWN_CHARACTERS = 2000
_PR_SET_PDEATHSIG = 1


class ProcessFailed(Exception):
    """Raised if a process of the bench ended with an error; the message has the end of its output."""


class Running:
    """A running process."""

    def __init__(self, argv: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self._argv, self._log = argv, log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": source_path(ROOT), **(extra or {})},
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._popen.pid

    def said(self) -> str:
        """Return the end of its output so far."""
        return self._log.read_text(errors="replace")[-SHOWN_CHARACTERS:]

    def write_line(self, line: str = "\n") -> None:
        """Write a line to its standard input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line.encode())
        self._popen.stdin.flush()

    def check(self) -> None:
        """Raise `ProcessFailed` if it has ended with an error."""
        code = self._popen.poll()
        if code:
            raise ProcessFailed(f"{' '.join(self._argv)} ended with {code}:\n{self.said()}")

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL if it does not end."""
        assert self._popen.stdin is not None
        self._popen.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(JOIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


@contextlib.contextmanager
def running(argv: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Yield a process that ends with the block."""
    process = Running(argv, log, extra)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def module(name: str, *arguments: str, log: Path, extra: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Yield a Python module run as a process that ends with the block."""
    with running([sys.executable, "-m", name, *arguments], log, extra) as process:
        yield process


@contextlib.contextmanager
def listening(argv: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Run a server on a port of this machine until the end of the block, once it accepts connections."""
    with running(argv, log) as process:

        def answers() -> bool:
            process.check()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return True
            return False

        eventually(answers, START_S, process.said)
        yield


def free_port() -> int:
    """Return a port of this machine that is free at present."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _die_with_parent() -> None:
    """Let Linux kill this new process when the bench ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
