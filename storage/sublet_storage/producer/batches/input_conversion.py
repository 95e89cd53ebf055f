"""Checks a user's values and converts them to batches of `BLOCK_SCHEMA`."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import pyarrow as pa

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_protocol.domain.errors import InvalidEpoch, InvalidTopic, UsageError, ValueTooLarge
from sublet_protocol.domain.limits import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_HEADERS, to_integer
from sublet_storage.log.arrow_batch_decoder import FIRST_US, LAST_US
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer.arguments import format_value
from sublet_storage.util import arrow_compute as pc

Headers = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]
Columns: TypeAlias = pa.Table | pa.RecordBatch | Mapping[str, Any]

MESSAGE_OVERHEAD_BYTES = 32
"""What a message counts for in the buffer beyond its topic, key, value and headers."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TYPES = {field.name: field.type for field in BLOCK_SCHEMA}
_HEADERS_RULE = "headers are names with bytes, text or None each. Give a mapping, or pairs of (name, value)."
_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What Arrow raises for values that do not fit their column; a lone surrogate is a ValueError."""


def get_now_us() -> int:
    """Return the wall clock in microseconds: the timestamp of a message that brings none."""
    return time.time_ns() // 1000


def as_bytes(field: str, value: object) -> bytes | None:
    """Return a key or value as bytes; text is encoded as UTF-8. Raise `UsageError` for anything else."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{field} {value[:40]!a} holds a lone surrogate: not UTF-8. Give the bytes instead."
            ) from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise UsageError(f"{field} of type {type(value).__name__}: give bytes or text. Encode it first (json.dumps, say).")


def as_headers(headers: object) -> list[tuple[str, bytes | None]] | None:
    """Return headers as a list of pairs; None and no headers at all are the same. Raise `UsageError`,
    `ValueTooLarge`."""
    if headers is None:
        return None
    if isinstance(headers, Mapping):
        headers = headers.items()
    elif not isinstance(headers, Iterable) or isinstance(headers, str | bytes):
        raise UsageError(f"headers {format_value(headers)}: {_HEADERS_RULE}")
    pairs = [_convert_header(pair) for pair in headers]
    _check_headers(len(pairs), sum(compute_header_size(*pair) for pair in pairs), "the message")
    return pairs or None


def compute_header_size(name: str, value: bytes | None) -> int:
    """Return what a header counts for in the limit of a message's headers, in bytes."""
    return len(name.encode()) + len(value or b"")


def as_timestamp_us(timestamp: object) -> int:
    """Return microseconds since 1970, UTC. A datetime must have a time zone. Raise `UsageError`."""
    if timestamp is None:
        return get_now_us()
    micros = _to_microseconds(timestamp) if isinstance(timestamp, datetime) else _to_integer(timestamp)
    _check_span(micros, micros)
    return micros


def size_of(topic: str, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]] | None) -> int:
    """Return what one message takes in the buffer, in bytes. Raise `InvalidTopic` for a topic that is not text."""
    if not isinstance(topic, str):
        raise InvalidTopic(f"topic {format_value(topic)}: a topic is text, not {type(topic).__name__}. Give a str.")
    size = MESSAGE_OVERHEAD_BYTES + len(topic) + len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(data or b"") for name, data in headers) if headers else size


def check_size(size: int, limit: int, subject: str, hint: str = "raise max_message_bytes.") -> None:
    """Raise `ValueTooLarge` above the limit."""
    if size > limit:
        raise ValueTooLarge(
            f"{subject} takes {size} bytes and the limit is {limit}. Publish a reference to where it is stored, or "
            f"{hint}"
        )


def to_record_batches(data: Columns) -> list[pa.RecordBatch]:
    """Return batches of `BLOCK_SCHEMA`, none empty, from a table, a record batch or a mapping of columns.

    `topic` and `value` are required; a topic may be one text for all, and what else is missing is null, or now.
    """
    table = _to_table(data)
    columns = [_to_column(table, field) for field in BLOCK_SCHEMA]
    entire = pa.Table.from_arrays(columns, schema=BLOCK_SCHEMA)
    if entire.column("topic").null_count:
        raise InvalidTopic("a topic in the batch is null. Each message needs one.")
    if entire.num_rows:
        _check_span(*(pc.min_max(entire.column("timestamp").cast(pa.int64())).as_py().values()))
    return [batch for batch in entire.combine_chunks().to_batches() if batch.num_rows]


def check_sizes(batch: pa.RecordBatch, limit: int) -> None:
    """Raise `ValueTooLarge` if a message of the batch is above the limit; cheap unless one is near it."""
    sizes = [pc.binary_length(batch.column(name)) for name in ("topic", "key", "value")]
    largest = sum(pc.max(size).as_py() or 0 for size in sizes)
    headers = batch.column("headers")
    bound = largest + (0 if headers.null_count == len(headers) else headers.nbytes)
    if bound + MESSAGE_OVERHEAD_BYTES <= limit:
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        stored_headers = row.column("headers").to_pylist()[0]
        pairs = None if stored_headers is None else [(pair["key"], pair["value"]) for pair in stored_headers]
        topic, key, value = (row.column(name)[0].as_py() for name in ("topic", "key", "value"))
        check_size(size_of(topic, key, value, pairs), limit, f"message {index} of the batch")


