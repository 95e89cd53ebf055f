"""The callbacks of one connection's subscriptions, and which is called for a delivery.

One delivery is one call: of the key's own `on_message`, else of that for all keys, else of the connection's. A gap goes
to the connection and to every subscription of one of its channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason, ReportConnectionLost
from sublet_protocol.pubsub.model import MailboxOverflow, SequencedMessage, Subject

log = logging.getLogger(__name__)

OnDelivery = Callable[[SequencedMessage], None]
OnLost = Callable[[ReportConnectionLost], None]


class SubscriptionCallbacks(Struct, frozen=True):
    """The callbacks of one subscription; None: the connection's is called."""

    on_message: OnDelivery | None
    on_lost: OnLost | None


class CallbackRegistry:
    """The callbacks by subscription; subscribing again replaces them, as the last command wins."""

    def __init__(self, on_message: OnDelivery, on_lost: OnLost) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._pairs: dict[Subject, SubscriptionCallbacks] = {}

    def register(self, subject: Subject, on_message: OnDelivery | None, on_lost: OnLost | None) -> None:
        """Enter those of a subscription."""
        if on_message is None and on_lost is None:
            self._pairs.pop(subject, None)
        else:
            self._pairs[subject] = SubscriptionCallbacks(on_message, on_lost)

    def unregister(self, subject: Subject) -> None:
        """Remove those of a subscription."""
        self._pairs.pop(subject, None)

    def deliver(self, deliveries: Iterable[SequencedMessage]) -> None:
        """Call the callback of each delivery, in order."""
        for delivery in deliveries:
            for callback in tuple(self._find_callbacks(delivery)):
                call_safely(callback, delivery)

    def _find_callbacks(self, delivery: SequencedMessage) -> Iterator[OnDelivery]:
        if isinstance(delivery.body, MailboxOverflow):
            yield self._on_message
            yield from self._find_callbacks_of(delivery.body.channels)
            return
        for subject in ((delivery.channel, delivery.key), (delivery.channel, None)):
            if (pair := self._pairs.get(subject)) is not None and pair.on_message is not None:
                yield pair.on_message
                return
        yield self._on_message

    def _find_callbacks_of(self, channels: tuple[str, ...]) -> Iterator[OnDelivery]:
        """Return each callback once, however many subscriptions it serves."""
        pairs = (pair for (channel, _), pair in self._pairs.items() if channel in channels)
        return iter(dict.fromkeys(pair.on_message for pair in pairs if pair.on_message is not None))

    def notify_lost(self, lost: ReportConnectionLost) -> None:
        """Notify the connection and each subscription that the connection is lost."""
        call_safely(self._on_lost, lost)
        self.notify_failed(lost)

    def notify_failed(self, lost: ReportConnectionLost) -> None:
        """Notify the subscriptions that `lost` names; remove them if it is final."""
        for subject in lost.subscriptions:
            pair = self._pairs.pop(subject, None) if lost.is_final else self._pairs.get(subject)
            if pair is not None and pair.on_lost is not None:
                call_safely(pair.on_lost, lost)

    def notify_rejected(self, subject: Subject, text: str) -> None:
        """Notify the subscription that the node refused it, and no other."""
        self.notify_failed(ReportConnectionLost(ConnectionLostReason.REJECTED, text, (subject,)))

    def subjects(self) -> tuple[Subject, ...]:
        """Return the subscriptions with callbacks of their own."""
        return tuple(self._pairs)


def call_safely(callback: Callable[..., None], *arguments: object) -> None:
    """Call it; an exception affects no other callback."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("session callback failed")
