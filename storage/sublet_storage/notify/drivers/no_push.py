"""The driver that moves nothing and leaves everything to the periodic catch-up."""

from __future__ import annotations

from collections.abc import Sequence

from sublet_storage.notify.drivers.base import NotificationDriverCapabilities, OnConnected, OnLost, OnMessage


class NoPushSender:
    """A sender that sends nothing and counts nothing as dropped."""

    dropped = 0

    def send(self, message: bytes) -> None:
        """Do nothing."""

    def close(self, timeout_s: float = 0.0) -> None:
        """Do nothing, as nothing is open."""


class NoPushReceiver:
    """A receiver that receives nothing."""

    endpoint = "poll:"

    def close(self) -> None:
        """Do nothing, as nothing is open."""


class NoPushDriver:
    """A driver without threads, sockets or connections."""

    name = "poll"
    capabilities = NotificationDriverCapabilities(is_ordered=True, is_lossless=False, payload_limit=None, is_push=False)

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        pass

    def open_sender(self, endpoints: Sequence[str]) -> NoPushSender:
        """Return the sender, which sends nothing."""
        return NoPushSender()

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> NoPushReceiver:
        """Return the receiver; `on_connected` is called once, before this returns."""
        on_connected()
        return NoPushReceiver()
