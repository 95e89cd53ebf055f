"""A log that tells the same story only now and then: what fails ten times a second is not news ten times a second."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable

MIN_INTERVAL_S = 10.0
"""Between two tellings of one subject's story."""

MAX_REMEMBERED = 10_000
"""Subjects beyond this number are forgotten, the longest told first, and may be told of early."""


CAUSES = 8
"""So many causes of a subject are told apart within the time between two tellings, and what else comes is one more."""

_ELSE = None
_VARYING = re.compile(r"\b(?=\w*\d)\w+\b")
LONGEST = 200


class LogThrottle:
    """Whom a log asks before it tells. `clock` is in seconds. A race of threads may tell a story twice."""

    def __init__(self, every_s: float = MIN_INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._reported: dict[Hashable, dict[str | None, tuple[float, int]]] = {}

    def acquire(self, subject: Hashable, cause: str = "") -> int | None:
        """How often this was kept back since it was last told, if it may be told now; None if it is kept back. Another
        `cause` is another story of the subject."""
        now, reported = self._clock(), self._reported.get(subject, {})
        known = self._known(reported, cause, now)
        at, retained = reported.get(known, (float("-inf"), 0))
        if now < at + self._every_s:
            reported[known] = at, retained + 1
            return None
        self._reported.pop(subject, None)
        self._reported[subject] = reported | {known: (now, 0)}
        if len(self._reported) > MAX_REMEMBERED:
            self._reported.pop(next(iter(self._reported)), None)
        return retained

    def reset(self, subject: Hashable) -> bool:
        """Its stories have ended: whether one was told, and the next is told at once."""
        return self._reported.pop(subject, None) is not None

    def _known(self, reported: dict[str | None, tuple[float, int]], cause: str, now: float) -> str | None:
        """The cause by which it is remembered. Where there are too many, those are forgotten that may be told again."""
        if cause not in reported and len(reported) >= CAUSES:
            for old in [each for each, (at, _) in reported.items() if now >= at + self._every_s]:
                del reported[old]
        return cause if cause in reported or len(reported) < CAUSES else _ELSE


def error_signature(error: BaseException) -> str:
    """Why, for `LogThrottle`: what differs from one time to the next (ids, times, addresses) is no other cause."""
    return f"{type(error).__name__}: {_VARYING.sub('#', str(error)[:LONGEST])}"


def format_suppressed_count(before: int) -> str:
    """What a log line says of those that were kept back before it."""
    return f" (and {before} times before this, unsaid)" if before else ""
