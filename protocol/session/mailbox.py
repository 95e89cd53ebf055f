"""What waits for one subscriber: bounded, first in first out, kept until acknowledged.

A message first *waits*, then is *handed out* under a sequence number, then is acknowledged and forgotten. Only what
waits can be dropped: what was handed out is bounded by one reply, and a reply that got lost must be given again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from protocol.session.values import Delivery, Gap


@dataclass(frozen=True, slots=True)
class MailboxLimits:
    """Bounds of one subscriber's mailbox, and of one reply out of it; bytes are the bodies' sizes."""

    messages: int = 10_000
    bytes: int = 4 << 20
    reply_messages: int = 1_000
    reply_bytes: int = 1 << 20


@dataclass(slots=True)
class Letter:
    """A message with its place still open. `once`: while it is unacknowledged, an equal one is not queued again."""

    channel: str
    key: str
    body: object
    size: int
    is_state: bool = False
    version: int = 0
    once: bool = False

    @property
    def identity(self) -> tuple[str, str, object]:
        return self.channel, self.key, self.body


class Mailbox:
    """The numbered messages of one subscriber id."""

    def __init__(self, limits: MailboxLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[Hashable, Letter] = OrderedDict()
        self._waiting_bytes = 0
        self._out: deque[tuple[Delivery, Letter | None]] = deque()
        self._out_bytes = 0
        self._once: set[tuple[str, str, object]] = set()
        self._last_on: dict[str, int] = {}
        self._sequence = 0
        self._arrivals = 0
        self._dropped = 0
        self._dropped_channels: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._out) + bool(self._dropped)

    def __bool__(self) -> bool:
        return len(self) > 0

    def put(self, letter: Letter) -> None:
        """Queue a message; what waits turns into a gap if there is too much of it."""
        if letter.once:
            if letter.identity in self._once:
                return
            self._once.add(letter.identity)
        place = self._place_of(letter)
        if (older := self._waiting.get(place)) is not None:
            self._waiting_bytes -= older.size
        self._waiting[place] = letter
        self._waiting_bytes += letter.size
        if len(self._waiting) > self._limits.messages or self._waiting_bytes > self._limits.bytes:
            self._overflow()

    def acknowledge(self, sequence: int) -> bool:
        """Forget all up to `sequence`; False if that was never handed out."""
        while self._out and self._out[0][0].sequence <= sequence:
            _, letter = self._out.popleft()
            if letter is not None:
                self._out_bytes -= letter.size
                self._once.discard(letter.identity)
        return sequence <= self._sequence

    def take(self) -> tuple[Delivery, ...]:
        """All that is unacknowledged, and as much of what waits as fits into a reply."""
        if self._dropped and self._has_room(0):
            self._hand_out_gap()
        while self._waiting and not self._dropped and self._has_room(next(iter(self._waiting.values())).size):
            self._hand_out(self._waiting.popitem(last=False)[1])
        return tuple(delivery for delivery, _ in self._out)

    def _place_of(self, letter: Letter) -> Hashable:
        """A state takes the place of the older value that still waits; everything else goes to the end."""
        if letter.is_state:
            return letter.channel, letter.key
        self._arrivals += 1
        return self._arrivals

    def _overflow(self) -> None:
        for letter in self._waiting.values():
            self._dropped_channels[letter.channel] = None
            if letter.once:
                self._once.discard(letter.identity)
        self._dropped += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _has_room(self, size: int) -> bool:
        """The first message always fits, whatever its size."""
        fits = len(self._out) < self._limits.reply_messages and self._out_bytes + size <= self._limits.reply_bytes
        return fits or not self._out

    def _hand_out(self, letter: Letter) -> None:
        self._sequence += 1
        predecessor = 0
        if not letter.is_state:
            predecessor = self._last_on.get(letter.channel, 0)
            self._last_on[letter.channel] = self._sequence
        delivery = Delivery(self._sequence, letter.channel, letter.key, letter.body, predecessor, letter.version)
        self._out.append((delivery, letter))
        self._out_bytes += letter.size
        self._waiting_bytes -= letter.size

    def _hand_out_gap(self) -> None:
        """The gap is the predecessor of what follows it, so that nobody can overlook it."""
        self._sequence += 1
        channels = tuple(self._dropped_channels)
        self._last_on.update((channel, self._sequence) for channel in channels)
        self._out.append((Delivery(self._sequence, "", "", Gap(self._dropped, channels)), None))
        self._dropped = 0
        self._dropped_channels.clear()
