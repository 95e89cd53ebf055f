"""A connection that times out on the client's clock, and treats read-only servers as unreachable.

A server's timeouts do not end the request of a frozen server process, and TCP's do not either, as its kernel goes on
acknowledging: only the client can stop waiting.

A fork shares every socket: what a child did with its copy would arrive in the midst of its parent's traffic. So a
child's copies of connections lead nowhere.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from sublet_protocol.domain.errors import PositionBeyondHead, TimelineChanged

_ENDED_TRANSACTION = ("25P03", "25P04")
"""For its client's silence, or its length: before 3.2.3 psycopg has no class for the second."""

_T = TypeVar("_T")


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed when no byte of an answer has come for `receive_timeout_s` seconds: it raises
    `psycopg.OperationalError`, and whether the server has executed the request is unknown. As long as the server takes
    bytes of the request it counts as well.

    The same error is raised where a server is read-only, or has ended a transaction for its length or silence, since
    psycopg's own would count as a programming error: a server that is full or was demoted accepts writes again later,
    or another server at the same address does.
    """

    schema: str | None = None
    """Of the tables that it is for."""
    receive_timeout_s: float = float("inf")
    timeline: str | None = None
    """Of the server, with its system identifier: on another, what was committed on this one may be missing. None: its
    user may not see it."""
    _timeline_number: int | None = None
    _silent_since: float | None = None
    _is_waiting = _is_to_close = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._guard = threading.RLock()
        _connections.add(self)

    def timeline_number(self, *, anew: bool = False) -> int:
        """Return the number of the server's timeline, as `timeline_number` of its ids. Requires the schema; the server
        is queried once, and again with `anew`."""
        if self._timeline_number is None or anew:
            ((self._timeline_number,),) = self.execute("select timeline_number()").fetchall()
        return self._timeline_number

    def silent_s(self) -> float:
        """Return for how long no byte has come of an answer that is waited for; 0 while none is. On any thread."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def wait(self, gen: PQGen[_T], *arguments: Any, **keywords: Any) -> _T:
        """Run the base class's wait, resuming the generator at intervals while nothing is received."""
        with self._guard:
            self._is_waiting = True
        try:
            return super().wait(self._wait_bounded(gen), *arguments, **keywords)
        finally:
            with self._guard:
                self._is_waiting = False
                if self._is_to_close:
                    super().close()

    def receive_result(self) -> PGresult:
        """Send the rest of what was sent by libpq's functions, wait for the result of the first statement, or the sync
        behind it, and return it. Raise the error that it is."""
        return self.wait(_receive_result(self.pgconn))

    def close(self) -> None:
        """Close it; while an answer is waited for, on another thread or below a signal handler, end that wait first:
        libpq is at work on what closing would free."""
        with self._guard:
            if self._is_waiting:
                self._is_to_close, self.receive_timeout_s = True, 0.0
            else:
                super().close()

    def _wait_bounded(self, gen: PQGen[_T]) -> Generator[Any, Any, _T]:
        try:
            state, received = next(gen), time.monotonic()
            self._silent_since = received
            while True:
                # Of statements in a pipeline psycopg sends what the socket takes, and then only waits for results: the
                # rest of a long one would never leave.
                is_sending = state == Wait.R and self.pgconn.flush()
                ready, now = (yield Wait.RW if is_sending else state), time.monotonic()
                if ready:
                    self._silent_since = received = now
                    if is_sending and ready == Ready.W:
                        continue
                elif now >= received + self.receive_timeout_s:
                    self._is_to_close = True
                    raise psycopg.OperationalError(
                        f"not a byte has come from Postgres for {now - received:.1f} s, and the connection is closed"
                    )
                state = gen.send(ready)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except psycopg.errors.ReadOnlySqlTransaction as error:
            raise psycopg.OperationalError(
                f"the database is read-only: {error.diag.message_primary}. Turn default_transaction_read_only off, or "
                "give the address of the primary"
            ) from error
        except psycopg.InternalError as error:
            if error.sqlstate not in _ENDED_TRANSACTION:
                raise
            raise psycopg.OperationalError(f"the server ended the connection: {error.diag.message_primary}") from error
        finally:
            self._silent_since = None


def _receive_result(server: PGconn) -> PQGen[PGresult]:
    result: PGresult
    (result,) = yield from generators.execute(server)
    if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.PIPELINE_SYNC):
        raise psycopg.errors.error_from_result(result)
    return result


_connections: weakref.WeakSet[BoundedConnection] = weakref.WeakSet()


def _close_after_fork() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for connection in tuple(_connections):
        with contextlib.suppress(psycopg.OperationalError):  # closed meanwhile
            os.dup2(nowhere, connection.fileno(), inheritable=False)
    os.close(nowhere)
    _connections.clear()


os.register_at_fork(after_in_child=_close_after_fork)


def is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the connection leads to the server itself. A pooler that shares server connections may run it on
    another server process than at its start, and session state there is not this client's alone."""
    return connection.execute("select pg_backend_pid()").fetchall() == [(connection.info.backend_pid,)]


def get_timeline(connection: psycopg.Connection[Any]) -> str | None:
    """Return the timeline of its server; None where it is not known."""
    return connection.timeline if isinstance(connection, BoundedConnection) else None


def has_gone_over(connection: psycopg.Connection[Any], timeline: str | None) -> bool:
    """Return whether its server is on another timeline than this; not where one of them is unknown."""
    current_timeline = get_timeline(connection)
    return None not in (timeline, current_timeline) and timeline != current_timeline


def check_timeline(connection: psycopg.Connection[Any], timeline: str | None, subject: str) -> None:
    """Raise `PositionBeyondHead` where `subject`, positions stored elsewhere, is of another timeline than the server is
    on: a position below the head may have been beyond it once."""
    if has_gone_over(connection, timeline):
        current_timeline = get_timeline(connection)
        raise PositionBeyondHead(
            f"{subject} is of timeline {timeline} of the database, and this is {current_timeline}: a standby was "
            "promoted, or a backup restored, and other messages may lie at its offsets now. Begin again at a time, or "
            f"at earliest. Only where every message is at its offset still, take `timeline` out of {subject}."
        )


def check_timeline_number(connection: BoundedConnection, number: int, subject: str) -> None:
    """Raise `TimelineChanged` where `subject`, from which is read on, is of another timeline than the server is on."""
    # An idle connection may lead to a dead server of the former timeline: so the server is queried.
    if number != connection.timeline_number() and number != connection.timeline_number(anew=True):
        raise TimelineChanged(
            f"{subject} on another timeline of the database: a standby was promoted, or a backup restored, and at its "
            "offsets may lie other messages now."
        )
