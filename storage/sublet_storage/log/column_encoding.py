"""The column encodings of a block, which store constant and repeated columns compactly.

Postgres takes a block at a speed that depends on its bytes alone, and most messages have no headers, no epoch and the
topic of their neighbour. So a column that is null throughout is not stored, and topic, key and timestamp are stored as
runs where they repeat, and an epoch that all of them have is stored once. Flags in the block's `codec` say which.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa

from sublet_protocol.domain.errors import SchemaMismatch
from sublet_storage.log.arrow_batch_header import ArrowBatchHeaderTemplate
from sublet_storage.util import arrow_compute as pc

BLOCK_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("epoch", pa.list_(pa.int64())),
    ]
)
"""What a block holds, version 1."""

VERSION = 1
_OPTIONAL = ("key", "headers", "epoch")
_REPEATING = ("topic", "key", "timestamp")
_FLAGS = [("absent", name) for name in _OPTIONAL] + [("runs", name) for name in _REPEATING] + [("runs", "epoch")]
_VERSION_BIT = 2 + len(_FLAGS)
_WORTHWHILE = 4
"""Messages per run, on average, from which a column is stored as runs."""
MIN_EPOCH_RUN = _WORTHWHILE
"""Messages from which one epoch that all of them have is stored once."""
_SAMPLE = 64
"""A column whose first messages have no runs is not looked at further."""
_MAX_RUNS_BYTES = 15 << 20
"""A larger batch has no runs: readers bound the values of runs and what they expand to together."""


def encode_codec(compression: int, flags: int) -> int:
    """Return the codec as one small integer: bits 0-1 the compression, then the flags, above them the version."""
    return VERSION << _VERSION_BIT | flags << 2 | compression


@lru_cache
def decode_flags(codec: int) -> int:
    """Return the flags in a codec. Raise `SchemaMismatch` for one that this program does not know, or that cannot
    be."""
    if codec >> _VERSION_BIT != VERSION or codec & 3 == 3:
        raise SchemaMismatch(f"block codec {codec}: this program reads version {VERSION} only. Upgrade sublet here.")
    flags = codec >> 2 & (1 << len(_FLAGS)) - 1
    for name in _OPTIONAL:
        if _is(flags, "absent", name) and _is(flags, "runs", name):
            raise SchemaMismatch(f"block codec {codec}: its column {name} is both stored as runs and not stored.")
    return flags


@lru_cache
def stored_schema(flags: int) -> pa.Schema:
    """Return the schema of the stored batch under these flags."""
    fields = []
    for field in BLOCK_SCHEMA:
        if _is(flags, "runs", field.name):
            fields.append(pa.field(field.name, pa.run_end_encoded(pa.int32(), field.type), field.nullable))
        elif not _is(flags, "absent", field.name):
            fields.append(field)
    return pa.schema(fields)


@lru_cache
def make_header_template(flags: int) -> ArrowBatchHeaderTemplate:
    """Return the header of the stored batches under these flags."""
    schema = stored_schema(flags)
    columns = [pa.nulls(1, field.type) for field in schema]  # `pa.array` would load pandas where it is installed
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return ArrowBatchHeaderTemplate(batch.serialize().to_pybytes())


def strip_columns(batch: pa.RecordBatch) -> tuple[int, pa.RecordBatch]:
    """Remove the columns that need not be stored; return (flags, the batch in `schema(flags)`)."""
    count, flags, columns = batch.num_rows, 0, []
    may_have_runs = batch.nbytes <= _MAX_RUNS_BYTES
    for name, column in zip(BLOCK_SCHEMA.names, batch.columns, strict=True):
        if name in _OPTIONAL and column.null_count == count:
            flags |= _get_flag("absent", name)
            continue
        if name in _REPEATING and may_have_runs and _is_worth_runs(column):
            flags |= _get_flag("runs", name)
            column = pc.run_end_encode(column)
        elif name == "epoch" and _is_one(column):
            flags |= _get_flag("runs", name)
            column = pa.RunEndEncodedArray.from_arrays(_run_of(count), column.slice(0, 1))
        columns.append(column)
    return flags, pa.RecordBatch.from_arrays(columns, schema=stored_schema(flags))


def has_one_epoch(codec: int) -> bool:
    """Return whether all messages of a block with this codec are in one epoch."""
    return _is(decode_flags(codec), "runs", "epoch")


def restore_columns(flags: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch in `BLOCK_SCHEMA` again."""
    if not flags:
        return batch
    stored, count = iter(batch.columns), batch.num_rows
    columns = [
        make_nulls(codec, count) if isinstance(codec, pa.Field) else codec(next(stored))
        for codec in _list_codecs(flags)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BLOCK_SCHEMA)


