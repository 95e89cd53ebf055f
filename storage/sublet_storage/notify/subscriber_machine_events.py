"""Events, actions and counters of the subscriber machine."""

from __future__ import annotations

from msgspec import Struct

from sublet_protocol.tick import Tick
from sublet_storage.notify.catch_up_scheduler import StartCatchUp
from sublet_storage.notify.changes import Message, ObjectChange


class SubscriberStarted(Struct, frozen=True):
    """The first event."""


class ListeningStarted(Struct, frozen=True):
    """The driver has begun to listen, for the first time or again."""


class ListeningStopped(Struct, frozen=True):
    """The driver has stopped listening, until `ListeningStarted`."""


class NotificationReceived(Struct, frozen=True):
    """A message was received."""

    message: Message


class MalformedNotificationReceived(Struct, frozen=True):
    """Bytes were received that are no message."""


class ChangeOrderUnknown(Struct, frozen=True):
    """It is unknown whether a change on that channel is newer than the cached one."""

    channel: str


class CatchUpRequested(Struct, frozen=True):
    """A read of that channel is requested."""

    channel: str


class CatchUpCompleted(Struct, frozen=True):
    """The catch-up of that channel has ended; not `is_ok`: the database could not be read."""

    channel: str
    is_ok: bool


Event = (
    SubscriberStarted
    | ListeningStarted
    | ListeningStopped
    | NotificationReceived
    | MalformedNotificationReceived
    | ChangeOrderUnknown
    | CatchUpRequested
    | CatchUpCompleted
    | Tick
)


class NotificationSubscriberOutcome(Struct, frozen=True):
    """The changes for the cache, then the catch-ups to begin; when to call again at the latest (None: with the next
    event)."""

    changes: tuple[ObjectChange, ...]
    catch_ups: tuple[StartCatchUp, ...]
    wake_at: float | None


class SubscriberCounters(Struct):
    """The counters of a subscriber since it began. `duplicates`: came twice, or after its gap had been given up."""

    received: int = 0
    duplicates: int = 0
    malformed: int = 0
    gaps: int = 0
    filled_gaps: int = 0
    expired_gaps: int = 0
    restarts: int = 0
    publisher_timeouts: int = 0
    expired_publishers: int = 0
    disconnects: int = 0


class SequenceGap(Struct):
    """The messages missing between messages that were received, and until when they are waited for.

    A range (after, until) stands for a chain of messages: the first has the predecessor `after`, the last the number
    `until`. No ranges: nothing is missing any more, or it was given up.
    """

    channel: str
    deadline: float
    missing_ranges: list[tuple[int, int]]

    def fill(self, predecessor: int, sequence: int) -> bool:
        """Add a message that came late; return False if it was not missing here."""
        for index, (lower, upper) in enumerate(self.missing_ranges):
            if lower <= predecessor and sequence <= upper:
                remaining = [(lower, predecessor), (sequence, upper)]
                self.missing_ranges[index : index + 1] = [piece for piece in remaining if piece[0] < piece[1]]
                return True
        return False
