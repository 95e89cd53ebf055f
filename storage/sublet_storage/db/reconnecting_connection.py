"""A long-lived connection, opened when it is first needed, and again after it was lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

import psycopg
from psycopg.pq import TransactionStatus

from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    SubletError,
    TimelineChanged,
    UnknownOutcome,
    UsageError,
)
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.util.retry import Backoff

IDLE_S = 1.0
"""A connection that has been idle for longer may be dead unnoticed."""
ANSWER_TIMEOUT_S = 5.0

_LOST = (psycopg.OperationalError, DatabaseUnreachable, UnknownOutcome)


def find_invalid_value(error: BaseException | None) -> UsageError | None:
    """Return the error for who sent the request, if the server refused a value in it that is too large for a row or a
    statement; else None.

    To psycopg it is an `OperationalError`, like a lost connection. So are others of its class (SQLSTATE 54) that are
    not about the request, and name no table: a full queue of notifications, no transaction ids left.
    """
    if isinstance(error, psycopg.errors.StatementTooComplex) or (
        isinstance(error, psycopg.errors.ProgramLimitExceeded) and error.diag.table_name is not None
    ):
        return UsageError(
            "a value in this request is too large for Postgres, and is not stored. Shorten it: docs/limits.md lists "
            "how long each may be."
        )
    return None


class ReconnectingConnection:
    """Not thread-safe. `connect` opens it and configures it.

    A `with` block uses it exclusively. An exception out of the block closes it, except for a `SubletError` about the
    request, and for an error that `find_invalid_value` turns into one; `TimelineChanged` may be about either. A caller
    that decides itself when to close it calls `get_connection`.

    With a `log` the first failure in a row is a warning there, and the end of the row is logged too, and it cannot be
    opened again until a pause is over, which grows from one failure to the next. Without, the caller does both.
    """

    def __init__(self, connect: Callable[[], BoundedConnection], log: logging.Logger | None = None) -> None:
        self._connect, self._log = connect, log
        self._backoff = Backoff()
        self._away = self._in_use = self._may_run = False
        self._asked_at = float("-inf")
        self.current: BoundedConnection | None = None

    def __enter__(self) -> BoundedConnection:
        if self._in_use:
            self.close()  # a signal's exception broke off the block before, and the end of it too
        connection = self.get_connection()
        self._in_use = True
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        invalid = find_invalid_value(error)
        if isinstance(error, TimelineChanged):
            self.close()  # it may be this that leads to a server of the past, which is still there
        elif error is None or invalid is not None or (isinstance(error, SubletError) and not isinstance(error, _LOST)):
            if self._away:
                self._on_return()
        elif isinstance(error, _LOST):
            self._on_failure(error)
        else:
            self.close()
        self._in_use = False
        if invalid is not None:
            raise invalid from error

    def get_connection(self) -> BoundedConnection:
        """Return the connection, with no transaction open on it, nor a statement running, unless `expect_answer` was
        called. Raise what `connect` does, and `DatabaseUnreachable` within the pause after a failure."""
        current, may_run, self._may_run = self.current, self._may_run, False
        if not (may_run or current is None or current.closed or _is_idle(current)):
            self.close()  # an exception out of a signal handler left a statement running there
        if self.current is None or self.current.closed:
            if self._log is not None and (left_s := self._backoff.wait_s) > 0:
                raise DatabaseUnreachable(f"the database was away a moment ago, and is tried again in {left_s:.1f} s.")
            try:
                self.current = self._connect()
            except _LOST as error:
                self._on_failure(error)
                raise
        return self.current

    def get_answering_connection(self) -> BoundedConnection:
        """Return the connection, as `get_connection` does, for work that cannot be retried by itself: after an idle
        time the server is first sent a query, and the connection is opened again if no answer comes."""
        idle, connection = self.current, self.get_connection()
        now, previous_at = time.monotonic(), self._asked_at
        self._asked_at = now
        if connection is not idle or now - previous_at < IDLE_S:
            return connection
        limit_s, connection.receive_timeout_s = connection.receive_timeout_s, ANSWER_TIMEOUT_S
        try:
            connection.execute("select")
        except _LOST:
            self.close()
            return self.get_connection()
        finally:
            connection.receive_timeout_s = limit_s
        return connection

    def expect_answer(self) -> None:
        """Let who gets the connection next have it with the statement that runs on it."""
        self._may_run = True

    def close(self) -> None:
        """Close it; it is opened again when it is needed."""
        connection, self.current = self.current, None
        if connection is not None:
            connection.close()

    def stop_waiting(self) -> None:
        """End a call that waits for the server on another thread: to it the connection is lost."""
        if (connection := self.current) is not None:
            connection.receive_timeout_s = 0.0

    def _on_failure(self, error: BaseException) -> None:
        self._backoff.start_pause()
        if not self._away and self._log is not None:
            self._log.warning("database unavailable, retrying: %s", error)
        self._away = True
        self.close()

    def _on_return(self) -> None:
        self._away = False
        self._backoff.reset()
        if self._log is not None:
            self._log.info("database available again")


def _is_idle(connection: BoundedConnection) -> bool:
    return connection.info.transaction_status is TransactionStatus.IDLE
