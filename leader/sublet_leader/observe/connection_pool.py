"""The HTTP port's own connections to the database: few, opened on demand, with short timeouts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from sublet_leader.observe.health import Health, HealthState
from sublet_protocol.domain.errors import Unavailable
from sublet_storage.db.connect import connect

MAX_CONNECTIONS = 3
STATEMENT_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 6.0
ACQUIRE_TIMEOUT_S = 5.0

Connection = psycopg.Connection[Any]


class ConnectionPool:
    """Gives connections to threads, one at a time to each. `look` checks first whether the database is there at all."""

    def __init__(self, url: str, look: Callable[[], Health]) -> None:
        self._url, self._look = url, look
        self._places: queue.LifoQueue[Connection | None] = queue.LifoQueue()
        for _ in range(MAX_CONNECTIONS):
            self._places.put(None)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Raises `Unavailable` where the database is known to be away, or all connections are in use for long."""
        check = self._look().check_named("database")
        if check.state is HealthState.UNREACHABLE:
            raise Unavailable(f"the database is unreachable: {check.detail}")
        try:
            place = self._places.get(timeout=ACQUIRE_TIMEOUT_S)
        except queue.Empty:
            raise Unavailable(
                f"{MAX_CONNECTIONS} others have been asking the database for {ACQUIRE_TIMEOUT_S:g} s. Try again."
            ) from None
        try:
            if place is None or place.closed:
                place = connect(
                    self._url,
                    application_name="sublet http",
                    statement_timeout_s=STATEMENT_TIMEOUT_S,
                    silence_s=RECEIVE_TIMEOUT_S,
                )
            yield place
        except psycopg.Error:
            if place is not None:
                place.close()
            raise
        finally:
            self._places.put(place)

    def close(self) -> None:
        """Close those that are not in use."""
        for _ in range(MAX_CONNECTIONS):
            try:
                place = self._places.get_nowait()
            except queue.Empty:
                return
            if place is not None:
                place.close()
