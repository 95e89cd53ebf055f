"""Session advisory locks, by which others detect the end of a process.

A process holds one lock, on a connection that is used for nothing else but to check locks. When the connection ends,
the server releases the lock: at once where the process was killed, after some seconds where its machine is gone from
the network. A frozen process keeps it.
"""

from __future__ import annotations

import hashlib
import logging
import select
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.bounded_connection import BoundedConnection, is_direct
from sublet_storage.db.connect import connect
from sublet_storage.util.log_throttle import format_suppressed_count
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)

LOCK_CLASS: Final = zlib.crc32(b"sublet leader locks") & 0x7FFFFFFF
"""The first half of the keys of these locks; the second is that of the name of an incarnation of a node, or agent."""

RETRY_S = 0.02
"""Before a held lock is tried again: its holder may be a server process that is just ending, or another's check."""

KEYS_OF_CHECK = 200
"""Most keys of one statement: until its end each free lock is an entry of the lock table, which all users share."""

_SET_UP = """
set idle_session_timeout = 0;
set tcp_keepalives_idle = 2; set tcp_keepalives_interval = 1; set tcp_keepalives_count = 3"""

_FREE_LOCKS = f"""
select key from unnest(%s::integer[]) key where pg_try_advisory_xact_lock_shared({LOCK_CLASS}, key)"""

_ACQUIRE_LOCK = f"select pg_try_advisory_lock({LOCK_CLASS}, %s::integer)"


class OwnLivenessLockAcquired(Struct, frozen=True):
    """The process holds its lock in the database, under this key."""

    key: int


class LivenessLockLost(Struct, frozen=True):
    """The lock was last known to be held at that time: another process may find it free, though this one lives."""

    at: float


class PeerLocksChecked(Struct, frozen=True):
    """One check of other processes' locks, over a connection that was opened at `connected_at`: which were `free`, and
    which `held`, at some time between `sent_at` and `answered_at`. The process's own lock, if it was held before, was
    still held. `timeline`: the number of the server's; None: not known."""

    connected_at: float
    sent_at: float
    answered_at: float
    free: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    timeline: int | None = None


LockEvent = OwnLivenessLockAcquired | LivenessLockLost | PeerLocksChecked


class LivenessLockSettings(Struct, frozen=True):
    """`retry_grace_s`: for how long a lock that was lost is tried again and again. `receive_timeout_s`: after which a
    connection that answers nothing is closed."""

    check_interval_s: float
    recheck_delay_s: float
    retry_grace_s: float
    statement_timeout_s: float
    tcp_timeout_s: float
    receive_timeout_s: float


