"""A steady load, and what came of it at the other end; both ends read the same clock, CLOCK_MONOTONIC.

A message has 100 bytes: when it was given to `publish`, its number, and whether it counts. Calls come in ticks of a
millisecond, for everybody: that is as fine as an event loop's timer.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from bench._report import quantile

MESSAGE_BYTES = 100
MIN_MEASURED = 2
"""For as many a load goes on beyond its time: so slow was the publisher."""
TICKS_PER_S = 1000

_HEAD = struct.Struct("<qqb")
_REST = b"x" * (MESSAGE_BYTES - _HEAD.size)


class Kind(IntEnum):
    """What a message is for."""

    WARM_UP = 0  # not counted
    MEASURED = 1
    LAST = 2  # its number is how many there were before it


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` messages per second for `seconds`, after `warm_up_s` of the same."""

    rate: int
    warm_up_s: float
    seconds: float


class Pace:
    """Which message is due when. A publisher that was held up makes up for it, but not beyond the end of its time."""

    def __init__(self, load: Load, now: float) -> None:
        self._rate, self._begun = load.rate, now
        self._counts_from = now + load.warm_up_s
        self._over_at = self._counts_from + load.seconds
        self._tick = max(load.rate // TICKS_PER_S, 1)
        self._number = self._measured = 0

    def wait_s(self, now: float) -> float | None:
        """Until the next message is due; 0: it is; None: the time is over."""
        if now >= self._over_at and self._measured >= MIN_MEASURED:
            return None
        due = self._begun + self._number // self._tick * self._tick / self._rate
        return max(due - now, 0.0)

    def message(self, now: float) -> bytes:
        """The next one, which is published now."""
        kind = Kind.MEASURED if now >= self._counts_from else Kind.WARM_UP
        message = _HEAD.pack(round(now * 1e9), self._number, kind) + _REST
        self._number += 1
        self._measured += kind == Kind.MEASURED
        return message

    def last(self) -> bytes:
        """What tells the consumer that it has had them all."""
        return _HEAD.pack(0, self._number, Kind.LAST) + _REST


def keep_pace(load: Load, send: Callable[[bytes], object]) -> bytes:
    """Call `send` with each message when it is due; the one that is to follow once all are acknowledged."""
    pace = Pace(load, time.monotonic())
    while (wait_s := pace.wait_s(now := time.monotonic())) is not None:
        if wait_s > 0:
            time.sleep(wait_s)
        else:
            send(pace.message(now))
    return pace.last()


class Recorder:
    """What a consumer was given, and how long after it was published; a line of JSON for each thing it has to say."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._took: list[int] = []
        self._numbers: set[int] = set()
        self._count = 0
        self._promised: int | None = None

    def ready(self) -> None:
        """The consumer waits for messages."""
        self._write({"ready": True})

    def take(self, values: Iterable[bytes]) -> None:
        """These messages are in the consumer's hands now."""
        now = time.monotonic_ns()
        for value in values:
            sent, number, kind = _HEAD.unpack_from(value)
            if kind == Kind.LAST:
                self._promised = number
                continue
            self._count += 1
            self._numbers.add(number)
            if kind == Kind.MEASURED:
                self._took.append(now - sent)

    @property
    def over(self) -> bool:
        """The last one was there."""
        return self._promised is not None

    def finish(self) -> None:
        """Say what was measured."""
        self._write(self.result())

    def result(self) -> dict[str, Any]:
        """Milliseconds, how many were measured, how many of all were lost, and how many came twice."""
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
