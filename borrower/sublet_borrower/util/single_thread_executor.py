"""A thread for calls that would block an event loop, awaited by coroutines of any loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

NOTICE_S = 1.0
"""The longest sleep of an event loop while a coroutine waits: a signal that comes when the loop has just checked for
one and goes to sleep, or that another thread received, does not wake it."""

_T = TypeVar("_T")
_Piece: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class SingleThreadExecutor:
    """A thread that runs one call after the other, in the order of `submit`.

    The thread begins with the first call and ends with `stop`, or when the executor is garbage. It is a daemon: a
    process that ends, or that is interrupted a second time, does not wait for it.
    """

    def __init__(self, name: str) -> None:
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._pieces,), name=name, daemon=True)
        self._end = weakref.finalize(self, self._pieces.put, None)

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        return threading.get_ident() == self._thread.ident

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Queue a call; from any thread but for the first. After `stop` it is cancelled."""
        future: Future[_T] = Future()
        if not self._end.alive:
            future.cancel()
            return future
        self._pieces.put((future, work))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def stop(self) -> None:
        """End after what is queued, without waiting for it."""
        self._end()


async def wait_until_done(work: Future[Any], timeout_s: float | None = None) -> bool:
    """Wait for the work for at most `timeout_s` (None: no limit), and return whether it is done. The work goes on when
    the wait ends early.
    """
    if work.done():
        return True
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def end_wait(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
            loop.call_soon_threadsafe(waiter.cancel)

    work.add_done_callback(end_wait)
    deadline = math.inf if timeout_s is None else loop.time() + timeout_s
    while not waiter.done() and (remaining_s := deadline - loop.time()) > 0:
        await asyncio.wait({waiter}, timeout=min(remaining_s, NOTICE_S))
    return work.done()


def _work(pieces: queue.SimpleQueue[_Piece | None]) -> None:
    """Run the thread, without keeping finished work or the executor alive."""
    while (piece := pieces.get()) is not None:
        _run(*piece)
        del piece


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 raised where it is waited for
        future.set_exception(error)
    else:
        future.set_result(result)
