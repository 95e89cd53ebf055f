"""Exactly once from a streaming query: a micro-batch's output and its progress are one commit.

    guard = Guard("orders-checkpoint", url)

    def store(frame, batch_id):
        rows = [(row.value,) for row in frame.select("value").collect()]
        with guard(batch_id) as connection:
            connection.cursor().executemany("insert into orders (raw) values (%s)", rows)

    orders.writeStream.foreachBatch(store).option("checkpointLocation", "orders-checkpoint").start()

Which messages the batch has is in the checkpoint, where Spark wrote it before the batch began; whether they are still
this query's is in the group's rows. So a process that was frozen, or a second one on a copy of the checkpoint, cannot
write what another has written or will.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct

from sublet_borrower.planner.grant_key_files import PlannerGrantKeys, read_grant_keys
from sublet_borrower.planner.planned_ranges import PlannedRange
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT, check_url, driver_url
from sublet_borrower.spark.source import spark_checkpoint_reader
from sublet_borrower.spark.source.offsets import EMPTY_OFFSET, check_offset_version, decode_ranges, is_sublet_offset
from sublet_protocol.domain.errors import DatabaseUnreachable, GrantLost, MicroBatchFenced, UnknownOutcome, UsageError
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.db.user_transaction import has_written, user_transaction
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.consumer_progress import LastPlannedRange, PostgresTransactionId

Connection = psycopg.Connection[Any]

RECEIVE_TIMEOUT_S = 600.0
"""A statement that takes longer than this is given up."""


class Guard:
    """Opens transactions for the micro-batches of one query: `checkpoint` is its `checkpointLocation`, `url` or
    `data_dir` the database that its source reads from, `credentials` where its password is. For the driver; not
    thread-safe.
    """

    def __init__(
        self,
        checkpoint: Path | str,
        url: str | None = None,
        *,
        data_dir: Path | str | None = None,
        credentials: str = FROM_ENVIRONMENT,
    ) -> None:
        check_url(url, credentials)
        self._checkpoint, self._url, self._data_dir = str(checkpoint).rstrip("/"), url, data_dir
        self._credentials = credentials
        self._opened = contextlib.ExitStack()
        self._in_use = threading.Lock()
        self._reconnecting = ReconnectingConnection(self._connect)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return only the arguments, since Spark Connect runs `foreachBatch` in another process, with its own
        connection.
        """
        return partial(type(self), data_dir=self._data_dir, credentials=self._credentials), (
            self._checkpoint,
            self._url,
        )

    @contextlib.contextmanager
    def __call__(self, batch_id: int) -> Iterator[Connection]:
        """Open a transaction that ends with the batch being done; an exception inside rolls it back.

        A batch of which nothing is left to do, since it was done or others have its messages, is empty when Spark runs
        it again, and the transaction may be empty too. Raise `MicroBatchFenced` if something was written all the same
        or if only some of the messages are still this query's, and `DatabaseUnreachable`: nothing was written.
        `UnknownOutcome`: the connection was lost during the commit; the batch finds out when it is run again. Raise
        `UsageError` where the checkpoint has no such batch, or belongs to a query that keeps state, or to another than
        the one that calls, if the block has ended the transaction, and while another block is under way.
        """
        if not self._in_use.acquire(blocking=False):
            raise UsageError(
                f"batch {batch_id}: another block of this guard is under way, in this thread or another. Give each "
                "query a guard of its own, and let a block end before the next begins."
            )
        try:
            with self._begin_transaction(batch_id) as connection:
                yield connection
        finally:
            self._in_use.release()

    @contextlib.contextmanager
    def _begin_transaction(self, batch_id: int) -> Iterator[Connection]:
        ranges = self._read_ranges(batch_id)
        connection, committing = self._reconnecting.get_answering_connection(), False
        attempt: PostgresTransactionId | None = None

        def settle() -> None:
            nonlocal committing, attempt
            attempt = self._settle(connection, batch_id, ranges)
            committing = True

        try:
            with user_transaction(connection, settle):
                yield connection
        except psycopg.Error as error:  # also the server's error for a client that idled for too long
            if not connection.closed:
                raise
            if not (committing and self._was_committed(ranges, attempt, error)):
                raise DatabaseUnreachable(
                    f"the connection to Postgres was lost before the commit, nothing of batch {batch_id} was written: "
                    f"{error}. Start the query again: it does the batch again."
                ) from error

    def close(self) -> None:
        """Close the connection. The guard may be used again."""
        self._reconnecting.close()
        self._opened.close()

    def _read_ranges(self, batch_id: int) -> list[SourceRanges]:
        """Return what the batch has of each source of this kind that the query has."""
        spark_checkpoint_reader.check_checkpoint(self._checkpoint)
        offsets = spark_checkpoint_reader.read_offsets(self._checkpoint, int(batch_id))
        for offset in offsets.values():
            check_offset_version(offset)
        known = [offset for offset in offsets.values() if offset == EMPTY_OFFSET or is_sublet_offset(offset)]
        if not known:
            raise UsageError(
                f"batch {batch_id} in checkpoint {self._checkpoint} has nothing that was read from sublet: give the "
                "guard the checkpointLocation of the query, and the number that foreachBatch was called with."
            )
        # A source without new messages has the same there as for the batch before.
        previous_offsets = spark_checkpoint_reader.read_offsets(self._checkpoint, batch_id - 1) if batch_id else {}
        fresh = [offset for source, offset in offsets.items() if offset != previous_offsets.get(source)]
        return [
            SourceRanges(
                offset["group_id"], read_grant_keys(offset["subscription"], offset["session"]), decode_ranges(offset)
            )
            for offset in fresh
            if is_sublet_offset(offset)
        ]

    def _connect(self) -> BoundedConnection:
        self._opened.close()
        url = driver_url(self._url, self._data_dir, self._credentials)
        return connect(
            self._opened.enter_context(open_database(url, self._data_dir)).url,
            application_name="sublet guard",
            idle_in_transaction_timeout_s=consumer_progress.compute_idle_limit_s(
                BorrowerSettings.from_env().max_poll_interval_s
            ),
            own_search_path=False,
            receive_timeout_s=RECEIVE_TIMEOUT_S,
        )

    def _settle(
        self, connection: Connection, batch_id: int, reads: Sequence[SourceRanges]
    ) -> PostgresTransactionId | None:
        """Move the groups' progress behind all of it, in the transaction; return the transaction's id, None where there
        was nothing to move."""
        attempt: PostgresTransactionId | None = None
        lost: list[str] = []
        for read in reads:
            plans = read.last_planned(connection)
            # In the order in which rows are locked.
            for planned in sorted(read.ranges, key=lambda planned: planned.stream_id):
                plan = plans.get(planned.stream_id)
                if plan is not None and planned.is_put_off(plan.in_doubt):
                    continue  # the batch is done without it
                if plan is None or not planned.matches(plan.in_doubt) or (plan.is_pending and plan.grant_id is None):
                    lost.append(f"stream {planned.stream_id} [{planned.start}, {planned.end})")
                elif plan.is_pending:
                    attempt = read.advance_range(connection, planned, plan, batch_id)
        if lost and attempt is not None:
            raise MicroBatchFenced(
                batch_id,
                f"only a part is this query's to do now, {', '.join(lost)} is not",
                "Start the query with a new checkpoint: it goes on where the group is, nothing of it is lost or done "
                "twice, except where it also writes to a sink that knows batches by their numbers, which count from 0 "
                "again. (Of other sources that it has, only the old checkpoint says where they are)",
            )
        if reads and attempt is None and has_written(connection):
            raise MicroBatchFenced(
                batch_id,
                f"{', '.join(lost)} is not this query's to do now" if lost else "all of it was done before, or put off",
                "Start the query again if it is the only one of its name, and write nothing where a batch is empty",
            )
        return attempt

    def _was_committed(
        self, reads: Sequence[SourceRanges], attempt: PostgresTransactionId | None, cause: Exception
    ) -> bool:
        """Return whether the transaction whose commit got no answer was committed, queried on a new connection: the
        server knows by its number when it has ended, and progress shows how."""
        lost = "the connection to Postgres was lost during the commit"
        if not reads:
            detail = "the batch had nothing of sublet's by which that could be seen. Look at the tables"
            raise UnknownOutcome(f"{lost}, and nobody can say what became of it: {detail}.") from cause
        try:
            if attempt is None:
                return True  # it was empty
            connection = self._reconnecting.get_connection()
            was_committed = consumer_progress.is_committed(connection, attempt)
            return was_committed is not False and all(read.is_done(connection) for read in reads)
        except (psycopg.OperationalError, DatabaseUnreachable) as error:
            raise UnknownOutcome(
                f"{lost}, and cannot be had again to see what became of it: {error}. Start the query again: it finds "
                "out."
            ) from cause


