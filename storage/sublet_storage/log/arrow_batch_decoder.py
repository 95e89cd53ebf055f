"""The one decoder of untrusted Arrow: blocks, published batches, and pages from nodes.

The envelope of such bytes can be right while their offsets point anywhere, and reading them then ends the process by a
signal, which cannot be caught. So they are validated in this order: the envelope, the number of messages and how large
they become, before anything is decompressed; the layout, before runs are expanded, compared or filtered; and the
constraints of the columns. `fast_small_block_decoder` takes what is small and certainly right from it.
`tests/unit/test_untrusted_data.py` holds that nothing else decodes Arrow, and `python -m tests.fuzz` looks for bytes
that get through.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Final, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa

from sublet_protocol.domain.errors import PoisonBlock, SchemaMismatch
from sublet_protocol.domain.limits import MAX_DIMENSIONS
from sublet_storage.log import column_encoding
from sublet_storage.log.arrow_batch_header import ArrowBatchHeader, parse_envelope
from sublet_storage.util import arrow_compute as pc

MAX_BLOCK_MESSAGES: Final = 100_000
MAX_BLOCK_BYTES: Final = 32 << 20
"""What a block may come to when it is decompressed, and its runs are expanded."""

MAX_PAYLOAD_BYTES: Final = 33 << 20
"""Of a block as it is stored, with its header; the table `block` checks it too."""

MAX_PAGE_BYTES: Final = 64 << 20
"""What the columns of a node's page may come to: more than a gRPC message of ours can have."""

_MAX_CAUSE: Final = 300
"""Characters of a cause in an error."""

MIN_ARROW_VALUES: Final = 64
"""Fewer values than this Python goes through sooner than Arrow's functions."""

_ESTIMATED: Final = 256 << 10
"""Up to this size in bytes an upper estimate of an expanded column is used, which costs less than computing the
size."""

REFUSED_IN_TOPICS: Final = (b"\0", b"+", b"#")
"""A NUL, which Postgres does not store, and the wildcards of filters."""

START: Final = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_US: Final = (datetime.min.replace(tzinfo=UTC) - START) // timedelta(microseconds=1)
LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - START) // timedelta(microseconds=1)
"""Timestamps that a Python datetime can have, in microseconds since 1970."""

Stored: TypeAlias = bytes | memoryview | pa.Buffer
Check: TypeAlias = Callable[[pa.RecordBatch], None]
_T = TypeVar("_T")


class InvalidRecordBatch(ValueError):
    """An error for bytes that are no record batch of the schema, or beyond a limit; the text says which, and is
    printable."""


class _Layout(NamedTuple):
    """The columns of a stored batch. `runs`: which are stored as runs. `checks`: by their places, names, whether they
    have nulls, and what is checked of their values."""

    schema: pa.Schema
    runs: list[int]
    checks: dict[int, tuple[str, bool, Callable[[pa.Array], None] | None]]


class ValidatedStoredBatch(NamedTuple):
    """A batch as it is stored; `decoded_bytes`: the expanded size of its columns."""

    batch: pa.RecordBatch
    decoded_bytes: int


def decode_block(
    codec: int, payload: Stored, stream_id: int, end_offset: int, count: int, check: Check | None = None
) -> pa.RecordBatch:
    """Decode a payload into `BLOCK_SCHEMA`; what is not compressed or left out refers to the payload's memory. `check`
    raises `ValueError` for a stored batch that it rejects.

    Raise `PoisonBlock`, which names the block of that row.
    """
    return restore(codec, [validate_block(codec, payload, stream_id, end_offset, count, check).batch])


def validate_block(
    codec: int, payload: Stored, stream_id: int, end_offset: int, count: int, check: Check | None = None
) -> ValidatedStoredBatch:
    """Return the batch for `restore`; the rest is as for `decode_block`."""
    try:
        return _read_or_reject(partial(_read_block, codec, payload, count, check))
    except InvalidRecordBatch as error:
        hint = (
            "Nothing of it is given out: put its payload back from a backup, or go past it; a group does so with "
            f"`sublet groups reset GROUP --stream {stream_id} --to-offset {end_offset}`, an atomic one with "
            "`--to-epoch EPOCH`, whoever reads without one begins there"
        )
        detail = f"cannot be decoded: {error}. {hint}."
        raise PoisonBlock(stream_id, (end_offset - count, end_offset), detail) from None


def is_decodable(codec: int, payload: Stored, count: int, check: Check | None = None) -> bool:
    """Return whether a block with this payload and number of messages can be decoded, and is not rejected."""
    try:
        _read_or_reject(partial(_read_block, codec, payload, count, check))
    except InvalidRecordBatch:
        return False
    return True


def count_undecodable(blocks: Iterable[tuple[int, Stored | None, int]], max_bytes: int) -> int:
    """Return how many of the first blocks (codec, payload, number of messages) cannot be decoded; of more than
    decompress to `max_bytes` together so many are counted."""
    found = size = 0
    for codec, payload, count in blocks:
        if payload is None:
            break
        size += _compute_claimed_bytes(payload)
        if size > max_bytes or is_decodable(codec, payload, count):
            break
        found += 1
    return found