def set_epoch(batch: pa.RecordBatch, epoch: Epoch) -> pa.RecordBatch:
    """Return the batch, normalised, with all its messages in that epoch. Raise `UsageError` if it has epochs of its
    own."""
    index = BLOCK_SCHEMA.get_field_index("epoch")
    if batch.column(index).null_count < batch.num_rows:
        raise UsageError(f"column epoch: all messages are to be in epoch {epoch}, and some have one. Leave it out.")
    return batch.set_column(index, BLOCK_SCHEMA.field(index), _repeat_epoch(epoch, batch.num_rows))


@functools.lru_cache(maxsize=16)
def _repeat_epoch(epoch: Epoch, count: int) -> pa.Array:
    if len(epoch) > 1:
        return pa.repeat(pa.scalar(list(epoch), BLOCK_SCHEMA.field("epoch").type), count)
    return pa.ListArray.from_arrays(_make_list_offsets(count), pa.repeat(pa.scalar(epoch[0], pa.int64()), count))


@functools.lru_cache(maxsize=16)
def _make_list_offsets(count: int) -> pa.Array:
    """Return the offsets of `count` lists of one number each: cached, as batches of one size are the common case."""
    return pa.array(range(count + 1), pa.int32())


def _to_table(data: Columns) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        _check_names(data.column_names)
        return data
    if not isinstance(data, Mapping):
        raise UsageError(f"a batch of type {type(data).__name__}: give an Arrow table or a mapping of columns.")
    _check_names([str(name) for name in data])
    if all(column is None or isinstance(column, str | bytes) for column in data.values()):
        raise UsageError("a batch without a single column: give the values as a list, or call publish() for one.")
    count = max((len(column) for column in data.values() if _is_column(column)), default=0)
    arrays = {str(name): _to_array(str(name), column, count) for name, column in data.items()}
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise UsageError(f"columns of different lengths ({lengths}). Give each one value per message.")
    return pa.table(arrays)


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise UsageError(f"columns {', '.join(names)}: a name stands twice. Give each column once.")
    if unknown := set(names) - set(_TYPES):
        raise UsageError(f"no such columns: {', '.join(sorted(unknown))}. Columns are {', '.join(_TYPES)}.")
    if missing := {"topic", "value"} - set(names):
        raise UsageError(f"columns missing: {', '.join(sorted(missing))}. Each message needs a topic and a value.")


def _is_column(column: object) -> bool:
    return isinstance(column, pa.Array | pa.ChunkedArray | Sequence) and not isinstance(column, str | bytes)


def _to_array(name: str, column: Any, count: int) -> Any:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    single = not _is_column(column)
    values = [column] if single else column
    if name == "headers":
        values = [as_headers(each) for each in values]
    if name == "timestamp":
        for each in values:
            if type(each).__name__ in ("datetime64", "NaTType") or (
                isinstance(each, datetime) and each.utcoffset() is None
            ):
                raise UsageError(f"column timestamp: {_format_no_zone(each)}")
    try:
        array = pa.array(values, _TYPES[name])
    except UnicodeEncodeError as error:
        kind = InvalidTopic if name == "topic" else UsageError
        raise kind(f"column {name}: {error.object[:40]!a} holds a lone surrogate: not UTF-8. Give true text.") from None
    except _UNFIT as error:
        kind = InvalidTopic if name == "topic" else UsageError
        type_text = f" given as {type(column).__name__}" if single else ""
        raise kind(f"column {name}{type_text}: {error}. Give a list or an Arrow array of {_TYPES[name]}.") from None
    return pa.repeat(array[0], count) if single else array


def _to_column(table: pa.Table, field: pa.Field) -> Any:
    count = table.num_rows
    if field.name not in table.column_names:
        if field.name == "timestamp":
            return pa.repeat(pa.scalar(get_now_us(), field.type), count)
        return pa.nulls(count, field.type)
    column = table.column(field.name)
    if field.name == "timestamp":
        _check_zone(column.type.value_type if pa.types.is_dictionary(column.type) else column.type)
    if field.name == "headers":
        _check_header_type(column.type)
    try:
        if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
            raise pa.ArrowInvalid("a list view")  # which Arrow casts by its offsets, without its sizes
        if column.type != field.type:
            column = column.cast(field.type, safe=not _is_finer(column.type))
        column.validate(full=True)
    except pa.ArrowException as error:
        kind = InvalidTopic if field.name == "topic" else UsageError
        raise kind(f"column {field.name} of type {column.type}: {error}. It must be {field.type}.") from None
    if field.name == "headers":
        _check_header_names(column)
        _check_header_sizes(column)
    if field.name == "epoch":
        _check_epochs(column)
    return column.fill_null(pa.scalar(get_now_us(), field.type)) if field.name == "timestamp" else column


