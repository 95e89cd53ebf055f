"""A steady load, and its latency at the other end; both ends read CLOCK_MONOTONIC.

A message has 100 bytes: when it was given to `publish`, its number, and whether it counts. Calls come in ticks of a
millisecond for every system: that is the resolution of an event loop's timer.
"""

from __future__ import annotations

import gc
import json
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from bench._report import quantile, read_lines

MESSAGE_BYTES = 100
MIN_MEASURED = 2
"""Fewest measured messages, for which a load may exceed its time if the publisher is slow."""
TICKS_PER_S = 1000
RESULT_LINES = 2
"""Lines of a consumer's file once the result is there."""

_HEAD = struct.Struct("<qqb")
_REST = b"x" * (MESSAGE_BYTES - _HEAD.size)


class Kind(IntEnum):
    """Purpose of a message."""

    WARM_UP = 0  # not counted
    MEASURED = 1
    LAST = 2  # its number is the number of messages before it


class Head(NamedTuple):
    """What a message begins with. `sent_ns`: when it was given to `publish`, by CLOCK_MONOTONIC; `number`: its own, or
    how many came before the last."""

    sent_ns: int
    number: int
    kind: int


def read_head(message: bytes) -> Head:
    """Return what a message begins with."""
    return Head._make(_HEAD.unpack_from(message))


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` messages per second for `seconds`, after `warm_up_s` of the same."""

    rate: int
    warm_up_s: float
    seconds: float


class Pace:
    """Schedule of the messages. A publisher that was delayed catches up, but not beyond the end of its time."""

    def __init__(self, load: Load, now: float) -> None:
        self._rate, self._begun = load.rate, now
        self._counts_from = now + load.warm_up_s
        self._over_at = self._counts_from + load.seconds
        self._tick = max(load.rate // TICKS_PER_S, 1)
        self._number = self._measured = 0

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next message is due, 0 if it is; None if the time is over."""
        if now >= self._over_at and self._measured >= MIN_MEASURED:
            return None
        due = self._begun + self._number // self._tick * self._tick / self._rate
        return max(due - now, 0.0)

    def message(self, now: float) -> bytes:
        """Return the next message, to be published now."""
        kind = Kind.MEASURED if now >= self._counts_from else Kind.WARM_UP
        message = _HEAD.pack(round(now * 1e9), self._number, kind) + _REST
        self._number += 1
        self._measured += kind == Kind.MEASURED
        return message

    def last(self) -> bytes:
        """Return the message that marks the end for the consumer."""
        return _HEAD.pack(0, self._number, Kind.LAST) + _REST


def keep_pace(load: Load, send: Callable[[bytes], object]) -> bytes:
    """Call `send` with each message when it is due; return the last one, to be sent once all are acknowledged."""
    pace = Pace(load, time.monotonic())
    while (wait_s := pace.wait_s(now := time.monotonic())) is not None:
        if wait_s > 0:
            time.sleep(wait_s)
        else:
            send(pace.message(now))
    return pace.last()


class Recorder:
    """Records what a consumer received and its latency, as lines of JSON."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._took: list[int] = []
        self._numbers: set[int] = set()
        self._count = 0
        self._promised: int | None = None

    def ready(self) -> None:
        """Record that the consumer waits for messages."""
        self._write({"ready": True})

    def take(self, values: Iterable[bytes]) -> None:
        """Record that the consumer has received these messages; write the result after the last. When the first comes,
        what was imported is left out of garbage collection: a full one takes longer than what is measured."""
        now = time.monotonic_ns()
        if not self._count:
            gc.collect()
            gc.freeze()
        for value in values:
            sent, number, kind = read_head(value)
            if kind == Kind.LAST:
                self._promised = number
                continue
            self._count += 1
            self._numbers.add(number)
            if kind == Kind.MEASURED:
                self._took.append(now - sent)
        if self.over:
            self._write(self.result())

    @property
    def over(self) -> bool:
        """Return whether the last message has been received."""
        return self._promised is not None

    def has_result(self) -> bool:
        """Return whether the result is written, by this recorder or a copy of it in another process."""
        return len(read_lines(self._file)) == RESULT_LINES

    def result(self) -> dict[str, Any]:
        """Return latencies in milliseconds, and how many messages were measured, lost, and received twice."""
        if self._promised is None or len(self._took) < MIN_MEASURED:
            least = f"at least {MIN_MEASURED} and the last one are needed"
            raise ValueError(f"{len(self._took)} messages were measured: {least}.")
        return {
            "p50_ms": quantile(self._took, 0.5) / 1e6,
            "p99_ms": quantile(self._took, 0.99) / 1e6,
            "messages": len(self._took),
            "lost": self._promised - len(self._numbers),
            "repeated": self._count - len(self._numbers),
        }

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
