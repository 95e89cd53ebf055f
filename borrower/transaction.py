"""The user's own transaction on the messages' database: output and progress are committed together, or neither is.

    for batch in session:
        with batch.transaction() as connection:
            connection.execute("insert into totals ...")

Progress is written inside that transaction, at its end, under the batch's grant id, and refused when the stream has
gone to somebody else: so each message has its effect exactly once, whoever crashes when. It takes tables in the same
database; for other sinks `batch.grant_id` is the fencing token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import psycopg

from borrower.process import sever_in_children
from protocol.epochs import ConsumedFrontier
from protocol.errors import DatabaseUnreachable, GrantLost, UsageError
from storage import fence
from storage.connect import UnknownOutcome, connect
from storage.users_transaction import users_transaction

Connection = psycopg.Connection[Any]


class Work(Protocol):
    """What a transaction needs to know of a batch."""

    @property
    def stream_id(self) -> int: ...

    @property
    def grant_id(self) -> int: ...

    @property
    def ticket(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def consumed(self) -> ConsumedFrontier | None: ...


class Transactions:
    """One connection for all transactions of a session, made when first needed. Not thread-safe, as a session is not.

    `group_id` answers the id of the group that lent the streams.
    """

    def __init__(self, url: str, group_id: Callable[[], int]) -> None:
        self._url, self._group_id = url, group_id
        self._connection: Connection | None = None
        self._open = False
        self._in_doubt: set[tuple[int, int, int, int]] = set()

    @contextlib.contextmanager
    def over(self, batches: Sequence[Work]) -> Iterator[Connection]:
        """A transaction that ends with the progress of these batches; an exception inside rolls it back.

        Raises `GrantLost` where a stream is somebody else's by now, and `DatabaseUnreachable`: both mean that nothing
        was written. After a commit that lost its connection the progress is read again to see whether it happened; only
        where that is impossible too `UnknownOutcome` is raised, and the work may be tried again all the same: if the
        first try turns out to have happened, the second one is rolled back in silence. `UsageError`: the block has
        ended the transaction.
        """
        if self._open:
            raise UsageError("a transaction of this session is open already: end it before the next begins.")
        furthest = _furthest(batches)
        connection = self._ready()
        self._open, committing = True, False

        def advance() -> None:
            nonlocal committing
            for batch in furthest:
                facts = (batch.stream_id, batch.grant_id, batch.position)
                fence.advance(connection, self._group_id(), *facts, consumed=batch.consumed)
            committing = True

        try:
            with users_transaction(connection, advance):
                yield connection
        except GrantLost:
            # A try before this one may have happened after all: then this one's work is not wanted, and rolled back.
            if _key(furthest[0]) not in self._in_doubt or not self._is_durable(connection, furthest[0]):
                raise
        except psycopg.OperationalError as error:
            if not connection.closed:
                raise
            if not (committing and self._happened(furthest, error)):
                raise DatabaseUnreachable(
                    f"the connection to Postgres was lost before the commit, nothing was written: {error}. The batch is"
                    " still to be done: try it again."
                ) from error
        finally:
            self._open = False
        self._in_doubt.difference_update(map(_key, furthest))

    def close(self) -> None:
        """Close the connection; whatever is open on it is rolled back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ready(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(
                self._url,
                application_name="sublet transaction",
                idle_in_transaction_timeout_s=None,
                own_search_path=False,
            )
            sever_in_children(self._connection)
        return self._connection

    def _happened(self, furthest: Sequence[Work], cause: Exception) -> bool:
        """Whether the transaction whose commit got no answer was committed, asked on a new connection."""
        try:
            return self._is_durable(self._ready(), furthest[0])
        except (psycopg.OperationalError, DatabaseUnreachable) as error:
            self._in_doubt.update(map(_key, furthest))
            raise UnknownOutcome(
                f"the connection to Postgres was lost during the commit, and cannot be had again to see what became of"
                f" it: {error}. Try the batch again in the same session, which finds out, or look at the tables."
            ) from cause

    def _is_durable(self, connection: Connection, batch: Work) -> bool:
        group_id, wanted = self._group_id(), batch.consumed
        if wanted is not None:
            consumed = fence.consumed(connection, group_id, batch.stream_id, batch.grant_id)
            if consumed is None:
                raise UnknownOutcome(
                    "the connection to Postgres was lost during the commit, and the stream was lent anew since, so that"
                    " nobody can say what became of it. Look at the tables; what was not committed is its new holder's."
                )
            return consumed.later(wanted) == consumed
        found = fence.position(connection, group_id, batch.stream_id, batch.grant_id)
        return found is not None and found >= batch.position


def _furthest(batches: Sequence[Work]) -> list[Work]:
    """The last batch of each stream, in the order of streams, in which their rows are locked."""
    ends = {batch.stream_id: batch for batch in sorted(batches, key=lambda one: (one.ticket, one.position))}
    return [ends[stream_id] for stream_id in sorted(ends)]


def _key(batch: Work) -> tuple[int, int, int, int]:
    return batch.stream_id, batch.grant_id, batch.ticket, batch.position
