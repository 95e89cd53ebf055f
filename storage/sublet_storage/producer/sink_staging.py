"""Publishes a write of many processes atomically and once: each stages blocks, one commits.

A task's blocks go into `staged_block`, some at a time, each time in a transaction of its own: no transaction is open
while a task computes. They are not read there. The commit names the attempts at tasks that count, in order; it enters
the batch into `sink_batch` and appends their blocks to their streams, in one transaction and inside the database. What
other attempts have staged is deleted with it.

Where a stream was closed since a block was routed, its messages are first routed again by that transaction, to the
children, in their places. So the messages of each key are in the order of the tasks, and in a task as they came.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import psycopg
import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.errors import SinkBatchOutOfOrder, StagedBlocksLost
from sublet_storage.log.append import BlockAppend
from sublet_storage.log.arrow_batch_decoder import decode_block
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.batches.sink_block_builder import SinkBlockBuilder
from sublet_storage.spaces.space_queries import find_space

COPIED_BYTES: Final = 4 * 1024 * 1024
"""About the size that is staged in one transaction."""

RETENTION_S: Final = 86400.0
"""How long staged blocks, and the record of an abandoned sink, are retained."""

_COPY = """
copy staged_block
  (sink, batch, attempt, ordinal, stream_id, count, first_timestamp, last_timestamp, topics, codec, payload)