def _check_epochs(column: pa.ChunkedArray) -> None:
    """Raise `InvalidEpoch` unless all epochs have the same number of dimensions, and no null among them."""
    lengths = pc.min_max(pc.list_value_length(column))
    shortest, longest = lengths["min"].as_py(), lengths["max"].as_py()
    if shortest is None:
        return
    if not 1 <= shortest == longest <= MAX_DIMENSIONS:
        rule = f"epochs of {shortest} to {longest} numbers: all of a space have as many, from 1 to {MAX_DIMENSIONS}"
        raise InvalidEpoch(f"column epoch: {rule}. Use epochs of one kind.")
    if pc.list_flatten(column).null_count:
        raise InvalidEpoch("column epoch: a null among the numbers of an epoch. Leave the whole epoch out, or name it.")


def _is_finer(kind: pa.DataType) -> bool:
    """Return whether times are in nanoseconds, which are cut off; coarser times are checked, as not all fit in
    microseconds."""
    return bool(pa.types.is_timestamp(kind) and kind.unit == "ns")


def _check_zone(kind: pa.DataType) -> None:
    """Raise `UsageError` for a time without a zone, as for a single message."""
    if (pa.types.is_timestamp(kind) and kind.tz is None) or pa.types.is_date(kind):
        raise UsageError(
            f"column timestamp of type {kind}: it has no time zone. Say which it is in "
            "(pyarrow.compute.assume_timezone(column, 'UTC'), say), or give microseconds since 1970."
        )


def _check_header_type(kind: pa.DataType) -> None:
    """Raise `UsageError` for fields of a header that Arrow would leave out, or fill with nulls."""
    fields = kind.value_type if hasattr(kind, "value_type") else kind
    names = [each.name for each in fields] if pa.types.is_struct(fields) else ["key", "value"]
    if sorted(names) != ["key", "value"]:
        raise UsageError(f"column headers: a header has the fields {', '.join(names)}. Name them key and value.")


def _check_header_names(column: pa.ChunkedArray) -> None:
    if not pc.struct_field(pc.list_flatten(column), "key").null_count:
        return
    for index, pairs in enumerate(column.to_pylist()):
        if any(pair is None or pair["key"] is None for pair in pairs or ()):
            raise UsageError(f"column headers: message {index} of the batch has a header without a name. Name each.")


def _check_header_sizes(column: pa.ChunkedArray) -> None:
    """Check the headers of each message of the column against the limits of one message."""
    for chunk in column.drop_null().chunks:  # a null may span headers, which are nobody's, and have a parent
        pairs = chunk.flatten()
        if not len(pairs):
            continue
        names, values = (pc.binary_length(pc.struct_field(pairs, part).cast(pa.binary())) for part in ("key", "value"))
        sizes = pc.add(pc.cast(names, pa.int64()), pc.fill_null(values, 0))
        owners = pc.list_parent_indices(chunk)
        totals = (
            pa.table({"owner": owners, "size": sizes}).group_by("owner").aggregate([("size", "sum"), ("size", "count")])
        )
        max_count, max_size = pc.max(totals.column("size_count")).as_py(), pc.max(totals.column("size_sum")).as_py()
        _check_headers(max_count, max_size, "a message of the batch")


def _check_headers(count: int, size: int, subject: str) -> None:
    hint = "Put the rest into its value"
    if count > MAX_HEADERS:
        raise ValueTooLarge(f"{subject} has {count} headers and the limit is {MAX_HEADERS}. {hint}.")
    if size > MAX_HEADER_BYTES:
        raise ValueTooLarge(f"{subject} has headers of {size} bytes and the limit is {MAX_HEADER_BYTES}. {hint}.")


def _convert_header(pair: object) -> tuple[str, bytes | None]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"header {format_value(pair)}: {_HEADERS_RULE}")
    name, value = pair
    if not isinstance(name, str):
        raise UsageError(f"header name {format_value(name)}: a name is text, not {type(name).__name__}. Give a str.")
    if not name.isascii():
        as_bytes("header name", name)
    return name, value if type(value) is bytes else as_bytes(f"header {name!r}", value)


def _to_microseconds(moment: datetime) -> int:
    if moment.utcoffset() is None:
        raise UsageError(_format_no_zone(moment))
    return int((moment - _EPOCH) // _MICROSECOND)


def _format_no_zone(moment: object) -> str:
    return f"timestamp {moment} has no time zone. Give an aware datetime, or microseconds."


def _to_integer(timestamp: object) -> int:
    """Return the integer of any integral type, such as numpy's."""
    if (integer := to_integer(timestamp)) is not None:
        return integer
    raise UsageError(
        f"timestamp {format_value(timestamp)} of type {type(timestamp).__name__}: neither a datetime nor a whole "
        "number. Give an aware datetime, or microseconds since 1970."
    )


def _check_span(first_us: int, last_us: int) -> None:
    if first_us < FIRST_US or last_us > LAST_US:
        raise UsageError(
            f"timestamp {first_us if first_us < FIRST_US else last_us}: outside of the years 1 to 9999. "
            "Timestamps are in microseconds since 1970."
        )
