"""The driver that moves nothing: always there, and always right, since the periodic catch-up is all there is."""

from __future__ import annotations

from collections.abc import Sequence

from sublet_storage.notify.drivers.base import Capabilities, OnConnected, OnLost, OnMessage


class PollOutlet:
    """Nobody listens, so nothing is sent, and nothing counts as dropped."""

    dropped = 0

    def send(self, message: bytes) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to let go of."""


class PollInlet:
    """Nothing arrives."""

    endpoint = "poll:"

    def close(self) -> None:
        """Nothing to let go of."""


class PollDriver:
    """Without threads, sockets or connections."""

    name = "poll"
    capabilities = Capabilities(ordered=True, lossless=False, payload_limit=None, pushes=False)

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        pass

    def outlet(self, endpoints: Sequence[str]) -> PollOutlet:
        """The sending end, which sends nothing."""
        return PollOutlet()

    def inlet(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> PollInlet:
        """The listening end; `on_connected` is called once, before this returns."""
        on_connected()
        return PollInlet()
