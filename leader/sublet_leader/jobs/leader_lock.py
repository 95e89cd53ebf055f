"""Holds this node's advisory lock, and checks the locks of leaders that it would succeed.

All on one connection that is used for nothing else. When it ends, the server releases the lock: at once where the
process was killed, after some seconds where its machine is gone from the network. A frozen process keeps it.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Sequence

import psycopg

from sublet_leader.election import LockAcquired, LockLost, LocksChecked
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.bounded_connection import BoundedConnection, is_direct
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.leadership import acquire_lock, find_free_locks
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

log = logging.getLogger(__name__)

RETRY_S = 0.02
"""Before a held lock is tried again: its holder may be a server process that is just ending, or another's check."""

_SET_UP = """
set idle_session_timeout = 0;
set tcp_keepalives_idle = 2; set tcp_keepalives_interval = 1; set tcp_keepalives_count = 3"""


class LeaderLockKeeper:
    """A thread with a connection. `key`: of this node's lock. `rival_keys` returns those to check. `on_event` is called
    on that thread, `on_failure` with the error that ended it early."""

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
        self._url, self._key, self._settings, self._rival_keys = url, key, settings, rival_keys
        self._on_event, self._clock, self._on_failure = on_event, clock, on_failure
        self._is_held = False
        self._lost_at = float("-inf")
        self._used_at = float("-inf")
        self._quiet = LogThrottle()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="sublet-lock", daemon=True)

    def start(self) -> None:
        """Start to acquire the lock."""
        self._thread.start()

    def stop(self) -> None:
        """Release the lock, with the connection."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._settings.silence_s)

    def _keep(self) -> None:
        try:
            while not self._stop.is_set() and self._tried():
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
            if (before := self._quiet.acquire(type(error).__name__)) is not None:
                log.warning("leader lock connection lost: %s%s", error, format_suppressed_count(before))
        was_held, self._is_held = self._is_held, False
        if was_held and not self._stop.is_set():
            self._lost_at = self._used_at
            self._on_event(LockLost(self._lost_at))
        else:
            self._stop.wait(self._settings.lock_check_interval_s)
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
        while not self._stop.is_set():
            self._used_at = self._clock()
            if not self._is_held and acquire_lock(connection, self._key):
                self._is_held = True
                self._on_event(LockAcquired(self._key))
            keys, before = self._rival_keys(), free
            if keys or before:
                sent_at = self._clock()
                free = find_free_locks(connection, keys)
                if free or before:
                    self._on_event(LocksChecked(connected_at, sent_at, self._clock(), free))
            self._wait(connection, self._pause_s(free))

    def _pause_s(self, free: frozenset[int]) -> float:
        settings = self._settings
        if not self._is_held and self._clock() < self._lost_at + settings.lock_grace_s:
            return RETRY_S
        return settings.lock_recheck_delay_s if free else settings.lock_check_interval_s

    def _wait(self, connection: BoundedConnection, pause_s: float) -> None:
        """Wait for the pause, or until the server sends something: mostly the connection's end, an error of the next
        statement."""
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if poll.poll(pause_s * 1000):
            connection.execute("select 1")
