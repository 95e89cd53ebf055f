"""The HTTP port's own connections to the database: few, made when they are needed, given up on soon."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from sublet_leader.observe.health import Health, State
from sublet_protocol.domain.errors import Unavailable
from sublet_storage.db.connect import connect

MOST = 3
STATEMENT_TIMEOUT_S = 5.0
SILENCE_S = 6.0
TURN_S = 5.0

Connection = psycopg.Connection[Any]


class Reading:
    """Lends connections to threads, one at a time to each. `look` says first whether the database is there at all."""

    def __init__(self, url: str, look: Callable[[], Health]) -> None:
        self._url, self._look = url, look
        self._places: queue.LifoQueue[Connection | None] = queue.LifoQueue()
        for _ in range(MOST):
            self._places.put(None)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Raises `Unavailable` where the database is known to be away, or all connections are in use for long."""
        check = self._look().named("database")
        if check.state is State.UNREACHABLE:
            raise Unavailable(f"the database is unreachable: {check.why}")
        try:
            place = self._places.get(timeout=TURN_S)
        except queue.Empty:
            raise Unavailable(f"{MOST} others have been asking the database for {TURN_S:g} s. Try again.") from None
        try:
            if place is None or place.closed:
                place = connect(
                    self._url,
                    application_name="sublet http",
                    statement_timeout_s=STATEMENT_TIMEOUT_S,
                    silence_s=SILENCE_S,
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
        for _ in range(MOST):
            try:
                place = self._places.get_nowait()
            except queue.Empty:
                return
            if place is not None:
                place.close()
