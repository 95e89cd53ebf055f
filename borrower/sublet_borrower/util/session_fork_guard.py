"""Keeps a forked process from using its parent's session, and grpc after its parent.

A fork copies the memory, but not the threads, and shares every socket. What a child did with its parent's session would
arrive in the midst of the parent's messages. So a child may not use it, and cannot reach the parent's peers by accident
either: its copies of connections to Postgres lead nowhere, see `sublet_storage.db.bounded_connection`. (Those of grpc
are silent there: their threads are the parent's. So would be each new one: calls hang, or abort the process.)
"""

from __future__ import annotations

import os
import socket

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.messages.agent_secret import AgentSecret
from sublet_storage.util.fork_guard import OwnerProcess

ADVICE = (
    "Make one in this process, which must not be forked from one that has used a session or a feed: start it with "
    "multiprocessing's `spawn` method, or fork before the first is used."
)


class SessionForkGuard(OwnerProcess):
    """The process in which a session was made."""

    hint = ADVICE


_grpc_user: OwnerProcess | None = None


def check_grpc() -> None:
    """Raise `UsageError` in a process that was forked from one that had used grpc."""
    if _grpc_user is not None and _grpc_user.is_forked:
        raise UsageError(
            f"process {os.getpid()} was forked from one that has used a session or a feed: grpc is of no use here. "
            f"{ADVICE}"
        )


def use_grpc() -> None:
    """Note that this process uses grpc. Raise what `check_grpc` raises."""
    global _grpc_user
    check_grpc()
    _grpc_user = OwnerProcess()


def new_agent_key() -> AgentSecret:
    """Draw the key of an agent in this process, whose id shows people where it runs: HOST:PID:HASH."""
    return AgentSecret(f"{socket.gethostname()[:40]}:{os.getpid()}".replace(".", "-"))
