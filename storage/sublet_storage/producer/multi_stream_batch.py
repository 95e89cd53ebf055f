"""Stores a batch for many streams once, atomically, for publishers that go through a node.

All parts are one transaction, which begins with a row of `producer` that belongs to no stream: number and digest of the
producer's last batch. An attempt waits there for an earlier one of unknown outcome, and then sees it. So a batch is
stored once, whatever node tries it, also where its streams were closed meanwhile and the next attempt would go to
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.errors import BatchNumberConflict, UnknownSpace, UsageError
from sublet_protocol.domain.limits import MAX_STEP
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.log.append import AppendOutcome, BlockAppend, ProducerStamp, append, producer_fenced_error
from sublet_storage.log.block_encoder import pack
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable, RoutedRows
from sublet_storage.producer.delivery import AppendedSpan
from sublet_storage.spaces.routing import Space, StreamCatalogRow

LEDGER_STREAM_ID = -1
"""Stands for the stream in the ledger's rows, which are forgotten with the others of an idle producer."""

_ENTER = """
insert into producer as p (producer_id, stream_id, incarnation, sequence, end_offset)
select %(producer)s, %(ledger)s, %(incarnation)s, %(number)s, %(digest)s
 where greatest(%(incarnation)s, %(number)s) <= %(step)s
    or exists (select from producer where producer_id = %(producer)s and stream_id = %(ledger)s)
on conflict (producer_id, stream_id) do update
   set incarnation = excluded.incarnation, sequence = excluded.sequence, end_offset = excluded.end_offset,
       updated_at = clock_timestamp()
 where (p.incarnation, p.sequence) < (excluded.incarnation, excluded.sequence)
   and excluded.incarnation - p.incarnation <= %(step)s
   and excluded.sequence - case when excluded.incarnation = p.incarnation then p.sequence else 0 end <= %(step)s
returning 1"""

_NEWEST = """
select incarnation, sequence, end_offset from producer
 where producer_id = %(producer)s and stream_id = %(ledger)s"""

_STORED = """
select stream_id, end_offset from producer
 where producer_id = %(producer)s and incarnation = %(incarnation)s and sequence = %(number)s and stream_id > 0"""

_THEIR_GENERATIONS = """
select s.stream_id, s.space_id, s.generation_id, s.hash_from::text, s.hash_to::text, g.filter
  from stream s join generation g using (generation_id)
 where generation_id in (select generation_id from stream where stream_id = any(%s)) order by s.stream_id"""


class StreamClosedError(Exception):
    """An error for a stream of the batch that was closed: nothing was stored, route again."""


class IdempotentBatch(Struct, frozen=True):
    """A batch in `BLOCK_SCHEMA`; `number` grows under one incarnation of the producer. `digest` is the same for the
    same messages: at least 0, and less than 2^63."""

    producer_id: str
    incarnation: int
    number: int
    messages: pa.RecordBatch
    digest: int


class BatchStoreResult(Struct, frozen=True):
    """The result of a batch that is durable. `is_duplicate`: it was stored before. `spans` None: its positions are
    forgotten."""

    spans: tuple[AppendedSpan, ...] | None
    is_duplicate: bool = False

    @property
    def heads(self) -> dict[int, int]:
        """Return the heads of the streams after it."""
        return {span.stream: span.first_offset + len(span.rows) for span in self.spans or ()}


def store_batch(
    conn: psycopg.Connection[Any], routes: PublisherRoutingTable, batch: IdempotentBatch
) -> BatchStoreResult:
    """Store the batch unless it is stored. Raise `StreamClosedError`, `ProducerFenced`, `BatchNumberConflict`,
    `UsageError`."""
    with conn.transaction():
        if not _enter(conn, batch):
            return BatchStoreResult(_read_spans(conn, batch), is_duplicate=True)
        parts = routes.partition_rows(batch.messages, range(batch.messages.num_rows))
        return BatchStoreResult(_append(conn, routes, batch, parts))


