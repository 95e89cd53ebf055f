"""The audit log: a line of JSON for each requested change, and for each refusal.

It never has a message, a token or a hash.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

AUDIT = "sublet.audit"
REFUSAL_INTERVAL_S = 60.0
"""The interval in which one refusal of a principal is written, with the number of all."""
MAX_PRINCIPALS = 10_000
MAX_OBJECT_CHARACTERS = 300

log = logging.getLogger(AUDIT)


def record(principal: str | None, address: str, action: str, object: str, outcome: str, count: int = 1) -> None:
    """Write a line. `principal` None: authentication is off, or the caller is not known."""
    fields = {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "principal": principal,
        "address": address,
        "action": action,
        "object": object[:MAX_OBJECT_CHARACTERS],
        "outcome": outcome,
    }
    log.info("%s", json.dumps(fields if count == 1 else {**fields, "count": count}))


class RefusalLog:
    """A log of refusals, one per principal and minute. Thread-safe. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._written: dict[str | None, tuple[float, int]] = {}

    def record(self, principal: str | None, address: str, action: str, object: str) -> None:
        """Write the refusal, or count it where one was written a short while ago."""
        with self._lock:
            now = self._clock()
            at, suppressed = self._written.get(principal, (float("-inf"), 0))
            is_due = now - at >= REFUSAL_INTERVAL_S
            if principal not in self._written and len(self._written) >= MAX_PRINCIPALS:
                self._written.clear()
            self._written[principal] = (now, 0) if is_due else (at, suppressed + 1)
        if is_due:
            record(principal, address, action, object, "refused", suppressed + 1)
