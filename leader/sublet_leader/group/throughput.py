"""The throughput of a stream, from its holders' reports, for allocation by load."""

from __future__ import annotations

import math

from msgspec import Struct

from sublet_leader.allocation import StreamLoad

HALF_LIFE_S = 30.0
"""Half-life of an observation: long enough that a pause in a batch is no change of load."""


class ThroughputMeter(Struct):
    """Measures one stream's throughput; it outlives grants, so that a stream that has moved has a known load."""

    _grant_id: int = 0
    _size: int = 0
    _at: float = 0.0
    _rate: float | None = None
    _lag: int = -1

    def record(self, grant_id: int, size: int, lag: int | None, now: float) -> None:
        """Record that the holder under that grant has consumed `size` bytes in total, with a lag of `lag` messages."""
        if lag is not None:
            self._lag = lag
        if grant_id != self._grant_id or size < self._size:
            self._grant_id, self._size, self._at = grant_id, size, now
            return
        elapsed_s = now - self._at
        if elapsed_s <= 0:
            return
        rate = (size - self._size) / elapsed_s
        fade = math.exp2(-elapsed_s / HALF_LIFE_S)
        self._rate = rate if self._rate is None else fade * self._rate + (1 - fade) * rate
        self._size, self._at = size, now

    def load(self) -> StreamLoad | None:
        """Return the load; None before two reports under one grant."""
        return None if self._rate is None else StreamLoad(self._rate, self._lag)
