"""The driver that moves nothing: always there, and always right, since the periodic catch-up is all there is."""

from __future__ import annotations

from collections.abc import Sequence

from sublet_storage.notify.drivers.base import NotificationDriverCapabilities, OnConnected, OnLost, OnMessage


class NoPushSender:
    """Nobody listens, so nothing is sent, and nothing counts as dropped."""

    dropped = 0

    def send(self, message: bytes) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to let go of."""


class NoPushReceiver:
    """Nothing arrives."""

    endpoint = "poll:"

    def close(self) -> None:
        """Nothing to let go of."""


class NoPushDriver:
    """Without threads, sockets or connections."""

    name = "poll"
    capabilities = NotificationDriverCapabilities(is_ordered=True, is_lossless=False, payload_limit=None, is_push=False)

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        pass

    def open_sender(self, endpoints: Sequence[str]) -> NoPushSender:
        """The sending end, which sends nothing."""
        return NoPushSender()

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> NoPushReceiver:
        """The listening end; `on_connected` is called once, before this returns."""
        on_connected()
        return NoPushReceiver()
