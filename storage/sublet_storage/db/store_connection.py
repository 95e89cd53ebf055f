"""One connection of the group store: one transaction at a time, with a known outcome.

A call that fails raises one of two errors: nothing was written (`DatabaseUnreachable`), or it is unknown
(`UnknownOutcome`: the connection was lost after the commit had been sent). A lost connection is replaced by the next
call. A value that is too large for the server is a `UsageError`. What psycopg calls our own mistake is raised as it is.
Both are rolled back.

Statements are pipelined: one waits only where a result is needed, so that a commit takes two round trips. Each wait
sends a Sync, not a Flush: only then does the server count the session as idle in a transaction, and end it by its
timeout if the client freezes there, with rows locked. Isolation is read committed, on which the statements rely: each
sees what was committed before it began, also while locks were waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome, format_error
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.reconnecting_connection import ReconnectingConnection, find_invalid_value

Connection = psycopg.Connection[Any]
T = TypeVar("T")


class TransactionRolledBack(DatabaseUnreachable):
    """An error of the server that rejected the transaction (such as a lock timeout) and wrote nothing. Smaller
    transactions may succeed."""


class _TurnEndingCursor(psycopg.Cursor[Any]):
    """A cursor of a pipeline: waiting for its result sends a Sync."""

    store_connection: GroupStoreConnection

    def fetchone(self) -> Any:
        self._arrive()
        return super().fetchone()

    def fetchall(self) -> list[Any]:
        self._arrive()
        return super().fetchall()

    def _arrive(self) -> None:
        if self.pgresult is None and self.store_connection.pipeline is not None:
            self.store_connection.pipeline.sync()


class GroupStoreConnection:
    """A connection for several threads, which wait for each other. Work that must not wait needs a connection of its
    own."""

    def __init__(self, connect: Callable[[], BoundedConnection]) -> None:
        self._reconnecting = ReconnectingConnection(connect)
        self._turn = threading.Lock()
        self.pipeline: psycopg.Pipeline | None = None
        self._cursors = type("_Cursor", (_TurnEndingCursor,), {"store_connection": self})

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run statements that write nothing, each on its own."""
        with self._turn:
            connection = self._get_connection()
            try:
                with self._open_pipeline(connection):
                    return work(connection)
            except psycopg.Error as error:
                self._fail(connection, error, committing=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` as one transaction; whatever it raises rolls it back."""
        with self._turn:
            connection = self._get_connection()
            committing = False
            try:
                with self._open_pipeline(connection):
                    connection.execute("begin isolation level read committed")
                    answer = work(connection)
                    committing = True
                    connection.execute("commit")
            except psycopg.Error as error:
                self._fail(connection, error, committing=committing)
            except BaseException:
                self._roll_back(connection)
                raise
            return answer

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        with self._turn:
            self._reconnecting.close()

    @contextmanager
    def _open_pipeline(self, connection: Connection) -> Iterator[None]:
        try:
            with connection.pipeline() as self.pipeline:
                yield
        finally:
            self.pipeline = None

    def _get_connection(self) -> Connection:
        connection = self._reconnecting.get_connection()
        connection.cursor_factory = self._cursors
        return connection

    def _fail(self, connection: Connection, error: psycopg.Error, *, committing: bool) -> NoReturn:
        """Translate the error, and make the next call open another connection.

        Whether the server is reachable is tested: its last message may have arrived before it closed the connection. A
        connection that survived is closed too, as another may lead to a server that takes the request; but not for an
        invalid value, which all refuse.
        """
        text = format_error(error)
        alive = self._roll_back(connection)
        if alive and (invalid := find_invalid_value(error)) is not None:
            raise invalid from error
        self._reconnecting.close()
        if alive:
            if not isinstance(error, psycopg.OperationalError):
                raise error
            raise TransactionRolledBack(
                f"Postgres refused a statement on groups, nothing was written: {text}"
            ) from error
        if committing:
            raise UnknownOutcome(
                f"the connection to Postgres was lost during a commit on groups: {text}. It may or may not have "
                "been"
                " written: read the rows again before deciding anything."
            ) from error
        raise DatabaseUnreachable(
            f"the connection to Postgres was lost before the commit, nothing was written: {text}. The next call"
            " connects again."
        ) from error

    def _roll_back(self, connection: Connection) -> bool:
        """End the transaction; return False if the connection had to be closed for that.

        By psycopg's own method, within a transaction: after a rejection within a pipeline psycopg may treat statements
        as prepared that the server does not have, and forgets all of them only then.
        """
        try:
            if connection.info.transaction_status is TransactionStatus.IDLE:
                connection.execute("begin")
            connection.rollback()
        except psycopg.Error:
            self._reconnecting.close()
            return False
        return True


Guard = Callable[[psycopg.Connection[Any]], None]
"""Called first in a maintenance transaction: locks the leadership row, raises `StaleTerm` if the term is over."""
