"""Threads that run a feed's database work off the node's event loop.

Each has a connection of its own, with no shared pool: a client must be rejected at once where the database is
unavailable, and a node that stops cancels the work in progress.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

import psycopg

from sublet_protocol.domain.errors import DatabaseUnreachable, SubletError, format_error
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection

STATEMENT_TIMEOUT_S = 30.0
LOCK_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 45.0
"""A server that sends no answer for this long is considered lost."""

_T = TypeVar("_T")
Work = Callable[[BoundedConnection], _T]


class DatabaseThreads:
    """Threads with one connection each, opened on demand and discarded after an error. They take the work of principals
    in rotation, and one has all threads but one at most, so that others do not wait for its long pieces of work."""

    def __init__(self, url: str, threads: int, name: str) -> None:
        self._url, self._name = url, name
        self._executor = ThreadPoolExecutor(threads, f"sublet {name}", self._begin_thread)
        self._of_thread = threading.local()
        self._connections: list[ReconnectingConnection] = []
        self._waiting: OrderedDict[str | None, deque[tuple[Future[Any], Work[Any]]]] = OrderedDict()
        self._max_of_principal = max(threads - 1, 1)
        self._running: Counter[str | None] = Counter()
        self._passed_over = 0
        self._lock = threading.Lock()

    def submit(self, work: Work[_T], principal: str | None = None) -> Future[_T]:
        """Run `work` when a thread is free. Raise what the work raises, `DatabaseUnreachable` for a lost database."""
        future: Future[_T] = Future()
        with self._lock:
            self._waiting.setdefault(principal, deque()).append((future, work))
        self._executor.submit(self._run_next)
        return future

    async def run(self, work: Work[_T], principal: str | None = None) -> _T:
        """Run `work` and wait for it; the work continues when the waiting is cancelled."""
        return await asyncio.wrap_future(self.submit(work, principal))

    def close(self) -> None:
        """Start no more work, stop waiting for the database, and close the connections."""
        for connection in tuple(self._connections):
            connection.stop_waiting()
        with self._lock:
            for future, _ in chain.from_iterable(self._waiting.values()):
                future.cancel()
        self._executor.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def _begin_thread(self) -> None:
        self._of_thread.connection = ReconnectingConnection(self._connect)
        self._connections.append(self._of_thread.connection)

    def _connect(self) -> BoundedConnection:
        return connect(
            self._url,
            application_name=f"sublet {self._name}",
            statement_timeout_s=STATEMENT_TIMEOUT_S,
            lock_timeout_s=LOCK_TIMEOUT_S,
            transaction_timeout_s=STATEMENT_TIMEOUT_S,
            receive_timeout_s=RECEIVE_TIMEOUT_S,
        )

    def _run_next(self) -> None:
        with self._lock:
            ready = [each for each in self._waiting if each is None or self._running[each] < self._max_of_principal]
            if not ready:  # the next thread that ends its work submits this again
                self._passed_over += 1
                return
            principal = ready[0]
            waiting = self._waiting.pop(principal)
            future, work = waiting.popleft()
            if waiting:
                self._waiting[principal] = waiting
            self._running[principal] += 1
        if future.set_running_or_notify_cancel():
            self._complete(future, work)
        del future, work
        with self._lock:
            self._running[principal] -= 1
            if not self._running[principal]:
                del self._running[principal]
            passed_over, self._passed_over = self._passed_over, 0
        for _ in range(passed_over):
            self._executor.submit(self._run_next)

    def _complete(self, future: Future[_T], work: Work[_T]) -> None:
        try:
            future.set_result(self._call(work))
        except BaseException as error:  # noqa: BLE001 - it is for who waits
            future.set_exception(error)
            del future, work  # the error has this frame

    def _call(self, work: Work[_T]) -> _T:
        try:
            with self._of_thread.connection as connection:
                return work(connection)
        except psycopg.OperationalError as error:
            raise DatabaseUnreachable(
                f"the database did not answer as it should: {format_error(error)}. Try again."
            ) from error
        except psycopg.Error as error:
            raise SubletError(f"the database refuses: {format_error(error)}") from error
