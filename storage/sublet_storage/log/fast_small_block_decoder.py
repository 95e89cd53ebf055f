"""Decodes blocks of few messages without Arrow's functions, several together into one batch.

Each function of Arrow has a constant cost, which is largest after some idle milliseconds, and small blocks come often.
A payload that is unusual or wrong in any way is left to `arrow_batch_decoder`. The arrays are made of Python's values,
so that no number of a payload can lead out of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import Final, TypeVar

import pyarrow as pa

from sublet_protocol.domain.errors import SchemaMismatch
from sublet_storage.log.arrow_batch_decoder import FIRST_US, LAST_US, MIN_ARROW_VALUES, REFUSED_IN_TOPICS
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA, make_integers
from sublet_storage.log.column_encoding import (
    BLOCK_SCHEMA,
    decode_flags,
    get_absent_flag,
    get_runs_flag,
    make_header_template,
    make_nulls,
)

MAX_REPEATED_BYTES: Final = 4096
"""Of a value that stands for a run of messages; larger ones are left to Arrow."""

_ABSENT: Final = get_absent_flag("headers") | get_absent_flag("epoch")
_T = TypeVar("_T", bytes, int)


class _Unusual(Exception):
    """An exception for a payload that is not decoded here."""


def decode_small_blocks(
    codec: int, blocks: Sequence[tuple[int, bytes]], stream_id: int, first_offset: int
) -> pa.RecordBatch | None:
    """Return blocks of one codec, each (number of messages, payload), which follow on each other from `first_offset`,
    as one batch in `DELIVERED_SCHEMA`; None where one of them is not small, unusual or wrong."""
    try:
        flags = decode_flags(codec)
        decoded = [_Block(flags, count, payload).read_columns() for count, payload in blocks]
    except (_Unusual, SchemaMismatch, struct.error, UnicodeDecodeError):
        return None
    topics, keys, values, timestamps = (list(chain.from_iterable(column)) for column in zip(*decoded, strict=True))
    total = len(values)
    columns = [
        _make_bytes(pa.string(), topics),
        _make_bytes(pa.binary(), keys) if keys else make_nulls(BLOCK_SCHEMA.field("key"), total),
        _make_bytes(pa.binary(), values),
        make_nulls(BLOCK_SCHEMA.field("headers"), total),
        make_integers(BLOCK_SCHEMA.field("timestamp").type, timestamps),
        make_nulls(BLOCK_SCHEMA.field("epoch"), total),
        make_integers(pa.int64(), [stream_id] * total),
        make_integers(pa.int64(), range(first_offset, first_offset + total)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DELIVERED_SCHEMA)


def _make_bytes(type_: pa.DataType, values: Sequence[bytes]) -> pa.Array:
    ends = struct.pack(f"<{len(values) + 1}i", 0, *accumulate(map(len, values)))
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])


class _Block:
    """The arrays of a stored block, which are read one after the other. Raises `_Unusual`, `struct.error` and
    `UnicodeDecodeError`."""

    def __init__(self, flags: int, count: int, payload: bytes) -> None:
        if not 0 < count < MIN_ARROW_VALUES or flags & _ABSENT != _ABSENT:
            raise _Unusual
        template = make_header_template(flags)
        numbers = template.read(payload, count)
        if numbers is None:
            raise _Unusual
        self._flags, self._count, self._body = flags, count, payload[template.size :]
        self._nodes, self._spans = map(iter, numbers)

    def read_columns(self) -> tuple[Sequence[bytes], Sequence[bytes], Sequence[bytes], Sequence[int]]:
        """Return topics, keys, values and timestamps; no keys where they are not stored."""
        topics = self._read_repeating("topic", self._read_bytes)
        for topic in set(topics):
            if any(map(topic.__contains__, REFUSED_IN_TOPICS)):
                raise _Unusual
            topic.decode()
        keys = () if self._flags & get_absent_flag("key") else self._read_repeating("key", self._read_bytes)
        values = self._read_bytes(self._count)
        timestamps = self._read_repeating("timestamp", self._read_integers)
        if min(timestamps) < FIRST_US or max(timestamps) > LAST_US:
            raise _Unusual
        return topics, keys, values, timestamps

    def _read_repeating(self, name: str, read: Callable[[int], Sequence[_T]]) -> Sequence[_T]:
        """Return the values of a column that may be stored as runs."""
        if not self._flags & get_runs_flag(name):
            return read(self._count)
        self._read_node(self._count)
        count = next(self._nodes)
        if next(self._nodes) or not 0 < count <= self._count:
            raise _Unusual
        self._skip_validity()
        ends: tuple[int, ...] = struct.unpack(f"<{count}i", self._read_buffer())
        values, lengths = read(count), [end - start for start, end in pairwise((0, *ends))]
        is_large = any(isinstance(value, bytes) and len(value) > MAX_REPEATED_BYTES for value in values)
        if is_large or min(lengths) <= 0 or ends[-1] != self._count:
            raise _Unusual
        return list(chain.from_iterable(map(repeat, values, lengths)))

    def _read_bytes(self, count: int) -> Sequence[bytes]:
        self._read_node(count)
        self._skip_validity()
        ends, data = struct.unpack(f"<{count + 1}i", self._read_buffer()), self._read_buffer()
        if ends[0] < 0 or ends[-1] > len(data) or any(start > end for start, end in pairwise(ends)):
            raise _Unusual
        return [data[start:end] for start, end in pairwise(ends)]

    def _read_integers(self, count: int) -> Sequence[int]:
        self._read_node(count)
        self._skip_validity()
        return struct.unpack(f"<{count}q", self._read_buffer())

    def _read_node(self, count: int) -> None:
        """Skip an array's node, which has `count` values and no nulls."""
        if (next(self._nodes), next(self._nodes)) != (count, 0):
            raise _Unusual

    def _skip_validity(self) -> None:
        if self._read_buffer():
            raise _Unusual

    def _read_buffer(self) -> bytes:
        start, size = next(self._spans), next(self._spans)
        if start % 8 or start < 0 or size < 0 or start + size > len(self._body):
            raise _Unusual
        return self._body[start : start + size]
