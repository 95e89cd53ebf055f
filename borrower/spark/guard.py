"""Exactly once out of a streaming query: what a micro-batch writes to the messages' database, and that it is done, are
one commit.

    guard = Guard("orders-checkpoint")

    def store(frame, batch_id):
        rows = [(row.value,) for row in frame.select("value").collect()]
        with guard(batch_id) as connection:
            connection.cursor().executemany("insert into orders (raw) values (%s)", rows)

    orders.writeStream.foreachBatch(store).option("checkpointLocation", "orders-checkpoint").start()

Which messages the batch has says the checkpoint, in which Spark wrote it down before the batch began; whether they are
still this query's to do, the group's rows. So a process that was frozen, or a second one on a copy of the checkpoint,
cannot write what another has written or will.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from borrower.plans import Planned
from borrower.spark.offsets import NOTHING, group_of, ranges_of
from protocol.errors import BatchLost, DatabaseUnreachable, UsageError
from storage import fence
from storage.connect import UnknownOutcome, connect
from storage.database import open_database
from storage.fence import LastPlan

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]

SILENCE_S = 600.0
"""A statement that takes longer than this is given up."""


class Guard:
    """Of one query: `checkpoint` is its `checkpointLocation`, `url` or `data_dir` the database that its source reads
    from. For the driver; not thread-safe."""

    def __init__(self, checkpoint: Path | str, url: str | None = None, *, data_dir: Path | str | None = None) -> None:
        self._checkpoint, self._url, self._data_dir = str(checkpoint).rstrip("/"), url, data_dir
        self._opened = contextlib.ExitStack()
        self._connection: Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Spark Connect runs `foreachBatch` in another process: it opens a connection of its own."""
        return {**self.__dict__, "_opened": contextlib.ExitStack(), "_connection": None}

    @contextlib.contextmanager
    def __call__(self, batch_id: int) -> Iterator[Connection]:
        """A transaction that ends with the batch being done; an exception inside rolls it back.

        A batch of which nothing is to be done any more, since it was, or since others have its messages, is empty when
        Spark runs it again, and the transaction may be so too. Raises `BatchLost` if something was written all the same
        or if only some of the messages are still this query's, and `DatabaseUnreachable`: nothing was written then.
        `UnknownOutcome`: the connection was lost during the commit; the batch, when it is run again, finds out. Raises
        `UsageError` where the checkpoint has no such batch, or belongs to a query that keeps state.
        """
        ranges = self._ranges(batch_id)
        connection, committing = self._ready(), False
        try:
            with connection.transaction():
                yield connection
                self._settle(connection, batch_id, ranges)
                committing = True
        except psycopg.OperationalError as error:
            if not connection.closed:
                raise
            if not (committing and self._happened(ranges, error)):
                raise DatabaseUnreachable(
                    f"the connection to Postgres was lost before the commit, nothing of batch {batch_id} was written: "
                    f"{error}. Start the query again: it does the batch again."
                ) from error

    def close(self) -> None:
        """Close the connection. The guard may be used again."""
        self._connection = None
        self._opened.close()

    def _ranges(self, batch_id: int) -> dict[int, list[Planned]]:
        """{group: what the batch has of it}, of all sources of this kind that the query has."""
        if Path(self._checkpoint, "state").exists():
            raise UsageError(
                f"the query of checkpoint {self._checkpoint} keeps state, and would not see messages again that the "
                "guard says are done. Use a sink that is idempotent by batch instead: format('sublet'), or a table "
                "with the batch's number in its key."
            )
        found: dict[int, list[Planned]] = {}
        is_ours = False
        for offset in map(_offset, self._logged(batch_id)):
            if offset is not None and (group_id := group_of(offset)) is not None:
                found.setdefault(group_id, []).extend(ranges_of(offset))
            is_ours = is_ours or bool(found) or offset == NOTHING  # a query's first batch may have nothing
        if not is_ours:
            raise UsageError(
                f"batch {batch_id} in checkpoint {self._checkpoint} has nothing that was read from sublet: give the "
                "guard the checkpointLocation of the query, and the number that foreachBatch was called with."
            )
        return found

    def _logged(self, batch_id: int) -> Sequence[str]:
        """The lines of Spark's write-ahead log for the batch, wherever the checkpoint is."""
        place = f"{self._checkpoint}/offsets/{int(batch_id)}"
        with contextlib.suppress(FileNotFoundError):
            return Path(place.removeprefix("file://")).read_text().splitlines()
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        try:
            spark = SparkSession.active()
            return [row.value for row in spark.read.text(place).collect()]
        except (PySparkException, RuntimeError) as error:
            raise UsageError(
                f"there is no batch {batch_id} in checkpoint {self._checkpoint}: give the guard the checkpointLocation "
                "of the query, and the number that foreachBatch was called with."
            ) from error

    def _ready(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self.close()
            url = self._opened.enter_context(open_database(self._url, self._data_dir)).url
            self._connection = self._opened.enter_context(
                connect(
                    url,
                    application_name="sublet guard",
                    idle_in_transaction_timeout_s=None,
                    own_search_path=False,
                    silence_s=SILENCE_S,
                )
            )
        return self._connection

    def _settle(self, connection: Connection, batch_id: int, ranges: Mapping[int, Sequence[Planned]]) -> None:
        """Move the group's progress behind all of it, in the transaction."""
        settled = 0
        lost: list[str] = []
        for group_id, planned in ranges.items():
            plans = _plans(connection, group_id, planned)
            for one in sorted(planned, key=lambda one: one.stream_id):  # the order in which rows are locked
                plan = plans.get(one.stream_id)
                if plan is None or not one.is_of(plan.in_doubt) or (plan.is_open and plan.grant_id is None):
                    lost.append(f"stream {one.stream_id} [{one.start}, {one.end})")
                elif plan.is_open:
                    assert plan.grant_id is not None
                    fence.advance(connection, group_id, one.stream_id, plan.grant_id, one.end, consumed=one.consumed)
                    settled += 1
        if lost and settled:
            raise BatchLost(
                batch_id,
                f"only a part is this query's to do now, {', '.join(lost)} is not",
                "Start the query with a new checkpoint: it goes on where the group is, nothing is lost or done twice",
            )
        if not settled and _has_written(connection):
            raise BatchLost(
                batch_id,
                f"{', '.join(lost)} is not this query's to do now" if lost else "all of it was done before",
                "Start the query again if it is the only one of its name, and write nothing where a batch is empty",
            )

    def _happened(self, ranges: Mapping[int, Sequence[Planned]], cause: Exception) -> bool:
        """Whether the transaction whose commit got no answer was committed, asked on a new connection."""
        try:
            connection = self._ready()
            return all(
                (plan := _plans(connection, group_id, planned).get(one.stream_id)) is not None and not plan.is_open
                for group_id, planned in ranges.items()
                for one in planned
            )
        except (psycopg.OperationalError, DatabaseUnreachable) as error:
            raise UnknownOutcome(
                f"the connection to Postgres was lost during the commit, and cannot be had again to see what became of"
                f" it: {error}. Start the query again: it finds out."
            ) from cause


def _plans(connection: Connection, group_id: int, ranges: Sequence[Planned]) -> dict[int, LastPlan]:
    return fence.last_plans(connection, group_id, [one.stream_id for one in ranges])


def _has_written(connection: Connection) -> bool:
    row = connection.execute("select pg_current_xact_id_if_assigned() is not null").fetchone()
    return row is not None and bool(row[0])


def _offset(line: str) -> dict[str, Any] | None:
    """A line of the log, if it is an offset: others are of the log itself, or of other sources."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
