"""The pure subscriber machine: which messages to apply, and when to read the database.

A *gap* is known by its ends: the last message seen before it and the predecessor of the one that showed it. What comes
within `gap_window_s` closes it; else the channel is caught up, once.

A catch-up answers for all that was missed before it began. Where something else than a gap shows that one is needed, it
begins `gap_window_s` later at the earliest: older messages that are still under way have arrived then, so that none
comes after the snapshot that is newer. Many subscribers see such events at once, and spread their reads.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import assert_never

from msgspec import Struct, field

from sublet_protocol.tick import Tick
from sublet_storage.notify.catch_up_scheduler import CatchUpCause, CatchUpScheduler
from sublet_storage.notify.changes import (
    KINDS,
    ChangeNotification,
    Message,
    NotificationHeartbeat,
    NotifySettings,
    ObjectChange,
)
from sublet_storage.notify.subscriber_machine_events import (
    CatchUpCompleted,
    CatchUpRequested,
    ChangeOrderUnknown,
    Event,
    ListeningStarted,
    ListeningStopped,
    MalformedNotificationReceived,
    NotificationReceived,
    NotificationSubscriberOutcome,
    SequenceGap,
    SubscriberCounters,
    SubscriberStarted,
)

MAX_PUBLISHERS = 10_000
"""Maximum number of publishers; beyond it, the one that was silent for longest is forgotten."""

MAX_GAPS = 64
"""On one channel of one publisher; of more, the oldest is given up early."""


class _Publisher(Struct):
    """The state of one publisher. `last`: the newest number by channel; `is_complete`: other channels begin with 0."""

    incarnation: str
    received_at: float = -math.inf
    last: dict[str, int] = field(default_factory=dict)
    is_complete: bool = False
    is_leaving: bool = False
    gaps: dict[str, list[SequenceGap]] = field(default_factory=dict)


class NotificationSubscriberMachine:
    """The machine of the notifications that one node receives. Pass it every event, `SubscriberStarted` first, and a
    `Tick` at `wake_at`.

    `pushes`: whether the driver can push at all. `jitter` is a number in [0, 1), drawn anew for every event.
    """

    def __init__(self, settings: NotifySettings, *, pushes: bool, channels: Iterable[str] = KINDS) -> None:
        self.counters = SubscriberCounters()
        self._settings, self._pushes = settings, pushes
        self.catch_ups = CatchUpScheduler(settings, channels)
        self._has_connected = False
        self._speaking: OrderedDict[str, _Publisher] = OrderedDict()  # when each last sent
        self._silent: OrderedDict[str, _Publisher] = OrderedDict()  # likewise
        self._gaps: deque[SequenceGap] = deque()  # by deadline; some are closed
        self._changes: list[ObjectChange] = []

    @property
    def publishers(self) -> int:
        """Return the number of known publishers."""
        return len(self._speaking) + len(self._silent)

    def decide(self, event: Event, now: float, jitter: float) -> NotificationSubscriberOutcome:
        """Process one event, and what has become due; times are seconds of a monotonic clock."""
        self._apply_event(event, now, jitter)
        self._expire_gaps(now)
        self._expire_silent_publishers(now, jitter)
        begun = self.catch_ups.take_due(now, jitter)
        changes, self._changes = tuple(self._changes), []
        return NotificationSubscriberOutcome(changes, begun, self._wake_at())

    # --- events -----------------------------------------------------------------------------------------------------

    def _apply_event(self, event: Event, now: float, jitter: float) -> None:
        match event:
            case NotificationReceived(message):
                self.counters.received += 1
                self._receive(message, now, jitter)
            case MalformedNotificationReceived():
                self.counters.malformed += 1
            case SubscriberStarted():
                self._start(now)
            case ListeningStarted():
                self._connect(now, jitter)
            case ListeningStopped():
                self.counters.disconnects += 1
                self.catch_ups.set_period(self._settings.poll_interval_s, now + jitter * self._settings.poll_interval_s)
            case ChangeOrderUnknown(channel):
                self.catch_ups.request(channel, CatchUpCause.AMBIGUOUS_VERSION, now + self._settings.gap_window_s)
            case CatchUpRequested(channel):
                self.catch_ups.request(channel, CatchUpCause.REQUESTED, now)
            case CatchUpCompleted(channel, ok):
                self.catch_ups.complete(channel, ok, now)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _start(self, now: float) -> None:
        """Poll until the driver has connected; one without push counts as connected at once."""
        self.catch_ups.set_period(self._settings.poll_interval_s, now + self._settings.poll_interval_s)
        if not self._pushes:
            self._connect(now, 0.0)

    def _connect(self, now: float, jitter: float) -> None:
        """Request the first read at once, since nothing was known before, and later ones spread, as all subscribers
        need them."""
        if self._has_connected and not self._pushes:
            return
        at = self._compute_shared_catch_up_at(now, jitter) if self._has_connected else now
        self._has_connected = True
        self.catch_ups.request_all(CatchUpCause.CONNECTED, at)
        period_s = self._settings.catch_up_interval_s if self._pushes else self._settings.poll_interval_s
        self.catch_ups.set_period(period_s, now + period_s)

    def _compute_shared_catch_up_at(self, now: float, jitter: float) -> float:
        """Return when to read what every subscriber has missed at the same time."""
        return now + self._settings.gap_window_s + jitter * self._settings.catch_up_jitter_s

    # --- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, message: Message, now: float, jitter: float) -> None:
        publisher, is_met = self._find_publisher(message, now, jitter)
        if isinstance(message, NotificationHeartbeat):
            for channel, sequence in message.sequences.items():
                if channel in self.catch_ups.channels:
                    self._compare_heartbeat(message, publisher, channel, sequence, now)
            publisher.is_complete = True
            publisher.is_leaving |= message.is_leaving
            if message.is_leaving:
                self._silent[message.publisher] = self._speaking.pop(message.publisher, publisher)
        elif message.channel in self.catch_ups.channels:
            if message.channel not in publisher.last:
                self._start_channel(publisher, message, is_met, self._compute_shared_catch_up_at(now, jitter))
            self._apply_notification(publisher, message, now)

    def _find_publisher(self, message: Message, now: float, jitter: float) -> tuple[_Publisher, bool]:
        """Return the publisher of a message, and whether it was unknown before."""
        name = message.publisher
        publisher = self._speaking.pop(name, None) or self._silent.pop(name, None)
        is_met = publisher is None or publisher.incarnation != message.incarnation
        if publisher is None or is_met:
            cause = CatchUpCause.NEW_PUBLISHER if publisher is None else CatchUpCause.RESTARTED
            self.counters.restarts += publisher is not None
            self._drop_gaps(publisher)
            self.catch_ups.request_all(cause, self._compute_shared_catch_up_at(now, jitter))
            publisher = _Publisher(message.incarnation)
        publisher.received_at = now
        (self._silent if publisher.is_leaving else self._speaking)[name] = publisher
        self._enforce_bound()
        return publisher, is_met

    def _start_channel(self, publisher: _Publisher, envelope: ChangeNotification, is_met: bool, at: float) -> None:
        """Record the first message of a channel: nothing came before it if a hello has named all channels; else that is
        unknown."""
        publisher.last[envelope.channel] = 0 if publisher.is_complete else envelope.predecessor
        if not publisher.is_complete and not is_met:
            self.catch_ups.request(envelope.channel, CatchUpCause.NEW_PUBLISHER, at)

    def _compare_heartbeat(
        self, hello: NotificationHeartbeat, publisher: _Publisher, channel: str, sequence: int, now: float
    ) -> None:
        last = publisher.last.setdefault(channel, 0 if publisher.is_complete else sequence)
        if sequence > last:
            self._open_gap(publisher, channel, last, sequence, now)

    def _apply_notification(self, publisher: _Publisher, envelope: ChangeNotification, now: float) -> None:
        channel, last = envelope.channel, publisher.last[envelope.channel]
        if envelope.sequence <= last:
            if not self._fill_gap(publisher, envelope):
                self.counters.duplicates += 1
                return
        elif envelope.predecessor > last:
            self._open_gap(publisher, channel, last, envelope.predecessor, now)
        self._changes += envelope.changes
        publisher.last[channel] = max(publisher.last[channel], envelope.sequence)

    # --- gaps -------------------------------------------------------------------------------------------------------

    def _open_gap(self, publisher: _Publisher, channel: str, predecessor: int, sequence: int, now: float) -> None:
        self.counters.gaps += 1
        gap = SequenceGap(channel, now + self._settings.gap_window_s, [(predecessor, sequence)])
        publisher.last[channel] = sequence
        still_open = [gap for gap in publisher.gaps.get(channel, ()) if gap.missing_ranges]
        if len(still_open) == MAX_GAPS:
            self._expire_gap(still_open.pop(0), gap.deadline)
        publisher.gaps[channel] = [*still_open, gap]
        self._gaps.append(gap)

    def _fill_gap(self, publisher: _Publisher, envelope: ChangeNotification) -> bool:
        """Return whether the message was missing; the gap may be closed by it."""
        gaps = publisher.gaps.get(envelope.channel, [])
        gap = next((gap for gap in gaps if gap.fill(envelope.predecessor, envelope.sequence)), None)
        if gap is not None and not gap.missing_ranges:
            gaps.remove(gap)
            self.counters.filled_gaps += 1
        return gap is not None

    def _expire_gaps(self, now: float) -> None:
        while self._gaps and (not self._gaps[0].missing_ranges or self._gaps[0].deadline <= now):
            gap = self._gaps.popleft()
            if gap.missing_ranges:
                self._expire_gap(gap, now)

    def _expire_gap(self, gap: SequenceGap, at: float) -> None:
        gap.missing_ranges.clear()
        self.counters.expired_gaps += 1
        self.catch_ups.request(gap.channel, CatchUpCause.GAP, at)

    def _drop_gaps(self, publisher: _Publisher | None) -> None:
        """Drop the gaps of a publisher, as a catch-up of all channels covers them."""
        for gap in (gap for gaps in (publisher.gaps.values() if publisher else ()) for gap in gaps):
            self.counters.expired_gaps += bool(gap.missing_ranges)
            gap.missing_ranges.clear()

    # --- silence ----------------------------------------------------------------------------------------------------

    def _expire_silent_publishers(self, now: float, jitter: float) -> None:
        """Request catch-ups, once for each silence, for publishers that should have sent a hello: their last messages
        may be lost."""
        while self._speaking:
            name, publisher = next(iter(self._speaking.items()))
            if now < publisher.received_at + self._settings.publisher_timeout_s:
                break
            del self._speaking[name]
            self._silent[name] = publisher
            self.counters.publisher_timeouts += 1
            self.catch_ups.request_all(CatchUpCause.PUBLISHER_TIMEOUT, now + jitter * self._settings.catch_up_jitter_s)
        while self._silent:
            name, publisher = next(iter(self._silent.items()))
            if now < publisher.received_at + self._settings.publisher_expiry_s:
                break
            self._remove_oldest(self._silent)

    def _enforce_bound(self) -> None:
        if self.publishers > MAX_PUBLISHERS:
            self._remove_oldest(self._silent or self._speaking)

    def _remove_oldest(self, publishers: OrderedDict[str, _Publisher]) -> None:
        publishers.popitem(last=False)
        self.counters.expired_publishers += 1

    def _wake_at(self) -> float | None:
        times = [self.catch_ups.wake_at()]
        if self._gaps:
            times.append(self._gaps[0].deadline)
        if self._speaking:
            times.append(next(iter(self._speaking.values())).received_at + self._settings.publisher_timeout_s)
        if self._silent:
            times.append(next(iter(self._silent.values())).received_at + self._settings.publisher_expiry_s)
        earliest = min(times)
        return None if earliest == math.inf else earliest