from stdin (format binary)"""
_TYPES = ["text", "int8", "uuid", "int4", "int8", "int4", "timestamptz", "timestamptz", "text[]", "int2", "bytea"]

_ENTER = "select * from enter_sink_batch(%(sink)s, %(batch)s, %(messages)s, %(single)s)"
_LOCK = "select * from lock_staged_streams(%(sink)s, %(batch)s, %(attempts)s)"
_CLOSED = "select * from read_staged_blocks(%(sink)s, %(batch)s, %(attempt)s, %(streams)s, %(after)s::integer)"
_REMOVE = "select delete_staged_blocks(%(sink)s, %(batch)s, %(attempt)s, %(streams)s)"
_PUBLISH = "select * from append_staged_blocks(%(sink)s, %(batch)s, %(attempts)s)"


class SinkBatchId(Struct, frozen=True):
    """A batch of a sink; the batches of a sink have growing numbers. `is_single`: the sink has no other."""

    sink: str
    batch: int
    is_single: bool = False


class TaskStagingResult(Struct, frozen=True):
    """The result of staging an attempt at a task."""

    task: int
    attempt: uuid.UUID
    blocks: int
    messages: int


class SinkCommitResult(Struct, frozen=True):
    """The result of a batch that is durable. `messages`: how many it has; `is_duplicate`: it was stored before;
    `heads`: {stream: its head}, of those that have grown."""

    messages: int
    heads: dict[int, int]
    is_duplicate: bool = False


def stage(
    conn: psycopg.Connection[Any],
    write: SinkBatchId,
    task: int,
    batches: Iterable[pa.RecordBatch],
    *,
    space: str | None = None,
) -> TaskStagingResult:
    """Stage a task's messages, batches of `BLOCK_SCHEMA`, over an autocommit connection; `space`: all are to be in it.

    What it has staged when it fails is in no commit. Raise `UnknownSpace`, what
    `PublisherRoutingTable.partition_rows` raises, and the database's own errors.
    """
    if space is not None:
        find_space(conn, space)
    stager, gathering = _Stager(conn, write), SinkBlockBuilder(PublisherRoutingTable.load(conn, space))
    for batch in batches:
        stager.put(gathering.add(batch))
    stager.put(gathering.flush())
    stager.flush()
    return TaskStagingResult(task, stager.attempt, stager.blocks, stager.messages)


def commit(conn: psycopg.Connection[Any], write: SinkBatchId, staged: Sequence[TaskStagingResult]) -> SinkCommitResult:
    """Store the batch unless it is stored, in one transaction over an autocommit connection; may be repeated.

    Raise `SinkBatchOutOfOrder` where a later one is stored, `StagedBlocksLost`, and the database's own errors: after a
    lost connection it may be stored or not, and the next attempt finds out."""
    message_count = sum(each.messages for each in staged)
    with conn.transaction():
        stored_count = _enter(conn, write, message_count)
        if stored_count is None:
            attempts = [each.attempt for each in sorted(staged, key=lambda each: each.task) if each.blocks]
            committed = SinkCommitResult(
                message_count, _publish(conn, write, _restage_closed(conn, write, attempts), message_count)
            )
        else:
            committed = SinkCommitResult(stored_count, {}, is_duplicate=True)
        discard(conn, write)
    return committed


def discard(conn: psycopg.Connection[Any], write: SinkBatchId) -> None:
    """Delete what is staged for this batch, and for earlier ones of its sink."""
    conn.execute("select discard_staged_blocks(%s, %s)", (write.sink, write.batch))


def delete_abandoned_blocks(conn: psycopg.Connection[Any], older_than_s: float = RETENTION_S) -> int:
    """Remove blocks that were staged longer ago and are not published, and records of abandoned sinks; return how many
    blocks they were."""
    age = "< clock_timestamp() - make_interval(secs => %s)"
    conn.execute(f"delete from sink_batch where single and at {age}", (older_than_s,))
    return conn.execute(f"delete from staged_block where staged_at {age}", (older_than_s,)).rowcount


def _enter(conn: psycopg.Connection[Any], write: SinkBatchId, messages: int) -> int | None:
    """Record the batch, whose sink's row is locked from now on; return None, or if it is there, how many messages it
    had. Raise `SinkBatchOutOfOrder`."""
    parameters = {"sink": write.sink, "batch": write.batch, "messages": messages, "single": write.is_single}
    ((newest, stored),) = conn.execute(_ENTER, parameters).fetchall()
    if newest is None:
        return None
    if newest > write.batch:
        raise SinkBatchOutOfOrder(write.sink, write.batch, newest)
    return int(stored)


def _publish(
    conn: psycopg.Connection[Any], write: SinkBatchId, attempts: list[uuid.UUID], messages: int
) -> dict[int, int]:
    """Append what these attempts have staged, whose streams are open; return {stream: head}. Raise
    `StagedBlocksLost`."""
    parameters = {"sink": write.sink, "batch": write.batch, "attempts": attempts}
    grown = conn.execute(_PUBLISH, parameters).fetchall() if attempts else []
    stored_count = sum(total for _, _, total in grown)
    if stored_count != messages:
        raise StagedBlocksLost(write.sink, write.batch, messages, stored_count)
    return {stream_id: head for stream_id, head, _ in grown}


def _restage_closed(conn: psycopg.Connection[Any], write: SinkBatchId, attempts: list[uuid.UUID]) -> list[uuid.UUID]:
    """Lock the streams, and stage anew what is for closed ones; return the attempts in order, with those that came to
    it."""
    while attempts:
        parameters = {"sink": write.sink, "batch": write.batch, "attempts": attempts}
        closed = [stream_id for (stream_id,) in conn.execute(_LOCK, parameters).fetchall()]
        if not closed:
            break
        attempts = [each for attempt in attempts for each in (*_restage(conn, write, attempt, closed), attempt)]
    return attempts


def _restage(
    conn: psycopg.Connection[Any], write: SinkBatchId, attempt: uuid.UUID, closed: list[int]
) -> Iterator[uuid.UUID]:
    """Yield the attempt that what this one has staged for closed streams belongs to now, if there is any.

    What comes out has no stream in common with what is left: those that were open at one time are not each other's
    children.
    """
    parameters = {"sink": write.sink, "batch": write.batch, "attempt": attempt, "streams": closed}
    blocks = _read_staged(conn, parameters)
    first = next(blocks, None)
    if first is None:
        return
    # Accepted before, they go where their topic belongs now.
    staged_task = stage(conn, write, 0, _decode_blocks(chain([first], blocks)))
    conn.execute(_REMOVE, parameters)
    yield staged_task.attempt


def _read_staged(conn: psycopg.Connection[Any], parameters: dict[str, object]) -> Iterator[tuple[Any, ...]]:
    last_block = -1
    while rows := conn.execute(_CLOSED, {**parameters, "after": last_block}, binary=True).fetchall():
        yield from rows
        last_block = rows[-1][-1]


def _decode_blocks(blocks: Iterable[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of staged blocks, which have no offsets yet: each is named as if its stream began with it."""
    for codec, payload, stream_id, count, _ in blocks:
        yield decode_block(codec, payload, stream_id, count, count)


class _Stager:
    """The writer of one attempt's blocks to the table."""

    def __init__(self, conn: psycopg.Connection[Any], write: SinkBatchId) -> None:
        self._conn, self._write = conn, write
        self.attempt = uuid.uuid4()
        self.blocks = self.messages = 0
        self._waiting: list[BlockAppend] = []
        self._size = 0

    def put(self, appends: Iterable[BlockAppend]) -> None:
        """Stage these, now or with the next."""
        for append in appends:
            self._waiting.append(append)
            self._size += append.block.payload.size
            if self._size >= COPIED_BYTES:
                self.flush()

    def flush(self) -> None:
        """Stage all that was put."""
        if not self._waiting:
            return
        with self._conn.cursor() as cursor, cursor.copy(_COPY) as copy:
            copy.set_types(_TYPES)
            for append in self._waiting:
                copy.write_row(self._make_row(append))
                self.blocks += 1
                self.messages += append.block.count
        self._waiting.clear()
        self._size = 0

    def _make_row(self, append: BlockAppend) -> tuple[object, ...]:
        task_columns = self._write.sink, self._write.batch, self.attempt, self.blocks
        block = append.block
        span = block.first_timestamp, block.last_timestamp
        return *task_columns, append.stream_id, block.count, *span, block.topics, block.codec, memoryview(block.payload)
