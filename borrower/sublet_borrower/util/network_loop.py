"""The one event loop for all network work of a process, on its own thread.

It lives as long as the process: grpc delivers the events of all its event loops through whichever wakes first, and
fails on a loop that has been closed. Agents come and go in a process; this loop stays.
"""

from __future__ import annotations

import asyncio
import os
import threading

from sublet_borrower.util.session_fork_guard import use_grpc

# grpc does not survive a fork, so its fork handlers only log warnings, for each process started. It reads this once,
# when it is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def network_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, running. Nothing may block or stop it.

    Raise `UsageError` in a process that was forked from one that had used grpc: that would wait there for ever.
    """
    global _loop
    with _lock:
        if _loop is None:
            use_grpc()
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="sublet-network", daemon=True).start()
            _loop = loop  # not before it runs: there may be no thread for it
        return _loop


def _forget() -> None:
    """Drop the loop in a forked child, which has none of its thread."""
    global _loop, _lock
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
