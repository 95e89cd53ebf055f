"""Limits how many notifications a process takes in."""

from __future__ import annotations

from sublet_protocol.domain.limits import MAX_NOTIFICATIONS_PER_S, MAX_NOTIFIED_CHANGES_PER_S


class ReceivedNotificationLimiter:
    """Limits the notifications per second, and the changes in them. `is_first_refused`: the last one was the first of
    its second that was refused."""

    def __init__(self, limit: int = MAX_NOTIFICATIONS_PER_S, most_changes: int = MAX_NOTIFIED_CHANGES_PER_S) -> None:
        self._limit, self._most_changes, self._begun_at = limit, most_changes, float("-inf")
        self._taken = self._changes = self._refused = 0

    def take(self, now: float, changes: int = 1, has_room: bool = True) -> bool:
        """Return whether one more, with so many changes, may be taken in; without room it is refused."""
        if now >= self._begun_at + 1.0:
            self._begun_at = now
            self._taken = self._changes = self._refused = 0
        if not has_room or self._taken >= self._limit or self._changes + changes > self._most_changes:
            self._refused += 1
            return False
        self._taken += 1
        self._changes += changes
        return True

    @property
    def is_first_refused(self) -> bool:
        return self._refused == 1
