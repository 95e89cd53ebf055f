"""Nodes and consumers as real processes, with times shortened in the same proportions on both sides."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from borrower.settings import BorrowerSettings
from leader.settings import LeaderSettings

ROOT = Path(__file__).parent.parent
SPEED = 4.0
"""How many times faster than the defaults the processes of a test live."""


def environment(speed: float = SPEED, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process of a test is started with: all times divided by `speed`."""
    times = {**asdict(LeaderSettings().scaled(speed)), **asdict(BorrowerSettings().scaled(speed))}
    settings = {f"SUBLET_{name.upper()}": f"{value:.6f}" for name, value in times.items()}
    return {**os.environ, "PYTHONPATH": str(ROOT), **settings, **(extra or {})}


class Process:
    """A Python module run as a process of its own; its output goes to a file beside its records."""

    def __init__(self, module: str, *arguments: str, log: Path, speed: float = SPEED) -> None:
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(speed),
                cwd=ROOT,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self._popen.poll() is None

    def output(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9, and wait."""
        self._popen.kill()
        self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._popen.send_signal(number)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; its exit code. Killed, and an error, if it does not end in time."""
        self._popen.terminate()
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.log.stem} did not end on SIGTERM:\n{self.output()[-3000:]}") from None


@dataclass(frozen=True, slots=True)
class Delivered:
    """One batch as a consumer recorded it."""

    consumer: str
    stream: int
    grant: int
    offsets: tuple[int, ...]
    at: float


class Fleet:
    """Starts processes against one database and ends them all with the test."""

    def __init__(self, url: str, directory: Path, speed: float = SPEED) -> None:
        self.url, self.directory, self.speed = url, directory, speed
        self.nodes: dict[str, Process] = {}
        self.consumers: dict[str, Process] = {}

    def node(self, name: str) -> Process:
        """A leader node; it may not be serving yet."""
        log = self.directory / f"node-{name}.log"
        self.nodes[name] = Process("tests.processes.node", self.url, name, log=log, speed=self.speed)
        return self.nodes[name]

    def consumer(self, name: str, subscription: str, pause_s: float = 0.0) -> Process:
        """A consumer that records what it is given."""
        log, record = self.directory / f"{name}.log", str(self._record(name))
        self.consumers[name] = Process(
            "tests.processes.consumer", self.url, subscription, record, str(pause_s), log=log, speed=self.speed
        )
        return self.consumers[name]

    def delivered(self, name: str | None = None) -> list[Delivered]:
        """What one consumer, or all of them, recorded so far, by time."""
        found: list[Delivered] = []
        for consumer in [name] if name else list(self.consumers):
            with contextlib.suppress(FileNotFoundError):
                found.extend(_read(consumer, self._record(consumer)))
        return sorted(found, key=lambda d: d.at)

    def close(self) -> None:
        """End every process."""
        for process in (*self.consumers.values(), *self.nodes.values()):
            process.signal(signal.SIGCONT)
            process.kill()

    def _record(self, consumer: str) -> Path:
        return self.directory / f"{consumer}.jsonl"


def _read(consumer: str, record: Path) -> Iterator[Delivered]:
    for line in record.read_text().splitlines(keepends=True):
        fields: dict[str, Any] = json.loads(line) if line.endswith("\n") else {"torn": True}
        if "stream" in fields:
            yield Delivered(consumer, fields["stream"], fields["grant"], tuple(fields["offsets"]), fields["at"])
