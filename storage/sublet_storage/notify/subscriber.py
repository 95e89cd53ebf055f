"""Receives notifications on a node: threads and connection around the machine and the `VersionCache`.

The driver's threads only queue what arrives. One thread decides, updates the cache and calls `on_change`, so that
changes are handed on one at a time, each newer than the last of its object. Another reads snapshots, over a connection
of its own, and survives a database that is away: the read that failed is tried again at the pace of catch-ups.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import psycopg
from msgspec import Struct
from msgspec.structs import asdict

from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_protocol.domain.limits import MAX_QUEUED_NOTIFICATION_BYTES
from sublet_protocol.tick import Tick
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.notify.catch_up_reads import ReadSnapshot
from sublet_storage.notify.catch_up_scheduler import CatchUpCause, StartCatchUp
from sublet_storage.notify.changes import KINDS, CatchUpSnapshot, MalformedNotification, NotifySettings, ObjectChange
from sublet_storage.notify.codec import decode
from sublet_storage.notify.drivers.base import NotificationDriver
from sublet_storage.notify.received_notification_limiter import ReceivedNotificationLimiter
from sublet_storage.notify.subscriber_machine import NotificationSubscriberMachine
from sublet_storage.notify.subscriber_machine_events import (
    CatchUpCompleted,
    CatchUpRequested,
    ChangeOrderUnknown,
    Event,
    ListeningStarted,
    ListeningStopped,
    MalformedNotificationReceived,
    NotificationReceived,
    SubscriberStarted,
)
from sublet_storage.notify.version_cache import ChangeNovelty, VersionCache
from sublet_storage.util.fork_guard import OwnerProcess
from sublet_storage.util.log_throttle import LogThrottle

log = logging.getLogger(__name__)

OnChange = Callable[[ObjectChange], None]
"""Called with each change that is newer than what was known of its object; must return soon."""

QUEUED_BYTES = 64
"""What a message takes in the queue besides its bytes."""

READ_TIMEOUT_S = 5.0
"""A database that sends nothing for this time in the middle of a catch-up is away."""

JOIN_TIMEOUT_S = 2.0
"""How long `close` waits for each thread."""


class _CatchUpRead(Struct, frozen=True):
    """The end of a catch-up; None: the database could not be read."""

    channel: str
    snapshot: CatchUpSnapshot | None
    begun: int


class NotificationSubscriber:
    """Listens from the moment it is made until `close`. In a fork of its process it does nothing.

    `read_snapshot(connection, kind)` is called from a thread of its own, `on_change` from another. What either raises
    is logged, and listening goes on. Raises what the driver raises if it can never listen.
    """

    def __init__(
        self,
        url: str,
        driver: NotificationDriver,
        read_snapshot: ReadSnapshot,
        on_change: OnChange,
        *,
        channels: Iterable[str] = KINDS,
        settings: NotifySettings | None = None,
    ) -> None:
        self._settings = (settings or NotifySettings()).check()
        self._channels = tuple(channels)
        self._on_change, self._owner = on_change, OwnerProcess()
        self._lock = threading.Lock()
        self._cache = VersionCache(self._settings.tombstone_retention_s)
        self._machine = NotificationSubscriberMachine(
            self._settings, pushes=driver.capabilities.is_push, channels=self._channels
        )
        self._queue: deque[bytes | Event | _CatchUpRead] = deque()
        self._wakeup = threading.Event()
        self._put(SubscriberStarted())
        self._closing = False
        self._handler_failures = self._dropped = 0
        self._bytes_in = self._bytes_out = 0  # each written by one thread only
        self._rate = ReceivedNotificationLimiter()
        self._log_throttle = LogThrottle()
        self._reader = _SnapshotReader(url, read_snapshot, self._put)
        self._thread = threading.Thread(target=self._run, name="sublet notify subscriber", daemon=True)
        self._receiver = driver.open_receiver(
            self._receive, lambda: self._put(ListeningStarted()), lambda: self._put(ListeningStopped())
        )
        self._reader.start()
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return the endpoint that publishers send to."""
        return self._receiver.endpoint

    def get(self, kind: str, key: str) -> ObjectChange | None:
        """Return the newest change of an object that exists."""
        with self._lock:
            return self._cache.get(kind, key)

    def request_catch_up(self, kind: str) -> None:
        """Read the objects of that kind soon."""
        self._put(CatchUpRequested(kind))

    @property
    def is_caught_up(self) -> bool:
        """Whether every channel has been read, and none is being read or waits for another attempt."""
        with self._lock:
            return all(
                channel.begun_at > 0 and not channel.is_running and CatchUpCause.RETRY not in channel.needs
                for channel in self._machine.catch_ups.channels.values()
            )

    def counters(self) -> dict[str, int]:
        """Return what has been seen, missed, healed and read so far; catch-ups also by what they were for."""
        with self._lock:
            catch_ups = self._machine.catch_ups
            return {
                **asdict(self._machine.counters),
                "old_versions": self._cache.old,
                "catch_ups": catch_ups.reads,
                "deferred": catch_ups.deferred,
                **{f"catch_ups_{cause.name.lower()}": times for cause, times in catch_ups.counts_by_cause.items()},
                "publishers": self._machine.publishers,
                "handler_failures": self._handler_failures,
                "dropped": self._dropped,
            }

    def close(self) -> None:
        """Stop listening, in bounded time; harmless when repeated."""
        if self._owner.is_forked:
            return
        self._closing = True
        self._receiver.close()
        self._wakeup.set()
        self._reader.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    # --- what comes in, from any thread -----------------------------------------------------------------------------

    def _receive(self, message: bytes) -> None:
        size = len(message) + QUEUED_BYTES
        has_room = self._bytes_in - self._bytes_out + size <= MAX_QUEUED_NOTIFICATION_BYTES
        # Each change has a bracket: so they are bounded before anything is decoded.
        if self._rate.take(time.monotonic(), message.count(b"["), has_room):
            self._bytes_in += size
            self._put(message)
            return
        self._dropped += 1
        if self._rate.is_first_refused:
            for channel in self._channels:
                self._put(CatchUpRequested(channel))

    def _put(self, event: bytes | Event | _CatchUpRead) -> None:
        self._queue.append(event)
        self._wakeup.set()

    # --- the thread that decides ------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake_at: float | None = None
        while not self._closing:
            self._wakeup.wait(None if wake_at is None else max(0.0, wake_at - time.monotonic()))
            self._wakeup.clear()
            wake_at = self._apply_event(Tick())
            while self._queue and not self._closing:
                wake_at = self._apply_event(self._queue.popleft())

    def _apply_event(self, event: bytes | Event | _CatchUpRead) -> float | None:
        if isinstance(event, bytes):
            self._bytes_out += len(event) + QUEUED_BYTES
            event = self._decode_event(event)
        if isinstance(event, _CatchUpRead):
            return self._merge(event)
        with self._lock:
            outcome = self._machine.decide(event, time.monotonic(), random.random())
            changes = [change for change in outcome.changes if self._is_new(change)]
            begun = self._cache.begin_snapshot()
        for catch_up in outcome.catch_ups:
            self._reader.read(catch_up, begun)
        self._deliver(changes)
        return outcome.wake_at

    def _decode_event(self, raw: bytes) -> Event:
        try:
            return NotificationReceived(decode(raw))
        except MalformedNotification as error:
            if self._log_throttle.acquire("malformed") is not None:
                log.warning("malformed notification dropped: %s", error)
            return MalformedNotificationReceived()

    def _is_new(self, change: ObjectChange) -> bool:
        novelty = self._cache.apply(change, time.monotonic())
        if novelty is ChangeNovelty.AMBIGUOUS:
            self._put(ChangeOrderUnknown(change.kind))
        return novelty is ChangeNovelty.NEWER

    def _merge(self, read: _CatchUpRead) -> float | None:
        changes: list[ObjectChange] = []
        if read.snapshot is not None:
            with self._lock:
                changes = self._cache.merge(read.channel, read.snapshot, read.begun, time.monotonic())
        self._deliver(changes)
        return self._apply_event(CatchUpCompleted(read.channel, read.snapshot is not None))

    def _deliver(self, changes: list[ObjectChange]) -> None:
        for change in changes:
            try:
                self._on_change(change)
            except Exception:
                self._handler_failures += 1
                if self._log_throttle.acquire("handler") is not None:
                    log.exception("change handler failed: change=%r", change)


