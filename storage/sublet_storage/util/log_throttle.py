"""Throttles log lines: a failure that repeats ten times a second is logged now and then."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable

MIN_INTERVAL_S = 10.0
"""Minimum time between two log lines of one subject."""

MAX_CAUSES = 10_000
"""Subjects beyond this number are forgotten, the longest logged first, and may be logged early."""


CAUSES = 8
"""How many causes of a subject are distinguished within that time; all others count as one more."""

_ELSE = None
_VARYING = re.compile(r"\b(?=\w*\d)\w+\b")
MAX_ERROR_CHARS = 200


class LogThrottle:
    """A throttle that decides whether a line is logged. `clock` is in seconds. A race of threads may log a line
    twice."""

    def __init__(self, every_s: float = MIN_INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._reported: dict[Hashable, dict[str | None, tuple[float, int]]] = {}

    def acquire(self, subject: Hashable, cause: str = "") -> int | None:
        """Return how often this was suppressed since it was last logged, if it may be logged now; None if it is
        suppressed. Another `cause` is another line of the subject."""
        now, reported = self._clock(), self._reported.get(subject, {})
        known = self._find_cause(reported, cause, now)
        at, suppressed_count = reported.get(known, (float("-inf"), 0))
        if now < at + self._every_s:
            reported[known] = at, suppressed_count + 1
            return None
        self._reported.pop(subject, None)
        self._reported[subject] = reported | {known: (now, 0)}
        if len(self._reported) > MAX_CAUSES:
            self._reported.pop(next(iter(self._reported)), None)
        return suppressed_count

    def reset(self, subject: Hashable) -> bool:
        """End the subject: return whether a line of it was logged; the next is logged at once."""
        return self._reported.pop(subject, None) is not None

    def _find_cause(self, reported: dict[str | None, tuple[float, int]], cause: str, now: float) -> str | None:
        """Return the cause under which it is counted. If there are too many, those are removed that may be logged
        again."""
        if cause not in reported and len(reported) >= CAUSES:
            for old in [each for each, (at, _) in reported.items() if now >= at + self._every_s]:
                del reported[old]
        return cause if cause in reported or len(reported) < CAUSES else _ELSE


def error_signature(error: BaseException) -> str:
    """Return the cause for `LogThrottle`, without what differs each time (ids, times, addresses)."""
    return f"{type(error).__name__}: {_VARYING.sub('#', str(error)[:MAX_ERROR_CHARS])}"


def format_suppressed_count(before: int) -> str:
    """Return what a log line adds about the lines suppressed before it."""
    return f" ({before} similar suppressed)" if before else ""
