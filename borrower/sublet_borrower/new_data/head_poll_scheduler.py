"""The machine that decides when a session polls heads: after a push, else at intervals.

A pushed head may be lost, late, repeated or invented: its only effect is an earlier poll. A stream that is read to its
end is subscribed to under an id (grant id, number). Only the first half is authority. The second is bumped after a
miss, which is a head that was polled and not pushed soon after: the old subscription is dropped, a new one made, and
pushes under the old one are rejected.

The poll interval is adaptive. Without push it is short, but never so short that a session would query the log for most
of its time, and grows while nothing comes. Once anything was pushed, also as the answer to a subscription, streams are
polled only rarely, except those with a miss and no push since, and those of which more was read than was pushed: under
load pushes lag behind the log, and one poll returns all at once. A stream that is due alone, and had grown when last
looked at, is read without asking for its head. A stream that is never read to its end is not subscribed to, since its
pushes would be of no use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct, field

from sublet_protocol.tick import Tick

WEIGHT = 0.25
"""The weight of the last poll in the average duration of polls."""


class HeadPollSchedulerSettings(Struct, frozen=True):
    """Times of a head poll scheduler in seconds. Poll intervals begin at `poll_initial_s`, or at a multiple of the time
    that recent polls took if that is longer (but not than `poll_max_with_push_s`), and grow to `poll_max_s`, or to
    `poll_max_with_push_s` where push works.
    """

    poll_initial_s: float = 0.0005
    poll_cost_factor: float = 2.0
    poll_max_s: float = 0.1
    poll_max_with_push_s: float = 1.0
    push_late_s: float = 0.1
    """How much later than a poll found it a head may be pushed without being a miss."""
    busy_after_s: float = 1.0
    """A stream that was not read to its end for this long is no longer subscribed to."""


class HeadSubscriptionId(Struct, frozen=True):
    """The id under which heads of a stream are pushed."""

    stream_id: int
    grant_id: int
    counter: int


class StreamsCaughtUp(Struct, frozen=True):
    """The streams that are read to where they ended when last looked at: {stream: (grant id, head)}; all of them."""

    streams: Mapping[int, tuple[int, int]]


class HeadPushed(Struct, frozen=True):
    """A pushed head: the stream ends at `head` by now, unverified."""

    subscription: HeadSubscriptionId
    head: int


class HeadsRead(Struct, frozen=True):
    """Heads read from the log, {stream: head}; absent where it did not answer. `took_s`: how long that took."""

    heads: Mapping[int, int]
    took_s: float = 0.0


HeadPollSchedulerEvent = StreamsCaughtUp | HeadPushed | HeadsRead | Tick


class HeadPollSchedulerOutcome(Struct, frozen=True):
    """Actions of the scheduler. `new_heads`: {stream: head} that are worth reading now. `poll`: streams whose heads are
    to be read from the log and returned as `HeadsRead`. `read`: {stream: head} of a stream that is to be read on
    from there, as it has probably grown; the head that this shows is returned as `HeadsRead`.
    """

    subscribe: tuple[HeadSubscriptionId, ...] = ()
    unsubscribe: tuple[HeadSubscriptionId, ...] = ()
    new_heads: Mapping[int, int] = field(default_factory=dict)
    poll: tuple[int, ...] = ()
    read: Mapping[int, int] = field(default_factory=dict)
    wake_at: float | None = None


class _HeadSubscription(Struct):
    """A stream under a head subscription. `has_missed_push`: a head was missed, and none was pushed since.
    `awaited_until`: until then heads that were polled, up to `polled_head`, may still be pushed. `unread`: pushed while
    the stream was not read to its end yet. `has_grown`: by the last look at the log.
    """

    id: HeadSubscriptionId
    head: int
    poll_interval_s: float
    poll_at: float
    is_at_end: bool = True
    busy_since: float = 0.0
    unread: int = 0
    has_missed_push: bool = False
    polled_head: int = 0
    awaited_until: float | None = None
    has_grown: bool = False


class NewHeadCounters(Struct):
    """Counts since the session began: heads by push, by polling, rejected; polls, and misses that were healed."""

    pushed: int = 0
    polled: int = 0
    rejected: int = 0
    polls: int = 0
    missed_pushes: int = 0


class HeadPollScheduler:
    """The streams of one session. Not thread-safe: the session's own thread calls it."""

    def __init__(self, settings: HeadPollSchedulerSettings | None = None) -> None:
        self._settings = settings or HeadPollSchedulerSettings()
        self._streams: dict[int, _HeadSubscription] = {}
        self._push_works = False
        self._poll_s = 0.0
        self._subscribed: list[HeadSubscriptionId] = []
        self._unsubscribed: list[HeadSubscriptionId] = []
        self._numbers = 0
        self.counters = NewHeadCounters()

    def decide(self, event: HeadPollSchedulerEvent, now: float) -> HeadPollSchedulerOutcome:
        """Apply one event, and return the outcome."""
        self._subscribed, self._unsubscribed = [], []
        new_heads: dict[int, int] = {}
        match event:
            case StreamsCaughtUp(streams):
                new_heads = self._note_ends(streams, now)
            case HeadPushed():
                new_heads = self._take_push(event, now)
            case HeadsRead(heads, took_s):
                if heads:
                    self._poll_s += WEIGHT * (took_s - self._poll_s)
                new_heads = self._compare(heads, now)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._note_misses(now)
        due = self._take_due(now)
        read = self._take_growing(due)
        return HeadPollSchedulerOutcome(
            tuple(self._subscribed), tuple(self._unsubscribed), new_heads, () if read else due, read, self._wake_at()
        )

    def _note_ends(self, streams: Mapping[int, tuple[int, int]], now: float) -> dict[int, int]:
        """Note that these streams were read to their ends; return {stream: head} of what was pushed while they were
        read and lies behind what was read."""
        new_heads: dict[int, int] = {}
        for stream_id, (grant_id, head) in streams.items():
            stream = self._streams.get(stream_id)
            if stream is None or stream.id.grant_id != grant_id:
                self._drop(stream_id)
                self._begin(stream_id, grant_id, head, now)
                continue
            if head > stream.head:  # the log grows more quickly than pushes report
                stream.has_grown, stream.poll_interval_s = True, self._first_s
                stream.poll_at = min(stream.poll_at, now + stream.poll_interval_s)
            if not stream.is_at_end:
                stream.is_at_end, stream.poll_at = True, now + stream.poll_interval_s
            # A head from the log counts: invented pushes cost one poll.
            stream.head, pushed, stream.unread = head, stream.unread, 0
            if pushed > head:
                new_heads[stream_id] = stream.head = pushed
        for stream_id, stream in tuple(self._streams.items()):
            if stream_id in streams:
                continue
            if stream.is_at_end:
                stream.is_at_end, stream.busy_since = False, now
            elif now >= stream.busy_since + self._settings.busy_after_s:
                self._drop(stream_id)
        return new_heads

    def _begin(self, stream_id: int, grant_id: int, head: int, now: float) -> None:
        subscription = self._make_subscription(stream_id, grant_id)
        self._streams[stream_id] = _HeadSubscription(subscription, head, self._first_s, now + self._first_s)

    def _make_subscription(self, stream_id: int, grant_id: int) -> HeadSubscriptionId:
        self._numbers += 1
        subscription = HeadSubscriptionId(stream_id, grant_id, self._numbers)
        self._subscribed.append(subscription)
        return subscription

    def _drop(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._unsubscribed.append(stream.id)

    def _take_push(self, pushed: HeadPushed, now: float) -> dict[int, int]:
        stream = self._streams.get(pushed.subscription.stream_id)
        if stream is None or stream.id != pushed.subscription:
            self.counters.rejected += 1
            return {}
        self._push_works = True  # a node has the subscription, at least
        if stream.awaited_until is not None and pushed.head >= stream.polled_head:
            stream.awaited_until, stream.has_missed_push = None, False
        if pushed.head <= stream.head:
            return {}
        self.counters.pushed += 1
        stream.has_missed_push = False
        if not stream.is_at_end:
            stream.unread = max(stream.unread, pushed.head)
            return {}
        stream.head, stream.poll_at = pushed.head, now + stream.poll_interval_s
        return {pushed.subscription.stream_id: pushed.head}

    def _compare(self, heads: Mapping[int, int], now: float) -> dict[int, int]:
        new_heads: dict[int, int] = {}
        for stream_id, head in heads.items():
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            stream.has_grown = head > stream.head
            if stream.has_grown:
                self.counters.polled += 1
                new_heads[stream_id] = stream.head = stream.polled_head = head
                stream.poll_interval_s = self._first_s
                if stream.awaited_until is None:
                    stream.awaited_until = now + self._settings.push_late_s
            else:
                longest_s = (
                    self._settings.poll_max_with_push_s if self._is_push_trusted(stream) else self._settings.poll_max_s
                )
                stream.poll_interval_s = min(
                    stream.poll_interval_s * 1.5 + self._first_s, max(longest_s, self._first_s)
                )
            stream.poll_at = now + stream.poll_interval_s
        return new_heads

    def _note_misses(self, now: float) -> None:
        """Mark subscriptions as failed whose heads were polled and not pushed by now."""
        for stream_id, stream in self._streams.items():
            if stream.awaited_until is None or now < stream.awaited_until:
                continue
            stream.awaited_until = None
            if self._is_push_trusted(stream):
                self.counters.missed_pushes += 1
                self._unsubscribed.append(stream.id)
                stream.id = self._make_subscription(stream_id, stream.id.grant_id)
                stream.has_missed_push, stream.poll_interval_s = True, self._first_s
                stream.poll_at = min(stream.poll_at, now + stream.poll_interval_s)

    @property
    def _first_s(self) -> float:
        """Return the shortest poll interval: the busier the database, the longer."""
        return max(
            self._settings.poll_initial_s,
            min(self._settings.poll_cost_factor * self._poll_s, self._settings.poll_max_with_push_s),
        )

    def _is_push_trusted(self, stream: _HeadSubscription) -> bool:
        return self._push_works and not stream.has_missed_push

    def _take_due(self, now: float) -> tuple[int, ...]:
        """Return the streams to poll: once one is due, also those that soon will be, since one statement polls all."""
        waiting = [(stream_id, stream) for stream_id, stream in self._streams.items() if stream.is_at_end]
        if not any(now >= stream.poll_at for _, stream in waiting):
            return ()
        self.counters.polls += 1
        due = [
            (stream_id, stream) for stream_id, stream in waiting if now >= stream.poll_at - stream.poll_interval_s / 2
        ]
        for _, stream in due:
            # If no answer comes, the database is away: poll again as if nothing was new.
            stream.poll_at = now + self._settings.poll_max_s
        return tuple(stream_id for stream_id, _ in due)

    def _take_growing(self, due: tuple[int, ...]) -> dict[int, int]:
        """Return the stream that is due, and its head, if it is the only one and has grown; once for each growth."""
        if len(due) != 1 or not (stream := self._streams[due[0]]).has_grown:
            return {}
        stream.has_grown = False
        return {stream.id.stream_id: stream.head}

    def _wake_at(self) -> float | None:
        times = [stream.poll_at for stream in self._streams.values() if stream.is_at_end]
        times += [stream.awaited_until for stream in self._streams.values() if stream.awaited_until is not None]
        times += [
            stream.busy_since + self._settings.busy_after_s for stream in self._streams.values() if not stream.is_at_end
        ]
        return min(times, default=None)