class _SnapshotReader(threading.Thread):
    """Executes reads in order, and puts a `_CatchUpRead` for each."""

    def __init__(self, url: str, read_snapshot: ReadSnapshot, put: Callable[[_CatchUpRead], None]) -> None:
        super().__init__(name="sublet notify catch-up", daemon=True)
        self._read_snapshot, self._put = read_snapshot, put
        self._requests: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._reconnecting = ReconnectingConnection(
            lambda: connect(url, application_name="sublet catch-up", receive_timeout_s=READ_TIMEOUT_S)
        )
        self._ending = self._away = False

    def read(self, catch_up: StartCatchUp, begun: int) -> None:
        """Queue it; `begun` is handed back."""
        self._requests.put((catch_up.channel, begun))

    def end(self) -> None:
        """Stop; a read under way is cancelled."""
        self._ending = True
        self._requests.put(None)
        self._reconnecting.stop_waiting()
        if threading.current_thread() is not self:
            self.join(JOIN_TIMEOUT_S)

    def run(self) -> None:
        while (request := self._requests.get()) is not None and not self._ending:
            channel, begun = request
            self._put(_CatchUpRead(channel, self._try_read(channel), begun))
        self._reconnecting.close()

    def _try_read(self, channel: str) -> CatchUpSnapshot | None:
        try:
            with self._reconnecting as connection:
                snapshot = self._read_snapshot(connection, channel)
        except (psycopg.OperationalError, DatabaseUnreachable) as error:
            if not (self._away or self._ending):
                log.warning("database unavailable, retrying: %s", error)
            self._away = True
            return None
        except Exception:
            log.exception("catch-up failed, retrying: channel=%s", channel)
            return None
        if self._away:
            log.info("database available again")
            self._away = False
        return snapshot
