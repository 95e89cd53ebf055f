"""Bounds the memory of the pages that readers have not taken yet. All of it is used on one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class PageMemory:
    """A node's memory for pages. A principal, or a connection without one, has at most as much as is left free, alone
    half; and one page where there is room. Who finds none waits, in rotation among principals."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Event]] = {}
        self.bytes_held = 0

    @property
    def is_short(self) -> bool:
        """Return whether somebody waits."""
        return bool(self._waiting)

    def has_room(self, size: int, principal: str) -> bool:
        """Return whether that many bytes more may be held."""
        free, own = self._max_bytes - self.bytes_held - size, self._held[principal]
        return free >= 0 and (not own or own + size <= free)

    def add(self, size: int, principal: str) -> None:
        """Hold so many bytes more; fewer where that is negative."""
        self.bytes_held += size
        self._held[principal] += size
        if not self._held[principal]:
            del self._held[principal]
        if size < 0:
            for waiting in self._waiting.values():
                waiting[0].set()

    async def wait(self, size: int, principal: str) -> None:
        """Return when there is room, after those of this principal who came before."""
        waiting, wakeup = self._waiting.setdefault(principal, deque()), asyncio.Event()
        waiting.append(wakeup)
        try:
            while waiting[0] is not wakeup or not self.has_room(size, principal):
                await wakeup.wait()
                wakeup.clear()
        finally:
            waiting.remove(wakeup)
            if waiting:
                waiting[0].set()
            else:
                del self._waiting[principal]


class ReaderMemory:
    """What one call holds of it."""

    def __init__(self, memory: PageMemory, principal: str) -> None:
        self._memory, self._principal, self._size = memory, principal, 0

    @property
    def is_short(self) -> bool:
        """Return whether somebody waits for memory."""
        return self._memory.is_short

    async def reserve(self, size: int) -> None:
        """Hold that many bytes, once there is room."""
        await self._memory.wait(size, self._principal)
        self.resize(size)

    def resize(self, size: int) -> None:
        """Hold that many bytes, whether or not there is room."""
        size, self._size = size - self._size, size
        self._memory.add(size, self._principal)
