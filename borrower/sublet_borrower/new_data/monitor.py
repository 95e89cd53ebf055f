"""The new-data monitor of a session: `HeadPollScheduler` with pushed heads and the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from sublet_borrower.new_data.head_poll_scheduler import (
    HeadPollScheduler,
    HeadPollSchedulerEvent,
    HeadPushed,
    HeadsRead,
    HeadSubscriptionId,
    NewHeadCounters,
    StreamsCaughtUp,
)
from sublet_storage.util.boottime_clock import boottime_clock

ReadHeads = Callable[[Iterable[int]], list[tuple[int, int]]]
"""Read where these streams end; empty where the log does not answer."""


class MonitoredStreams(Protocol):
    """The streams of a member; see `SessionAssignment`."""

    def caught_up_streams(self) -> dict[int, tuple[int, int]]: ...

    def update_heads(self, heads: Iterable[tuple[int, int]]) -> None: ...

    def hint_heads(self, heads: Iterable[tuple[int, int]]) -> None: ...


class NewDataMonitor:
    """The shell around the pure `HeadPollScheduler`. `subscribe` and `unsubscribe` begin and end the push of one
    stream's head."""

    def __init__(
        self,
        streams: MonitoredStreams,
        read_heads: ReadHeads,
        subscribe: Callable[[HeadSubscriptionId], None],
        unsubscribe: Callable[[HeadSubscriptionId], None],
    ) -> None:
        self._machine = HeadPollScheduler()
        self._streams, self._read_heads = streams, read_heads
        self._subscribe, self._unsubscribe = subscribe, unsubscribe
        self._poll_at = float("-inf")
        self._reading: Mapping[int, int] = {}
        self._reading_since = 0.0

    @property
    def wait_s(self) -> float:
        """Return how long until the next poll is due; 0: now."""
        return max(self._poll_at - boottime_clock(), 0.0)

    @property
    def counters(self) -> NewHeadCounters:
        """Return the counts of heads by how they were found, since the member was made."""
        return self._machine.counters

    def on_head_pushed(self, event: HeadPushed) -> None:
        """Act on the hint that a stream has new messages."""
        self._apply(event)

    def poll(self) -> bool:
        """Find which streams are caught up, and read the heads of those that are due. Return whether any has moved, or
        probably has."""
        return self._apply(StreamsCaughtUp(self._streams.caught_up_streams()))

    def on_read(self, stream_id: int, head: int | None) -> None:
        """Note that a stream was read, and where it ended then."""
        if stream_id in self._reading:
            self._reading = {}
            heads = {} if head is None else {stream_id: head}
            took_s = (boottime_clock() - self._reading_since) / 4  # of the server; the rest is decoding and waiting
            self._apply(HeadsRead(heads, took_s))

    def _apply(self, event: HeadPollSchedulerEvent) -> bool:
        outcome = self._machine.decide(event, boottime_clock())
        for subscription in outcome.unsubscribe:
            self._unsubscribe(subscription)
        for subscription in outcome.subscribe:
            self._subscribe(subscription)
        self._streams.hint_heads(outcome.new_heads.items())
        if outcome.read:
            self._reading, self._reading_since = outcome.read, boottime_clock()
            self._streams.hint_heads((stream_id, head + 1) for stream_id, head in outcome.read.items())
        self._poll_at = float("inf") if outcome.wake_at is None else outcome.wake_at
        if outcome.poll:
            started_at = boottime_clock()
            heads = self._read_heads(outcome.poll)
            self._streams.update_heads(heads)
            return self._apply(HeadsRead(dict(heads), boottime_clock() - started_at)) or bool(outcome.new_heads)
        return bool(outcome.new_heads or outcome.read)
