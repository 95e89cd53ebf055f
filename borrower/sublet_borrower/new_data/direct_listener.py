"""Receives heads directly from publishers through the database, for the sessions of this process.

A few processes listen to what publishers notify nodes of by LISTEN and NOTIFY: see
`sublet_storage.notify.drivers.direct_listeners`. One thread and one connection serve all sessions of a process, while
there is a free slot.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Mapping

import psycopg

from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.connect import connect, schema_name
from sublet_storage.notify.drivers.direct_listeners import acquire_listener_slot, decode_heads, direct_listener_slots
from sublet_storage.notify.drivers.postgres import RECEIVE_TIMEOUT_S, receive_payloads
from sublet_storage.util.retry import Backoff
from sublet_storage.util.threads import DriverThread

log = logging.getLogger(__name__)

BACKOFF_INITIAL_S = 1.0
BACKOFF_MAX_S = 300.0
"""Before a try to get a place: a session that soon ends makes none."""

OnHeads = Callable[[Mapping[int, int]], None]
"""Called with {stream: head}, of any streams, on a thread of ours."""


class DirectListener(DriverThread):
    """Listens while it has a place, and tries to get one while it has none."""

    def __init__(self, url: str) -> None:
        super().__init__("sublet shortcut")
        self._url = url
        self.hearers: tuple[OnHeads, ...] = ()

    def run(self) -> None:
        pauses = Backoff(BACKOFF_INITIAL_S, BACKOFF_MAX_S)
        self.sleep(pauses.next_s())
        while not self.is_stopping:
            try:
                with connect(self._url, application_name="sublet shortcut", silence_s=RECEIVE_TIMEOUT_S) as connection:
                    if acquire_listener_slot(connection):
                        pauses.succeeded()
                        for payload in receive_payloads(connection, self):
                            self._notify(decode_heads(payload))
            except (psycopg.Error, SubletError, OSError) as error:  # the last: no more files
                log.info("news comes by way of the nodes only: %s", error)
            self.sleep(pauses.next_s() * random.uniform(0.5, 1.0))

    def _notify(self, heads: Mapping[int, int]) -> None:
        for hearer in self.hearers if heads else ():
            self.call_handler(hearer, heads)


_open: dict[tuple[str, str], DirectListener] = {}
"""By URL and schema."""
_sharing = threading.Lock()


def subscribe_heads(url: str, on_heads: OnHeads) -> Callable[[], None]:
    """Have `on_heads` called from now on; what ends it is returned, and is called once. Raises `InvalidSetting`."""
    if direct_listener_slots() == 0:
        return lambda: None
    database = url, schema_name()
    with _sharing:
        shortcut = _open.get(database)
        if shortcut is None or not shortcut.is_alive():
            try:
                shortcut = DirectListener(url)
                shortcut.start()
            except (OSError, RuntimeError) as error:  # no more files, or threads, or the process ends
                log.info("news comes by way of the nodes only: %s", error)
                return lambda: None
            _open[database] = shortcut
        shortcut.hearers = (*shortcut.hearers, on_heads)

    def stop() -> None:
        with _sharing:
            shortcut.hearers = tuple(each for each in shortcut.hearers if each is not on_heads)
            is_last = not shortcut.hearers and _open.get(database) is shortcut
            if is_last:
                del _open[database]
        if is_last:
            shortcut.stop()

    return stop


def _forget_parents() -> None:
    """A forked child has a copy of these and none of their threads."""
    global _sharing
    _open.clear()
    _sharing = threading.Lock()


os.register_at_fork(after_in_child=_forget_parents)
