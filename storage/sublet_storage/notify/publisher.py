"""Publishes a process's changes to nodes: the thread around the machine, and the senders.

The endpoints of nodes are read from the directory, every few seconds and only while something is published; where no
node listens, publishing costs nothing but that. A process that has published nothing for long sends that it leaves, and
its senders are closed until it publishes again. What was dropped meanwhile is not known: so a new incarnation begins
then, at which every subscriber catches up.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import SubletError
from sublet_protocol.tick import Tick
from sublet_storage import node_directory
from sublet_storage.db.connect import connect
from sublet_storage.notify.changes import NotifySettings, ObjectChange, stream_change
from sublet_storage.notify.drivers import registry
from sublet_storage.notify.drivers.base import (
    FLUSH_S,
    NotificationDriver,
    NotificationDriverFactory,
    NotificationSender,
)
from sublet_storage.notify.publisher_machine import (
    ChangesQueued,
    Event,
    NotificationPublisherMachine,
    NotificationPublisherStatus,
    NotificationSendersOpened,
    PublisherCloseRequested,
)
from sublet_storage.util.fork_guard import OwnerProcess
from sublet_storage.util.log_throttle import LogThrottle

log = logging.getLogger(__name__)

MAX_PENDING_CHANGES = 10_000
"""Calls of `publish` that were not processed yet; after one more, a new incarnation shows that some are missing."""

REST_S = 600.0
"""After how long without a publish a process leaves."""

READ_TIMEOUT_S = 2.0
"""A directory that does not answer for this time counts as unavailable."""

CLOSE_S = 1.0
"""How long closing waits for what was published to go out, by default."""

GRACE_S = 1.0
"""How much longer than that it takes at most."""


class NotificationPublisher:
    """Notifies all nodes that listen of changes. Thread-safe; nothing it does raises or waits. In a fork it does
    nothing. Whoever publishes sends, where that may be done at once: a thread that is woken for it begins later.

    `publisher` is a name that no other process has at the same time; without one, it is made up.
    """

    def __init__(
        self,
        url: str,
        *,
        publisher: str | None = None,
        settings: NotifySettings | None = None,
        load: Callable[[str], NotificationDriverFactory] = registry.load_driver,
    ) -> None:
        self._settings = (settings or NotifySettings()).check()
        self._url = url
        self._publisher = publisher or f"{socket.gethostname()[:40]}:{os.getpid()}:{secrets.token_hex(3)}"
        self._owner = OwnerProcess()
        self._changed = threading.Condition()
        self._queued_changes: deque[Sequence[ObjectChange]] = deque()
        self._has_overflown = self._is_closing = False
        self._is_refreshing = self._is_napping = False
        self._directory_endpoints: list[str] | None = None
        self._deaf_until = -math.inf  # no node listens, and until then the directory is not read
        self._close_by = math.inf
        self._thread: threading.Thread | None = None
        self._working = threading.Lock()
        # The rest belongs to who holds this lock.
        self._refresh_at = self._rest_at = -math.inf
        self._machine = self._make_machine()
        self._senders = NotificationSenders(url, load)
        self._log_throttle = LogThrottle()
        self.sent = 0
        """Messages handed to drivers."""

    def publish(self, changes: Sequence[ObjectChange]) -> None:
        """Notify all subscribers of committed changes. The sequence must not change afterwards."""
        if self._is_in_vain():
            return
        with self._changed:
            if len(self._queued_changes) < MAX_PENDING_CHANGES:
                self._queued_changes.append(changes)
            else:
                self._has_overflown = True
            if self._thread is None:
                self._start()
            if self._is_napping:
                return
            if not self._working.acquire(blocking=False):
                self._changed.notify()
                return
        try:
            if self._may_send_at_once(now := time.monotonic()):
                self._work(now)
            else:
                with self._changed:
                    self._changed.notify()
        finally:
            self._working.release()

    def publish_heads(self, heads: Mapping[int, int]) -> None:
        """Publish the new heads of streams, {stream: head}; free where no node listens."""
        if heads and not self._is_in_vain():
            self.publish([stream_change(stream_id, head, closed=False) for stream_id, head in heads.items()])

    @property
    def may_announce(self) -> bool:
        """Return whether it is worth a call of `announce_head`, at a glance: without the lock."""
        return self._senders.notify_channel is not None and self._may_send_at_once(time.monotonic())

    def announce_head(self, stream_id: int) -> tuple[str, bytes] | None:
        """Return the channel of NOTIFY, and the message with marks in place of the head, by which the caller itself
        announces over its own connection that the stream has grown; None where it has to publish the head."""
        if self._is_in_vain() or self._working.locked():
            return None
        with self._working:  # else an exception of a signal handler could be raised between `acquire` and `try`
            channel, now = self._senders.notify_channel, time.monotonic()
            if channel is None or self._queued_changes or not self._may_send_at_once(now):
                return None
            if (message := self._machine.announce_head(stream_id, now)) is None:
                return None
            self._rest_at = now + REST_S
            self.sent += 1
            return channel, message

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what was published, within that time, then leave and close everything; harmless when repeated."""
        with self._changed:
            self._close_by = min(self._close_by, time.monotonic() + timeout_s)
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s + GRACE_S)

    def _may_send_at_once(self, now: float) -> bool:
        """Return whether there is nothing to do but to send, and the rate allows it."""
        is_open = self._machine.status is NotificationPublisherStatus.OPEN
        is_left_to_thread = self._is_closing or self._has_overflown or self._directory_endpoints is not None
        is_due = self._machine.ready_at <= now < min(self._refresh_at, self._rest_at)
        return is_open and is_due and not is_left_to_thread

    def _is_in_vain(self) -> bool:
        return self._owner.is_forked or self._is_closing or time.monotonic() < self._deaf_until

    # --- the thread -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="sublet notification publisher", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process ends, or may have no more threads
            log.warning("notification publisher not started: %s", error)
            self._is_closing = True
        else:
            self._thread = thread

    def _run(self) -> None:
        wake_at = math.inf
        while self._wait(wake_at):
            with self._working:
                wake_at = self._work(time.monotonic())
        with self._working:
            self._send(PublisherCloseRequested(), now := time.monotonic())
            self._senders.close(max(FLUSH_S, self._close_by - now))

    def _wait(self, wake_at: float) -> bool:
        """Wait until there is something to do and the rate allows it; return False when it is over."""
        with self._changed:
            while True:
                now = time.monotonic()
                has_work = bool(self._queued_changes) or self._directory_endpoints is not None
                is_early = now < self._machine.ready_at and not self._is_closing
                if has_work and not is_early:
                    return True
                if not has_work and self._is_over():
                    return False
                deadline = self._machine.ready_at if is_early else min(wake_at, self._close_by)
                if deadline <= now:
                    return True
                self._is_napping = is_early  # no call need wake it then
                self._changed.wait(None if deadline == math.inf else deadline - now)
                self._is_napping = False

    def _is_over(self) -> bool:
        """Return whether nothing is left to do before closing: changes that wait for the directory are, while there is
        time."""
        is_waiting = self._is_refreshing and self._machine.status is NotificationPublisherStatus.WAITING
        return self._is_closing and not (is_waiting and time.monotonic() < self._close_by)

    def _work(self, now: float) -> float:
        """Execute what is due; return when to call again at the latest."""
        with self._changed:
            queued_changes, has_overflown, endpoints = (
                list(self._queued_changes),
                self._has_overflown,
                self._directory_endpoints,
            )
            self._queued_changes.clear()
            self._has_overflown, self._directory_endpoints = False, None
        if queued_changes:
            self._rest_at = now + REST_S
            self._send(ChangesQueued(tuple(change for changes in queued_changes for change in changes)), now)
            self._refresh_if_due(now)
        if endpoints is not None:
            self._open_senders(endpoints, now)
        if has_overflown:
            self._restart_machine(now)
        if now >= self._rest_at:
            self._close_idle_senders(now)
        if self._machine.status is NotificationPublisherStatus.WAITING and self._machine.has_pending:
            self._refresh_if_due(now)  # the last read may have failed
            return self._refresh_at
        return self._send(Tick(), now)

    def _send(self, event: Event, now: float) -> float:
        outcome = self._machine.decide(event, now)
        for message in outcome.sends:
            self.sent += self._senders.send(message)
        return math.inf if outcome.wake_at is None else min(outcome.wake_at, self._rest_at)

    def _make_machine(self) -> NotificationPublisherMachine:
        return NotificationPublisherMachine(self._publisher, secrets.token_hex(6), self._settings)

    def _restart_machine(self, now: float) -> None:
        self._machine = self._make_machine()
        if self._senders:
            self._send(NotificationSendersOpened(self._senders.payload_limit), now)

    def _close_idle_senders(self, now: float) -> None:
        self._send(PublisherCloseRequested(), now)
        self._senders.close()
        self._machine = self._make_machine()
        self._refresh_at, self._rest_at = -math.inf, math.inf

    # --- endpoints --------------------------------------------------------------------------------------------------

    def _refresh_if_due(self, now: float) -> None:
        if now < self._refresh_at:
            return
        self._refresh_at = now + self._settings.endpoint_refresh_interval_s
        if self._is_refreshing:
            return
        self._is_refreshing = True
        try:
            threading.Thread(target=self._read_directory, name="sublet directory", daemon=True).start()
        except RuntimeError:
            self._is_refreshing = False

    def _read_directory(self) -> None:
        """Read the directory in a thread of its own, so that a slow database does not delay known nodes."""
        endpoints: list[str] | None = None
        try:
            with connect(
                self._url, application_name="sublet directory", receive_timeout_s=READ_TIMEOUT_S
            ) as connection:
                endpoints = node_directory.list_notify_endpoints(connection)
        except (psycopg.Error, SubletError, OSError) as error:  # the last: no more files
            if self._log_throttle.acquire("directory") is not None:
                log.info("node directory not read, new nodes not notified: %s", error)
        with self._changed:
            self._directory_endpoints, self._is_refreshing = endpoints, False
            self._changed.notify()

    def _open_senders(self, endpoints: list[str], now: float) -> None:
        """Open senders to these endpoints; if they have changed, a hello is sent to all of them."""
        opened = self._senders.set_endpoints(endpoints)
        if not self._senders:
            self._machine = self._make_machine()
            self._deaf_until = self._refresh_at
        elif opened:
            self._send(NotificationSendersOpened(self._senders.payload_limit), now)


