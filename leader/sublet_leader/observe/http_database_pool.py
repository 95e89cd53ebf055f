"""The HTTP port's own connections to the database: few, opened on demand, with short timeouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import psycopg_pool

from sublet_leader.feed.admission import AdmissionLimiter
from sublet_leader.observe.health import Health, HealthState
from sublet_protocol.domain.errors import SubletError, Unavailable
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect

MAX_CONNECTIONS = 3
MAX_WAITING = 16
"""Fewer than the HTTP port has threads, so that some are left for requests that need no database."""
STATEMENT_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 6.0
ACQUIRE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 0.5
RETRY_AFTER_MS = 1000

Connection = psycopg.Connection[Any]

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # the caller's error has the reason


class _ReadingConnection(BoundedConnection):
    """A connection made by the pool, with the options of all other connections."""

    @classmethod
    def connect(  # type: ignore[override]
        cls, conninfo: str = "", *, note: Callable[[SubletError | None], None], **_: Any
    ) -> BoundedConnection:
        """Connect; `note` is called with the error, None on success."""
        try:
            connection = connect(
                conninfo,
                application_name="sublet http",
                statement_timeout_s=STATEMENT_TIMEOUT_S,
                receive_timeout_s=RECEIVE_TIMEOUT_S,
            )
        except SubletError as error:
            note(error)
            raise
        note(None)
        return connection


class HttpDatabasePool:
    """Pools the threads' connections, one for each at a time. `get_health` is called first and checks the database. One
    principal has a part of what there is, as others do, and metrics."""

    def __init__(self, url: str, get_health: Callable[[], Health]) -> None:
        self._get_health = get_health
        self._hindrance: SubletError | None = None
        self._admission = AdmissionLimiter("queries", MAX_CONNECTIONS + MAX_WAITING, 0, RETRY_AFTER_MS)
        self._pool = psycopg_pool.ConnectionPool(
            url,
            connection_class=_ReadingConnection,
            kwargs={"note": self._set_hindrance},
            min_size=0,
            max_size=MAX_CONNECTIONS,
            timeout=ACQUIRE_TIMEOUT_S,
            reconnect_timeout=ACQUIRE_TIMEOUT_S,
            check=psycopg_pool.ConnectionPool.check_connection,
            open=True,
        )

    @contextmanager
    def connection(self, principal: str | None = None) -> Iterator[Connection]:
        """Provide a connection. Raise `Unavailable` if the database is known to be unreachable, or all connections, or
        those for the principal, are in use."""
        check = self._get_health().check_named("database")
        if check.state is HealthState.UNREACHABLE:
            raise Unavailable(f"the database is unreachable: {check.detail}")
        with self._admission.admit(principal=principal), self._take_connection() as connection:
            yield connection

    @contextmanager
    def _take_connection(self) -> Iterator[Connection]:
        try:
            connection = self._pool.getconn()
        except psycopg_pool.PoolTimeout:
            busy = f"{MAX_CONNECTIONS} others have been asking the database for {ACQUIRE_TIMEOUT_S:g} s. Try again."
            raise Unavailable(busy if self._hindrance is None else str(self._hindrance)) from None
        try:
            yield connection
        finally:
            self._pool.putconn(connection)

    def close(self) -> None:
        """Close the idle connections, and the others when they are returned."""
        self._pool.close(CLOSE_TIMEOUT_S)

    def _set_hindrance(self, hindrance: SubletError | None) -> None:
        self._hindrance = hindrance
