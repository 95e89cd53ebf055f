"""Nodes and consumers as real processes, with all times shortened by the same factor."""

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

from sublet_borrower.settings import BorrowerSettings
from sublet_leader.settings import LeaderSettings
from tests.fork_server import FORK_SERVER, Forked
from tests.kit import eventually
from tools.source_path import source_path

ROOT = Path(__file__).parent.parent
SPEED = 4.0
"""Factor by which the times of a test's processes are shorter than the defaults."""
UNSCALED = {
    "reconnect_grace_s": LeaderSettings().reconnect_grace_s,
    "lock_confirm_interval_s": BorrowerSettings().lock_confirm_interval_s,
    "lock_valid_s": BorrowerSettings().lock_valid_s,
}
"""A busy machine may take longer than a fourth of these for a look at a lock: consumers would wait with each call."""


def environment(speed: float = SPEED, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a test's processes: the times divided by `speed`, except those of `UNSCALED`."""
    times = {**asdict(LeaderSettings().scaled(speed)), **asdict(BorrowerSettings().scaled(speed))} | UNSCALED
    settings = {f"SUBLET_{name.upper()}": f"{value:.6f}" for name, value in times.items()}
    return {**os.environ, "PYTHONPATH": source_path(ROOT), **settings, **(extra or {})}


class Process:
    """Runs a Python module as a process; its output goes to a file. With `forks` it starts with all modules
    imported."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path,
        speed: float = SPEED,
        extra: Mapping[str, str] | None = None,
        forks: bool = False,
    ) -> None:
        self.log = log
        settings = environment(speed, extra)
        self._popen: Forked | subprocess.Popen[bytes]
        with log.open("ab") as output, Path(os.devnull).open() as nothing:
            if forks:
                streams = nothing.fileno(), output.fileno(), output.fileno()
                self._popen = FORK_SERVER.start(module, arguments, ROOT, settings, *streams)
                return
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=nothing,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=settings,
                cwd=ROOT,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def await_serving(self) -> None:
        eventually(lambda: "serves on" in self.output(), 60.0, self.output, 0.05)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM, and return its exit code. If it does not end in time, kill it and raise."""
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
    """Starts processes against one database and ends them all with the test. `extra`: settings beside the times."""

    def __init__(self, url: str, directory: Path, speed: float = SPEED, extra: Mapping[str, str] | None = None) -> None:
        self.url, self.directory, self.speed, self.extra = url, directory, speed, extra
        self.nodes: dict[str, Process] = {}
        self.consumers: dict[str, Process] = {}

    def node(self, name: str, url: str | None = None) -> Process:
        """Start a leader node, without waiting until it serves. `url`: another address of the same database."""
        log = self.directory / f"node-{name}.log"
        self.nodes[name] = self._start("node", url or self.url, name, str(self._state(name)), log=log)
        return self.nodes[name]

    def serve(self, *names: str, url: str | None = None) -> None:
        for node in [self.node(name, url) for name in names]:
            node.await_serving()

    def state(self, name: str) -> dict[str, Any]:
        """Return what a node reports of itself, a `NodeSnapshot`. Raise AssertionError before it serves."""
        try:
            return dict(json.loads(self._state(name).read_text()))
        except FileNotFoundError:
            raise AssertionError(f"node {name} does not serve yet") from None

    def _state(self, name: str) -> Path:
        return self.directory / f"node-{name}.json"

    def consumer(
        self, name: str, subscription: str, pause_s: float = 0.0, url: str | None = None, session: str = ""
    ) -> Process:
        """Start a consumer that records its batches. `session`: a stable name."""
        log, record = self.directory / f"{name}.log", str(self._record(name))
        arguments = (url or self.url, subscription, record, str(pause_s), session)
        self.consumers[name] = self._start("consumer", *arguments, log=log)
        return self.consumers[name]

    def subscriber(self, name: str, pattern: str, count: int) -> Process:
        """Start an agent that subscribes to `count` groups, `{}` in the pattern replaced by 0, 1, ..., and consumes
        nothing."""
        log, record = self.directory / f"{name}.log", str(self._record(name))
        self.consumers[name] = self._start("many", self.url, record, pattern, str(count), log=log)
        return self.consumers[name]

    def _start(self, program: str, *arguments: str, log: Path) -> Process:
        module = f"tests.processes.{program}"
        return Process(module, *arguments, log=log, speed=self.speed, extra=self.extra, forks=True)

    def delivered(self, name: str | None = None) -> list[Delivered]:
        """Return the batches that one consumer, or all of them, recorded so far, by time."""
        found: list[Delivered] = []
        for consumer in [name] if name else list(self.consumers):
            with contextlib.suppress(FileNotFoundError):
                found.extend(_read(consumer, self._record(consumer)))
        return sorted(found, key=lambda d: d.at)

    def done(self, name: str) -> list[tuple[int, int]]:
        """Return the batches that one consumer has finished: (stream, first offset)."""
        done = [line["done"] for line in _lines(self._record(name)) if "done" in line]
        return [(stream, first) for stream, first in done]

    def head_counters(self, name: str) -> dict[str, int]:
        """Return a consumer's counters of how it learned of new messages; empty before its first batch."""
        return dict(self._last(name, "head_counters"))

    def connections(self, name: str) -> dict[str, dict[str, Any]]:
        """Return {node address: counters of the connection to it} of a consumer, at its last batch or its end."""
        return dict(self._last(name, "connections"))

    def consumed(self, name: str) -> list[list[list[int]]]:
        """Return the consumed frontiers that a consumer of an atomic group has received, in order."""
        return [line["consumed"] for line in _lines(self._record(name)) if "consumed" in line]

    def _last(self, name: str, what: str) -> dict[str, Any]:
        found = [line[what] for line in _lines(self._record(name)) if what in line]
        return found[-1] if found else {}

    def ended(self, name: str) -> str | None:
        """Return the final reason that a consumer was given; None if it was given none."""
        return next((str(line["ended"]) for line in _lines(self._record(name)) if "ended" in line), None)

    def close(self) -> None:
        for process in (*self.consumers.values(), *self.nodes.values()):
            process.signal(signal.SIGCONT)
            process.kill()

    def _record(self, consumer: str) -> Path:
        return self.directory / f"{consumer}.jsonl"


def _lines(record: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines: the last may be incomplete."""
    for line in record.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _read(consumer: str, record: Path) -> Iterator[Delivered]:
    for fields in _lines(record):
        if "stream" in fields:
            yield Delivered(consumer, fields["stream"], fields["grant"], tuple(fields["offsets"]), fields["at"])
