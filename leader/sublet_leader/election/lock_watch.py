"""Finds leaders' locks that were free in two checks, as a pure machine.

A lock is free for a moment where its leader's connection was cut, and all are after a restart of the database. So one
check is not enough: two must find it free, some time apart, over one connection that is itself old enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet_leader.settings import LeaderSettings


@dataclass(frozen=True, slots=True)
class LocksChecked:
    """One check of leaders' locks, over a connection that was opened at `connected_at`: which were `free` at some time
    between `sent_at` and `answered_at`."""

    connected_at: float
    sent_at: float
    answered_at: float
    free: frozenset[int]


class LockWatch:
    """Tracks the locks that were free in the last check of this connection."""

    def __init__(self, settings: LeaderSettings) -> None:
        self._settings = settings
        self._connected_at = float("-inf")
        self._free_since: dict[int, float] = {}

    def check(self, look: LocksChecked) -> frozenset[int]:
        """Return the keys of the locks that have been free long enough, each once; a later report needs two checks
        again."""
        if look.connected_at != self._connected_at:
            self._connected_at, self._free_since = look.connected_at, {}
        if look.sent_at < look.connected_at + self._settings.lock_watch_age_s:
            return frozenset()
        free_since = {key: self._free_since.get(key, look.answered_at) for key in look.free}
        delay_s = self._settings.lock_recheck_delay_s
        twice = frozenset(key for key, at in free_since.items() if look.sent_at >= at + delay_s)
        self._free_since = {key: at for key, at in free_since.items() if key not in twice}
        return twice
