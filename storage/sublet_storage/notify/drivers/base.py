"""The interface of notification drivers, which move bytes and declare their capabilities.

Names, sequences, gaps, windows, catch-ups and versions are handled outside of the drivers (`publisher_machine`,
`subscriber_machine`, `version_cache`); a driver may lose, repeat or reorder messages, as long as its
`NotificationDriverCapabilities` say so and no message arrives torn.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

OnMessage = Callable[[bytes], None]
"""Called with each message that arrives, from a thread of the driver; must return soon."""

OnConnected = Callable[[], None]
"""Called whenever listening has begun, the first time and after each loss: messages sent from now on may arrive."""

OnLost = Callable[[], None]
"""Called when the connection is lost: messages may be missed until `OnConnected` is called again."""


FLUSH_S = 0.25
"""How long closing a sender waits for queued messages, unless its process ends and has more time."""


class NotificationDriverCapabilities(Struct, frozen=True):
    """The capabilities of a driver.

    `is_ordered`: one sender's messages arrive in the order they were sent. `is_lossless`: what a sender has not counted
    as dropped arrives at every receiver that stays connected. `payload_limit`: the longest message in bytes (None: no
    limit). `is_push`: False if it moves nothing at all, so that no sender need be opened and there is only the periodic
    catch-up. `notify_channel`: of Postgres, where what a connection of another publishes by NOTIFY arrives like what a
    sender sends.
    """

    is_ordered: bool
    is_lossless: bool
    payload_limit: int | None
    is_push: bool
    notify_channel: str | None = None


class NotificationSender(Protocol):
    """The sending end, of one process. Used by one thread at a time; in a fork of its process it sends nothing."""

    @property
    def dropped(self) -> int:
        """Return the number of messages dropped so far: too long, no receiver reachable, too many waiting."""
        ...

    def send(self, message: bytes) -> None:
        """Send to every endpoint it was opened for. Never blocks for long, never raises: what fails is counted."""
        ...

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Wait so long at most for queued messages, then release everything, in bounded time; harmless when
        repeated."""
        ...


class NotificationReceiver(Protocol):
    """The listening end, of one node."""

    @property
    def endpoint(self) -> str:
        """Return the endpoint for publishers, beginning with the driver's name: `postgres:`,
        `zmq:tcp://10.0.0.5:40211?key=...`."""
        ...

    def close(self) -> None:
        """Stop listening, in bounded time; no callback is called after it returns; harmless when repeated."""
        ...


class NotificationDriver(Protocol):
    """One way to move notifications."""

    @property
    def name(self) -> str:
        """Return its name in the entry point group `sublet.notify`, with which its endpoints begin."""
        ...

    @property
    def capabilities(self) -> NotificationDriverCapabilities:
        """Return its capabilities."""
        ...

    def open_sender(self, endpoints: Sequence[str]) -> NotificationSender:
        """Open the sending end towards these endpoints of its own kind."""
        ...

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> NotificationReceiver:
        """Begin to listen. The three callbacks come one at a time, and may come before this has returned.

        Raise `SubletError` if it can never listen; transient failures, such as a database that is away, are retried.
        """
        ...


class NotificationDriverFactory(Protocol):
    """A factory named by an entry point of the group `sublet.notify`: it makes the driver for a database URL and opens
    nothing."""

    def __call__(self, url: str, *, host: str = "127.0.0.1") -> NotificationDriver:
        """Return the driver. `host`: the address of this machine that a node listens on, for drivers that open a
        port."""
        ...
