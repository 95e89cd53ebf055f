"""A log that tells the same story only now and then: what fails ten times a second is not news ten times a second."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable

EVERY_S = 10.0
"""Between two tellings of one subject's story."""

REMEMBERED = 10_000
"""Subjects beyond this number are forgotten, the longest told first, and may be told of early."""


CAUSES = 8
"""So many causes of a subject are told apart within the time between two tellings, and what else comes is one more."""

_ELSE = None
_VARYING = re.compile(r"\b(?=\w*\d)\w+\b")
LONGEST = 200


class Quiet:
    """Whom a log asks before it tells. `clock` is in seconds. A race of threads may tell a story twice."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._told: dict[Hashable, dict[str | None, tuple[float, int]]] = {}

    def ask(self, subject: Hashable, cause: str = "") -> int | None:
        """How often this was kept back since it was last told, if it may be told now; None if it is kept back. Another
        `cause` is another story of the subject."""
        now, told = self._clock(), self._told.get(subject, {})
        known = self._known(told, cause, now)
        at, kept = told.get(known, (float("-inf"), 0))
        if now < at + self._every_s:
            told[known] = at, kept + 1
            return None
        self._told.pop(subject, None)
        self._told[subject] = told | {known: (now, 0)}
        if len(self._told) > REMEMBERED:
            self._told.pop(next(iter(self._told)), None)
        return kept

    def over(self, subject: Hashable) -> bool:
        """Its stories have ended: whether one was told, and the next is told at once."""
        return self._told.pop(subject, None) is not None

    def _known(self, told: dict[str | None, tuple[float, int]], cause: str, now: float) -> str | None:
        """The cause by which it is remembered. Where there are too many, those are forgotten that may be told again."""
        if cause not in told and len(told) >= CAUSES:
            for old in [each for each, (at, _) in told.items() if now >= at + self._every_s]:
                del told[old]
        return cause if cause in told or len(told) < CAUSES else _ELSE


def cause(error: BaseException) -> str:
    """Why, for `Quiet`: what differs from one time to the next (ids, times, addresses) is no other cause."""
    return f"{type(error).__name__}: {_VARYING.sub('#', str(error)[:LONGEST])}"


def again(before: int) -> str:
    """What a log line says of those that were kept back before it."""
    return f" (and {before} times before this, unsaid)" if before else ""
