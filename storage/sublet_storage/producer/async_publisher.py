"""The publisher for asyncio: the same queues and thread, with awaits instead of blocking calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_protocol.domain.errors import PublisherClosed
from sublet_storage.producer.batches.input_conversion import Columns, Headers
from sublet_storage.producer.delivery import BatchDelivery, Delivery, wake_loop
from sublet_storage.producer.publisher import Publisher, SingleEpochPublisher
from sublet_storage.util.fork_guard import OwnerProcess


class AsyncPublisher:
    """`Publisher` for asyncio, with the same settings: `async with AsyncPublisher(url) as publisher`.

    `await publisher.publish(...)` returns a Delivery once the message is queued; awaiting that gives the position.
    Without `async with`, the first call connects, also where several are the first, and `close` ends it. If the wait
    for the connection is cancelled, nothing is left of it, and the next call connects again.
    """

    def __init__(self, url: str | None = None, space: str | None = None, **settings: Any) -> None:
        self._make: Callable[[], Publisher] = partial(Publisher, url, space, **settings)
        self._opening: _Opening | None = None
        self._closed = False
        self._owner = OwnerProcess()

    async def open(self) -> AsyncPublisher:
        """Connect, as `async with` does. Raise what `Publisher` raises, and `PublisherClosed` after `close`."""
        await self._get_publisher()
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
        return await self._publish(topic, value, key, headers, timestamp)

    async def publish_batch(self, data: Columns) -> BatchDelivery:
        """Queue a batch, in a thread of its own where it has to wait."""
        publisher = await self._get_publisher()
        return await asyncio.to_thread(publisher.publish_batch, data)

    async def in_epoch(self, epoch: int | Sequence[int]) -> AsyncSingleEpochPublisher:
        """Publish in an epoch: `await (await publisher.in_epoch(7)).publish(...)`. See `Publisher.in_epoch`."""
        publisher = await self._get_publisher()
        return AsyncSingleEpochPublisher(self, await asyncio.to_thread(publisher.in_epoch, epoch))

    async def advance(self, *epochs: int | Sequence[int], wait: bool = True) -> None:
        """See `Publisher.advance`. It goes on when the waiting is cancelled."""
        publisher = await self._get_publisher()
        await asyncio.to_thread(publisher.advance, *epochs, wait=wait)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all published so far is durable. Raise the first delivery error since the last flush."""
        if self._opening is not None and not self._opening.has_failed:
            publisher = await self._get_publisher()
            await asyncio.to_thread(publisher.flush, timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is queued, then end, for good. Raise the first delivery error.

        It goes on when the waiting is cancelled.
        """
        await self._end(lambda publisher: publisher.close(timeout_s))

    async def __aenter__(self) -> AsyncPublisher:
        try:
            return await self.open()
        except asyncio.CancelledError:
            self._closed = True
            if self._opening is not None:
                self._opening.undo()  # also if it was there the moment before
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end(lambda publisher: publisher.__exit__(kind, error, traceback))

    async def _publish(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: datetime | int | None,
        epoch: Epoch | None = None,
    ) -> Delivery:
        publisher = await self._get_publisher()
        while (delivery := publisher._offer(topic, value, key, headers, timestamp, epoch, wait=False)) is None:
            await self._wait_for_room(publisher)
        return delivery

    async def _get_publisher(self) -> Publisher:
        """Return the one publisher of all callers."""
        self._owner.check("this publisher")
        while True:
            if self._opening is None or self._opening.has_failed:
                if self._closed:
                    raise PublisherClosed("this publisher is closed. Make a new AsyncPublisher.")
                self._opening = _Opening(self._make)
            with contextlib.suppress(_OpeningCancelled):
                return await self._opening.wait()

    async def _end(self, close: Callable[[Publisher], None]) -> None:
        self._closed = True
        if self._opening is not None and not self._owner.is_forked:
            await asyncio.to_thread(self._opening.end, close)

    @staticmethod
    async def _wait_for_room(publisher: Publisher) -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Event()

        publisher._buffer.add_room_callback(partial(wake_loop, loop, room.set))
        await room.wait()


class AsyncSingleEpochPublisher:
    """An asynchronous publisher, in one epoch."""

    def __init__(self, publisher: AsyncPublisher, at: SingleEpochPublisher) -> None:
        self._publisher, self._at = publisher, at

    async def publish(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
    ) -> Delivery:
        """Publish as `AsyncPublisher.publish` does, in this epoch."""
        self._at.check()
        return await self._publisher._publish(topic, value, key, headers, timestamp, self._at.epoch)

    async def publish_batch(self, data: Columns) -> BatchDelivery:
        """Publish as `AsyncPublisher.publish_batch` does; all messages are in this epoch."""
        return await asyncio.to_thread(self._at.publish_batch, data)


class _OpeningCancelled(Exception):
    """An error for an opening of which all waiters were cancelled."""


class _Opening:
    """An attempt to connect, in a thread of its own, for all waiters; without a waiter left it is undone."""

    def __init__(self, make: Callable[[], Publisher]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._publisher: Future[Publisher] = Future()
        self._waiting = 0
        self._is_abandoned = False
        threading.Thread(target=self._run, name="sublet publisher opening", daemon=True).start()

    @property
    def has_failed(self) -> bool:
        """Return whether the attempt has failed."""
        return self._publisher.done() and self._publisher.exception() is not None

    async def wait(self) -> Publisher:
        """Wait for the publisher. Raise the error of the attempt."""
        if self._publisher.done():
            return self._publisher.result()
        done = self._add_waiter()
        try:
            await done.wait()
        except asyncio.CancelledError:
            if self._waiting == 1:
                self._cancel_if_pending()
            raise
        finally:
            self._waiting -= 1
        return self._publisher.result()

    def undo(self) -> None:
        """Close the publisher, or see to it that it is closed as soon as it is there; waits for neither."""
        self._cancel_if_pending()
        close = partial(self.end, lambda publisher: publisher.close())
        threading.Thread(target=close, name="sublet publisher closing", daemon=True).start()

    def end(self, close: Callable[[Publisher], None]) -> None:
        """Wait for the publisher, if there will be one, and close it; blocks."""
        if self._publisher.exception() is None:
            close(self._publisher.result())

    def _add_waiter(self) -> asyncio.Event:
        """Add a waiter; return the event that is set when the attempt is over."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        self._waiting += 1
        with self._lock:
            self._is_abandoned = False
        self._publisher.add_done_callback(lambda _: wake_loop(loop, done.set))
        return done

    def _cancel_if_pending(self) -> None:
        with self._lock:
            self._is_abandoned = not self._publisher.done()

    def _run(self) -> None:
        try:
            publisher = self._make()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._publisher.set_exception(error)
            return
        with self._lock:
            if not self._is_abandoned:
                self._publisher.set_result(publisher)
                return
            self._publisher.set_exception(_OpeningCancelled())
        publisher.close()
