"""Threads that run a feed's database work off the node's event loop.

Each has a connection of its own, with no shared pool: a client must be rejected at once where the database is
unavailable, and a node that stops cancels the work in progress.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
    """Threads with one connection each, opened on demand and discarded after an error."""

    def __init__(self, url: str, threads: int, name: str) -> None:
        self._url, self._name = url, name
        self._executor = ThreadPoolExecutor(threads, f"sublet {name}", self._begin_thread)
        self._of_thread = threading.local()
        self._connections: list[ReconnectingConnection] = []

    def submit(self, work: Work[_T]) -> Future[_T]:
        """Run `work` when a thread is free. Raise what the work raises, `DatabaseUnreachable` for a lost database."""
        return self._executor.submit(self._call, work)

    async def run(self, work: Work[_T]) -> _T:
        """Run `work` and wait for it; the work continues when the waiting is cancelled."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Start no more work, stop waiting for the database, and close the connections."""
        for connection in tuple(self._connections):
            connection.stop_waiting()
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
