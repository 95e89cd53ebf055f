"""The publisher for asyncio: the same queues and the same thread; what would block is awaited."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import TracebackType
from typing import Any

from storage.publish.columns import Columns, Headers
from storage.publish.delivery import BatchDelivery, Delivery
from storage.publish.publisher import Publisher


class AsyncPublisher:
    """`Publisher` for asyncio, with the same settings: `async with AsyncPublisher(url) as publisher`.

    `await publisher.publish(...)` returns a Delivery once the message is queued; awaiting that gives the position.
    """

    def __init__(self, url: str | None = None, space: str | None = None, **settings: Any) -> None:
        self._arguments = (url, space)
        self._settings = settings
        self._publisher: Publisher | None = None

    async def open(self) -> AsyncPublisher:
        """Connect; `async with` does it. Raises what `Publisher` raises."""
        if self._publisher is None:
            self._publisher = await asyncio.to_thread(Publisher, *self._arguments, **self._settings)
        return self

    async def publish(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
    ) -> Delivery:
        """Queue one message; waits only while the buffer is full."""
        publisher = (await self.open())._publisher
        assert publisher is not None
        while (delivery := publisher._offer(topic, value, key, headers, timestamp, wait=False)) is None:
            await self._room(publisher)
        return delivery

    async def publish_batch(self, data: Columns) -> BatchDelivery:
        """Queue a batch, in a thread of its own where it has to wait."""
        publisher = (await self.open())._publisher
        assert publisher is not None
        return await asyncio.to_thread(publisher.publish_batch, data)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all published so far is durable. Raises the first delivery error since the last flush."""
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.flush, timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is queued, then end. Raises the first delivery error."""
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close, timeout_s)

    async def __aenter__(self) -> AsyncPublisher:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.__exit__, kind, error, traceback)

    @staticmethod
    async def _room(publisher: Publisher) -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(room.set)

        publisher._buffer.when_room(wake)
        await room.wait()
