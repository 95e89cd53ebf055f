"""Ends a wait for a server that does not answer, from another thread.

A server that is frozen keeps its connections open, and the network acknowledges for it: a thread that waits for its
answer waits for as long as it stays so. Shutting the socket down ends that wait with an error, as if the server were
gone. It is done through a descriptor of our own: the connection's may be closed, and its number another's, by then.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg


class Cutoff:
    """Watches over one connection at a time, used by one thread and cut by any.

    The thread that keeps the deadlines begins with the first of them, and sleeps while there is none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None
        self._sleeps_until = -math.inf
        self._ended = False

    def watch(self, conn: psycopg.Connection[Any]) -> None:
        """Look after this connection from now on."""
        self.forget()
        held = socket.socket(fileno=os.dup(conn.fileno()))
        with self._changed:
            self._socket = held

    def forget(self) -> None:
        """Look after none; before the connection is closed or left."""
        with self._changed:
            held, self._socket = self._socket, None
        if held is not None:
            held.close()

    def cut(self) -> None:
        """End what waits for the server now; from any thread, again is harmless."""
        with self._changed:
            self._cut()

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Cut the connection if the body takes longer."""
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._see_to_it(self._deadline)
        try:
            yield
        finally:
            with self._changed:
                self._deadline = None

    def end(self) -> None:
        """Look after nothing any more."""
        self.forget()
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _see_to_it(self, deadline: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name=f"{self._name} cutoff", daemon=True)
            self._thread.start()
        elif deadline < self._sleeps_until:
            self._changed.notify()

    def _keep(self) -> None:
        """Sleeps until the deadline in force when it last looked, met or not: so a met one costs no waking."""
        with self._changed:
            while not self._ended:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._deadline = None
                    self._cut()
                if self._deadline is None:
                    self._sleeps_until = math.inf
                    self._changed.wait()
                else:
                    self._sleeps_until = self._deadline
                    self._changed.wait(self._deadline - time.monotonic())

    def _cut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)
