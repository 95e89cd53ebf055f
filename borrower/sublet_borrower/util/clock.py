"""A clock that goes on while the machine sleeps."""

from __future__ import annotations

import time


def boottime_clock() -> float:
    """Seconds that go on while the machine sleeps: trust in a lease must not outlive it there."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
