"""The sink of `df.write` and `df.writeStream.format("sublet")`: each batch is published completely, once.

Each task stages its messages in the database as blocks, and the driver's commit publishes all of them in one
transaction (`sublet_storage.producer.sink_staging`), whose record identifies the batch. What rests on how Spark works,
as measured in 4.3:

- a batch write has one writer, made on the driver and sent to the tasks: it carries the name of the write. Of a
  streaming query's writer there is one for the tasks and another for each commit: there the tasks send the commit
  which query it is, as they alone know;
- a query's id is in its checkpoint, as are the numbers of its batches. So a batch that is repeated has the same name,
  and a query with a new checkpoint another;
- of a task that runs twice one message reaches the commit. A query that is stopped in a batch has no abort: the next
  commit clears up.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from sublet_borrower.spark.common.malloc_and_gc_tuning import freeze_loaded_objects
from sublet_borrower.spark.common.retry import retry_while_unavailable
from sublet_borrower.spark.sink.columns import check_columns, to_message_batches
from sublet_borrower.spark.sink.options import WriteOptions, stream_write_options, write_options
from sublet_borrower.spark.sink.sink_connection import SinkDatabaseAddress
from sublet_protocol.domain.errors import InvalidSetting, SubletError
from sublet_storage.producer.sink_staging import (
    SinkBatchId,
    SinkCommitResult,
    TaskStagingResult,
    commit,
    discard,
    stage,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

DATABASE_TIMEOUT_S = 60.0
"""How long a commit waits for a database that is away, or a stream that is locked, before the write fails."""


@dataclass(frozen=True, slots=True)
class StagedTaskMessage(WriterCommitMessage):
    """A task's message to the driver."""

    write: SinkBatchId
    staged: TaskStagingResult


def batch_writer(raw_options: Mapping[str, str], schema: StructType, overwrite: bool) -> SinkBatchWriter:
    """Return the writer of a batch write. Raise `InvalidSetting`, `InvalidTopic`."""
    options = write_options(raw_options)
    _check(options, schema, overwrite, 'a write in the mode "overwrite"', 'mode("append")')
    if options.sink_name is None or options.batch_id is None:
        batch = SinkBatchId(f"write {uuid.uuid4().hex}", 0, is_single=True)
    else:
        batch = SinkBatchId(f"sink {options.sink_name}", options.batch_id)
    return SinkBatchWriter(SinkDatabaseAddress.of(options), options, batch)


def stream_writer(raw_options: Mapping[str, str], schema: StructType, overwrite: bool) -> SinkStreamWriter:
    """Return the writer of a streaming query. Raise `InvalidSetting`, `InvalidTopic`."""
    options = stream_write_options(raw_options)
    _check(options, schema, overwrite, 'the output mode "complete"', 'outputMode("append"), or "update"')
    return SinkStreamWriter(SinkDatabaseAddress.of(options), options)


def _check(options: WriteOptions, schema: StructType, overwrite: bool, refused: str, hint: str) -> None:
    if overwrite:
        raise InvalidSetting(f"{refused}: messages that are published stay, and none is replaced. Use {hint}.")
    check_columns(schema, options.topic)


def stage_rows(
    target: SinkDatabaseAddress, options: WriteOptions, write: SinkBatchId, task: int, batches: Iterator[pa.RecordBatch]
) -> StagedTaskMessage:
    """Stage what a task has. Raise what a publisher raises for a bad topic or message, and the database's errors."""
    with target.open_connection() as (_, conn):
        rows = (each for batch in batches for each in to_message_batches(batch, options.topic))
        message = StagedTaskMessage(write, stage(conn, write, task, rows, space=options.space))
    freeze_loaded_objects()
    return message


class SinkBatchWriter(DataSourceArrowWriter):
    """The writer of a batch; see the module's docstring. Pickled on its way to the tasks, and to the commit.

    `target`: the database. `batch`: under which the rows are staged and published.
    """

    def __init__(self, target: SinkDatabaseAddress, options: WriteOptions, write: SinkBatchId) -> None:
        self.target, self.options, self.batch = target, options, write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTaskMessage:
        """Stage the rows of one attempt at a task, on an executor."""
        return stage_rows(self.target, self.options, self.batch, _get_task_context().partitionId(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the batch, on the driver, when all tasks are done."""
        _commit(self.target, self.batch, _keep_done(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete what was staged, on the driver, when a task or the commit has failed."""
        _abort(self.target, [self.batch])


class SinkStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a streaming query; see the module's docstring."""

    def __init__(self, target: SinkDatabaseAddress, options: WriteOptions) -> None:
        self.target, self.options = target, options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTaskMessage:
        """Stage the rows of one attempt at a task of a micro-batch, on an executor."""
        context = _get_task_context()
        query, batch = (context.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        if query is None or batch is None:
            raise InvalidSetting(
                "Spark's tasks do not have the id of their query, so a batch could not be stored once. Use "
                "foreachBatch, with the options sinkName and batchId of write."
            )
        write = SinkBatchId(f"query {query}", int(batch))
        return stage_rows(self.target, self.options, write, context.partitionId(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Publish the micro-batch, on the driver, when all its tasks are done."""
        done = _keep_done(messages)
        if done:
            _commit(self.target, done[0].write, done)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Delete what was staged, on the driver, when a task or the commit has failed."""
        _abort(self.target, {each.write for each in _keep_done(messages)})


def _get_task_context() -> Any:
    from pyspark import TaskContext

    return TaskContext.get()


def _keep_done(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTaskMessage]:
    """Return the messages of the tasks; those that failed have none."""
    return [each for each in messages if isinstance(each, StagedTaskMessage)]


def _commit(target: SinkDatabaseAddress, write: SinkBatchId, done: Sequence[StagedTaskMessage]) -> None:
    def attempt() -> tuple[SinkCommitResult, str]:
        with target.open_connection() as (url, conn):
            return commit(conn, write, [each.staged for each in done]), url

    committed, url = retry_while_unavailable(attempt, DATABASE_TIMEOUT_S, "commit")
    message_count = sum(each.staged.messages for each in done)
    if committed.is_duplicate and committed.messages != message_count:
        log.warning(
            "batch stored already with another number of messages, ignored: sink=%s batch_id=%d stored_count=%d "
            "ignored_count=%d: if the messages differ, another query has this sink name: give each its own",
            *(write.sink, write.batch, committed.messages, message_count),
        )
    _notify(url, committed)


def _notify(url: str, committed: SinkCommitResult) -> None:
    """Notify nodes of the new heads before this process ends."""
    from sublet_storage.notify.changes import stream_change
    from sublet_storage.notify.publisher import publish_once

    if committed.heads:
        publish_once(url, [stream_change(stream, head, closed=False) for stream, head in committed.heads.items()])


def _abort(target: SinkDatabaseAddress, writes: Sequence[SinkBatchId] | set[SinkBatchId]) -> None:
    """Delete what these have staged; what is left, the next commit or maintenance deletes: the original error matters
    more.
    """
    try:
        with target.open_connection() as (_, conn):
            for write in writes:
                discard(conn, write)
    except (psycopg.Error, SubletError) as error:
        log.warning("staged blocks not deleted, left to maintenance: %s", error)
