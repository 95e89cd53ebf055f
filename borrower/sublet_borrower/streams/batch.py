"""The batch that a session gives its user: consecutive messages of one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pyarrow as pa
from msgspec import Struct

from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream, StepBoundaryProgress
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.limits import to_integer
from sublet_storage.util import arrow_compute as pc

BeginTransaction = Callable[["Batch"], AbstractContextManager[psycopg.Connection[Any]]]
"""The session's part in `Batch.transaction`."""

CheckOutcome = Callable[[int, int, int], None]
"""Called with stream, grant and ticket of a batch before it is acknowledged by other than its transaction."""


class BatchAttempts(Struct):
    """What became of a batch so far, however often it was given out. `has_transaction`: one was begun for it, or for a
    part of it."""

    failures: int = 0
    has_transaction: bool = False


class Batch:
    """Messages of one stream at offsets in [first, end), those that match the filter.

    `table`: Arrow, columns topic, key, value, headers, timestamp, epoch, stream, offset. `grant_id` is the fencing
    token: it only grows per stream, and a larger one means that the stream has another holder. It is also in the
    metadata of the table's schema, as `sublet.grant_id` beside `sublet.stream_id`.
    """

    def __init__(
        self,
        table: pa.Table,
        first: int,
        end: int,
        granted: GrantedStream,
        acknowledge: Callable[[GrantedStream, int], None] | None,
        progressed: Callable[[GrantedStream, int, int], None] | None = None,
        transact: BeginTransaction | None = None,
        ticket: int | None = None,
        step_end: StepBoundaryProgress | None = None,
        check_outcome: CheckOutcome | None = None,
    ) -> None:
        token = {"sublet.stream_id": str(granted.stream_id), "sublet.grant_id": str(granted.grant_id)}
        self.table, self.first, self.end = table.replace_schema_metadata(token), first, end
        self.stream_id, self.grant_id = granted.stream_id, granted.grant_id
        self._granted, self._acknowledge, self._progressed = granted, acknowledge, progressed
        self._transact, self._check_outcome = transact, check_outcome
        self._delegate_ack: Callable[[Batch, int | None], None] | None = None
        """Called by `ack` instead of acknowledging it, where the session has a thread of its own."""
        self._source, self._row = self, 0
        self.ticket = first if ticket is None else ticket
        self.step_end = step_end
        self.committed = False
        """Whether a transaction with its progress was committed: then it must not be worked on again."""
        self._recovered_rows = range(0)
        self.attempts = BatchAttempts()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        return f"Batch(stream {self.stream_id}, offsets [{self.first}, {self.end}), {len(self)} messages)"

    @property
    def positions(self) -> dict[int, tuple[int, int]]:
        """Return {stream: (first offset, offset after the last)}."""
        return {self.stream_id: (self.first, self.end)}

    @property
    def grant_key(self) -> GrantSecret:
        """Return the key that the database requires to move the progress of the batch's grant; `reveal` returns its
        bytes.
        """
        return self._granted.grant_key

    @property
    def completes_epochs(self) -> bool:
        """Return whether, in an atomic group, the epochs in it and in the batches of its stream before it end with it.

        Progress moves behind batches that do, and so may a transaction.
        """
        return self.step_end is not None

    @property
    def is_atomic(self) -> bool:
        """Return whether it is of a group that is atomic."""
        return isinstance(self._granted, CompleteEpochStream)

    @property
    def next_offset(self) -> int:
        """Return the position of its stream once it is done."""
        return self.end if self.step_end is None else self.step_end.position

    @property
    def consumed_frontier(self) -> ConsumedFrontier | None:
        """Return, in an atomic group, what is consumed in entire epochs after it."""
        return None if self.step_end is None else self.step_end.consumed

    @property
    def is_lost(self) -> bool:
        """Return whether the stream was taken away without this session's final progress: its new holder will get these
        messages again.
        """
        return self._granted.is_lost

    @property
    def is_outstanding(self) -> bool:
        """Return whether it is still to be done, and by this session."""
        return not self._granted.is_ended and self.ticket in self._granted.outstanding

    @property
    def is_done(self) -> bool:
        """Return whether it was acknowledged while its stream was this session's, or, in an atomic group, comes again
        in other batches."""
        return not self._granted.is_ended and self.ticket not in self._granted.outstanding

    @property
    def has_uncommitted_transaction(self) -> bool:
        """Return whether a transaction was begun for it, or for a part of it, and not all of it is known to be
        committed.
        """
        return self.attempts.has_transaction and not self.committed and self.count_rows_done() < len(self)

    @property
    def is_recovered(self) -> bool:
        """Return whether a transaction committed it whose outcome was found out later, so that its user will still
        retry it.
        """
        known = self._source._recovered_rows
        return known.start <= self._row < self._rows.stop <= known.stop

    def transaction(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Return a transaction on the messages' database in which the user's output and this batch's progress are
        committed together: exactly once. An exception inside rolls it back, and the batch is still to be done.

        Raise `GrantLost` where the stream has another holder by now: nothing was written, and its new holder has the
        messages. `DatabaseUnreachable`: nothing was written, try the batch again. `UnknownOutcome`: try it again, which
        finds out the outcome. `UsageError` if batches of the stream that came before it, or rows of the batch before a
        part of it, are not acknowledged, or its progress is committed already.
        """
        if self._transact is None:
            raise UsageError(f"{self!r} belongs to no session that could commit its progress.")
        return self._transact(self)

    def ack(self, up_to_offset: int | None = None) -> None:
        """Acknowledge all of it. Polling for the next batch does this too, unless the session has auto_ack off or a
        transaction was begun for the batch, or a part of it, and not all of it is committed.

        The stream's progress moves behind it once all batches before it are acknowledged as well. `up_to_offset`: only
        what lies before this offset is done, the rest is still to be done. Acknowledging a batch again has no effect.
        Raise `UsageError`, once, where a transaction for it, whose outcome was unknown, turns out not to have been
        committed, and `UnknownOutcome` where that is not known yet. Of an `AsyncSession`, whose `ack` waits for
        nothing, `poll` raises these, or `ack` of the batch when it is called again, or `close`.
        """
        if up_to_offset is not None:
            up_to_offset = self._check_offset(up_to_offset)
        if self._delegate_ack is None:
            self.acknowledge(up_to_offset)
        else:
            self._delegate_ack(self, up_to_offset)

    def acknowledge(self, up_to_offset: int | None = None, *, is_committed: bool = False) -> None:
        """Acknowledge it as `ack` does, on the session's thread. `is_committed`: by its transaction."""
        end = self.end if up_to_offset is None else min(up_to_offset, self.end)
        is_all, progressed = end == self.end, self._progressed if end > self.first else None
        if self._acknowledge is None or not (is_all or progressed):
            return
        if self._check_outcome is not None and not is_committed:
            self._check_outcome(self.stream_id, self.grant_id, self.ticket)
        if not is_all and progressed is not None:
            progressed(self._granted, self.ticket, end)
        elif self._acknowledge is not None:  # else the outcome has done it
            self._acknowledge(self._granted, self.ticket)
            self._acknowledge = None

    def _check_offset(self, up_to_offset: object) -> int:
        """Return it as an int. Raise `UsageError`: a NaN would acknowledge everything, as it is less than nothing."""
        if (offset := to_integer(up_to_offset)) is not None:
            return offset
        raise UsageError(
            f"{self!r}: up_to_offset {ascii(up_to_offset)[:60]} is no offset, so that nothing is acknowledged. Give the"
            " offset behind the last message that is done, as a whole number."
        )

    def slice(self, start: int, count: int) -> Batch:
        """Return rows [start, start + count) as a batch of their own; acknowledging it has no effect, its transaction
        has.
        """
        rows = self.table.slice(start, count)
        first = end = self.first
        if rows.num_rows:
            offsets = rows.column("offset")
            first, end = offsets[0].as_py(), offsets[-1].as_py() + 1
        part = Batch(rows, first, end, self._granted, None, transact=self._transact, ticket=self.ticket)
        part._source, part._row = self._source, self._row + min(start, len(self))
        return part

    def count_rows_done(self) -> int:
        """Return how many of its rows are done."""
        done = self._granted.outstanding.get(self.ticket, self.first)
        return 0 if done <= self.first else pc.sum(pc.less(self.table.column("offset"), done)).as_py() or 0

    def rest(self) -> Batch:
        """Return what is still to be done of it, all or its last rows, as a batch in its place: another object, as a
        variable that still holds this one does not show that it was received again."""
        rows_done, first = self.count_rows_done(), self._granted.outstanding.get(self.ticket, self.first)
        calls = self._acknowledge, self._progressed, self._transact
        facts = self.ticket, self.step_end, self._check_outcome
        rest = Batch(self.table.slice(rows_done), first, self.end, self._granted, *calls, *facts)
        rest._delegate_ack, rest.attempts = self._delegate_ack, self.attempts
        rest._source, rest._row = self._source, self._row + rows_done
        return rest

    def is_same_as(self, batch: Batch) -> bool:
        """Return whether it is the same work, given out again or not."""
        return self._granted is batch._granted and self.ticket == batch.ticket

    def is_from(self, assignment: object) -> bool:
        """Return whether the session of this assignment has given it out."""
        return self._granted.assignment is assignment

    def join_transaction(self, together: Iterable[Batch]) -> None:
        """Check that a transaction may have its progress and that of the others in `together`. Raise `UsageError`."""
        if self.committed:
            raise UsageError(
                f"{self!r}: its progress is committed already. One transaction does all of a batch's work."
            )
        if isinstance(self._granted, CompleteEpochStream) and self.ticket in self._granted.withdrawn:
            raise UsageError(
                f"{self!r}: a block that follows in its epochs cannot be decoded. Those before that block come again in"
                " other batches: leave out all that are not is_outstanding."
            )
        if self._source._acknowledge is None or self.is_done:
            raise UsageError(f"{self!r} is acknowledged already: its progress may be durable without this transaction.")
        of_stream = [batch for batch in together if batch._granted is self._granted]
        if self.is_atomic and not max(of_stream, key=lambda batch: batch.ticket).completes_epochs:
            raise UsageError(
                f"{self!r}: its epochs go on in the next batch of its stream, and progress moves only behind whole"
                " epochs. Give all batches up to the one that completes_epochs to one session.transaction()."
            )
        with_it = {batch._source.ticket for batch in of_stream}
        outstanding = self._granted.outstanding.copy()
        earlier_tickets = [ticket for ticket in outstanding if ticket < self._source.ticket and ticket not in with_it]
        if earlier_tickets:
            raise UsageError(
                f"{self!r}: the batch of its stream that begins at offset {outstanding[min(earlier_tickets)]} is still"
                " to be done. Acknowledge that one first, or give both to one session.transaction()."
            )
        self._source._check_rows(of_stream)

    def begin_transaction(self) -> None:
        """Note that its user processes it in transactions, also if this one is refused: only they, or `ack`,
        acknowledge it.
        """
        self._source.attempts.has_transaction = True

    def _check_rows(self, of_stream: Iterable[Batch]) -> None:
        """Raise `UsageError` unless its parts are the next rows to be done, without a gap, each once, and all of them
        if a later batch follows.
        """
        rows_done, offsets = self.count_rows_done(), self.table.column("offset")
        for part in sorted((part for part in of_stream if part._source is self), key=lambda part: part._row):
            if part._row < rows_done or not len(part):
                detail = "there is nothing in it"
                if len(part):
                    last = offsets[rows_done - 1].as_py()
                    detail = f"messages up to offset {last} are done already, or by another part of this transaction"
                raise UsageError(
                    f"{part!r}: {detail}. Give the transaction a part of what is left: batch.slice({rows_done}, ...) "
                    "of the batch as it came first."
                )
            if part._row > rows_done:
                self._refuse_gap(part, offsets[rows_done].as_py())
            rows_done += len(part)
        if rows_done < len(self) and (later := [batch for batch in of_stream if batch.ticket > self.ticket]):
            self._refuse_gap(later[0], offsets[rows_done].as_py())

    def _refuse_gap(self, part: Batch, offset: int) -> None:
        raise UsageError(
            f"{part!r}: offset {offset}, which comes before it, is still to be done, and would be passed over. Do the "
            "parts of a batch in their order, or give them to one session.transaction()."
        )

    @property
    def _rows(self) -> range:
        """Return its rows, as numbered in the batch that it is a slice of."""
        return range(self._row, self._row + len(self))

    def complete_transaction(self, *, recovered: bool = False) -> None:
        """Note that its transaction is committed. A slice includes the rows before it. `recovered`: its user does not
        have the outcome.
        """
        self.committed, known = True, self._source._recovered_rows
        if recovered:
            first = min(known.start, self._row) if known else self._row
            self._source._recovered_rows = range(first, max(known.stop, self._rows.stop))
        is_all = self._rows.stop == len(self._source)
        self._source.acknowledge(None if is_all else self.end, is_committed=True)

    def forget_recovery(self) -> None:
        """Note that its user has tried it again."""
        known = self._source._recovered_rows
        self._source._recovered_rows = range(max(self._rows.stop, known.start), known.stop)
