"""A publisher's capability for epochs of its space: acquired, advanced, renewed, released."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, check_count, check_epoch
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    EpochCapabilityExpired,
    ProducerFenced,
    SubletError,
    Unavailable,
    format_error,
)
from sublet_storage.db.bounded_connection import BoundedConnection, has_gone_over
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import BlockAppend, ProducerIdentity, append
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.producer.sender import LOCK_TIMEOUT_S, Retryable
from sublet_storage.util.log_throttle import LogThrottle
from sublet_storage.util.reentry import check_reentry
from sublet_storage.util.retry import Backoff, call_with_retry

log = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 10.0
"""After how long a silent database is tried again, over another connection."""
RETRY_PAUSE_S = 1.0
"""How long after a renewal that failed the next is tried: the lease goes on running out."""

_T = TypeVar("_T")


class EpochCapability:
    """The capability of a publisher, which holds nothing until the first `advance`. Thread-safe; a thread of its own
    renews the lease while it is held.

    `timeline`: the database's, on which `space_id` is the space's. `follow_timeline` is called on another: it registers
    the producer there, and raises `ProducerFenced` if the id may be another space's.
    """

    def __init__(
        self,
        url: str,
        space_id: int,
        producer: ProducerIdentity,
        delivery_timeout_s: float,
        lease_s: float,
        timeline: str | None,
        follow_timeline: Callable[[psycopg.Connection[Any]], None],
    ) -> None:
        self._url, self._space_id, self._producer = url, space_id, producer
        self._timeline, self._follow_timeline = timeline, follow_timeline
        self._delivery_timeout_s, self._lease_s = delivery_timeout_s, lease_s
        self._lock = threading.RLock()  # entered once at a time: see `check_reentry`
        self._frontier: LowerFrontier | None = None
        self._reserved: LowerFrontier | None = None
        self._error: SubletError | None = None
        self._over = threading.Event()
        self._reconnecting = ReconnectingConnection(
            self._connect
        )  # for the holder of the lock: epochs may follow one another quickly
        self._thread: threading.Thread | None = None

    def check(self, epochs: Sequence[Epoch]) -> None:
        """Take the capability for these epochs if there is none yet. Raise `EpochAlreadyCompleted` for one that may be
        published no more, `InvalidEpoch`, and what `advance` raises."""
        if self._frontier is None:
            self.check_idle()
            with self._lock:
                if self._frontier is None:
                    self._hold(epochs)
        if self._error is not None:
            raise self._error
        frontier = self._reserved or self._frontier
        assert frontier is not None
        epoch_leases.check_not_backwards(
            self._producer, frontier, [check_epoch(epoch, len(frontier.least[0])) for epoch in epochs]
        )

    def check_idle(self) -> None:
        """Raise `UsageError` in a signal handler in the middle of this thread's own call."""
        check_reentry(self._lock)

    def reserve(self, epochs: Sequence[Epoch]) -> None:
        """Check what is published by these from now on; what is held moves on later. Raise what `check` raises."""
        check_count(epochs)
        self.check(epochs)
        self._reserved = LowerFrontier.from_epochs(epochs)

    def cancel_reservations(self) -> None:
        """Cancel the reservation of epochs."""
        self._reserved = None

    def advance(
        self, conn: psycopg.Connection[Any], appends: Sequence[BlockAppend], epochs: Sequence[Epoch]
    ) -> epoch_leases.EpochAdvanceResult:
        """Append these blocks, and publish only at or after these epochs from now on. Raise what `append` raises."""
        if self._error is not None:
            return epoch_leases.EpochAdvanceResult(append(conn, appends) if appends else [], error=self._error)
        result = epoch_leases.append_and_advance(conn, appends, self._space_id, self._producer, epochs, self._lease_s)
        if isinstance(result.error, (EpochCapabilityExpired, ProducerFenced)):
            self._error = result.error
        if result.change is not None:
            self._frontier = LowerFrontier.from_epochs(epochs)
            shared_publisher(self._url).publish([result.change])
        return result

    def close(self, *, abandon: bool = False) -> None:
        """Release the capability; or `abandon` it: unfinished epochs stay open until the lease has run out, as they do
        if the database is away."""
        self._over.set()
        with self._lock:
            if self._frontier is not None and self._error is None and not abandon:
                self._release()
            self._error = self._error or epoch_leases.capability_expired_error(self._producer.producer_id)
            self._reconnecting.close()

    def _release(self) -> None:
        try:
            self._reconnecting.get_answering_connection()  # it may have been lost while it was idle
            with self._reconnecting as conn:
                epoch_leases.release(conn, self._space_id, self._producer)
                shared_publisher(self._url).publish([epoch_leases.frontier_change(conn, self._space_id)])
        except (*Retryable, SubletError) as error:
            log.warning(
                "epochs not released, lease expires instead: producer_id=%s: %s", self._producer.producer_id, error
            )

    def _hold(self, epochs: Sequence[Epoch]) -> None:
        if self._error is not None:
            raise self._error
        frontier = LowerFrontier.from_epochs(check_epoch(epoch, len(epochs[0])) for epoch in epochs)
        self._call_with_retry(lambda conn: self._hold_and_publish(conn, frontier))
        self._frontier = frontier
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_until_over, name="sublet publisher lease", daemon=True)
            self._thread.start()

    def _hold_and_publish(self, conn: psycopg.Connection[Any], frontier: LowerFrontier) -> None:
        epoch_leases.hold(conn, self._space_id, self._producer, frontier.least, self._lease_s)
        shared_publisher(self._url).publish([epoch_leases.frontier_change(conn, self._space_id)])

    def _renew_until_over(self) -> None:
        throttle, interval_s = LogThrottle(), self._lease_s / 3
        pause_s = interval_s
        while not self._over.wait(pause_s):
            pause_s = interval_s
            try:
                with self._connect() as conn:
                    space_ids = epoch_leases.renew(conn, self._producer, self._lease_s)
            except ProducerFenced as error:
                self._error = error
                return
            except (*Retryable, SubletError) as error:
                pause_s = min(RETRY_PAUSE_S, interval_s)
                if throttle.acquire(type(error).__name__) is not None:
                    log.warning("lease not renewed, retrying: producer_id=%s: %s", self._producer.producer_id, error)
                continue
            if self._space_id not in space_ids and not self._over.is_set():
                self._error = epoch_leases.capability_expired_error(self._producer.producer_id)
                return

    def _call_with_retry(self, attempt: Callable[[psycopg.Connection[Any]], _T]) -> _T:
        """Return the result of an attempt, retried while the database is away: `hold` is idempotent."""

        def try_once() -> _T:
            with self._reconnecting as conn:
                return attempt(conn)

        try:
            return call_with_retry(
                "hold epochs",
                try_once,
                lambda error: isinstance(error, Retryable) and not self._over.is_set(),
                Backoff(total_s=self._delivery_timeout_s),
                self._over.wait,
            )
        except Retryable as error:
            raise _delivery_timeout_error(error) from error

    def _connect(self) -> BoundedConnection:
        conn = connect(
            self._url,
            application_name="sublet publisher lease",
            lock_timeout_s=LOCK_TIMEOUT_S,
            receive_timeout_s=RECEIVE_TIMEOUT_S,
        )
        if has_gone_over(conn, self._timeline):
            try:
                self._follow_timeline(conn)
            except BaseException:
                conn.close()
                raise
            self._timeline = conn.timeline
        return conn


def _delivery_timeout_error(error: Exception) -> Unavailable:
    return DatabaseUnreachable(
        f"the database does not say which epochs may be published: {format_error(error)}. Try again."
    )
