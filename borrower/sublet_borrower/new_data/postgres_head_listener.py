"""Receives heads from publishers at the database itself, without a node between.

A few processes listen to what publishers send to nodes by LISTEN and NOTIFY: see
`sublet_storage.notify.drivers.listener_slots`. One thread and one connection serve all sessions of a process, while
it has a listener slot.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

import psycopg

from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.notify.drivers.listener_slots import acquire_listener_slot, decode_heads, direct_listener_slots
from sublet_storage.notify.drivers.postgres import RECEIVE_TIMEOUT_S, receive_payloads
from sublet_storage.notify.received_notification_limiter import ReceivedNotificationLimiter
from sublet_storage.util.retry import Backoff
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)

BACKOFF_INITIAL_S = 1.0
BACKOFF_MAX_S = 300.0
"""Before a try to acquire a slot: a session that soon ends makes none."""

OnHeads = Callable[[Mapping[int, int]], None]
"""Called with {stream: head}, of any stream, on the listener's thread."""

OnListening = Callable[[bool], None]
"""Called with whether the process listens: when that changes, on any thread, which it must not block."""


class PostgresHeadListener(StoppableThread):
    """The listener thread of a process, which listens while it has a slot and tries to acquire one while it has
    none.
    """

    def __init__(self, url: str) -> None:
        super().__init__("sublet direct listener")
        self._url = url
        self.handlers: tuple[tuple[OnHeads, OnListening], ...] = ()
        self.is_listening = False
        self._rate = ReceivedNotificationLimiter()

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
                        self._set_listening(True)
                        for payload in receive_payloads(connection, self):
                            self.receive(payload, time.monotonic())
            except (psycopg.Error, SubletError, OSError) as error:  # the last: no more files
                log.info("direct listener not connected, using nodes: %s", error)
            finally:
                self._set_listening(False)
            self.sleep(backoff.draw_pause_s())

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


def subscribe_heads(url: str, on_heads: OnHeads, on_listening: OnListening) -> Callable[[], None]:
    """Call `on_heads` with new heads from now on, while the process listens. Return the function that ends that, to be
    called once. Raise `InvalidSetting`.
    """
    if direct_listener_slots() == 0:
        return lambda: None
    database = url, resolve_schema_name()
    with _lock:
        listener = _open.get(database)
        if listener is None or not listener.is_alive():
            try:
                listener = PostgresHeadListener(url)
                listener.start()
            except (OSError, RuntimeError) as error:  # no more files, or threads, or the process ends
                log.info("direct listener not connected, using nodes: %s", error)
                return lambda: None
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
        if is_last:
            listener.stop()

    return stop


def _forget_parents() -> None:
    """Clear the parent's listeners in a forked child, which has none of their threads."""
    global _lock
    _open.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_parents)
