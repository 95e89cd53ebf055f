"""Keeps a node's copy of rules and tokens up to date.

It looks for changes every two seconds, and at once after one. Every change, however it was made, goes to the audit log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import psycopg

from sublet_protocol.domain.errors import Conflict, SubletError
from sublet_protocol.gate import audit
from sublet_protocol.gate.access_cache import AccessCache
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.groups.admin.access_snapshot import (
    has_changed,
    listen_for_changes,
    read_access,
    read_changes,
    record_use,
)
from sublet_storage.util.stoppable_thread import JOIN_TIMEOUT_S, StoppableThread

log = logging.getLogger(__name__)

READ_INTERVAL_S = 2.0
REREAD_INTERVAL_S = 60.0
"""Maximum age of the copy: what is loaded with triggers disabled is in no history."""
MAX_AUDITED = 1_000
"""Maximum number of changes per read written to the audit log, the newest; all of them are in the table."""
MIN_READ_INTERVAL_S = 0.2
"""Minimum time between reads, for notifications and for callers with an unknown token."""
STOP_CHECK_INTERVAL_S = 0.2
"""Maximum time of one wait for a notification, after which callers and `stop` are noticed."""
MAX_WAITING = 1_000
"""Maximum number of callers with an unknown token that wait at a time."""


class AccessRefreshThread(StoppableThread):
    """Follows the rules and tokens. `on_change` is called, on a thread of its own, after a change."""

    def __init__(self, url: str, on_change: Callable[[], None], clock: Callable[[], float]) -> None:
        super().__init__("sublet-access")
        self._url, self._on_change, self._clock = url, on_change, clock
        self._reconnecting = ReconnectingConnection(self._open_connection, log)
        self._waiting: list[Future[bool]] = []
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def open(self) -> AccessCache:
        """Return the present rules and tokens. Raise the error that prevents it, `Conflict` if there are too many."""
        with self._reconnecting as connection:
            self._cache = AccessCache(read_access(connection), self._clock)
            self._note_read(connection)
        return self._cache

    def read_anew(self) -> Future[bool] | None:
        """Return a future: True when all that is committed by now has been read, False if that failed. Return None if
        too many callers wait."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                return None
            self._waiting.append(Future())
            return self._waiting[-1]

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """End the thread, and close the database connection."""
        super().stop(timeout_s)
        self._reconnecting.close()

    def run(self) -> None:
        """Follow changes."""
        while not self.is_stopping:
            waiting: list[Future[bool]] = []
            is_read = False
            try:
                with self._reconnecting as connection:
                    self._wait_for_change(connection)
                    waiting = self._take_waiting()
                    self._read(connection)
                is_read = True
            except Conflict as error:
                log.warning("access rules not read, retrying: %s", error)
                self.sleep(READ_INTERVAL_S)
            except (SubletError, psycopg.Error) as error:
                log.debug("access rules not read, retrying: %s", error)
                self.sleep(MIN_READ_INTERVAL_S)
                waiting += self._take_waiting()
            for future in waiting:
                future.set_result(is_read)

    def _wait_for_change(self, connection: BoundedConnection) -> None:
        """Wait for a notification or a caller, and until the last read is long enough ago. Take all notifications that
        have arrived: psycopg would retain the rest without a bound."""
        deadline, due_at = time.monotonic() + READ_INTERVAL_S, self._read_at + MIN_READ_INTERVAL_S
        is_notified = False
        while not self.is_stopping and (now := time.monotonic()) < deadline:
            if (is_notified or self._waiting) and now >= due_at:
                break
            wait_s = max(0.0, due_at - now) if is_notified else STOP_CHECK_INTERVAL_S
            for _ in connection.notifies(timeout=wait_s, stop_after=1):
                is_notified = True
        self._read_at = time.monotonic()

    def _take_waiting(self) -> list[Future[bool]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def _read(self, connection: BoundedConnection) -> None:
        # Over another connection the database may be on another timeline, whose transactions are others.
        is_same = connection is self._read_over and time.monotonic() < self._reread_at
        if is_same and not has_changed(connection, self._cache.version):
            self._cache.confirm()
        else:
            previous_version = self._cache.version
            self._cache.replace(read_access(connection))
            self._note_read(connection)
            self._on_change()
            for change in read_changes(connection, previous_version, self._cache.version, MAX_AUDITED):
                audit.record(change.by, "", change.event, change.object, "done")
        if used := self._cache.take_used():
            record_use(connection, used)

    def _note_read(self, connection: BoundedConnection) -> None:
        self._read_over, self._reread_at = connection, time.monotonic() + REREAD_INTERVAL_S

    def _open_connection(self) -> BoundedConnection:
        connection = connect(
            self._url, application_name="sublet access", statement_timeout_s=10.0, receive_timeout_s=15.0
        )
        listen_for_changes(connection)
        return connection