shared_publishers: dict[str, NotificationPublisher] = {}
"""This process's publishers, by the URL of the database."""

_inherited: list[NotificationPublisher] = []
"""Of the processes that this one was forked from: never released, as that might close the parent's sockets."""

_sharing = threading.Lock()


def shared_publisher(url: str) -> NotificationPublisher:
    """Return this process's publisher for that database, which is closed when the process ends."""
    with _sharing:
        if url not in shared_publishers:
            shared_publishers[url] = NotificationPublisher(url, settings=NotifySettings.from_env())
        return shared_publishers[url]


def publish_once(url: str, changes: Sequence[ObjectChange], timeout_s: float = CLOSE_S) -> None:
    """Publish and leave, for a process that ends at once; as far as it goes out in time. Never raise."""
    try:
        notifier = NotificationPublisher(url, settings=NotifySettings.from_env())
        notifier.publish(changes)
        notifier.close(timeout_s)
    except Exception:
        log.exception("notifications not published")


def _close_all() -> None:
    for notifier in list(shared_publishers.values()):
        notifier.close(CLOSE_S / 2)


def _forget_parents() -> None:
    global _sharing
    _inherited.extend(shared_publishers.values())
    shared_publishers.clear()
    _sharing = threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_parents)


class _OpenSender(Struct, frozen=True):
    """A sender of one driver, to these endpoints."""

    sender: NotificationSender
    endpoints: tuple[str, ...]
    payload_limit: int | None
    notify_channel: str | None


