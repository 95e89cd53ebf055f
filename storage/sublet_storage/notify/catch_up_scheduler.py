"""Schedules reads of the database for needs, each with the earliest time that serves it.

A read that begins at a need's time or later serves it. One read of a channel is under way at a time, and from the
beginning of one to that of the next it is `catch_up_min_interval_s`: what is too early is put off, and never dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct, field

from sublet_storage.notify.changes import NotifySettings

EARLIER = 0.2
"""The part of its period by which a regular catch-up may be early, so that those of many listeners spread out."""


class CatchUpCause(StrEnum):
    """The cause of a catch-up."""

    CONNECTED = "connected"  # listening has begun, and what was sent before is not known
    NEW_PUBLISHER = "new publisher"  # a publisher that was not known has spoken before, perhaps
    RESTARTED = "restarted"  # a publisher has a new incarnation, and its predecessor's last messages may be lost
    PUBLISHER_TIMEOUT = "publisher timeout"  # a publisher has stopped, or its messages were lost
    GAP = "gap"  # a message is missing
    AMBIGUOUS_VERSION = "ambiguous version"  # a change of something that a snapshot did not have
    REQUESTED = "requested"  # a caller requested it
    PERIODIC = "periodic"  # the last one is long ago
    RETRY = "retry"  # the database was away the last time


class StartCatchUp(Struct, frozen=True):
    """A read of the present state of a channel's objects, to begin now; its end is to be reported."""

    channel: str
    causes: frozenset[CatchUpCause]


class _Channel(Struct):
    """The state of a channel. `needs`: by cause, the earliest and the latest of the times from which a read serves."""

    needs: dict[CatchUpCause, tuple[float, float]] = field(default_factory=dict)
    is_running: bool = False
    begun_at: float = -math.inf
    regular_at: float = math.inf

    def find_due_at(self, every_s: float) -> float:
        """Return when the next read is due."""
        if self.is_running:
            return math.inf
        needed_at = min((first for first, _ in self.needs.values()), default=math.inf)
        return max(min(needed_at, self.regular_at), self.begun_at + every_s)


class CatchUpScheduler:
    """Schedules the catch-ups of one subscriber, by channel."""

    def __init__(self, settings: NotifySettings, channels: Iterable[str]) -> None:
        self.channels = {channel: _Channel() for channel in channels}
        self.counts_by_cause: Counter[CatchUpCause] = Counter()
        """Reads by what they were for; one may serve several causes."""
        self.reads = 0
        self.deferred = 0
        """Needs that had to wait because of the rate."""
        self._settings = settings
        self._period_s = math.inf
        self._wake_at: float | None = math.inf  # None: to be found again

    def request(self, channel: str, cause: CatchUpCause, at: float) -> None:
        """Request a read of the channel that begins at that time or later."""
        if (state := self.channels.get(channel)) is None:
            return
        self._wake_at = None
        first, last = state.needs.get(cause, (at, at))
        state.needs[cause] = min(first, at), max(last, at)
        self.deferred += at < state.begun_at + self._settings.catch_up_min_interval_s

    def request_all(self, cause: CatchUpCause, at: float) -> None:
        """Request a read of every channel, as `request` does."""
        for channel in self.channels:
            self.request(channel, cause, at)

    def set_period(self, period_s: float, first_at: float) -> None:
        """Set the period of regular reads of each channel; the first is due at `first_at`."""
        self._period_s, self._wake_at = period_s, None
        for state in self.channels.values():
            state.regular_at = first_at

    def complete(self, channel: str, ok: bool, now: float) -> None:
        """Record the end of a read; one that failed is requested again."""
        if (state := self.channels.get(channel)) is not None:
            state.is_running, self._wake_at = False, None
            if not ok:
                self.request(channel, CatchUpCause.RETRY, now)

    def take_due(self, now: float, jitter: float) -> tuple[StartCatchUp, ...]:
        """Return the reads that are due."""
        if now < self.wake_at():
            return ()
        self._wake_at = None
        every_s = self._settings.catch_up_min_interval_s
        due = [(channel, state) for channel, state in self.channels.items() if state.find_due_at(every_s) <= now]
        return tuple(StartCatchUp(channel, self._begin(state, now, jitter)) for channel, state in due)

    def wake_at(self) -> float:
        """Return when `take_due` has something to return next."""
        if self._wake_at is None:
            every_s = self._settings.catch_up_min_interval_s
            self._wake_at = min((state.find_due_at(every_s) for state in self.channels.values()), default=math.inf)
        return self._wake_at

    def _begin(self, state: _Channel, now: float, jitter: float) -> frozenset[CatchUpCause]:
        causes = frozenset(cause for cause, (first, _) in state.needs.items() if first <= now)
        state.needs = {
            cause: (first if first > now else last, last) for cause, (first, last) in state.needs.items() if last > now
        }
        state.is_running, state.begun_at = True, now
        state.regular_at = now + self._period_s * (1 - EARLIER * jitter)
        self.reads += 1
        self.counts_by_cause.update(causes or {CatchUpCause.PERIODIC})
        return causes or frozenset({CatchUpCause.PERIODIC})
