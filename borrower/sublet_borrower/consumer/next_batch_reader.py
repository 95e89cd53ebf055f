"""Reads the next batch of a session, a page of one stream at a time."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from sublet_borrower.consumer.group_membership import GroupMembership
from sublet_borrower.consumer.redelivery_queue import RedeliveryQueue
from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_borrower.fetch.stream_fetcher import SessionStreamFetcher
from sublet_borrower.streams.batch import Batch, BeginTransaction
from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.streams.session_assignment import SessionAssignment


class NextBatchReader:
    """Returns what failed first, then reads the streams in turn. Not thread-safe but for `may_redeliver`.

    The batch that was read last is in nobody's hands until `on_given`, or `undo` or `recover`, which go back in its
    stream. `is_draining`: only epochs that were given out in part are read on; it may be set from any thread.
    """

    def __init__(
        self,
        member: GroupMembership[SessionAssignment],
        transactions: ProgressTransactions,
        failed: RedeliveryQueue,
        max_batch_bytes: int,
        *,
        whole_epochs: bool,
    ) -> None:
        self._member, self._transactions, self._failed = member, transactions, failed
        self._assignment = member.assignment
        self._fetcher = SessionStreamFetcher(
            member.subscription, member.reader, member.assignment, max_batch_bytes, whole_epochs=whole_epochs
        )
        self._reading: tuple[GrantedStream, tuple[Any, ...]] | None = None
        self.is_draining = False

    def read_next(self, transact: BeginTransaction) -> tuple[Batch | None, bool]:
        """Read a page of the stream whose turn it is. Return a batch if it has something for this subscription, and
        whether a stream has moved on. One page only: what arrives meanwhile is acted on before the next.

        `transact`: the session's part in the batch's transactions. It is not kept, so that the session is dropped with
        its last reference.
        """
        self._assignment.retry_deferred(time.monotonic())
        if (failed := self._failed.next(self.may_redeliver)) is not None:
            return failed, True
        granted = self._assignment.next_readable(self._may_start)
        if granted is None:
            return None, False
        self._reading = granted, granted.read_state()
        batch, has_moved = self._read(granted, transact)
        self._member.monitor.on_read(granted.stream_id, granted.head)
        if batch is None:
            self._reading = None
        return batch, has_moved

    def on_given(self) -> None:
        """Note that the batch that was read last is in the user's hands."""
        self._reading = None

    def undo(self) -> None:
        """Go back in the stream: the grant was not valid any more when the batch had been read."""
        if self._reading is not None:  # else it is offered again already
            (granted, cursor), self._reading = self._reading, None
            self._assignment.go_back(granted, cursor)
            self._assignment.release_read(granted)

    def recover(self, *, is_given: bool) -> None:
        """Go back in the stream after an exception in the middle of a read, unless its batch was given out."""
        if self._reading is not None and not is_given:
            self._assignment.go_back(*self._reading)
        self._reading = None

    def may_redeliver(self, batch: Batch) -> bool:
        """Return whether a user's call may begin on a batch that is to be given out again. From any thread."""
        is_in_doubt = self._transactions.is_in_doubt(batch.stream_id)
        return not is_in_doubt and self._member.may_continue(batch.stream_id, batch.grant_id)

    def _may_start(self, granted: GrantedStream) -> bool:
        """Return whether to go on reading. Epochs that are given out in part are also read on while draining; what lies
        behind a batch whose outcome is unknown is not read, as that batch may have to come first."""
        if self._transactions.is_in_doubt(granted.stream_id):
            return False
        if isinstance(granted, CompleteEpochStream) and granted.is_mid_step:
            return self._member.may_continue(granted.stream_id, granted.grant_id)
        return not self.is_draining and self._member.may_start_call(granted.stream_id, granted.grant_id)

    def _read(self, granted: GrantedStream, transact: BeginTransaction) -> tuple[Batch | None, bool]:
        if isinstance(granted, CompleteEpochStream):
            return self._read_atomic(granted, transact)
        first = granted.next_read_offset
        try:
            page = self._fetcher.fetch(granted, self._may_start)
        finally:
            self._assignment.release_read(granted)
        if page is None:
            return None, granted.is_unreadable
        if not page.batches:
            self._assignment.mark_skipped(granted, first)
            return None, True
        self._member.note_group()
        table = pa.Table.from_batches(page.batches)
        self._assignment.mark_delivered(granted, table.nbytes)
        calls = self._assignment.mark_acknowledged, self._assignment.mark_progress, transact
        check_outcome = self._transactions.check_outcome
        return Batch(table, first, page.position, granted, *calls, check_outcome=check_outcome), True

    def _read_atomic(self, granted: CompleteEpochStream, transact: BeginTransaction) -> tuple[Batch | None, bool]:
        """Read a stream that is read in whole epochs; return its next batch, and whether it has moved on, as
        `read_next` does."""
        has_moved, rows = False, granted.next_rows()
        try:
            if rows is None:
                has_moved = self._fetcher.fetch_epochs(granted, self._may_start)
                rows = granted.next_rows()
        finally:
            self._assignment.release_read(granted)
        if rows is None:
            return None, has_moved
        piece, step_end = rows
        self._member.note_group()
        self._assignment.mark_delivered(granted, piece.table.nbytes)
        calls = self._assignment.mark_acknowledged, None, transact
        facts = piece.ticket, step_end, self._transactions.check_outcome
        return Batch(piece.table, piece.first, piece.end, granted, *calls, *facts), True
