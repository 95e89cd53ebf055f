"""Appends blocks to streams, and fences earlier incarnations of their producers.

An append is one round trip. The stream's row lock makes the order of offsets the order of commits: offsets have no
holes, and what commits later lies behind, so a reader that has read up to an offset has missed nothing before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, Final

import psycopg
from msgspec import Struct
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import Format, PipelineStatus, TransactionStatus
from psycopg.types.numeric import Int2, Int4, Int8

from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    ProducerFenced,
    Unavailable,
    UnknownOutcome,
    format_error,
)
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.log.block_encoder import BlockEpochRange, PackedBlock

_TYPES = [
    "text",
    "bigint",
    "bigint",
    "bigint",
    "integer",
    "timestamptz",
    "timestamptz",
    "text[]",
    "smallint",
    "bytea",
    "text::jsonb",
]
_CALL = "select outcome, end_offset from append_block({})"
_APPEND = _CALL.format(", ".join(f"%s::{name}" for name in _TYPES))
_SINGLE_APPEND = _CALL.format(", ".join(f"${number}::{name}" for number, name in enumerate(_TYPES, start=1)))
_SINGLE_APPEND_NAME, _FOLLOW_UP_NAME = b"sublet_append", b"sublet_follow_up"
_APPEND_BLOCKS = """
select outcome, end_offset from append_blocks(
  %b::text, %b::bigint, %b::bigint[], %b::bigint[], %b::integer[], %b::timestamptz[], %b::timestamptz[], %b::text[],
  %b::smallint[], %b::bytea[], %b::text[]::jsonb[])"""

_MAX_SHARED_BYTES = 160 * 1024
"""Bytes of a payload, on average, up to which blocks are appended by one call: the server copies them more often."""


class AppendOutcome(StrEnum):
    """The outcome of an append: exactly one of these."""

    APPENDED = "appended"  # it is in the stream, durably, once the transaction has committed
    DUPLICATE = "duplicate"  # it was there already, from an earlier attempt
    CLOSED = "closed"  # the stream takes no more: route to its children
    FENCED = "fenced"  # a newer incarnation of the producer writes: stop
    COMPLETED = "completed"  # it has an epoch that its producer may publish no more
    EXPIRED = "expired"  # it has epochs, and its producer may publish none (any more)


STORED_OUTCOMES = frozenset({AppendOutcome.APPENDED, AppendOutcome.DUPLICATE})

UNNAMED: Final = 1
"""The incarnation of a producer without a name, which has no other."""


class ProducerIdentity(Struct, frozen=True):
    """The identity of a producer. `incarnation` distinguishes this process from earlier ones of the same name."""

    producer_id: str
    incarnation: int


class ProducerStamp(Struct, frozen=True):
    """The stamp of an append: (producer, incarnation) and a sequence that grows by one per block and stream, from 1."""

    producer_id: str
    incarnation: int
    sequence: int


class BlockAppend(Struct, frozen=True):
    """One block for one stream. Without a stamp a retry is stored twice."""

    stream_id: int
    block: PackedBlock
    stamp: ProducerStamp | None = None


class AppendResult(Struct, frozen=True):
    """The result of an append. `end_offset` is the offset after the block's last message; None where nothing was
    written, or it is forgotten."""

    outcome: AppendOutcome
    end_offset: int | None


def append(
    conn: psycopg.Connection[Any], appends: Sequence[BlockAppend], *, in_pipeline: bool = False
) -> list[AppendResult]:
    """Append the blocks in one transaction (the caller's, if it is in one), by stream id; return the answers in the
    given order. `in_pipeline`: the caller has begun a pipeline, and a transaction in it.

    Raise `UnknownOutcome` if the connection died: repeat with the same stamps. Other database errors pass through,
    and then nothing was written.
    """
    order = sorted(range(len(appends)), key=lambda index: appends[index].stream_id)
    with map_append_errors(conn):
        answers = _send(conn, [appends[index] for index in order], in_pipeline)
    by_index = dict(zip(order, answers, strict=True))
    return [by_index[index] for index in range(len(appends))]


class SingleAppender:
    """Appends one block at a time over a connection in autocommit mode: one thread may send it, and another receive the
    answer. `follow_up`: a statement that may be sent before the answer is there, for a transaction of its own behind
    it. Nothing else may be executed over the connection until the answer is received, and where there is a follow-up,
    until `finish`. Methods raise `psycopg.Error`, too, after which it is of no more use.
    """

    def __init__(self, conn: BoundedConnection, follow_up: str) -> None:
        self.conn, self._server, self._dumper = conn, conn.pgconn, Transformer(conn)
        self._owes_sync = self.has_follow_up = False
        for name, statement in ((_SINGLE_APPEND_NAME, _SINGLE_APPEND), (_FOLLOW_UP_NAME, follow_up)):
            self._server.send_prepare(name, statement.encode())
            conn.receive_result()

    @property
    def is_ready(self) -> bool:
        """Return whether the connection is open, and no statement runs on it."""
        return self.conn.info.transaction_status is TransactionStatus.IDLE

    @property
    def _is_in_pipeline(self) -> bool:
        return self._server.pipeline_status != PipelineStatus.OFF

    def send(self, append: BlockAppend, *, is_followed: bool = False) -> None:
        """Send it without waiting for the server. `is_followed`: a follow-up may be sent."""
        parameters = _list_parameters(append)
        values = self._dumper.dump_sequence(parameters, [PyFormat.BINARY] * len(parameters))
        if is_followed:
            self._server.enter_pipeline_mode()
        self._send(_SINGLE_APPEND_NAME, values, [Format.BINARY] * len(values))

    def send_follow_up(self, parameters: Sequence[bytes]) -> None:
        """Send the statement that follows on the append, which was sent, without waiting for the server."""
        self.has_follow_up = True
        self._send(_FOLLOW_UP_NAME, parameters, None)

    def _send(self, name: bytes, values: Sequence[Any], formats: Sequence[Format] | None) -> None:
        self._owes_sync = self._is_in_pipeline  # until it is sent: an exception of a signal handler may prevent it
        self._server.send_query_prepared(name, values, formats)
        self._send_owed_sync()

    def _send_owed_sync(self) -> None:
        if self._owes_sync:
            self._server.pipeline_sync()
            self._owes_sync = False

    def receive(self) -> AppendResult:
        """Wait for the answer to the append that was sent. Raise what `append` raises."""
        self._send_owed_sync()
        with map_append_errors(self.conn):
            result = self.conn.receive_result()
        if self._is_in_pipeline and not self.has_follow_up:
            self.finish()
        outcome, end_offset = result.get_value(0, 0), result.get_value(0, 1)
        assert outcome is not None
        return AppendResult(AppendOutcome(outcome.decode()), None if end_offset is None else int(end_offset))

    def finish(self) -> bool:
        """Wait until no statement runs, whatever comes of it; return whether there was a follow-up that found a row."""
        has_row = self.has_follow_up = False
        while self.conn.info.transaction_status is TransactionStatus.ACTIVE:
            with suppress(psycopg.Error):
                has_row = self.conn.receive_result().ntuples > 0 or has_row
        if self.is_ready:
            self._server.exit_pipeline_mode()
        return has_row


@contextmanager
def map_append_errors(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Raise `UnknownOutcome` where the connection dies while something is appended, and `DatabaseUnreachable` where its
    server process does not know the partition, as when that was attached while it looked for partitions."""
    try:
        yield
    except psycopg.errors.CheckViolation as error:
        if error.diag.constraint_name is None:
            raise DatabaseUnreachable(f"{format_error(error)}: try again over another connection.") from error
        raise
    except psycopg.OperationalError as error:
        if conn.closed:
            raise UnknownOutcome(f"the connection died during an append: {error}".strip()) from error
        raise


def register_producer(conn: psycopg.Connection[Any], producer_id: str) -> int:
    """Begin a new incarnation of a named producer and return it; appends of older ones are fenced from now on.

    Appends of older ones that are under way are waited for, as long as the connection's lock_timeout allows; raises
    `Unavailable` if it takes longer.
    """
    try:
        ((incarnation,),) = conn.execute("select register_producer(%s)", (producer_id,)).fetchall()
        return int(incarnation)
    except psycopg.errors.LockNotAvailable:
        raise Unavailable(
            f"producer {producer_id!r}: an earlier incarnation of it is still writing, and a new one begins only after "
            "that. Try again; if it goes on, end the process that publishes under this name."
        ) from None


def register_again(conn: psycopg.Connection[Any], producer: ProducerIdentity) -> None:
    """Register a named producer on another timeline of the database, where the registration may be missing: older
    incarnations stay fenced."""
    conn.execute("select register_producer(%s, %s)", (producer.producer_id, producer.incarnation))


def producer_fenced_error(producer_id: str, incarnation: int) -> ProducerFenced:
    """Return the error for an append that was `FENCED`."""
    return ProducerFenced(
        f"producer {producer_id!r}: a newer incarnation of it has begun, and this one ({incarnation}) may write no "
        "more. Give each process a name of its own."
    )


def _send(conn: psycopg.Connection[Any], appends: list[BlockAppend], in_pipeline: bool) -> list[AppendResult]:
    if _can_share_call(appends):
        rows = conn.execute(_APPEND_BLOCKS, _list_shared_parameters(appends), prepare=True, binary=True).fetchall()
        return [AppendResult(AppendOutcome(outcome), end_offset) for outcome, end_offset in rows]
    if in_pipeline or len(appends) == 1:
        cursors = [_execute(conn, each) for each in appends]
    elif conn.info.transaction_status != TransactionStatus.IDLE:
        with conn.pipeline():
            cursors = [_execute(conn, each) for each in appends]
    else:
        with conn.pipeline(), conn.transaction():
            cursors = [_execute(conn, each) for each in appends]
    return [_read_append_result(cursor) for cursor in cursors]


def _can_share_call(appends: list[BlockAppend]) -> bool:
    """Return whether there are several small blocks of one producer."""
    producers = {each.stamp and (each.stamp.producer_id, each.stamp.incarnation) for each in appends}
    size = sum(memoryview(each.block.payload).nbytes for each in appends)
    return len(appends) > 1 and len(producers) == 1 and size <= len(appends) * _MAX_SHARED_BYTES


def _list_shared_parameters(appends: list[BlockAppend]) -> tuple[object, ...]:
    """Return a list of each column; None for those that are null throughout, of which psycopg knows no type."""
    producers, incarnations, sequences, *streams_and_times, topics, codecs, payloads, epochs = map(
        list, zip(*map(_list_parameters, appends), strict=True)
    )
    joined = [each and "#".join(each) for each in topics]
    return (
        producers[0],
        incarnations[0],
        sequences if producers[0] else None,
        *streams_and_times,
        joined if any(joined) else None,
        codecs,
        payloads,
        epochs if any(epochs) else None,
    )


def _execute(conn: psycopg.Connection[Any], append: BlockAppend) -> psycopg.Cursor[Any]:
    return conn.execute(_APPEND, _list_parameters(append), prepare=True, binary=True)


def _list_parameters(append: BlockAppend) -> tuple[object, ...]:
    stamp, block = append.stamp, append.block
    stamp_parameters = (None, Int8(0), Int8(0)) if stamp is None else _stamp(stamp)
    block_parameters = (
        block.first_timestamp,
        block.last_timestamp,
        block.topics,
        Int2(block.codec),
        memoryview(block.payload),
    )
    return (
        *stamp_parameters,
        Int8(append.stream_id),
        Int4(block.count),
        *block_parameters,
        _encode_epochs(block.epochs),
    )


def _encode_epochs(epochs: BlockEpochRange | None) -> str | None:
    if epochs is None:
        return None
    return json.dumps({"least": epochs.least, "greatest": epochs.greatest, "has_unset": epochs.has_unset})


def _stamp(stamp: ProducerStamp) -> tuple[object, ...]:
    return stamp.producer_id, Int8(stamp.incarnation), Int8(stamp.sequence)


def _read_append_result(cursor: psycopg.Cursor[Any]) -> AppendResult:
    row = cursor.fetchone()
    assert row is not None
    return AppendResult(AppendOutcome(row[0]), row[1])
