"""Shares an event loop among callers, in rotation.

No caller's work delays another's by more than a slice of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable

from sublet_protocol.domain.limits import SLICE_ITEMS, SLICE_S

PAUSE_S = 0.001
"""After a slice, or as long as it took too long: taking in a call that arrives needs several rounds of the loop."""


class CallerTurns:
    """One piece of work has the turn at a time. It then passes to the next caller, whatever that caller has waiting,
    and what else is ready on the loop comes between."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, caller: str) -> None:
        """Wait for the turn. A caller that is cancelled while it waits does not get it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        if not self._is_taken:
            self._pass_on()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given, and not taken any more
                self.release()
            raise

    def release(self, pause_s: float = 0.0) -> None:
        """Give the turn to the next caller that waits, on the loop's next round or after a pause."""
        asyncio.get_running_loop().call_later(pause_s, self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            caller = next(iter(self._waiting))
            turns = self._waiting.pop(caller)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.cancelled():
                self._is_taken = True
                turn.set_result(None)
                return
        self._is_taken = False


class SlicedWork:
    """The work of one caller, in slices; it has a turn between `async with`, unless it is cancelled while it waits."""

    def __init__(self, turns: CallerTurns, caller: str) -> None:
        self._turns, self._caller = turns, caller
        self._items, self._until, self._has_turn = 0, 0.0, False

    async def __aenter__(self) -> SlicedWork:
        await self._begin()
        return self

    async def __aexit__(self, *raised: object) -> None:
        overrun_s = time.perf_counter() - self._until
        if self._has_turn:
            self._end(max(overrun_s, PAUSE_S) if overrun_s >= 0 else 0.0)

    async def wait(self, result: Awaitable[object]) -> None:
        """Wait without the turn."""
        self._end()
        try:
            await result
        finally:
            await self._begin()

    async def spend(self, items: int) -> None:
        """Count `items` as done; after a slice, let others have their turn."""
        self._items += items
        overrun_s = time.perf_counter() - self._until
        if self._items >= SLICE_ITEMS or overrun_s >= 0:
            self._end(max(overrun_s, PAUSE_S))
            await self._begin()

    async def _begin(self) -> None:
        await self._turns.acquire(self._caller)
        self._items, self._until, self._has_turn = 0, time.perf_counter() + SLICE_S, True

    def _end(self, pause_s: float = 0.0) -> None:
        self._has_turn = False
        self._turns.release(pause_s)
