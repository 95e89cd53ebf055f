"""Rows of the outbox: written in a transaction of a caller, and converted to blocks, routed like a publisher's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import sql

from sublet_protocol.domain.errors import MalformedRow, UnknownSpace, UsageError
from sublet_storage.db.connect import resolve_schema_name
from sublet_storage.log.append import BlockAppend
from sublet_storage.log.block_encoder import pack
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer.batches.input_conversion import (
    as_bytes,
    as_headers,
    check_size,
    check_sizes,
    to_record_batches,
)
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, split_into_blocks
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.delivery import SharedPublishResult
from sublet_storage.producer.publisher import MAX_MESSAGE_BYTES

BLOCK_MESSAGES: Final = 1000
BLOCK_BYTES: Final = 256 * 1024

FETCHED_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""A row that is larger by Postgres' own measure is not even fetched: it is refused for certain."""


_REFUSED = (UsageError, UnknownSpace, MalformedRow)
"""What a publisher raises for a message that it does not take."""

_PUBLISH = "select {}.publish(%s::text, %s::bytea, %s::bytea, %s::jsonb, %s::timestamptz)"


class OutboxRow(NamedTuple):
    """A row that was read. `ctid` is the row's ctid; `snapshot`, of the statement, is in the first row only."""

    ctid: str
    outbox_id: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: str | None
    timestamp_us: int
    size: int
    xact: str
    snapshot: str | None


def publish_in_transaction(
    conn: psycopg.Connection[Any],
    topic: str,
    value: bytes | None,
    key: bytes | None,
    headers: str,
    timestamp: datetime | None,
) -> None:
    """Write a row of the outbox in the transaction that is open. `headers`: as JSON."""
    call = sql.SQL(_PUBLISH).format(sql.Identifier(resolve_schema_name(opened=conn)))
    conn.execute(call, (topic, value, key, headers, timestamp))


def validate_rows(
    rows: Sequence[OutboxRow], routes: PublisherRoutingTable
) -> tuple[list[pa.RecordBatch], dict[int, str]]:
    """Return the messages in the order of their ids, and those that can never be published: {id: why}.

    They are checked one by one only if one of them is invalid.
    """
    with suppress(*_REFUSED):
        return _make_batches(rows, routes), {}
    refused: dict[int, str] = {}
    for row in rows:
        try:
            _make_batches([row], routes)
        except _REFUSED as error:
            refused[row.outbox_id] = str(error)
    return _make_batches([row for row in rows if row.outbox_id not in refused], routes), refused


def _make_batches(rows: Sequence[OutboxRow], routes: PublisherRoutingTable) -> list[pa.RecordBatch]:
    """Return the rows in Arrow. Raise one of `_REFUSED` if a publisher would refuse one of them."""
    if not rows:
        return []
    check_size(max(row.size for row in rows), FETCHED_BYTES, "the message", "publish smaller ones.")
    _, _, topics, keys, values, headers, times, *_ = zip(*rows, strict=True)
    columns = {"topic": pa.array(topics, pa.string()), "key": pa.array(keys, pa.binary())}
    columns |= {"value": pa.array(values, pa.binary()), "timestamp": pa.array(times, pa.int64())}
    if any(each is not None for each in headers):
        columns["headers"] = pa.array(map(_parse_headers, headers), BLOCK_SCHEMA.field("headers").type)
    batches = to_record_batches(columns)
    for batch in batches:
        check_sizes(batch, MAX_MESSAGE_BYTES)
        routes.check(batch)
    return batches


def _parse_headers(text: str | None) -> list[tuple[str, bytes | None]] | None:
    try:
        return None if text is None else as_headers([_parse_header(pair) for pair in json.loads(text)])
    except (TypeError, ValueError, LookupError, RecursionError):
        raise UsageError(f"headers {text!a:.60}: not as publish() writes them. Publish by that function.") from None


def _parse_header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, list):
        raise TypeError
    name, value = pair
    if value is None or isinstance(value, str):
        return name, as_bytes("header", value)
    return name, base64.b64decode(value["base64"], validate=True)


def build_appends(batch: pa.RecordBatch, routes: PublisherRoutingTable) -> Iterator[BlockAppend]:
    """Yield blocks for the streams that the messages belong to, in order within each."""
    for stream_id, part, numbers in routes.partition_rows(batch, range(batch.num_rows)):
        for piece in split_into_blocks(
            PendingArrowBatch(part, numbers, SharedPublishResult(len(numbers))), BLOCK_MESSAGES, BLOCK_BYTES
        ):
            yield BlockAppend(stream_id, pack(piece.batch, routes.get_compression(stream_id)))
