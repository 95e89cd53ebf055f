"""A notification driver of somebody else's, found by its entry point: postgres, of whose messages a share is lost.

`LOSS` says how many of a hundred never arrive, `LOSS_FILE` names a file that says so and may be changed meanwhile.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from sublet_storage.notify.drivers.base import Capabilities, Inlet, OnConnected, OnLost, OnMessage, Outlet
from sublet_storage.notify.drivers.postgres import PostgresDriver


class LossyDriver:
    """Loses at its inlets. Its endpoints are its own, so that publishers use it too."""

    name = "lossy"

    def __init__(self, url: str, *, host: str = "127.0.0.1") -> None:
        self._whole = PostgresDriver(url, host=host)
        self.capabilities = Capabilities(
            ordered=True, lossless=False, payload_limit=self._whole.capabilities.payload_limit, pushes=True
        )

    def outlet(self, endpoints: Sequence[str]) -> Outlet:
        """As postgres."""
        return self._whole.outlet([endpoint.replace("lossy:", "postgres:", 1) for endpoint in endpoints])

    def inlet(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> Inlet:
        """As postgres, but for what is lost."""

        def perhaps(message: bytes) -> None:
            if random.random() * 100 >= _loss():
                on_message(message)

        return _Inlet(self._whole.inlet(perhaps, on_connected, on_lost))


class _Inlet:
    def __init__(self, whole: Inlet) -> None:
        self._whole = whole

    @property
    def endpoint(self) -> str:
        """As postgres, under this driver's name."""
        return self._whole.endpoint.replace("postgres:", "lossy:", 1)

    def close(self) -> None:
        """As postgres."""
        self._whole.close()


def _loss() -> float:
    file = os.environ.get("LOSS_FILE")
    return float(Path(file).read_text()) if file else float(os.environ.get("LOSS", "0"))
