"""Ends calls that may hang on a silent database within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 3.0


async def run_with_timeout(step: str, work: Callable[[], None], timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
    """Run `work`, which may block, in a thread that the end of the process does not wait for. Return False if it took
    longer than `timeout_s`."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        except Exception:
            log.exception("shutdown step failed: step=%r", step)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the wait is over
            loop.call_soon_threadsafe(over.set)

    threading.Thread(target=run, name=f"sublet shutdown: {step}", daemon=True).start()
    try:
        await asyncio.wait_for(over.wait(), timeout_s)
    except TimeoutError:
        log.warning("shutdown step timed out, skipped: step=%r timeout_s=%g", step, timeout_s)
        return False
    return True
