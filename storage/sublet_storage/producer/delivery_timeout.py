"""How long it is tried to store what was handed to a publisher."""

from __future__ import annotations

import math
import time

from sublet_storage.util.retry import Backoff

AGE_SPREAD_S = 1.0
"""Where it is uncertain that messages are stored, those are sent together that were published within so long."""


class DeliveryTimeout:
    """`timeout_s`, counted from when a message was handed over: what waits behind others that fail is tried for no
    longer than they are. For one thread."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._failed_at = -math.inf

    def backoff(self, entered_at: float, first_s: float, max_s: float) -> Backoff:
        """Return the pauses between attempts to store what was handed over at that time."""
        return Backoff(first_s, max_s, total_s=entered_at + self.timeout_s - time.monotonic())

    def is_over(self, entered_at: float) -> bool:
        """Whether it is not even to be sent: its time is over, and others failed while it waited. Where they are
        answered it is tried once, however long it had to wait for its turn."""
        return entered_at < self._failed_at and entered_at + self.timeout_s <= time.monotonic()

    def failed(self) -> None:
        """Something was not stored in its time."""
        self._failed_at = time.monotonic()

    def succeeded(self) -> None:
        """Something was answered."""
        self._failed_at = -math.inf

    @property
    def age_spread_s(self) -> float:
        """Within how long what is sent together was handed over, as it fails together, when the oldest has to."""
        return math.inf if self._failed_at == -math.inf else AGE_SPREAD_S
