"""A few threads with a connection each, for a feed's queries beside the node's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg

from sublet_protocol.domain.errors import DatabaseUnreachable, SubletError
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect

STATEMENT_TIMEOUT_S = 30.0
LOCK_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 45.0
"""A server that gives no answer for so long is taken for lost."""

_T = TypeVar("_T")
Work = Callable[[psycopg.Connection[Any]], _T]


class DatabaseThreadPool:
    """Connections are opened when they are needed, and thrown away when something went wrong on them."""

    def __init__(self, url: str, threads: int, name: str) -> None:
        self._url, self._name = url, name
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"sublet {name}")
        self._mine = threading.local()
        self._open: set[BoundedConnection] = set()

    def submit(self, work: Work[_T]) -> Future[_T]:
        """Do it when a thread is free. Raises what the work raises, `DatabaseUnreachable` for a lost database."""
        return self._executor.submit(self._call, work)

    async def run(self, work: Work[_T]) -> _T:
        """Do it, and wait for it; it goes on when the waiting is cancelled."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Begin nothing more, wait no longer for the database, and hang up."""
        for conn in tuple(self._open):
            conn.receive_timeout_s = 0.0
        self._executor.shutdown(cancel_futures=True)
        for conn in self._open:
            conn.close()

    def _call(self, work: Work[_T]) -> _T:
        try:
            return work(self._connection())
        except psycopg.OperationalError as error:
            self._discard()
            raise DatabaseUnreachable(
                f"the database did not answer as it should: {_said(error)}. Try again."
            ) from error
        except psycopg.Error as error:
            self._discard()
            raise SubletError(f"the database refuses: {_said(error)}") from error

    def _connection(self) -> psycopg.Connection[Any]:
        conn: BoundedConnection | None = getattr(self._mine, "conn", None)
        if conn is None:
            opened = connect(
                self._url,
                application_name=f"sublet {self._name}",
                statement_timeout_s=STATEMENT_TIMEOUT_S,
                lock_timeout_s=LOCK_TIMEOUT_S,
                transaction_timeout_s=STATEMENT_TIMEOUT_S,
                silence_s=RECEIVE_TIMEOUT_S,
            )
            assert isinstance(opened, BoundedConnection)
            conn = self._mine.conn = opened
            self._open.add(conn)
        return conn

    def _discard(self) -> None:
        conn = self._mine.__dict__.pop("conn", None)
        if conn is not None:
            self._open.discard(conn)
            conn.close()


def _said(error: psycopg.Error) -> str:
    return " ".join(str(error).split()).rstrip(".")
