"""Refuses a call that a signal handler makes in the middle of a call of its own thread's.

Such a handler runs on top of the call that it interrupts. If that holds a lock, and what the handler calls waits for
the lock, or for a thread that needs it, neither ever goes on.
"""

from __future__ import annotations

import threading

from sublet_protocol.domain.errors import UsageError


def check_reentry(lock: threading.RLock) -> None:
    """Raise `UsageError` if this thread holds the lock."""
    if lock._is_owned():  # type: ignore[attr-defined]
        raise UsageError(
            "called by a signal handler in the middle of this thread's own call, which it would wait for. Set a flag "
            "in the handler, or raise an exception there, and make this call afterwards."
        )
