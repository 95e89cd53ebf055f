"""A bounded queue of messages for one subscriber, kept until acknowledged.

A message first *waits*, then is *handed out* under a sequence number, then is acknowledged and removed. Only what waits
can be dropped: what was handed out is bounded by one reply, and a reply that got lost must be repeated.

When too much waits, or its principal leaves too much unread, the channel that takes the most room is emptied: all its
messages are dropped and a `MailboxOverflow` takes their place. The other channels lose nothing.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from msgspec import Struct, field

from sublet_protocol.pubsub.model import Channel, CommandRefusal, MailboxOverflow, SequencedMessage

MESSAGE_BYTES = 320
"""What a message takes in memory beside its key and body, in bytes, approximately."""


class PrincipalUsage(Struct, weakref=True):
    """What one principal takes of a node's memory with all its subscriber ids, in bytes: what it has not taken yet, and
    the keys of its subscriptions; and its subscriptions to groups. Where callers are not known, each id has one of its
    own, which is not `is_of_principal`."""

    is_of_principal: bool = False
    unread_limit: int = sys.maxsize
    unread_bytes: int = 0
    key_bytes: int = 0
    watches: int = 0


class MailboxLimits(Struct, frozen=True):
    """The bounds of one subscriber's mailbox, and of one reply out of it; bytes are those of keys and bodies."""

    messages: int = 10_000
    bytes: int = 4 << 20
    reply_messages: int = 1_000
    reply_bytes: int = 1 << 20


class QueuedMessage(Struct, frozen=True):
    """A message with its place still open, which several mailboxes may share. `is_deduplicated`: while it is
    unacknowledged, an equal one is not queued again."""

    channel: str
    key: str
    body: object
    size: int
    is_state: bool = False
    version: int = 0
    is_deduplicated: bool = False

    @property
    def identity(self) -> tuple[str, str, object]:
        return self.channel, self.key, self.body


