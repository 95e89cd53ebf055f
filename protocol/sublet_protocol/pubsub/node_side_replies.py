"""Replies of a publisher to polls and command batches."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.pubsub.model import CommandRefusal, SequencedMessage


@dataclass(frozen=True, slots=True)
class UnknownSubscriber:
    """The reply that the node does not have this subscriber id: begin again under a new one. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class SubscriberRefused:
    """The reply that the node has no room for another subscriber: it may come again later. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class CommandsAlreadyExecuted:
    """The reply that the batch was executed before; these were its errors."""

    errors: tuple[CommandRefusal, ...]


@dataclass(frozen=True, slots=True)
class CommandsAccepted:
    """The reply that the batch is executed; `messages` (index in the batch, body) are for the owner of the
    publisher.
    """

    messages: tuple[tuple[int, object], ...]
    errors: tuple[CommandRefusal, ...]


@dataclass(frozen=True, slots=True)
class PollReply:
    """The answer to a poll, in order of sequence."""

    deliveries: tuple[SequencedMessage, ...]


@dataclass(frozen=True, slots=True)
class HoldPoll:
    """The reply that nothing waits: poll again when `on_ready` names the subscriber, or at `hold_until`."""

    hold_until: float


@dataclass(frozen=True, slots=True)
class KeysWithSubscribers:
    """The keys of a channel that are subscribed by name, and whether all keys are."""

    keys: frozenset[str]
    has_all: bool