def compute_lock_key(name: str) -> int:
    """Return the key of the lock of that incarnation of a node, or agent."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], signed=True)


def find_free_locks(connection: psycopg.Connection[Any], keys: Sequence[int]) -> frozenset[int]:
    """Return those of the keys whose locks are free, each at some moment of the call. There is a statement, which fails
    on a lost connection, also without a key."""
    pages = (list(keys[start : start + KEYS_OF_CHECK]) for start in range(0, max(len(keys), 1), KEYS_OF_CHECK))
    return frozenset(key for page in pages for (key,) in connection.execute(_FREE_LOCKS, (page,)).fetchall())


def acquire_lock(connection: psycopg.Connection[Any], key: int) -> bool:
    """Acquire the lock until this connection closes; return False if another session holds it. Call it once per
    connection, since the server counts."""
    ((is_held,),) = connection.execute(_ACQUIRE_LOCK, (key,)).fetchall()
    return bool(is_held)


class LivenessLockKeeper(StoppableThread):
    """A thread with a connection that holds the lock of `name`.

    `keys_to_check` returns the keys of others' locks, `wakeup` has them checked at once. `always_checks`: also where
    there are none, to confirm that the lock is held. `on_event` is called on that thread, `on_failure` with the error
    that ended it early. `on_absent` is called when an attempt to get the lock has failed.
    """

    def __init__(
        self,
        url: str,
        name: str,
        times: LivenessLockSettings,
        keys_to_check: Callable[[], Sequence[int]],
        on_event: Callable[[LockEvent], None],
        clock: Callable[[], float],
        on_failure: Callable[[Exception], None] = lambda error: None,
        *,
        always_checks: bool = False,
        on_absent: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("sublet-lock")
        self._url, self._key, self._times, self._keys_to_check = url, compute_lock_key(name), times, keys_to_check
        self._on_event, self._clock, self._on_failure = on_event, clock, on_failure
        self._always_checks, self._on_absent = always_checks, on_absent
        self._is_held = False
        self._lost_at = float("-inf")
        self._used_at = float("-inf")

    def run(self) -> None:
        """Acquire the lock, and again where its connection ended; a stop releases it, with the connection."""
        try:
            while not self.is_stopping and self._try_connection():
                pass
        except Exception as error:  # noqa: BLE001 a lock that is no longer checked would count as held
            self._on_failure(error)

    def _try_connection(self) -> bool:
        """Use one connection until it ends; return False if none that can hold a lock is available."""
        began_at = self._used_at = self._clock()
        try:
            with self._open() as connection:
                if not is_direct(connection):
                    log.info("advisory lock not used, connection pooler found: leases and timeouts alone decide")
                    self._on_absent()
                    return False
                self._use(connection)
        except (SubletError, psycopg.Error) as error:
            if (suppressed_count := self._log_throttle.acquire(type(error).__name__)) is not None:
                log.warning("lock connection lost: %s%s", error, format_suppressed_count(suppressed_count))
        was_held, self._is_held = self._is_held, False
        if was_held and not self.is_stopping:
            self._lost_at = self._used_at
            self._on_event(LivenessLockLost(self._lost_at))
            if self._clock() < began_at + self._times.recheck_delay_s:  # perhaps no check succeeds
                self.sleep(self._times.recheck_delay_s)
        else:
            self._on_absent()
            self.sleep(self._times.check_interval_s)
        return True

    def _open(self) -> BoundedConnection:
        times = self._times
        connection = connect(
            self._url,
            application_name="sublet lock",
            statement_timeout_s=times.statement_timeout_s,
            tcp_timeout_s=times.tcp_timeout_s,
            receive_timeout_s=times.receive_timeout_s,
        )
        connection.execute(_SET_UP)
        return connection

    def _use(self, connection: BoundedConnection) -> None:
        connected_at, free = self._clock(), frozenset[int]()
        timeline = None if connection.timeline is None else connection.timeline_number()
        while not self.is_stopping:
            self._used_at = self._clock()
            if not self._is_held:
                self._acquire(connection)
            keys, last_free = self._keys_to_check(), free
            if keys or last_free or self._always_checks:
                sent_at = self._clock()
                free = find_free_locks(connection, keys)
                held = frozenset(keys) - free
                self._on_event(PeerLocksChecked(connected_at, sent_at, self._clock(), free, held, timeline))
            self._wait(connection, self._choose_pause_s(free))

    def _acquire(self, connection: BoundedConnection) -> None:
        if acquire_lock(connection, self._key):
            self._is_held = True
            self._on_event(OwnLivenessLockAcquired(self._key))
        else:
            self._on_absent()

    def _choose_pause_s(self, free: frozenset[int]) -> float:
        times = self._times
        if not self._is_held and self._clock() < self._lost_at + times.retry_grace_s:
            return RETRY_S
        return times.recheck_delay_s if free else times.check_interval_s

    def _wait(self, connection: BoundedConnection, pause_s: float) -> None:
        """Wait for the pause, for a new key, or until the server sends something: mostly the connection's end, an error
        of the next statement."""
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        waiting.register(self.wakeup_socket, select.POLLIN)
        ready = {number for number, _ in waiting.poll(pause_s * 1000)}
        if self.wakeup_socket.fileno() in ready:
            self.wakeup_socket.recv(64)
        if connection.fileno() in ready:
            connection.execute("select 1")
