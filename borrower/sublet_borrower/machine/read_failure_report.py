"""The read failure of a stream, and what of it is reported to the leader; pure."""

from __future__ import annotations

from msgspec import Struct

from sublet_protocol.domain.errors import PayloadUnavailable
from sublet_protocol.domain.limits import MAX_EXPLANATION_CHARACTERS

PERSISTENT_AFTER_S = 10.0
"""A location that is away for less than this gets no line in the group's history for each stream that waits."""

RETRY_INTERVAL_S = 60.0
"""Minimum time between two reports of an error that comes and goes: each is two lines of history."""


class ReadFailureTracker(Struct):
    """Tracks a stream's read failure. `current_error`: in the log, as it is now. `reported_error`: sent to the leader,
    as it was first of its kind; both are empty where reading works. `failing_since`: the first failure, of any kind.
    """

    current_error: str = ""
    reported_error: str = ""
    failing_since: float = 0.0
    _kind: type[Exception] | None = None
    _reported_at: float = -RETRY_INTERVAL_S

    def record(self, problem: Exception, now: float) -> bool:
        """Record that it is tried again later; return whether the leader is to be notified now."""
        if not self.current_error:
            self.failing_since = now
        self.current_error, kind = str(problem), type(problem)
        lasts_s = PERSISTENT_AFTER_S if kind is PayloadUnavailable else 0.0
        if kind is self._kind or now < max(self.failing_since + lasts_s, self._reported_at + RETRY_INTERVAL_S):
            return False
        self.reported_error, self._kind, self._reported_at = plain(self.current_error), kind, now
        return True

    def clear(self) -> bool:
        """Record that it can be read on; return whether the leader is to be notified."""
        was_reported, self.current_error, self.reported_error, self._kind = bool(self.reported_error), "", "", None
        return was_reported


def plain(text: str) -> str:
    """Return an error's text for the wire: shortened, and with a space for each unprintable character."""
    return "".join(each if each.isprintable() else " " for each in text)[:MAX_EXPLANATION_CHARACTERS]
