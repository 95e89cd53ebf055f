"""Holds this node's advisory lock, and checks the locks of leaders that it would succeed.

All on one connection that is used for nothing else. When it ends, the server releases the lock: at once where the
process was killed, after some seconds where its machine is gone from the network. A frozen process keeps it.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence

import psycopg

from sublet_leader.election import LockAcquired, LockLost, LocksChecked
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.bounded_connection import BoundedConnection, is_direct
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.leadership import acquire_lock, find_free_locks
from sublet_storage.util.log_throttle import format_suppressed_count
from sublet_storage.util.threads import StoppableThread

log = logging.getLogger(__name__)

RETRY_S = 0.02
"""Before a held lock is tried again: its holder may be a server process that is just ending, or another's check."""

_SET_UP = """
set idle_session_timeout = 0;
set tcp_keepalives_idle = 2; set tcp_keepalives_interval = 1; set tcp_keepalives_count = 3"""


class LeaderLockKeeper(StoppableThread):
    """A thread with a connection. `key`: of this node's lock. `rival_keys` returns those to check, `ring` has them
    checked at once. `on_event` is called on that thread, `on_failure` with the error that ended it early."""

    def __init__(
        self,
        url: str,
        key: int,
        settings: LeaderSettings,
        rival_keys: Callable[[], Sequence[int]],
        on_event: Callable[[LockAcquired | LockLost | LocksChecked], None],
        clock: Callable[[], float],
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        super().__init__("sublet-lock")
        self._url, self._key, self._settings, self._rival_keys = url, key, settings, rival_keys
        self._on_event, self._clock, self._on_failure = on_event, clock, on_failure
        self._is_held = False
        self._lost_at = float("-inf")
        self._used_at = float("-inf")

    def run(self) -> None:
        """Acquire the lock, and again where its connection ended; a stop releases it, with the connection."""
        try:
            while not self.is_stopping and self._tried():
                pass
        except Exception as error:  # noqa: BLE001 a lock that is no longer checked would count as held
            self._on_failure(error)

    def _tried(self) -> bool:
        """Use one connection until it ends; return False if none that can hold a lock is available."""
        self._used_at = self._clock()
        try:
            with self._open() as connection:
                if not is_direct(connection):
                    log.info("leader lock not used, connection pooler found: leases alone decide who leads")
                    return False
                self._use(connection)
        except (SubletError, psycopg.Error) as error:
            if (suppressed_count := self._quiet.acquire(type(error).__name__)) is not None:
                log.warning("leader lock connection lost: %s%s", error, format_suppressed_count(suppressed_count))
        was_held, self._is_held = self._is_held, False
        if was_held and not self.is_stopping:
            self._lost_at = self._used_at
            self._on_event(LockLost(self._lost_at))
        else:
            self.sleep(self._settings.lock_check_interval_s)
        return True

    def _open(self) -> BoundedConnection:
        settings = self._settings
        connection = connect(
            self._url,
            application_name="sublet lock",
            statement_timeout_s=settings.statement_timeout_s,
            tcp_timeout_s=settings.tcp_timeout_s,
            silence_s=settings.silence_s,
        )
        connection.execute(_SET_UP)
        return connection

    def _use(self, connection: BoundedConnection) -> None:
        connected_at, free = self._clock(), frozenset[int]()
        while not self.is_stopping:
            self._used_at = self._clock()
            if not self._is_held and acquire_lock(connection, self._key):
                self._is_held = True
                self._on_event(LockAcquired(self._key))
            keys, last_free = self._rival_keys(), free
            if keys or last_free:
                sent_at = self._clock()
                free = find_free_locks(connection, keys)
                if free or last_free:
                    self._on_event(LocksChecked(connected_at, sent_at, self._clock(), free))
            self._wait(connection, self._pause_s(free))

    def _pause_s(self, free: frozenset[int]) -> float:
        settings = self._settings
        if not self._is_held and self._clock() < self._lost_at + settings.lock_grace_s:
            return RETRY_S
        return settings.lock_recheck_delay_s if free else settings.lock_check_interval_s

    def _wait(self, connection: BoundedConnection, pause_s: float) -> None:
        """Wait for the pause, for a new rival, or until the server sends something: mostly the connection's end, an
        error of the next statement."""
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        waiting.register(self.bell, select.POLLIN)
        ready = {number for number, _ in waiting.poll(pause_s * 1000)}
        if self.bell.fileno() in ready:
            self.bell.recv(64)
        if connection.fileno() in ready:
            connection.execute("select 1")
