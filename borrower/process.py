"""A session and the process that made it: a fork copies the memory, but not the threads, and shares every socket.

What a child did with its parent's session would arrive in the midst of what the parent says. So a child may not use it,
and cannot reach the parent's peers by accident either: its copies of connections to Postgres lead nowhere. (Those of
grpc say nothing there: the threads that would are the parent's.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from typing import Any

import psycopg

from protocol.errors import UsageError

ADVICE = (
    "Make one in this process, which must not be forked from one that has had a session: start it with "
    "multiprocessing's `spawn` method, or fork before the first session is made."
)

_connections: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()


class Home:
    """The process in which it was made."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is another process."""
        return os.getpid() != self.pid

    def check(self, what: str) -> None:
        """Raise `UsageError` if this is another process."""
        if self.is_elsewhere:
            raise UsageError(
                f"{what} was made in process {self.pid}, and this is process {os.getpid()}: a session does not survive "
                f"a fork. {ADVICE}"
            )


def new_agent_id() -> str:
    """A name for an agent's life in this process, telling people where it runs."""
    return f"{socket.gethostname()[:40]}:{os.getpid()}:{secrets.token_hex(6)}".replace(".", "-")


def sever_in_children(connection: psycopg.Connection[Any]) -> None:
    """A forked child's copy of this connection leads nowhere."""
    _connections.add(connection)


def _after_fork() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for connection in tuple(_connections):
        with contextlib.suppress(psycopg.OperationalError):  # closed meanwhile
            os.dup2(nowhere, connection.fileno(), inheritable=False)
    os.close(nowhere)
    _connections.clear()


os.register_at_fork(after_in_child=_after_fork)
