"""The pure publisher machine: changes become messages, numbered and of bounded size.

Nothing is sent before a sender is open; until then, and between two sends, the newest change of each object waits. A
change that could not be sent takes a number all the same, so that the next message or hello shows that one is missing.

One machine is one incarnation. Where it is unknown what was published meanwhile (no node listened), a new one takes
over.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES
from sublet_protocol.tick import Tick
from sublet_storage.notify.changes import (
    STREAM,
    ChangeNotification,
    NotificationHeartbeat,
    NotifySettings,
    ObjectChange,
)
from sublet_storage.notify.codec import encode, encode_change, encode_head_change, encode_parts

MAX_WAITING = 10_000
"""Objects whose change waits to be sent; of more, the oldest is left out."""

NUMBERS = 44
"""Bytes that a message may grow by when its numbers do."""


BUSY = 10.0
"""How many times the shortest pause a pause grows to under load: a reader of such a stream polls by then. Other changes
of the same process wait as long."""

GROWTH = 1.2
"""The growth from one pause to the next, while objects change more often than is sent."""

LIGHT = 0.6
"""Of the most sends per second: where an object changes less often than that, the load is over."""


class NotificationPublisherStatus(Enum):
    """The status of one incarnation of a notification publisher."""

    WAITING = "waiting"  # no sender is open: changes wait
    OPEN = "open"  # changes are sent
    CLOSED = "closed"  # the last heartbeat is out, and nothing is sent any more


class NotificationSendersOpened(Struct, frozen=True):
    """Senders are open, to other endpoints than before; none accepts messages of more than `payload_limit` bytes."""

    payload_limit: int | None


class ChangesQueued(Struct, frozen=True):
    """These objects have changed."""

    changes: tuple[ObjectChange, ...]


class PublisherCloseRequested(Struct, frozen=True):
    """The process ends, or has nothing more to publish."""


Event = NotificationSendersOpened | ChangesQueued | PublisherCloseRequested | Tick


class NotificationsToSend(Struct, frozen=True):
    """The messages for all senders, in this order, and when to call again at the latest (None: with the next event)."""

    sends: tuple[bytes, ...]
    wake_at: float | None


class NotificationPublisherMachine:
    """The machine of one incarnation of a publisher. Pass it every event, and a `Tick` at `wake_at`."""

    def __init__(
        self, publisher: str, incarnation: str, settings: NotifySettings, max_waiting: int = MAX_WAITING
    ) -> None:
        self.status = NotificationPublisherStatus.WAITING
        self.ready_at = -math.inf
        """Until when nothing is sent, to bound the rate."""
        self._publisher, self._incarnation, self._settings = publisher, incarnation, settings
        self._pause_s = 1 / settings.max_sends_per_s
        self._sent_at, self._replaced = -math.inf, 0
        self._max_waiting = max_waiting
        self._limit = MAX_NOTIFICATION_BYTES
        self._sequences: dict[str, int] = {}
        self._waiting: OrderedDict[tuple[str, str], ObjectChange] = OrderedDict()
        self._spoke_at = -math.inf

    @property
    def has_pending(self) -> bool:
        """Return whether a change waits to be sent."""
        return bool(self._waiting)

    def decide(self, event: Event, now: float) -> NotificationsToSend:
        """Return what to send now; times are seconds of a monotonic clock."""
        sends: list[bytes] = []
        if self.status is not NotificationPublisherStatus.CLOSED:
            sends += self._apply_event(event)
            if sends:
                self._spoke_at = now
            if self.status is NotificationPublisherStatus.OPEN and (due := self._list_due(now)):
                sends += due
                self._spoke_at = now
        return NotificationsToSend(tuple(sends), self._wake_at())

    def announce_head(self, stream_id: int, now: float) -> bytes | None:
        """Return a message, with marks, of the head that a stream will have when it is sent, for the caller to send at
        once; None where something else is to be sent first, or it is too early."""
        if self.status is not NotificationPublisherStatus.OPEN or self._waiting or now < self.ready_at:
            return None
        self._begin_pause(now, 1)
        self._spoke_at = now
        return self._encode_message(STREAM, [encode_head_change(stream_id)])

    # --- events -----------------------------------------------------------------------------------------------------

    def _apply_event(self, event: Event) -> Iterable[bytes]:
        match event:
            case ChangesQueued(changes):
                for change in changes:
                    self._queue_change(change)
            case NotificationSendersOpened(payload_limit):
                self.status = NotificationPublisherStatus.OPEN
                self._limit = (
                    MAX_NOTIFICATION_BYTES if payload_limit is None else min(payload_limit, MAX_NOTIFICATION_BYTES)
                )
                return [self._encode_heartbeat()]
            case PublisherCloseRequested():
                return self._close()
            case Tick():
                pass
            case _:
                assert_never(event)
        return ()

    def _queue_change(self, change: ObjectChange) -> None:
        """Queue the newest change of each object, in the place of the first."""
        object_key = change.kind, change.key
        queued_change = self._waiting.get(object_key)
        if queued_change is None:
            self._waiting[object_key] = change
            if len(self._waiting) > self._max_waiting:
                self._skip(self._waiting.popitem(last=False)[1].kind)
        elif change.order_key > queued_change.order_key:
            self._waiting[object_key] = change
            self._replaced += 1

    def _skip(self, channel: str) -> None:
        """Take a number without a message: subscribers will see that one is missing."""
        self._sequences[channel] = self._sequences.get(channel, 0) + 1

    def _close(self) -> list[bytes]:
        was_open = self.status is NotificationPublisherStatus.OPEN
        self.status = NotificationPublisherStatus.CLOSED
        return [*self._encode_waiting(), self._encode_heartbeat(leaving=True)] if was_open else []

    # --- sending ----------------------------------------------------------------------------------------------------

    def _list_due(self, now: float) -> list[bytes]:
        if self._waiting and now >= self.ready_at:
            sends = list(self._encode_waiting())
            self._begin_pause(now, len(sends))
            return sends
        return [self._encode_heartbeat()] if now >= self._spoke_at + self._settings.hello_interval_s else []

    def _begin_pause(self, now: float, sent_count: int) -> None:
        self._pause_s = self._compute_pause_s(now)
        self.ready_at = now + sent_count * self._pause_s
        self._sent_at, self._replaced = now, 0

    def _compute_pause_s(self, now: float) -> float:
        """Return the next pause: longer where an object has changed more often since the last send than may be sent,
        and the shortest where it has changed seldom, so that a rare change is sent at once."""
        max_sends = self._settings.max_sends_per_s * (now - self._sent_at)
        change_count = self._replaced + 1
        if change_count >= max_sends:
            return min(self._pause_s * GROWTH, BUSY / self._settings.max_sends_per_s)
        return self._pause_s if change_count > LIGHT * max_sends else 1 / self._settings.max_sends_per_s

    def _wake_at(self) -> float | None:
        if self.status is not NotificationPublisherStatus.OPEN:
            return None
        hello_at = self._spoke_at + self._settings.hello_interval_s
        return min(hello_at, self.ready_at) if self._waiting else hello_at

    def _encode_heartbeat(self, leaving: bool = False) -> bytes:
        return encode(NotificationHeartbeat(self._publisher, self._incarnation, self._sequences, leaving))

    def _encode_waiting(self) -> Iterator[bytes]:
        """Yield all that waits, by channel, in as few messages as the limit allows."""
        channels: dict[str, list[ObjectChange]] = {}
        for change in self._waiting.values():
            channels.setdefault(change.kind, []).append(change)
        self._waiting.clear()
        for channel, changes in channels.items():
            yield from self._split(channel, changes)

    def _split(self, channel: str, changes: list[ObjectChange]) -> Iterator[bytes]:
        empty = ChangeNotification(self._publisher, self._incarnation, channel, 1, 0, ())
        room = self._limit - len(encode_parts(empty, [])) - NUMBERS
        part: list[str] = []
        size = 0
        for change in changes:
            text = self._encode_fitting(change, room)
            if text is None:
                self._skip(channel)
                continue
            if part and size + len(text) + 1 > room:
                yield self._encode_message(channel, part)
                part, size = [], 0
            part.append(text)
            size += len(text) + 1
        if part:
            yield self._encode_message(channel, part)

    def _encode_message(self, channel: str, parts: list[str]) -> bytes:
        predecessor = self._sequences.get(channel, 0)
        self._sequences[channel] = predecessor + 1
        envelope = ChangeNotification(self._publisher, self._incarnation, channel, predecessor + 1, predecessor, ())
        return encode_parts(envelope, parts)

    def _encode_fitting(self, change: ObjectChange, room: int) -> str | None:
        """Return the change as text, with as much of it as there is room for: the version is what matters."""
        for shorter in (change, replace(change, data=None)):
            text = encode_change(shorter)
            if len(text) < room:
                return text
        return None
