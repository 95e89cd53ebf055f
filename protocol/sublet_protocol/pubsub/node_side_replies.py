"""Replies of a node to polls and command batches."""

from __future__ import annotations

from msgspec import Struct

from sublet_protocol.pubsub.model import CommandRefusal, SequencedMessage


class UnknownSubscriber(Struct, frozen=True):
    """The reply that the node does not have this subscriber id: begin again under a new one. `reason` is for people."""

    reason: str


class SubscriberRefused(Struct, frozen=True):
    """The reply that the node has no room for another subscriber: it may come again later. `reason` is for people."""

    reason: str


class CommandsAlreadyExecuted(Struct, frozen=True):
    """The reply that the batch was executed before; these were its errors."""

    errors: tuple[CommandRefusal, ...]


class CommandsAccepted(Struct, frozen=True):
    """The reply that the batch is executed; `messages` (index in the batch, body) are for the owner of the
    publisher.
    """

    messages: tuple[tuple[int, object], ...]
    errors: tuple[CommandRefusal, ...]


class PollReply(Struct, frozen=True):
    """The answer to a poll, in order of sequence."""

    deliveries: tuple[SequencedMessage, ...]


class HoldPoll(Struct, frozen=True):
    """The reply that nothing waits: poll again when `on_ready` names the subscriber, or at `hold_until`."""

    hold_until: float
