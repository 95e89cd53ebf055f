"""A connection that is kept for long: opened when it is first needed, and again after it was lost, but not at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from protocol.errors import DatabaseUnreachable
from storage.bounded import BoundedConnection
from storage.retry import Backoff

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
JITTER = 0.5


class KeptConnection:
    """Not thread-safe. `connect` opens it, and sets what it is to be like.

    Whoever uses it says what became of that: `worked`, or `failed`, which closes it. Until a pause is over, which grows
    from one failure to the next, it cannot be had again. With a `log` the first failure in a row is a warning
    there, and the end of the row said too.
    """

    def __init__(self, connect: Callable[[], BoundedConnection], log: logging.Logger | None = None) -> None:
        self._connect, self._log = connect, log
        self._connection: BoundedConnection | None = None
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, JITTER)
        self._away = False
        self._not_before = float("-inf")

    def ready(self) -> BoundedConnection:
        """The connection. Raises what `connect` does, and `DatabaseUnreachable` within the pause after a failure."""
        if self._connection is None or self._connection.closed:
            if (left_s := self._not_before - time.monotonic()) > 0:
                raise DatabaseUnreachable(f"the database was away a moment ago, and is tried again in {left_s:.1f} s.")
            self._connection = self._connect()
        return self._connection

    def worked(self) -> None:
        """It is there."""
        self._backoff.succeeded()
        if self._away:
            self._away = False
            if self._log is not None:
                self._log.info("the database is back")

    def failed(self, error: Exception) -> None:
        """It is to be used no more."""
        now = time.monotonic()
        if now >= self._not_before:  # else nothing was tried
            self._not_before = now + self._backoff.next_s()
        if not self._away and self._log is not None:
            self._log.warning("the database is away, it goes on when it is back: %s", error)
        self._away = True
        self.close()

    def close(self) -> None:
        """Close it; it is opened again when it is needed."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