def _enter(conn: psycopg.Connection[Any], batch: IdempotentBatch) -> bool:
    """Enter the batch in the ledger; return False if it is the one that is there already."""
    parameters = _to_parameters(batch)
    if conn.execute(_ENTER, parameters, prepare=True).fetchone() is not None:
        return True
    incarnation, number, digest = conn.execute(_NEWEST, parameters).fetchone() or (0, 0, 0)
    if (incarnation, number) < (batch.incarnation, batch.number):
        raise UsageError(
            f"producer {batch.producer_id!r}: incarnation {batch.incarnation}, batch number {batch.number} after "
            f"{incarnation}, {number}: each grows by at most {MAX_STEP} at a time. Count on from there, and an "
            "incarnation's batches from 1."
        )
    if incarnation > batch.incarnation:
        raise producer_fenced_error(batch.producer_id, batch.incarnation)
    if (number, digest) != (batch.number, batch.digest):
        with_others = "and it had other messages" if number == batch.number else "and nobody knows whether this one is"
        raise BatchNumberConflict(
            f"producer {batch.producer_id!r}: batch number {batch.number} is not stored now, as number {number} is "
            f"stored already, {with_others}. Give each producer a name of its own, and each batch a higher number than "
            "the one before."
        )
    return False


def _append(
    conn: psycopg.Connection[Any], routes: PublisherRoutingTable, batch: IdempotentBatch, parts: Sequence[RoutedRows]
) -> tuple[AppendedSpan, ...]:
    stamp = ProducerStamp(batch.producer_id, batch.incarnation, batch.number)
    blocks = [
        BlockAppend(stream, pack(messages, routes.get_compression(stream)), stamp) for stream, messages, _ in parts
    ]
    answers = append(conn, blocks)
    outcomes = {answer.outcome for answer in answers}
    if AppendOutcome.FENCED in outcomes:
        raise producer_fenced_error(batch.producer_id, batch.incarnation)
    if outcomes != {AppendOutcome.APPENDED}:
        raise StreamClosedError
    return tuple(
        AppendedSpan(stream, (answer.end_offset or 0) - len(rows), rows)
        for (stream, _, rows), answer in zip(parts, answers, strict=True)
    )


def _read_spans(conn: psycopg.Connection[Any], batch: IdempotentBatch) -> tuple[AppendedSpan, ...] | None:
    """Return where a stored batch lies: it is routed as it was then. None if later batches went to its streams
    since."""
    ends = dict(conn.execute(_STORED, _to_parameters(batch)).fetchall())
    try:
        parts = _read_routes(conn, list(ends)).partition_rows(batch.messages, range(batch.messages.num_rows))
    except UnknownSpace:
        return None
    if {stream for stream, _, _ in parts} != ends.keys():
        return None
    return tuple(AppendedSpan(stream, ends[stream] - len(rows), rows) for stream, _, rows in parts)


def _read_routes(conn: psycopg.Connection[Any], stream_ids: list[int]) -> PublisherRoutingTable:
    """Return the part of the routes in force when these streams were open that led to them."""
    spaces, streams = {}, []
    for stream_id, space_id, generation_id, low, high, filter in conn.execute(_THEIR_GENERATIONS, (stream_ids,)):
        spaces[space_id] = Space(space_id, str(space_id), TopicFilter(filter), 1)
        streams.append(StreamCatalogRow(stream_id, space_id, generation_id, int(low), int(high), 0))
    return PublisherRoutingTable(list(spaces.values()), streams, None)


def _to_parameters(batch: IdempotentBatch) -> dict[str, object]:
    return {
        "producer": batch.producer_id,
        "incarnation": batch.incarnation,
        "number": batch.number,
        "digest": batch.digest,
        "ledger": LEDGER_STREAM_ID,
        "step": MAX_STEP,
    }
