"""Receives heads from publishers at the database itself, without a node between.

A few processes listen to what publishers send to nodes by LISTEN and NOTIFY: see
`sublet_storage.notify.drivers.listener_slots`. One connection serves all sessions of a process, while it has a listener
slot. A session that is the only one listens on its own thread while it waits: a thread that wakes it would itself have
to be woken first. Else there is a thread that listens for all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
from msgspec import Struct

from sublet_borrower.util.interrupted_lock_release import release_fully
from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.notify.drivers.listener_slots import acquire_listener_slot, decode_heads, direct_listener_slots
from sublet_storage.notify.drivers.postgres import RECEIVE_TIMEOUT_S, PayloadReceiver
from sublet_storage.notify.received_notification_limiter import ReceivedNotificationLimiter
from sublet_storage.util.retry import Backoff
from sublet_storage.util.stoppable_thread import JOIN_TIMEOUT_S, StoppableThread

log = logging.getLogger(__name__)

BACKOFF_INITIAL_S = 1.0
BACKOFF_MAX_S = 300.0
"""Before a try to acquire a slot: a session that soon ends makes none."""

SESSION_GRACE_S = 0.2
"""How long after a session has listened itself the thread leaves that to it."""
TURN_S = 0.05
"""How long a session waits for the thread to leave off."""

OnHeads = Callable[[Mapping[int, int]], None]
"""Called with {stream: head}, of any stream, on the thread that listens."""

OnListening = Callable[[bool], None]
"""Called with whether the process listens: when that changes, on any thread, which it must not block."""


class PostgresHeadListener(StoppableThread):
    """The listener of a process: a thread that acquires a slot, and listens while no session does."""

    def __init__(self, url: str) -> None:
        super().__init__("sublet direct listener")
        self._url = url
        self.handlers: tuple[tuple[OnHeads, OnListening], ...] = ()
        self.is_listening = False
        self._rate = ReceivedNotificationLimiter()
        self._turn = threading.RLock()
        self._receiver: PayloadReceiver | None = None  # for who has the turn
        self._session_listened_at = -math.inf
        self._wait_ender, self._wait_end = socket.socketpair()

    def run(self) -> None:
        backoff = Backoff(BACKOFF_INITIAL_S, BACKOFF_MAX_S)
        self.sleep(backoff.draw_pause_s())
        while not self.is_stopping:
            try:
                with connect(
                    self._url, application_name="sublet direct listener", receive_timeout_s=RECEIVE_TIMEOUT_S
                ) as connection:
                    if acquire_listener_slot(connection):
                        backoff.reset()
                        self._listen_on(connection)
            except (psycopg.Error, SubletError, OSError) as error:  # the last: no more files
                log.info("direct listener not connected, using nodes: %s", error)
            finally:
                self._set_listening(False)
            self.sleep(backoff.draw_pause_s())

    def wait(self, timeout_s: float) -> bool:
        """Listen on the calling thread until something comes, or `end_wait` is called, or the time is over. Return
        False at once where the process does not listen, or has other sessions to listen for."""
        if self._receiver is None or len(self.handlers) != 1:
            return False
        self._session_listened_at = time.monotonic()
        if not self._turn.acquire(blocking=False):
            self.wakeup()
            if not self._turn.acquire(timeout=TURN_S):
                self._session_listened_at = -math.inf
                return False
        try:
            return self._receive(self._wait_end, timeout_s)
        except (psycopg.OperationalError, ValueError):  # the second: it was stopped meanwhile, and has no socket
            self._receiver = None  # for the thread, which connects again
            return False
        finally:
            self._session_listened_at = time.monotonic()
            self._turn.release()

    def end_wait(self) -> None:
        """End the `wait` that a session is in, or the next one. From any thread."""
        with contextlib.suppress(OSError):  # it is stopped, or the socket is full of such requests
            self._wait_ender.send(b"\0", socket.MSG_DONTWAIT)

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Request its end and wait for that for `timeout_s`; harmless when repeated."""
        super().stop(timeout_s)
        if not self.is_alive():
            self._wait_ender.close()
            self._wait_end.close()

    def release_fully(self) -> None:
        """Release the turn after an exception out of `wait` on this thread."""
        release_fully(self._turn.release)

    def _listen_on(self, connection: psycopg.Connection[Any]) -> None:
        """Listen until requested to end; raise `psycopg.OperationalError` when the connection is lost."""
        self._receiver = PayloadReceiver(connection)
        try:
            self._set_listening(True)
            while not self.is_stopping:
                if not self.sleep(max(0.0, self._session_listened_at + SESSION_GRACE_S - time.monotonic())):
                    self._listen()
        finally:
            with self._turn:
                self._receiver = None

    def _listen(self) -> None:
        with self._turn:
            if time.monotonic() < self._session_listened_at + SESSION_GRACE_S:
                return
            if not self._receive(self.wakeup_socket, math.inf):
                raise psycopg.OperationalError("the connection was lost while a session listened")

    def _receive(self, wakeup: socket.socket, timeout_s: float) -> bool:
        """Receive on the thread that has the turn; return False if there is no connection."""
        if self._receiver is None:
            return False
        payloads = self._receiver.receive(wakeup, timeout_s)
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(1024, socket.MSG_DONTWAIT)
        for payload in payloads:
            self.receive(payload, time.monotonic())
        return True

    def receive(self, payload: bytes, now: float) -> None:
        """Pass on the heads of a payload, of as many as a node takes in in a second: polls find the others."""
        heads = decode_heads(payload) if self._rate.take(now) else {}
        for on_heads, _ in self.handlers if heads else ():
            self.call_handler(on_heads, heads)

    def _set_listening(self, is_listening: bool) -> None:
        with _lock:
            has_changed, self.is_listening = self.is_listening != is_listening, is_listening
            for _, on_listening in self.handlers if has_changed else ():
                self.call_handler(on_listening, is_listening)


_open: dict[tuple[str, str], PostgresHeadListener] = {}
"""By URL and schema."""
_lock = threading.Lock()


class HeadFeed(Struct, frozen=True):
    """A handler's part in the listener of its process. `stop` ends it, to be called once; `listener`: None where the
    process has none."""

    stop: Callable[[], None]
    listener: PostgresHeadListener | None = None


def subscribe_heads(url: str, on_heads: OnHeads, on_listening: OnListening) -> HeadFeed:
    """Call `on_heads` with new heads from now on, while the process listens. Raise `InvalidSetting`."""
    if direct_listener_slots() == 0:
        return HeadFeed(lambda: None)
    database = url, resolve_schema_name(opened=url)
    with _lock:
        listener = _open.get(database)
        if listener is None or not listener.is_alive():
            try:
                listener = PostgresHeadListener(url)
                listener.start()
            except (OSError, RuntimeError) as error:  # no more files, or threads, or the process ends
                log.info("direct listener not connected, using nodes: %s", error)
                return HeadFeed(lambda: None)
            _open[database] = listener
        listener.handlers = (*listener.handlers, (on_heads, on_listening))
        if listener.is_listening:
            on_listening(True)

    def stop() -> None:
        with _lock:
            listener.handlers = tuple(each for each in listener.handlers if each[0] is not on_heads)
            is_last = not listener.handlers and _open.get(database) is listener
            if is_last:
                del _open[database]
        listener.end_wait()
        if is_last:
            listener.stop()

    return HeadFeed(stop, listener)


def _forget_parents() -> None:
    """Clear the parent's listeners in a forked child, which has none of their threads."""
    global _lock
    _open.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_parents)
