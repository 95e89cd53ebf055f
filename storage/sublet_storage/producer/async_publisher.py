"""The publisher for asyncio: the same queues and thread, with awaits instead of blocking calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_protocol.domain.errors import PublisherClosed
from sublet_storage.producer.batches.input_conversion import Columns, Headers
from sublet_storage.producer.delivery import BatchDelivery, Delivery, wake_loop
from sublet_storage.producer.publisher import Publisher, SingleEpochPublisher
from sublet_storage.util.fork_guard import OwnerProcess, describe_origin
from sublet_storage.util.timeouts import check_timeout

_T = TypeVar("_T")


class AsyncPublisher:
    """`Publisher` for asyncio, with the same settings: `async with AsyncPublisher(url) as publisher`.

    `await publisher.publish(...)` returns a Delivery once the message is queued; awaiting that gives the position.
    Without `async with`, the first call connects, also where several are the first, and `close` ends it. If the wait
    for the connection is cancelled, nothing is left of it, and the next call connects again.
    """

    def __init__(self, url: str | None = None, space: str | None = None, **settings: Any) -> None:
        self._make: Callable[[], Publisher] = partial(Publisher, url, space, **settings)
        self._origin = describe_origin("an AsyncPublisher")
        self._opening: _Opening | None = None
        self._lock = threading.Lock()  # callers may be on several loops
        self._batch_threads = ThreadPoolExecutor(thread_name_prefix="sublet batches")
        self._closed = False
        self._owner = OwnerProcess()

    async def open(self) -> AsyncPublisher:
        """Connect, as `async with` does. Raise what `Publisher` raises, and `PublisherClosed` after `close`."""
        self._check_open()
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
        """Queue a batch, in a thread of the publisher's where it has to wait."""
        publisher = await self._get_publisher()
        return await self._queue_batch(partial(publisher.publish_batch, data))

    async def in_epoch(self, epoch: int | Sequence[int]) -> AsyncSingleEpochPublisher:
        """Publish in an epoch: `await (await publisher.in_epoch(7)).publish(...)`. See `Publisher.in_epoch`."""
        publisher = await self._get_publisher()
        return AsyncSingleEpochPublisher(self, await _in_thread(partial(publisher.in_epoch, epoch)))

    async def advance(self, *epochs: int | Sequence[int], wait: bool = True) -> None:
        """See `Publisher.advance`. It goes on when the waiting is cancelled."""
        publisher = await self._get_publisher()
        await _in_thread(partial(publisher.advance, *epochs, wait=wait))

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all published so far is durable. Raise the first delivery error since the last flush."""
        if self._opening is not None and not self._opening.has_failed:
            publisher = await self._get_publisher()
            await _in_thread(partial(publisher.flush, timeout_s))

    async def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is queued, then end, for good. Raise the first delivery error.

        It goes on when the waiting is cancelled.
        """
        timeout_s = check_timeout(timeout_s)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

        def close(publisher: Publisher) -> None:
            publisher.close(None if timeout_s is None else max(deadline - time.monotonic(), 0.0))

        await self._end(close, timeout_s)

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
            with self._lock:
                opening = self._opening
                if opening is None or not opening.has_succeeded:
                    self._check_open()
                if opening is None or opening.has_failed:
                    opening = self._opening = _Opening(self._make, self._origin)
            with contextlib.suppress(_OpeningCancelled):
                return await opening.wait()

    async def _queue_batch(self, queue: Callable[[], BatchDelivery]) -> BatchDelivery:
        self._owner.check("this publisher")
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._batch_threads, queue)

    def _check_open(self) -> None:
        if self._closed:
            raise PublisherClosed("this publisher is closed. Make a new AsyncPublisher.")

    async def _end(self, close: Callable[[Publisher], None], timeout_s: float | None = None) -> None:
        with self._lock:
            self._closed = True
        if self._opening is not None and not self._owner.is_forked:
            await _in_thread(partial(self._opening.end, close, timeout_s))
            self._batch_threads.shutdown(wait=False)

    @staticmethod
    async def _wait_for_room(publisher: Publisher) -> None:
        room = asyncio.Event()
        callback = partial(wake_loop, asyncio.get_running_loop(), room.set)
        publisher._buffer.add_room_callback(callback)
        try:
            await room.wait()
        finally:
            publisher._buffer.remove_room_callback(callback)


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
        return await self._publisher._queue_batch(partial(self._at.publish_batch, data))


class _OpeningCancelled(Exception):
    """An error for an opening of which all waiters were cancelled."""


class _Opening:
    """An attempt to connect, in a thread of its own, for all waiters; without a waiter left it is undone."""

    def __init__(self, make: Callable[[], Publisher], origin: str) -> None:
        self._make, self._origin = make, origin
        self._lock = threading.Lock()
        self._publisher: Future[Publisher] = Future()
        self._waiting = 0
        self._is_abandoned = False
        threading.Thread(target=self._run, name="sublet publisher opening", daemon=True).start()

    @property
    def has_failed(self) -> bool:
        """Return whether the attempt has failed."""
        return self._publisher.done() and self._publisher.exception() is not None

    @property
    def has_succeeded(self) -> bool:
        """Return whether the publisher is there."""
        return self._publisher.done() and not self.has_failed

    async def wait(self) -> Publisher:
        """Wait for the publisher. Raise the error of the attempt."""
        if self._publisher.done():
            return self._publisher.result()
        done = self._add_waiter()
        is_cancelled = True
        try:
            await done.wait()
            is_cancelled = False
        finally:
            with self._lock:
                self._waiting -= 1
                if is_cancelled and not self._waiting:
                    self._is_abandoned = not self._publisher.done()
        return self._publisher.result()

    def undo(self) -> None:
        """Close the publisher, or see to it that it is closed as soon as it is there; waits for neither."""
        self._cancel_if_pending()
        close = partial(self.end, lambda publisher: publisher.close())
        threading.Thread(target=close, name="sublet publisher closing", daemon=True).start()

    def end(self, close: Callable[[Publisher], None], timeout_s: float | None = None) -> None:
        """Wait for the publisher, if there will be one, and close it; blocks. After `timeout_s` it is undone."""
        with contextlib.suppress(TimeoutError):
            self._publisher.exception(timeout_s)
        self._cancel_if_pending()
        if not self._is_abandoned and self._publisher.exception() is None:
            close(self._publisher.result())

    def _add_waiter(self) -> asyncio.Event:
        """Add a waiter; return the event that is set when the attempt is over."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        with self._lock:
            self._waiting += 1
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
        publisher._drop_monitor.origin = self._origin  # its own is a line of this thread
        with self._lock:
            if not self._is_abandoned:
                self._publisher.set_result(publisher)
                return
            self._publisher.set_exception(_OpeningCancelled())
        publisher.close()


async def _in_thread(call: Callable[[], _T]) -> _T:
    """Return what a call does that may wait for long, in a thread of its own: those of the loop's executor are few, and
    a program's other work, and the call that ends the waiting, would have to wait for one. It goes on when the waiting
    is cancelled, and the process does not end before it has."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="sublet publishing call", daemon=False).start()
    return await asyncio.wrap_future(future)
