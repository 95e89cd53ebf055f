"""Plain values that the two halves of a connection exchange, independent of what they carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, StrEnum

from msgspec import Struct


class Channel(StrEnum):
    """The channels that nodes serve."""

    BORROWER = "borrower"  # key: borrower id; from the leader to one borrower
    STREAM = "stream"  # key: stream id; the newest head
    GROUP = "group"  # key: subscription; events of a group, for its watchers


class ChannelKind(Enum):
    """The kinds of channels, by what a subscriber may rely on."""

    LOG = "log"  # every message, in order; each names its predecessor
    STATE = "state"  # the newest value of each key; a subscribe is answered with it


Subject = tuple[str, str | None]
"""What is subscribed to: a channel, and a key or None for all."""


class ChannelCatalog(Mapping[str, ChannelKind]):
    """The channels that two parties use: a name, its number on the wire (from 1 on), and its kind."""

    def __init__(self, *channels: tuple[str, int, ChannelKind]) -> None:
        self._kinds = {name: kind for name, _, kind in channels}
        self._numbers = {name: number for name, number, _ in channels}
        self._names = {number: name for name, number, _ in channels}

    def __getitem__(self, name: str) -> ChannelKind:
        return self._kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def find_number(self, name: str) -> int:
        """Return the number of a channel; 0 for what is none."""
        return self._numbers.get(name, 0)

    def find_name(self, number: int) -> str | None:
        """Return the channel of a number; None for what is none."""
        return self._names.get(number)


CHANNELS = ChannelCatalog(
    (Channel.BORROWER, 1, ChannelKind.LOG),
    (Channel.STREAM, 2, ChannelKind.STATE),
    (Channel.GROUP, 3, ChannelKind.LOG),
)


class Subscribe(Struct, frozen=True):
    """The command to subscribe to one key of a channel; to all of them where `key` is None."""

    channel: str
    key: str | None


class Unsubscribe(Struct, frozen=True):
    """The command to undo the subscribe with the same channel and key."""

    channel: str
    key: str | None


class MessageToNode(Struct, frozen=True):
    """A message to the node."""

    body: object


class UndecodableCommand(Struct, frozen=True):
    """A command that could not be decoded; `text` is the reason. It is answered with an error and has no other
    effect.
    """

    text: str


Command = Subscribe | Unsubscribe | MessageToNode
ReceivedCommand = Command | UndecodableCommand


class CommandRefusal(Struct, frozen=True):
    """The error that the command at `index` of a batch was refused."""

    index: int
    text: str


class MailboxOverflow(Struct, frozen=True):
    """The gap where the mailbox overflowed, and `dropped` messages of these channels were lost: read the state
    again.
    """

    dropped: int
    channels: tuple[str, ...]


class SequencedMessage(Struct, frozen=True):
    """One numbered message to one subscriber.

    `predecessor` (log channels): the sequence of the delivery before it on this channel, 0 for the first. `version`
    (state channels): higher is newer. A `MailboxOverflow` has neither channel nor key.
    """

    sequence: int
    channel: str
    key: str
    body: object
    predecessor: int = 0
    version: int = 0
