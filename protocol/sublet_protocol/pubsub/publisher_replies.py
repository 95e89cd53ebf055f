"""What a publisher answers to those who ask it."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.pubsub.model import CommandError, Delivery


@dataclass(frozen=True, slots=True)
class Unknown:
    """The node has nothing of this subscriber id: it must begin again under a new one. `why` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """The batch was executed before; these were its errors."""

    errors: tuple[CommandError, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """The batch is executed; `messages` (index in the batch, body) are for the owner of the publisher."""

    messages: tuple[tuple[int, object], ...]
    errors: tuple[CommandError, ...]


@dataclass(frozen=True, slots=True)
class Messages:
    """The answer to a poll, in order of sequence."""

    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing waits: come back when `on_ready` names the subscriber, or at `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class Subscribed:
    """What somebody subscribed to on a channel: these keys by name, and whether anybody to all of them."""

    keys: frozenset[str]
    all: bool