def _compute_claimed_bytes(payload: Stored) -> int:
    """Return the size to which a payload is decompressed; 0 if it is refused before that."""
    try:
        claimed = parse_envelope(pa.ipc.read_message(pa.py_buffer(payload))).decoded_bytes
    except (pa.ArrowException, OSError, EOFError, ValueError):
        return 0
    return claimed if claimed <= MAX_BLOCK_BYTES else 0


def restore(codec: int, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return validated batches that are stored alike as one: less work than to restore one by one and to copy them
    together."""
    flags = column_encoding.decode_flags(codec)
    if len(batches) == 1:
        return column_encoding.restore_columns(flags, batches[0])
    (together,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return column_encoding.restore_columns(flags, together)


def decode_published_batch(payload: bytes, max_messages: int, max_bytes: int) -> pa.RecordBatch:
    """Return a batch of `BLOCK_SCHEMA` that a client has sent, which may not be compressed. Raise
    `InvalidRecordBatch`."""
    return _read_or_reject(lambda: _read_published(payload, max_messages, max_bytes))


def decode_stream(payload: bytes, schema: pa.Schema) -> pa.Table:
    """Return the messages of an Arrow stream. Raise `InvalidRecordBatch`, and `SchemaMismatch` where it is in another
    schema."""
    return _read_or_reject(lambda: _read_stream(payload, schema), passed=(SchemaMismatch,))


def _read_or_reject(read: Callable[[], _T], passed: tuple[type[Exception], ...] = ()) -> _T:
    """Return the result of the read. Raise `InvalidRecordBatch` for errors of Arrow about the bytes."""
    try:
        return read()
    except passed:
        raise
    except pa.ArrowMemoryError:  # it is the process that lacks memory
        raise
    except (pa.ArrowException, SchemaMismatch, OSError, EOFError, ValueError) as error:
        cause = " ".join(str(error)[:_MAX_CAUSE].split()).rstrip(".")
        raise InvalidRecordBatch("".join(each if each.isprintable() else "?" for each in cause)) from None


def _read_block(codec: int, payload: Stored, count: int, check: Check | None) -> ValidatedStoredBatch:
    layout = _get_block_layout(column_encoding.decode_flags(codec))
    stored = pa.py_buffer(payload)
    if stored.size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"it has more than {MAX_PAYLOAD_BYTES} bytes, and that is the limit")
    message = pa.ipc.read_message(stored)
    header = parse_envelope(message)
    if header.count != count:
        raise ValueError(f"it has {header.count} messages, and its row says {count}")
    validated_batch = _validate(message, header, layout, MAX_BLOCK_MESSAGES, MAX_BLOCK_BYTES)
    _check_columns(layout, validated_batch.batch)
    if check is not None:
        check(validated_batch.batch)
    return validated_batch


def _read_published(payload: bytes, max_messages: int, max_bytes: int) -> pa.RecordBatch:
    message = pa.ipc.read_message(payload)
    header = parse_envelope(message)
    if header.is_compressed:
        raise ValueError("a compressed record batch")
    return _validate(message, header, _get_block_layout(0), max_messages, max_bytes).batch


def _read_stream(payload: bytes, schema: pa.Schema) -> pa.Table:
    """Read a stream message by message: pyarrow's reader of streams would decode them before they can be validated."""
    reader = pa.ipc.MessageReader.open_stream(payload)
    first = next(reader, None)
    if first is None or first.type != "schema":
        raise ValueError("its first message is not Arrow's 'schema'")
    if pa.ipc.read_schema(first) != schema:
        raise SchemaMismatch("it is in another schema")
    layout, batches, size = _make_layout(schema), list[pa.RecordBatch](), 0
    for message in reader:
        validated_batch = _validate(message, parse_envelope(message), layout, MAX_BLOCK_MESSAGES, MAX_PAGE_BYTES - size)
        _check_columns(layout, validated_batch.batch)
        batches.append(validated_batch.batch)
        size += validated_batch.decoded_bytes
    return pa.Table.from_batches(batches, schema=schema)


@lru_cache
def _get_block_layout(flags: int) -> _Layout:
    return _make_layout(column_encoding.stored_schema(flags))


def _make_layout(schema: pa.Schema) -> _Layout:
    runs = [index for index, field in enumerate(schema) if isinstance(field.type, pa.RunEndEncodedType)]
    checks = {
        index: (field.name, field.nullable, _COLUMN_CHECKS.get(field.name))
        for index, field in enumerate(schema)
        if not field.nullable or field.name in _COLUMN_CHECKS
    }
    return _Layout(schema, runs, checks)


def _validate(
    message: pa.ipc.Message, header: ArrowBatchHeader, layout: _Layout, max_messages: int, max_bytes: int
) -> ValidatedStoredBatch:
    """Return the validated batch. Raise what Arrow raises, or `ValueError`."""
    if not 0 < header.count <= max_messages:
        raise ValueError(f"it has {header.count} messages: there must be 1 to {max_messages}")
    if header.decoded_bytes > max_bytes:
        raise ValueError(f"it decompresses to {header.decoded_bytes} bytes, and the limit is {max_bytes}")
    batch = pa.ipc.read_record_batch(message, layout.schema)
    batch.validate(full=True)
    if (index := layout.schema.get_field_index("headers")) >= 0:
        batch = batch.set_column(index, layout.schema.field(index), _begin_at_0(batch.column(index)))
    size = header.decoded_bytes + sum(_compute_expanded_bytes(batch.column(index)) for index in layout.runs)
    if size > max_bytes:
        raise ValueError(f"its columns expand to {size} bytes, and the limit is {max_bytes}")
    return ValidatedStoredBatch(batch, size)


def _begin_at_0(headers: pa.ListArray) -> pa.ListArray:
    """Return the column, copied if the offsets of its names or values begin behind 0. Where there is no header at all
    that place may lie outside of the data, and Arrow writes such a column again with a size below 0."""
    starts = [memoryview(headers.values.field(name).buffers()[1] or b"")[:4] for name in ("key", "value")]
    return headers.take(pa.array(range(len(headers)))) if any(map(any, starts)) else headers


def _compute_expanded_bytes(column: pa.RunEndEncodedArray) -> int:
    """Return how large runs become, or somewhat more: a few bytes can be repeated very often."""
    count, values = len(column), column.values
    if pa.types.is_timestamp(values.type):
        return 8 * count
    at_most: int = values.nbytes * count
    if at_most <= _ESTIMATED or pa.types.is_list(values.type):
        return at_most
    lengths = pc.cast(pc.binary_length(values), pa.int64())
    at_most = (4 + (pc.max(lengths).as_py() or 0)) * count
    if at_most <= _ESTIMATED:
        return at_most
    ends = pc.cast(column.run_ends, pa.int64())
    counts = pc.subtract(ends, pa.concat_arrays([pa.array([0], pa.int64()), ends[:-1]]))
    return 4 * count + (pc.sum(pc.multiply(counts, lengths)).as_py() or 0)


def _check_columns(layout: _Layout, batch: pa.RecordBatch) -> None:
    """Raise `ValueError` for columns that no caller accepts."""
    for index, (name, nullable, check) in layout.checks.items():
        column = batch.column(index)
        values = column.values if index in layout.runs else column
        if not nullable and values.null_count:
            raise ValueError(f"its column {name} has nulls")
        if name == "epoch" and index in layout.runs and len(values) != 1:
            raise ValueError(f"its column epoch has {len(values)} runs, and one is for all")
        if check is not None:
            check(values)


def _check_topics(topics: pa.Array) -> None:
    """Raise `ValueError` for a topic with one of `REFUSED_IN_TOPICS`. There are no nulls, so that topics are all that
    lies between their first offset and their last."""
    _, offsets, data = topics.buffers()
    start, end = (struct.unpack_from("<i", offsets, 4 * (topics.offset + index))[0] for index in (0, len(topics)))
    text = memoryview(data or b"")[start:end].tobytes()
    if any(each in text for each in REFUSED_IN_TOPICS):
        raise ValueError("its column topic has a wildcard or a NUL")


def _check_headers(headers: pa.Array) -> None:
    if headers.null_count == len(headers):
        return
    pairs = pc.list_flatten(headers)
    if pairs.null_count or pc.struct_field(pairs, "key").null_count:
        raise ValueError("its column headers has a header without a name")


def _check_timestamps(timestamps: pa.Array) -> None:
    if len(timestamps) < MIN_ARROW_VALUES:
        start, end = 8 * timestamps.offset, 8 * (timestamps.offset + len(timestamps))
        values = memoryview(timestamps.buffers()[1])[start:end].cast("q")
        first, last = min(values), max(values)
    else:
        span = pc.min_max(timestamps.view(pa.int64()))
        first, last = span["min"].as_py(), span["max"].as_py()
    if first < FIRST_US or last > LAST_US:
        raise ValueError("its column timestamp has a time outside of the years 1 to 9999")


def _check_epochs(epochs: pa.Array) -> None:
    if epochs.null_count == len(epochs):
        return
    lengths = pc.min_max(pc.list_value_length(epochs))
    shortest, longest = lengths["min"].as_py(), lengths["max"].as_py()
    if not 1 <= shortest == longest <= MAX_DIMENSIONS or pc.list_flatten(epochs).null_count:
        raise ValueError(f"its column epoch has epochs that are not of one to {MAX_DIMENSIONS} numbers, all of as many")


_COLUMN_CHECKS: Final = {
    "topic": _check_topics,
    "headers": _check_headers,
    "timestamp": _check_timestamps,
    "epoch": _check_epochs,
}