class NotificationSenders:
    """The senders of all drivers. Not thread-safe. A driver that is unavailable in this process, or fails, is logged
    and affects no other."""

    def __init__(self, url: str, load: Callable[[str], NotificationDriverFactory]) -> None:
        self._url, self._load = url, load
        self._senders: dict[str, _OpenSender] = {}
        self._drivers: dict[str, NotificationDriver | None] = {}
        self._log_throttle = LogThrottle()

    def __bool__(self) -> bool:
        """Return whether any sender is open."""
        return bool(self._senders)

    @property
    def payload_limit(self) -> int | None:
        """Return the longest message that all senders accept, in bytes; None: any."""
        limits = (opened.payload_limit for opened in self._senders.values())
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def notify_channel(self) -> str | None:
        """Return the channel of NOTIFY that reaches all endpoints; None if there is none."""
        channels = {opened.notify_channel for opened in self._senders.values()}
        return channels.pop() if len(channels) == 1 else None

    def set_endpoints(self, endpoints: Iterable[str], flush_s: float = FLUSH_S) -> bool:
        """Open senders to these endpoints, and close others; return True if one was opened."""
        endpoints_by_driver: dict[str, list[str]] = {}
        for endpoint in endpoints:
            endpoints_by_driver.setdefault(registry.driver_name(endpoint), []).append(endpoint)
        opened = [self._open(name, tuple(sorted(addresses))) for name, addresses in endpoints_by_driver.items()]
        for name in self._senders.keys() - endpoints_by_driver.keys():
            self._close(name, self._senders.pop(name).sender, flush_s)
        return any(opened)

    def send(self, message: bytes) -> int:
        """Send by all senders; return how many accepted it."""
        return sum(self._send(name, opened.sender, message) for name, opened in self._senders.items())

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Close all senders; others may be opened later."""
        self.set_endpoints((), flush_s)

    def _send(self, name: str, sender: NotificationSender, message: bytes) -> bool:
        try:
            sender.send(message)
        except Exception as error:  # noqa: BLE001 - a driver that breaks the rules must not silence the others
            self._log_failure(name, "notification not sent: driver=%s: %s", error)
            return False
        return True

    def _open(self, name: str, endpoints: tuple[str, ...]) -> bool:
        previous, driver = self._senders.get(name), self._get_driver(name)
        if driver is None or (previous and previous.endpoints == endpoints):
            return False
        try:
            if not driver.capabilities.is_push:
                return False
            limit, channel = driver.capabilities.payload_limit, driver.capabilities.notify_channel
            self._senders[name] = _OpenSender(
                driver.open_sender(endpoints), endpoints, None if limit is None else int(limit), channel
            )
        except Exception as error:  # noqa: BLE001 - whatever its trouble is, the others go on
            self._log_failure(name, "notification sender not opened: driver=%s: %s", error)
            return False
        if previous:
            self._close(name, previous.sender)
        return True

    def _close(self, name: str, sender: NotificationSender, flush_s: float = FLUSH_S) -> None:
        try:
            sender.close(flush_s)
        except Exception as error:  # noqa: BLE001 - likewise
            self._log_failure(name, "notification sender not closed: driver=%s: %s", error)

    def _get_driver(self, name: str) -> NotificationDriver | None:
        """Return the driver; None if it is unavailable in this process: it is not tried again."""
        if name not in self._drivers:
            try:
                self._drivers[name] = self._load(name)(self._url)
            except Exception as error:  # noqa: BLE001 - it may be another package's, and raise anything
                self._log_failure(name, "notification driver not loaded: driver=%s: %s", error)
                self._drivers[name] = None
        return self._drivers[name]

    def _log_failure(self, name: str, text: str, error: Exception) -> None:
        if self._log_throttle.acquire(name) is not None:
            log.warning(text, name, error)
