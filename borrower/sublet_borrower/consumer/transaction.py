"""Transactions on the messages' database that commit a user's output and progress together.

    for batch in session:
        with batch.transaction() as connection:
            connection.execute("insert into totals ...")

Progress is written inside that transaction, at its end, under the batch's grant id, and rejected when the stream has
another holder: so each message has its effect exactly once, even after a crash. The tables must be in the same
database; for other sinks `batch.grant_id` is the fencing token.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import psycopg
from msgspec import Struct

from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome, UsageError
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.db.user_transaction import user_transaction
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.consumer_progress import PostgresTransactionId

Connection = psycopg.Connection[Any]

RESOLVE_INTERVAL_S = 1.0
"""How often a session that waits queries the outcome of a transaction that is in doubt."""


class TransactionalBatch(Protocol):
    """The part of a batch that a transaction uses."""

    @property
    def stream_id(self) -> int: ...

    @property
    def grant_id(self) -> int: ...

    @property
    def ticket(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    @property
    def grant_key(self) -> GrantSecret: ...

    @property
    def consumed_frontier(self) -> ConsumedFrontier | None: ...

    def complete_transaction(self, *, recovered: bool) -> None: ...


class _Doubt(Struct):
    """A transaction whose commit was begun, until its batches know its outcome. `is_committed`: whether it was
    committed, once that is known.
    """

    batches: Sequence[TransactionalBatch]
    furthest: Sequence[TransactionalBatch]
    attempt: PostgresTransactionId
    was_committed: bool | None = None


class _RollBack(Exception):
    """An exception that rolls a transaction back."""


class ProgressTransactions:
    """The one connection for all transactions of a session, made when first needed. Not thread-safe, as a session is
    not.

    `url`: None where a session has no database, and so no transactions. `group_id` returns the id of the group that has
    granted the streams, `batch_s` is how long a user may take for a batch.

    A transaction is in doubt from before its commit until its batches are marked as done. If that is interrupted, by a
    lost answer or an exception of a signal handler, nothing else is done with any batch before `find_out` has returned
    the outcome.
    """

    def __init__(self, url: str | None, group_id: Callable[[], int], batch_s: float) -> None:
        self._url, self._group_id = url, group_id
        self._idle_s = consumer_progress.compute_idle_limit_s(batch_s)
        self._reconnecting = ReconnectingConnection(self._connect)
        self._open: frozenset[tuple[int, int, int]] | None = None
        """The batches of the transaction that is open, as in `_not_committed`."""
        self._doubt: _Doubt | None = None
        self._not_committed: set[tuple[int, int, int]] = set()
        """(stream, grant, ticket) of what raised `UnknownOutcome` and was not committed, or not begun, until its user
        knows."""
        self._tried_at = -math.inf

    @contextlib.contextmanager
    def run(self, batches: Sequence[Batch]) -> Iterator[Connection]:
        """Open a transaction for these batches, as `begin` does, once the outcome of the one before is known. If that
        was committed the batches are done, and this transaction is rolled back.
        """
        if self._url is None:
            raise UsageError(
                "a transaction is on the messages' database, and this session goes through nodes. Make it with access "
                "to the database, with transport='database'; for sinks of your own `batch.grant_id` is the fencing "
                "token."
            )
        _check_batches(batches)
        for batch in batches:
            batch.begin_transaction()
        not_begun = {_get_key(batch) for batch in batches if not self._is_of_doubt(batch)}
        try:
            self.find_out()
        except UnknownOutcome:
            self._not_committed |= not_begun  # their block does not run
            raise
        for batch in batches:
            self.forget_refusal(batch)
        if committed := [batch for batch in batches if batch.is_recovered]:
            _check_all_committed(committed, batches)
            with self.rolled_back() as connection:
                yield connection
            for batch in committed:
                batch.forget_recovery()
            return
        for batch in batches:
            batch.join_transaction(batches)
        with self.begin(batches) as connection:
            yield connection

    @contextlib.contextmanager
    def begin(self, batches: Sequence[TransactionalBatch]) -> Iterator[Connection]:
        """Open a transaction that ends with the progress of these batches, which are then settled; an exception inside
        rolls it back. No transaction may be in doubt.

        Raise `GrantLost` where a stream has another holder by now, and `DatabaseUnreachable`: both mean that nothing
        was written. After a commit that lost its connection the server is queried for the outcome; only where that is
        impossible too `UnknownOutcome` is raised. `UsageError`: the block has ended the transaction.
        """
        furthest = _find_furthest(batches)
        with self._use_connection(batches) as connection:

            def advance() -> None:
                for batch in furthest:
                    facts = (batch.stream_id, batch.grant_id, batch.grant_key, batch.next_offset)
                    attempt = consumer_progress.advance(
                        connection, self._group_id(), *facts, consumed=batch.consumed_frontier
                    )
                self._doubt = _Doubt(batches, furthest, attempt)

            try:
                with user_transaction(connection, advance):
                    yield connection
                assert self._doubt is not None
                self._doubt.was_committed = True
            except psycopg.Error as error:
                if not connection.closed:
                    self._doubt = None  # the server has answered that it was rolled back
                    raise
                if self._doubt is None or not self._is_committed(error):
                    raise DatabaseUnreachable(
                        f"the connection to Postgres was lost before the commit, nothing was written: {error}. The "
                        "batch is still to be done: try it again."
                    ) from error
            except BaseException:
                if self._doubt is not None:
                    connection.close()  # in the middle of the commit: it is found out before anything else is done
                raise
        self._apply_outcome(recovered=False)

    @contextlib.contextmanager
    def rolled_back(self) -> Iterator[Connection]:
        """Open a transaction that is always rolled back, because an earlier one has done its work. Raise
        `DatabaseUnreachable` where it cannot be run to its end."""

        def roll_back() -> None:
            raise _RollBack

        with self._use_connection() as connection:
            try:
                with contextlib.suppress(_RollBack), user_transaction(connection, roll_back):
                    yield connection
            except psycopg.Error as error:
                if not connection.closed:
                    raise
                raise DatabaseUnreachable(
                    f"the connection to Postgres was lost, and what was committed before stays: {error}."
                ) from error

    def is_in_doubt(self, stream_id: int, ticket: int | None = None) -> bool:
        """Return whether the outcome of a transaction of that batch, or of any batch of the stream, is unknown."""
        doubt = self._doubt
        return (
            doubt is not None
            and doubt.was_committed is None
            and any(batch.stream_id == stream_id and ticket in (None, batch.ticket) for batch in doubt.batches)
        )

    def check_outcome(self, stream_id: int, grant_id: int, ticket: int) -> None:
        """Find out the outcome of the batch's transaction, where it is in doubt, before the batch is acknowledged.
        Raise `UsageError` while it is open, and, once, if it was not committed, and `UnknownOutcome`.
        """
        if self._open is not None and (stream_id, grant_id, ticket) in self._open:
            raise UsageError(
                f"the batch of stream {stream_id} at offset {ticket}: its transaction is open, and commits its "
                "progress at the end of the block. Leave `ack` out: rolled back, it would count as done."
            )
        if self.is_in_doubt(stream_id, ticket):
            self.find_out()
        if (stream_id, grant_id, ticket) in self._not_committed:
            self._not_committed.remove((stream_id, grant_id, ticket))
            raise UsageError(
                f"the batch of stream {stream_id} at offset {ticket}: its transaction, whose outcome was unknown, was "
                "not committed. Do the batch again; to pass its messages over, acknowledge it once more."
            )

    def forget_refusal(self, batch: TransactionalBatch) -> None:
        """Note that its user does the batch again: to acknowledge it after that is not refused."""
        self._not_committed.discard(_get_key(batch))

    def find_out(self, timeout_s: float = consumer_progress.OUTCOME_TIMEOUT_S) -> bool:
        """Return whether the transaction in doubt was committed, and record that in its batches; False if none is in
        doubt.

        Raise `UnknownOutcome` where it cannot be known yet.
        """
        if self._doubt is None:
            return False
        if self._doubt.was_committed is None:
            self._doubt.was_committed = self._ask(self._doubt, timeout_s)
        return self._apply_outcome(recovered=True)

    def resolve(self, interval_s: float = 0.0) -> None:
        """Find out an outcome in doubt if that is possible at once, unless it was tried within the interval."""
        if self._doubt is not None and time.monotonic() - self._tried_at >= interval_s:
            with contextlib.suppress(UnknownOutcome):
                self.find_out(0.0)
            self._tried_at = time.monotonic()

    def close(self) -> None:
        """Close the connection; a transaction that is open on it is rolled back."""
        self._reconnecting.close()

    @contextlib.contextmanager
    def _use_connection(self, batches: Sequence[TransactionalBatch] = ()) -> Iterator[Connection]:
        """Yield the connection, for one transaction at a time."""
        if self._open is not None:
            raise UsageError("a transaction of this session is open already: end it before the next begins.")
        try:
            self._open = frozenset(map(_get_key, batches))
            yield self._reconnecting.get_answering_connection()
        finally:
            self._open = None

    def _connect(self) -> BoundedConnection:
        assert self._url is not None, "nothing is begun without a database"
        return connect(
            self._url,
            application_name="sublet transaction",
            idle_in_transaction_timeout_s=self._idle_s,
            own_search_path=False,
        )

    def _is_of_doubt(self, batch: TransactionalBatch) -> bool:
        """Return whether the transaction in doubt has all of that batch, or of that part of one."""
        return self._doubt is not None and any(
            _get_key(other) == _get_key(batch) and other.next_offset >= batch.next_offset
            for other in self._doubt.batches
        )

    def _apply_outcome(self, *, recovered: bool) -> bool:
        doubt = self._doubt
        assert doubt is not None
        if doubt.was_committed:
            for batch in doubt.batches:
                batch.complete_transaction(recovered=recovered)
        else:
            self._not_committed |= {_get_key(batch) for batch in doubt.batches}
        self._doubt = None
        return bool(doubt.was_committed)

    def _is_committed(self, cause: Exception) -> bool:
        """Return whether the transaction whose commit got no answer was committed, queried on a new connection."""
        assert self._doubt is not None
        try:
            self._doubt.was_committed = self._ask(self._doubt, consumer_progress.OUTCOME_TIMEOUT_S)
        except UnknownOutcome as unknown:
            raise unknown from cause
        if not self._doubt.was_committed:
            self._doubt = None
        return self._doubt is not None

    def _ask(self, doubt: _Doubt, timeout_s: float) -> bool:
        try:
            connection = self._reconnecting.get_connection()
            was_committed = consumer_progress.is_committed(connection, doubt.attempt, timeout_s)
            return was_committed is not False and self._is_all_durable(connection, doubt.furthest)
        except (psycopg.Error, DatabaseUnreachable) as error:
            self.close()
            raise UnknownOutcome(
                f"the connection to Postgres was lost during the commit, and cannot be had again to see what became of"
                f" it: {error}. Try the batch again in the same session, which finds out, or look at the tables."
            ) from error

    def _is_all_durable(self, connection: Connection, furthest: Sequence[TransactionalBatch]) -> bool:
        """Return whether the progress of all of them is durable, by those of which it can be known: they were committed
        together, so that one answer holds for all. Raise `UnknownOutcome` where it can be known of none.
        """
        answers = [self._is_durable(connection, batch) for batch in furthest]
        if known := [answer for answer in answers if answer is not None]:
            return all(known)
        self._doubt = None  # for good; a repetition is rejected, as all their grants are over
        raise UnknownOutcome(
            "the connection to Postgres was lost during the commit, and the stream was granted anew since, so that its "
            "outcome is unknown. Look at the tables; what was not committed is its new holder's."
        )

    def _is_durable(self, connection: Connection, batch: TransactionalBatch) -> bool | None:
        """Return whether its progress is durable; None where its grant is over and what came of it is not stored."""
        group_id, frontier = self._group_id(), batch.consumed_frontier
        grant = (batch.stream_id, batch.grant_id, batch.grant_key)
        if frontier is not None:
            consumed = consumer_progress.read_consumed_frontier(connection, group_id, *grant)
            return None if consumed is None else consumed.max_of(frontier) == consumed
        position = consumer_progress.read_position(connection, group_id, *grant)
        return None if position is None else position >= batch.next_offset


def _check_batches(batches: Sequence[object]) -> None:
    if not batches:
        raise UsageError("a transaction without a batch has no progress to commit: name the batches it is for.")
    for batch in batches:
        if not isinstance(batch, Batch):
            raise UsageError(f"{ascii(batch)[:60]} is no batch: name the session's batches, one after another.")


def _check_all_committed(committed: Sequence[Batch], batches: Sequence[Batch]) -> None:
    uncommitted = [batch for batch in batches if batch not in committed]
    if uncommitted:
        raise UsageError(
            f"the transaction whose outcome was unknown was committed: {', '.join(map(repr, committed))} is done with "
            f"it. Do the rest in a transaction without that: {', '.join(map(repr, uncommitted))}."
        )


def _get_key(batch: TransactionalBatch) -> tuple[int, int, int]:
    return batch.stream_id, batch.grant_id, batch.ticket


def _find_furthest(batches: Sequence[TransactionalBatch]) -> list[TransactionalBatch]:
    """Return the last batch under each grant, in the order of streams, in which their rows are locked."""
    ordered = sorted(batches, key=lambda batch: (batch.ticket, batch.next_offset))
    ends = {(batch.stream_id, batch.grant_id): batch for batch in ordered}
    return [ends[grant] for grant in sorted(ends)]
