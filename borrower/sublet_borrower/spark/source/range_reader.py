"""Reads a range of a stream in a Spark task, from the log, as Arrow.

Workers live on from task to task, so each keeps its connection. Nothing depends on that: a worker that has none, or
whose connection has died, makes another.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from sublet_borrower.spark.common.database_credentials import FROM_ENVIRONMENT, task_url
from sublet_borrower.spark.common.database_reachability import check_socket_reachable, keep_server_running
from sublet_borrower.spark.common.malloc_and_gc_tuning import freeze_loaded_objects, keep_freed_memory
from sublet_borrower.spark.common.retry import retry_while_unavailable
from sublet_borrower.util.single_thread_executor import SingleThreadExecutor
from sublet_protocol.domain.errors import NotFound, PoisonBlock, PositionBeyondHead, PositionGone, Unavailable
from sublet_protocol.domain.topics import TopicFilter

if TYPE_CHECKING:
    import pyarrow as pa

    from sublet_storage.db.reconnecting_connection import ReconnectingConnection
    from sublet_storage.log.fetch import LogPage
    from sublet_storage.log.message_predicate import MessagePredicate
    from sublet_storage.readers.epoch_steps import EpochStep

log = logging.getLogger(__name__)

DATABASE_TIMEOUT_S = 30.0
"""How long a task waits for a database that is away, before it fails and Spark tries it again."""
RECEIVE_TIMEOUT_S = 10.0
"""Short enough that after a dead connection there is time for another."""


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """Messages [start, end) of a stream that match a filter; with `step` those of its epochs. `address`, `credentials`:
    of the database, see `task_url`; `driver_host`: the machine that named it. `fail_on_data_loss`: whether messages
    that retention has taken are an error. `timeline_number`: of the database where they were planned.

    `predicate`: only these of them. `data_dir`: of the embedded server that the task needs and keeps running.
    """

    stream_id: int
    generation_id: int
    start: int
    end: int
    filter: str
    space: str
    address: str
    schema_name: str
    driver_host: str
    fail_on_data_loss: bool
    timeline_number: int
    step: EpochStep | None = None
    predicate: MessagePredicate | None = None
    data_dir: str | None = None
    credentials: str = FROM_ENVIRONMENT

    @property
    def max_messages(self) -> int:
        """Return the number of messages that the partition has at most."""
        return self.end - self.start if self.step is None else self.step.max_messages

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the [start, end) of each part that is read, in order."""
        return [(self.start, self.end)] if self.step is None else [(run.start, run.end) for run in self.step.runs]

    def split(self, count: int) -> list[RangePartition]:
        """Return `count` parts of it of about one size, at most one for each offset; a step is not divided."""
        if self.step is not None:
            return [self]
        total = self.end - self.start
        count = min(count, total)
        bounds = [self.start + total * number // count for number in range(count + 1)]
        return [replace(self, start=low, end=high) for low, high in pairwise(bounds)]


@dataclass(frozen=True)
class MultiRangePartition(InputPartition):
    """Several ranges, which one task reads one after the other."""

    ranges: tuple[RangePartition, ...]


def plan_tasks(
    ranges: Sequence[RangePartition], min_partitions: int | None, max_partitions: int | None
) -> list[InputPartition]:
    """Return a task for each range that has messages: at least `min_partitions`, if there are as many messages, for
    which the largest ranges are divided, and at most `max_partitions`, of about one size.
    """
    divided = _divide(ranges, min_partitions or 0)
    if max_partitions is None or len(divided) <= max_partitions:
        return list(divided)
    return [MultiRangePartition(tuple(together)) for together in _put_together(divided, max_partitions)]


def _divide(ranges: Sequence[RangePartition], min_partitions: int) -> list[RangePartition]:
    ranges = [each for each in ranges if each.max_messages]
    total = sum(each.max_messages for each in ranges)
    if len(ranges) >= min_partitions:
        return ranges
    return [piece for each in ranges for piece in each.split(-(-min_partitions * each.max_messages // total))]


def _put_together(ranges: Sequence[RangePartition], max_partitions: int) -> list[list[RangePartition]]:
    """Deal ranges out, the largest first, each to the task with the least so far. Return those of each task that has
    any, in their order."""
    shares: list[list[int]] = [[] for _ in range(max_partitions)]
    waiting = [(0, task) for task in range(max_partitions)]
    for index in sorted(range(len(ranges)), key=lambda index: -ranges[index].max_messages):
        size, task = heappop(waiting)
        shares[task].append(index)
        heappush(waiting, (size + ranges[index].max_messages, task))
    return [[ranges[index] for index in sorted(share)] for share in shares if share]


def read_task(partition: InputPartition, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all that a task has, in the columns of the schema; nothing of the one that Spark makes where there are
    none.

    While Spark takes one page, the next is read. A database that is away for a while is waited for. Raises
    `PositionGone`, `PositionBeyondHead`, `TimelineChanged`, `DatabaseUnreachable`.
    """
    ranges = partition.ranges if isinstance(partition, MultiRangePartition) else (partition,)
    pages = chain.from_iterable(_read_range(each, schema) for each in ranges if isinstance(each, RangePartition))
    worker = _get_worker(os.getpid())
    ahead = worker.submit(partial(next, pages, None))
    while (page := ahead.result()) is not None:
        ahead = worker.submit(partial(next, pages, None))
        yield from page
    freeze_loaded_objects()


@cache
def _get_worker(pid: int) -> SingleThreadExecutor:
    """Return the one thread of the process for reads, so that its connection has one use at a time, also when a task
    ends in the middle of its pages.
    """
    return SingleThreadExecutor("sublet reads ahead")


def _read_range(partition: RangePartition, schema: pa.Schema) -> Iterator[list[pa.RecordBatch]]:
    """Read the range page by page."""
    from sublet_borrower.spark.common.source_columns import to_output_batches

    os.environ["SUBLET_SCHEMA"] = partition.schema_name  # also the default: the worker may have had a job with another
    keep_server_running(partition.data_dir, partition.driver_host)
    check_socket_reachable(partition.address, partition.driver_host)
    keep_freed_memory()
    if partition.step is None:
        for batches in _fetch_pages(partition, partition.start, partition.end):
            yield list(to_output_batches(batches, partition.space, schema))
        return
    for run in partition.step.runs:
        for batches in _fetch_pages(partition, run.start, run.end):
            sifted = [partition.step.filter_batch(run, batch) for batch in batches]
            yield list(to_output_batches([batch for batch in sifted if batch.num_rows], partition.space, schema))


def poison_in(partitions: Sequence[RangePartition]) -> dict[int, PoisonBlock]:
    """Return {stream: the first block that its task could not decode}. Other errors are left to the task; where a
    location is away the rest is not looked at.
    """
    import psycopg

    poison_blocks: dict[int, PoisonBlock] = {}
    try:
        for partition in partitions:
            with contextlib.suppress(PositionGone, PositionBeyondHead, NotFound):
                if (problem := _find_poison(partition)) is not None:
                    poison_blocks[partition.stream_id] = problem
    except (Unavailable, psycopg.OperationalError) as problem:
        log.warning("ranges not checked for unreadable blocks: %s", problem)
    finally:
        for partition in partitions:
            _get_connection(partition).close()
    return poison_blocks


def _find_poison(partition: RangePartition) -> PoisonBlock | None:
    try:
        for start, end in partition.spans:
            for _ in _fetch_pages(partition, start, end):
                pass
    except PoisonBlock as problem:
        return problem
    return None


def _fetch_pages(partition: RangePartition, start: int, end: int) -> Iterator[Sequence[pa.RecordBatch]]:
    filter, offset = TopicFilter.parse(partition.filter), start
    while offset < end:
        try:
            page = _fetch_page(partition, filter, offset, end)
        except PositionGone as gone:
            offset = _skip_gone(partition, gone, end)
            continue
        yield page.batches
        offset = page.position


def _skip_gone(partition: RangePartition, gone: PositionGone, end: int) -> int:
    """Return where to go on behind what retention has taken."""
    if partition.fail_on_data_loss:
        raise gone
    log.warning("messages gone, skipped as failOnDataLoss is false: stream_id=%d: %s", partition.stream_id, gone)
    return end if gone.oldest is None else min(gone.oldest, end)


def _fetch_page(partition: RangePartition, filter: TopicFilter, offset: int, end: int) -> LogPage:
    from sublet_borrower.spark.common.source_columns import FEW_ROWS
    from sublet_storage.db.bounded_connection import check_timeline_number
    from sublet_storage.log import fetch as message_log

    def attempt() -> LogPage:
        with _get_connection(partition) as connection:
            check_timeline_number(connection, partition.timeline_number, f"stream {partition.stream_id} was planned")
            return message_log.fetch(
                connection,
                partition.stream_id,
                offset,
                filter=filter,
                generation_id=partition.generation_id,
                predicate=partition.predicate,
                end=end,
                few=FEW_ROWS,
            )

    page = retry_while_unavailable(attempt, DATABASE_TIMEOUT_S, "fetch")
    if page.head < end:  # such as a standby that took over without all that was planned
        raise message_log.beyond_head_error(partition.stream_id, end, page.head)
    return page


def _get_connection(partition: RangePartition) -> ReconnectingConnection:
    return _make_connection(os.getpid(), partition.address, partition.credentials, partition.schema_name)


@cache
def _make_connection(pid: int, address: str, credentials: str, schema: str) -> ReconnectingConnection:
    """Return the connection of this process, database and schema, which is closed when the process ends."""
    from sublet_storage.db.connect import connect
    from sublet_storage.db.reconnecting_connection import ReconnectingConnection

    connection = ReconnectingConnection(
        lambda: connect(
            task_url(address, credentials),
            schema=schema,
            application_name="sublet spark",
            receive_timeout_s=RECEIVE_TIMEOUT_S,
        )
    )
    atexit.register(connection.close)
    return connection
