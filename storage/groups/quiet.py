"""A log that tells the same story only now and then: what fails ten times a second is not news ten times a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

EVERY_S = 10.0
"""Between two tellings of one subject's story."""

REMEMBERED = 10_000
"""Subjects beyond this number are forgotten, the longest told first, and may be told of early."""


class Quiet:
    """Whom a log asks before it tells. `clock` is in seconds. A race of threads may tell a story twice."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._told: dict[Hashable, tuple[float, int]] = {}

    def ask(self, subject: Hashable) -> int | None:
        """How often this was kept back since it was last told, if it may be told now; None if it is kept back."""
        now, (at, kept) = self._clock(), self._told.get(subject, (float("-inf"), 0))
        if now < at + self._every_s:
            self._told[subject] = at, kept + 1
            return None
        self._told.pop(subject, None)
        self._told[subject] = now, 0
        if len(self._told) > REMEMBERED:
            self._told.pop(next(iter(self._told)), None)
        return kept

    def over(self, subject: Hashable) -> bool:
        """Its story has ended: whether one was told, and the next is told at once."""
        return self._told.pop(subject, None) is not None


def again(before: int) -> str:
    """What a log line says of those that were kept back before it."""
    return f" (and {before} times before this, unsaid)" if before else ""