@lru_cache
def _list_codecs(flags: int) -> list[Any]:
    """Return for each column of `BLOCK_SCHEMA` how it comes from the stored one; for one that is not stored its
    field."""
    return [_find_codec(flags, field) for field in BLOCK_SCHEMA]


def _find_codec(flags: int, field: pa.Field) -> Any:
    if _is(flags, "absent", field.name):
        return field
    if not _is(flags, "runs", field.name):
        return _keep_unchanged
    return _expand_run if field.name == "epoch" else pc.run_end_decode


def _keep_unchanged(column: pa.Array) -> pa.Array:
    return column


def make_nulls(field: pa.Field, count: int) -> pa.Array:
    """Return a column of nulls, which all batches have in common: to make one anew takes longer than to read the
    others."""
    return _get_nulls(field.name, round_up(count)).slice(0, count)


@lru_cache
def _get_nulls(name: str, count: int) -> pa.Array:
    return pa.nulls(count, BLOCK_SCHEMA.field(name).type)


@lru_cache
def _run_of(count: int) -> pa.Array:
    return pa.array([count], pa.int32())


def round_up(count: int) -> int:
    """Return a power of two that is at least `count`, so that the arrays cached for batches of any size have few
    sizes."""
    return 1 << max(count - 1, 1).bit_length()


def _is_worth_runs(column: pa.Array) -> bool:
    """Return whether the column has few runs: comparing neighbours costs less than a useless encoding."""
    count = len(column)
    if not is_few_runs(count, 1) or (count > 4 * _SAMPLE and not _is_worth_runs(column.slice(0, _SAMPLE))):
        return False
    changes: int = pc.sum(pc.not_equal(column.slice(1), column.slice(0, count - 1))).as_py() or 0
    return is_few_runs(count, changes + column.null_count + 1)


def is_few_runs(count: int, runs: int) -> bool:
    """Return whether a column of `count` messages in `runs` runs is stored as runs."""
    return count >= 2 * _WORTHWHILE and runs * _WORTHWHILE <= count


def _is_one(epochs: pa.Array) -> bool:
    """Return whether all epochs are set and equal; all that are set have the same number of dimensions."""
    count, numbers = len(epochs), epochs.flatten()
    if count < MIN_EPOCH_RUN or epochs.null_count or len(numbers) % count:
        return False
    of_each = len(numbers) // count
    dimensions = [numbers] if of_each == 1 else [pc.list_element(epochs, dimension) for dimension in range(of_each)]
    return all(bounds["min"] == bounds["max"] for bounds in map(pc.min_max, dimensions))


def _expand_run(column: pa.RunEndEncodedArray) -> pa.Array:
    return column.values.take(pa.repeat(pa.scalar(0, pa.int32()), len(column)))


def get_absent_flag(name: str) -> int:
    """Return the flag of a column that is null throughout, and is not stored."""
    return _get_flag("absent", name)


def get_runs_flag(name: str) -> int:
    """Return the flag of a column that is stored as runs."""
    return _get_flag("runs", name)


@lru_cache
def _get_flag(kind: str, name: str) -> int:
    return 1 << _FLAGS.index((kind, name))


def _is(flags: int, kind: str, name: str) -> bool:
    return (kind, name) in _FLAGS and bool(flags & _get_flag(kind, name))