class Mailbox:
    """The numbered messages of one subscriber id; they count in `usage`, until `close`."""

    __slots__ = (
        "_arrivals",
        "_counted_bytes",
        "_dropped",
        "_dropped_channels",
        "_last_on",
        "_limits",
        "_once",
        "_out",
        "_out_bytes",
        "_sequence",
        "_usage",
        "_waiting",
        "_waiting_bytes",
    )

    def __init__(self, limits: MailboxLimits, usage: PrincipalUsage | None = None) -> None:
        self._limits = limits
        self._usage = usage or PrincipalUsage()
        self._counted_bytes = 0
        self._waiting: OrderedDict[Hashable, QueuedMessage] = OrderedDict()
        self._waiting_bytes = 0
        self._out: list[tuple[SequencedMessage, QueuedMessage | None]] = []
        self._out_bytes = 0
        self._once: dict[tuple[str, str, object], None] = {}
        self._last_on: dict[str, int] = {}
        self._sequence = 0
        self._arrivals = 0
        self._dropped = 0
        self._dropped_channels: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._out) + bool(self._dropped)

    def __bool__(self) -> bool:
        return len(self) > 0

    @property
    def sequence(self) -> int:
        """Return the last number that was handed out."""
        return self._sequence

    @property
    def memory_bytes(self) -> int:
        """Return the memory of its messages, in bytes, approximately."""
        return self._waiting_bytes + self._out_bytes + MESSAGE_BYTES * (len(self._waiting) + len(self._out))

    def put(self, message: QueuedMessage) -> None:
        """Queue a message; if there is too much, the fullest channel's messages turn into a gap."""
        if message.is_deduplicated:
            if message.identity in self._once:
                return
            self._once[message.identity] = None
        queue_key = self._make_queue_key(message)
        if (older := self._waiting.get(queue_key)) is not None:
            self._waiting_bytes -= older.size
        self._waiting[queue_key] = message
        self._waiting_bytes += message.size
        self._count()
        while self._has_too_much():
            self._make_room()
            self._count()

    def acknowledge(self, sequence: int) -> bool:
        """Remove all up to `sequence`; return False if that was never handed out."""
        while self._out and self._out[0][0].sequence <= sequence:
            _, message = self._out.pop(0)
            if message is not None:
                self._out_bytes -= message.size
                self._once.pop(message.identity, None)
        self._count()
        return sequence <= self._sequence

    def take(self) -> tuple[SequencedMessage, ...]:
        """Return all that is unacknowledged, and as much of what waits as fits into a reply."""
        if self._dropped and self._has_room(0):
            self._hand_out_gap()
        while self._waiting and self._has_room(next(iter(self._waiting.values())).size):
            self._hand_out(self._waiting.popitem(last=False)[1])
        self._count()
        return tuple(delivery for delivery, _ in self._out)

    def close(self) -> None:
        """End counting its messages."""
        self._usage.unread_bytes -= self._counted_bytes

    def find_leaks(self) -> Iterator[str]:
        """Return bookkeeping that should have gone with its messages; empty unless there is a leak."""
        out = [message for _, message in self._out if message is not None]
        known = {message.identity for message in (*self._waiting.values(), *out) if message.is_deduplicated}
        yield from (f"{identity[:2]} is not queued again, though it is gone" for identity in self._once.keys() - known)
        if self._waiting_bytes != (waiting := sum(message.size for message in self._waiting.values())):
            yield f"{self._waiting_bytes} bytes are said to wait, and {waiting} do"
        if self._out_bytes != (handed_out := sum(message.size for message in out)):
            yield f"{self._out_bytes} bytes are said to be handed out, and {handed_out} are"
        if self._counted_bytes != self.memory_bytes:
            yield f"{self._counted_bytes} bytes of memory are counted, and {self.memory_bytes} are held"

    def _count(self) -> None:
        held = self.memory_bytes
        self._usage.unread_bytes += held - self._counted_bytes
        self._counted_bytes = held

    def _has_too_much(self) -> bool:
        if len(self._waiting) > self._limits.messages or self._waiting_bytes > self._limits.bytes:
            return True
        return bool(self._waiting) and self._usage.unread_bytes > self._usage.unread_limit

    def _make_queue_key(self, message: QueuedMessage) -> Hashable:
        """Return the key under which it waits: a state replaces the older value that still waits; everything else goes
        to the end."""
        if message.is_state:
            return message.channel, message.key
        self._arrivals += 1
        return self._arrivals

    def _make_room(self) -> None:
        """Drop what waits on the channel that takes the most of what is short."""
        by_number = len(self._waiting) > self._limits.messages
        room: dict[str, int] = {}
        for message in self._waiting.values():
            room[message.channel] = room.get(message.channel, 0) + (1 if by_number else message.size)
        fullest = max(room, key=room.__getitem__)
        queue_keys = [queue_key for queue_key, message in self._waiting.items() if message.channel == fullest]
        self._drop(fullest, queue_keys)

    def _drop(self, channel: str, queue_keys: list[Hashable]) -> None:
        for queue_key in queue_keys:
            message = self._waiting.pop(queue_key)
            self._waiting_bytes -= message.size
            if message.is_deduplicated:
                self._once.pop(message.identity, None)
        self._dropped += len(queue_keys)
        self._dropped_channels[channel] = None

    def _has_room(self, size: int) -> bool:
        """Return whether it fits; the first message always does, whatever its size."""
        fits = len(self._out) < self._limits.reply_messages and self._out_bytes + size <= self._limits.reply_bytes
        return fits or not self._out

    def _hand_out(self, message: QueuedMessage) -> None:
        self._sequence += 1
        predecessor = 0
        if not message.is_state:
            predecessor = self._last_on.get(message.channel, 0)
            self._last_on[message.channel] = self._sequence
        delivery = SequencedMessage(
            self._sequence, message.channel, message.key, message.body, predecessor, message.version
        )
        self._out.append((delivery, message))
        self._out_bytes += message.size
        self._waiting_bytes -= message.size

    def _hand_out_gap(self) -> None:
        """Hand out the gap, as the predecessor of what follows on its channels, so that it cannot be overlooked."""
        self._sequence += 1
        channels = tuple(self._dropped_channels)
        self._last_on.update((channel, self._sequence) for channel in channels)
        self._out.append((SequencedMessage(self._sequence, "", "", MailboxOverflow(self._dropped, channels)), None))
        self._dropped = 0
        self._dropped_channels.clear()


class Subscriber(Struct):
    """The state of a subscriber. `subjects`: the keys, or None for all, by channel."""

    mailbox: Mailbox
    usage: PrincipalUsage
    received_at: float
    batch: int = 0
    errors: tuple[CommandRefusal, ...] = ()
    subjects: dict[str, dict[str | None, None]] = field(default_factory=dict)

    def keep_errors(self, errors: tuple[CommandRefusal, ...]) -> None:
        """Keep the errors of the last batch, in place of those of the batch before."""
        self.usage.unread_bytes += _measure_errors(errors) - _measure_errors(self.errors)
        self.errors = errors

    def measure(self) -> int:
        return self.mailbox.memory_bytes + _measure_errors(self.errors)

    def measure_keys(self) -> int:
        return sum(len(key or "") for _, key in self.list_subjects())

    def count_watches(self) -> int:
        return len(self.subjects.get(Channel.GROUP, ()))

    def close(self) -> None:
        self.keep_errors(())
        self.mailbox.close()

    def list_subjects(self) -> Iterator[tuple[str, str | None]]:
        return ((channel, key) for channel, keys in self.subjects.items() for key in keys)


def _measure_errors(errors: tuple[CommandRefusal, ...]) -> int:
    """Return their bytes of memory: a character that is not ASCII makes all of its text wider."""
    return sum(sys.getsizeof(error) + sys.getsizeof(error.text) for error in errors)
