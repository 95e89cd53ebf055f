"""Threads that can be woken from a wait and stopped, and survive errors of handlers."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import ParamSpec

from sublet_storage.util.fork_guard import OwnerProcess
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

log = logging.getLogger(__name__)

P = ParamSpec("P")

JOIN_TIMEOUT_S = 2.0
"""How long a thread that was asked to end is waited for: longer only takes one that is stuck, in a handler or a
connect."""


class StoppableThread(threading.Thread):
    """A daemon thread that ends on request. A fork of its process has a copy of this object and no such thread: there,
    `stop` does nothing, as the event is the parent's."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.owner = OwnerProcess()
        self._wakeup_sender, self.wakeup_socket = socket.socketpair()
        """`wakeup_socket` becomes readable when the thread shall end: to be waited for with what it works on."""
        self._is_stop_requested = threading.Event()
        self._log_throttle = LogThrottle()

    @property
    def is_stopping(self) -> bool:
        """Return whether it was requested to end."""
        return self._is_stop_requested.is_set()

    def log_warning(self, text: str, *arguments: object) -> None:
        """Log a warning; the same text only now and then."""
        if (before := self._log_throttle.acquire(text)) is not None:
            log.warning(text + "%s", *arguments, format_suppressed_count(before))

    def sleep(self, seconds: float) -> bool:
        """Wait for these seconds, or until requested to end; return whether it was."""
        return self._is_stop_requested.wait(seconds)

    def wakeup(self) -> None:
        """Make `wakeup_socket` readable, for a thread that waits for it and clears it by a read."""
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"\0", socket.MSG_DONTWAIT)

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Request its end and wait for that for `timeout_s`; harmless when repeated, and from the thread itself."""
        if self.owner.is_forked:
            return
        self._is_stop_requested.set()
        with contextlib.suppress(OSError):
            self._wakeup_sender.shutdown(socket.SHUT_RDWR)
        if self is not threading.current_thread() and self.ident is not None:
            self.join(timeout_s)
        if not self.is_alive():
            self._wakeup_sender.close()
            self.wakeup_socket.close()

    def call_handler(self, handler: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
        """Call a handler, unless requested to end: what it raises is logged, and the thread goes on."""
        if self.is_stopping:
            return
        try:
            handler(*arguments, **named)
        except Exception as error:
            if self._log_throttle.acquire(type(error).__name__) is not None:
                log.exception("handler failed")
