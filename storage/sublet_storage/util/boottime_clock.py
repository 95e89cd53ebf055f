"""A clock that goes on while the machine sleeps."""

from __future__ import annotations

import time


def boottime_clock() -> float:
    """Return seconds that go on while the machine sleeps: a lease must not be trusted longer than its real time."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
