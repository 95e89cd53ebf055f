"""A notification driver of somebody else's, found by its entry point: postgres, of whose messages a share is lost.

`LOSS` says how many of a hundred never arrive, `LOSS_FILE` names a file that says so and may be changed meanwhile.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from sublet_storage.notify.drivers.base import (
    NotificationDriverCapabilities,
    NotificationReceiver,
    NotificationSender,
    OnConnected,
    OnLost,
    OnMessage,
)
from sublet_storage.notify.drivers.postgres import PostgresNotificationDriver


class LossyDriver:
    """Loses at its receivers. Its endpoints are its own, so that publishers use it too."""

    name = "lossy"

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        self._complete = PostgresNotificationDriver(url, host=host)
        self.capabilities = NotificationDriverCapabilities(
            is_ordered=True, is_lossless=False, payload_limit=self._complete.capabilities.payload_limit, is_push=True
        )

    def open_sender(self, endpoints: Sequence[str]) -> NotificationSender:
        return self._complete.open_sender([endpoint.replace("lossy:", "postgres:", 1) for endpoint in endpoints])

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> NotificationReceiver:
        """As postgres, but for what is lost."""

        def perhaps(message: bytes) -> None:
            if random.random() * 100 >= _loss():
                on_message(message)

        return _Inlet(self._complete.open_receiver(perhaps, on_connected, on_lost))


class _Inlet:
    def __init__(self, entire: NotificationReceiver) -> None:
        self._complete = entire

    @property
    def endpoint(self) -> str:
        """As postgres, under this driver's name."""
        return self._complete.endpoint.replace("postgres:", "lossy:", 1)

    def close(self) -> None:
        self._complete.close()


def _loss() -> float:
    file = os.environ.get("LOSS_FILE")
    return float(Path(file).read_text()) if file else float(os.environ.get("LOSS", "0"))
