"""Detects new messages of a session's streams, from pushes and from the log; the shell of `HeadTracker`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from sublet_borrower.new_data.head_tracker import (
    HeadPushed,
    HeadsRead,
    HeadSubscription,
    HeadTracker,
    HeadTrackerCounters,
    HeadTrackerEvent,
    StreamsCaughtUp,
)
from sublet_borrower.util.clock import boottime_clock

ReadHeads = Callable[[Iterable[int]], list[tuple[int, int]]]
"""Returns the heads of these streams from the log; empty where it does not answer."""


class MonitoredStreams(Protocol):
    """The streams to monitor; see `SessionAssignment`."""

    def caught_up_streams(self) -> dict[int, tuple[int, int]]: ...

    def update_heads(self, heads: Iterable[tuple[int, int]]) -> None: ...

    def hint_heads(self, heads: Iterable[tuple[int, int]]) -> None: ...


class NewDataMonitor:
    """The shell around the pure `HeadTracker`. `follow` and `unfollow` begin and end the subscription to pushed
    heads."""

    def __init__(
        self,
        handler: MonitoredStreams,
        heads: ReadHeads,
        follow: Callable[[HeadSubscription], None],
        unfollow: Callable[[HeadSubscription], None],
    ) -> None:
        self._machine = HeadTracker()
        self._handler, self._heads = handler, heads
        self._follow, self._unfollow = follow, unfollow
        self._look_at = float("-inf")

    @property
    def wait_s(self) -> float:
        """Seconds until the next look; 0: now."""
        return max(self._look_at - boottime_clock(), 0.0)

    @property
    def counters(self) -> HeadTrackerCounters:
        """What was found how, since the session began."""
        return self._machine.counters

    def on_head_pushed(self, news: HeadPushed) -> None:
        """Take a pushed head."""
        self._do(news)

    def poll(self) -> bool:
        """Follow streams that are read to their ends by now, and look at those whose silence is over; True if any has
        more."""
        return self._do(StreamsCaughtUp(self._handler.caught_up_streams()))

    def _do(self, event: HeadTrackerEvent) -> bool:
        outcome = self._machine.decide(event, boottime_clock())
        for follow in outcome.unsubscribe:
            self._unfollow(follow)
        for follow in outcome.subscribe:
            self._follow(follow)
        self._handler.hint_heads(outcome.new_heads.items())
        self._look_at = float("inf") if outcome.wake_at is None else outcome.wake_at
        if outcome.poll:
            asked_at = boottime_clock()
            heads = self._heads(outcome.poll)
            self._handler.update_heads(heads)
            return self._do(HeadsRead(dict(heads), boottime_clock() - asked_at)) or bool(outcome.new_heads)
        return bool(outcome.new_heads)