class SourceRanges(Struct, frozen=True):
    """The ranges that a batch has of one source: of a group, as a session whose planners on this machine have `handed`
    on their keys.
    """

    group_id: int
    handed: list[PlannerGrantKeys]
    ranges: list[PlannedRange]

    def last_planned(self, connection: Connection) -> dict[int, LastPlannedRange]:
        """Return what its session planned last of its streams. One that has a `grant_id` is the session's to do: what
        is only reserved for it may not be done before it has it again."""
        streams = [planned.stream_id for planned in self.ranges]
        for each in self.handed:
            plans = consumer_progress.read_last_planned_ranges(connection, self.group_id, each.session, streams)
            if plans:
                return plans
        return {}

    def advance_range(
        self, connection: Connection, planned: PlannedRange, plan: LastPlannedRange, batch_id: int
    ) -> PostgresTransactionId:
        """Move the group's progress behind one range, and return the transaction's id. Raise `MicroBatchFenced` if that
        has changed meanwhile."""
        assert plan.grant_id is not None
        grant = (planned.stream_id, plan.grant_id)
        key = next((each.keys[grant] for each in self.handed if grant in each.keys), None)
        if key is None:
            raise MicroBatchFenced(
                batch_id,
                f"the key of stream {planned.stream_id} was not handed on to this process",
                "Run the guard on the machine of the query's driver, as the same user and with the same directory for "
                "temporary files",
            )
        try:
            return consumer_progress.advance(
                connection, self.group_id, *grant, key, planned.end,
                consumed=planned.consumed_frontier, in_doubt=plan.in_doubt,
            )  # fmt: skip
        except GrantLost as lost:
            raise MicroBatchFenced(
                batch_id, f"stream {planned.stream_id} went to another process", "Start the query again"
            ) from lost

    def is_done(self, connection: Connection) -> bool:
        """Return whether progress is behind all of it. Raise `UnknownOutcome` where another plan is the last of a
        stream: on this timeline it may have been the one before, or be one after.
        """
        plans = self.last_planned(connection)
        for planned in self.ranges:
            plan = plans.get(planned.stream_id)
            if plan is None or not (planned.matches(plan.in_doubt) or planned.is_put_off(plan.in_doubt)):
                raise UnknownOutcome(
                    "the connection to Postgres was lost during the commit, and this server cannot know what became of "
                    f"it: what it has as planned last of stream {planned.stream_id} is another range than "
                    f"[{planned.start}, {planned.end}). Start the query again: it finds out."
                )
        return not any(plans[planned.stream_id].is_pending for planned in self.ranges)
