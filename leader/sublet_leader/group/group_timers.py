"""The times at which a group's leader next has to act.

It rebalances, syncs streams, announces frontiers, ends the reclaim grace, and stops when it is idle.
"""

from __future__ import annotations

from sublet_leader.settings import LeaderSettings

_NEVER = float("inf")

ANNOUNCEMENT_INTERVAL_S = 0.02
"""Between two slices of the members to which frontiers are announced: others have their turn meanwhile."""


class GroupTimers:
    """Due times, each taken once. Joins and leaves are debounced: the rebalance runs when they have been quiet for the
    debounce time, or at its cap; a stream that became free is granted at once unless that is pending."""

    def __init__(self, settings: LeaderSettings, now: float, previous_leader_until: float = -_NEVER) -> None:
        self._settings = settings
        self._allocate_at = _NEVER
        self._changing_since: float | None = None
        self._renew_at = now
        self._renewed_at = _NEVER
        self._announce_at = _NEVER
        self._grace_end = max(now, previous_leader_until) + settings.reclaim_grace_s
        self._sweep_at = now + settings.resend_interval_s / 2
        self._reallocate_at = now + settings.rebalance_interval_s
        self._idle_since: float | None = now

    def note_membership_change(self, now: float) -> None:
        """Record that a member joined or left."""
        if self._changing_since is None:
            self._changing_since = now
        cap = self._changing_since + self._settings.rebalance_debounce_max_s
        self._allocate_at = min(now + self._settings.rebalance_debounce_s, cap)

    def note_stream_freed(self, at: float) -> None:
        """Record that a stream can be granted from that time on."""
        if self._changing_since is None:
            self._allocate_at = min(self._allocate_at, at)

    def rebalance_by(self, at: float) -> None:
        """Rebalance at that time at the latest: something could not move yet."""
        self._allocate_at = min(self._allocate_at, at)

    def take_rebalance_due(self, now: float) -> bool:
        """Return whether the rebalance is due; True once."""
        if now >= self._reallocate_at:
            self._allocate_at = min(self._allocate_at, now)
        if now < self._allocate_at:
            return False
        self._allocate_at, self._changing_since = _NEVER, None
        self._reallocate_at = now + self._settings.rebalance_interval_s
        return True

    def sync_soon(self, now: float) -> None:
        """Schedule a stream sync, at most one per debounce time."""
        self._renew_at = min(self._renew_at, max(now, self._renewed_at + self._settings.rebalance_debounce_s))

    def take_sync_due(self, now: float) -> bool:
        """Return whether the stream sync is due; True once."""
        if now < self._renew_at:
            return False
        self._renewed_at, self._renew_at = now, now + self._settings.stream_sync_interval_s
        return True

    def note_announced(self, now: float, *, is_complete: bool) -> None:
        """Schedule the next slice of an announcement, unless it is complete."""
        self._announce_at = _NEVER if is_complete else now + ANNOUNCEMENT_INTERVAL_S

    def is_announcement_due(self, now: float) -> bool:
        """Return whether the next slice of an announcement is due."""
        return now >= self._announce_at

    def take_grace_due(self, now: float) -> bool:
        """Return whether the grace period for borrowers of the previous leader has ended; True once."""
        if now < self._grace_end:
            return False
        self._grace_end = _NEVER
        return True

    def take_sweep_due(self, now: float) -> bool:
        """Return whether resends and evictions are to be checked."""
        if now < self._sweep_at:
            return False
        self._sweep_at = now + self._settings.resend_interval_s / 2
        return True

    def sweep_soon(self, now: float) -> None:
        """Check at the next opportunity, as a sweep has left something."""
        self._sweep_at = now

    def is_idle_timeout(self, idle: bool, now: float) -> bool:
        """Return whether there has been no member, and nothing to write, for the idle time."""
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        return self._idle_since is not None and now >= self._idle_since + self._settings.leader_idle_timeout_s

    def wake_at(self) -> float:
        """Return the next due time."""
        sharing = min(self._allocate_at, self._reallocate_at)
        return min(sharing, self._renew_at, self._grace_end, self._sweep_at, self._announce_at)
