"""Bounds the calls of one method that are under way for one principal.

Such a call is made as one whose requests are a stream, so that its one request is read here, and not at all for a
principal that has as many calls under way as it may. A call counts until its reply has left, or its client has gone and
its work is done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from sublet_protocol.domain.limits import MAX_CALLS_OF_PRINCIPAL, REQUEST_TIMEOUT_S
from sublet_protocol.gate.bounded_request_parser import abort_busy, read_request


def call_when_over(callback: Callable[[], object]) -> None:
    """Call back once the call that this task serves is over: its reply has left, or its client has gone. gRPC's own
    callbacks are in a cycle with the call and its request, which would be left to the collector."""
    task = asyncio.current_task()
    assert task is not None, "each call has one"
    task.add_done_callback(lambda _: callback())


class PrincipalCallLimiter:
    """The calls of one method. `max_at_a_time`: those of a principal that are read and executed, while its others wait
    unread; None: all of them.
    """

    def __init__(self, max_at_a_time: int | None = None, max_calls: int = MAX_CALLS_OF_PRINCIPAL) -> None:
        self._max_at_a_time, self._max_calls = max_at_a_time, max_calls
        self._calls: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def read(self, requests: Any, principal: str, context: Any) -> bytes:
        """Return the request, once it is its turn; abort the call where there are too many."""
        if self._calls[principal] >= self._max_calls:
            text = f"{self._max_calls} such calls of {principal} are under way, which is the limit. Try again."
            await abort_busy(context, text)
        self._calls[principal] += 1
        call_when_over(lambda: self._end(principal))
        if self._max_at_a_time is not None:
            turns = self._turns.setdefault(principal, asyncio.Semaphore(self._max_at_a_time))
            await turns.acquire()
            call_when_over(turns.release)
        return await read_request(requests, REQUEST_TIMEOUT_S, context)

    def _end(self, principal: str) -> None:
        self._calls[principal] -= 1
        if not self._calls[principal]:
            del self._calls[principal]
            self._turns.pop(principal, None)
