"""Packs a block of few messages from Python's values, which is faster than with Arrow; converts more to Arrow.

Arrow's functions have a constant cost, which is largest after some idle milliseconds. The result equals that of
`sublet_storage.log.block_encoder.pack`. The header of a record batch of one schema differs in numbers alone: it is made
by Arrow once, and the numbers are written over.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, Final, TypeAlias

import pyarrow as pa

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_storage.log.arrow_batch_decoder import START
from sublet_storage.log.block_encoder import (
    MAX_INDEXED_TOPICS,
    MIN_COMPRESSED,
    BlockEpochRange,
    PackedBlock,
    make_integers,
)
from sublet_storage.log.column_encoding import (
    BLOCK_SCHEMA,
    MIN_EPOCH_RUN,
    encode_codec,
    get_absent_flag,
    get_runs_flag,
    is_few_runs,
    make_header_template,
    make_nulls,
)

Header: TypeAlias = tuple[str, bytes | None]

Message: TypeAlias = tuple[str, bytes | None, bytes | None, list[Header] | None, int, Epoch | None]
"""As it was published, in the order of `BLOCK_SCHEMA`."""

SMALL_BLOCK: Final = MIN_COMPRESSED
"""Messages from which on Arrow is faster, and blocks are compressed."""

_PADDING: Final = tuple(bytes(-size % 8) for size in range(8))


def pack_messages(messages: Sequence[Message]) -> PackedBlock:
    """Encode fewer than `SMALL_BLOCK` messages, at least one, and describe them."""
    topics, keys, values, headers, timestamps, epochs = zip(*messages, strict=True)
    columns = _Columns(len(messages))
    columns.add_repeating("topic", topics, lambda topics: columns.add_bytes([topic.encode() for topic in topics]))
    columns.add_repeating("key", keys, columns.add_bytes)
    columns.add_bytes(values)
    columns.add_optional("headers", headers, columns.add_headers)
    columns.add_repeating("timestamp", timestamps, columns.add_integers)
    columns.add_epochs(epochs)
    distinct = list(dict.fromkeys(topics))
    return PackedBlock(
        len(messages),
        START + timedelta(microseconds=min(timestamps)),
        START + timedelta(microseconds=max(timestamps)),
        distinct if len(distinct) <= MAX_INDEXED_TOPICS else None,
        encode_codec(0, columns.flags),
        columns.to_payload(),
        _compute_bounds(epochs),
    )


def to_record_batch(messages: Sequence[Message]) -> pa.RecordBatch:
    """Return messages in `BLOCK_SCHEMA`, without lists that Arrow converts: for these it imports pandas where that is
    installed, which takes a fifth of a second."""
    topics, keys, values, headers, timestamps, epochs = zip(*messages, strict=True)
    columns = [
        _to_bytes_array("topic", [topic.encode() for topic in topics]),
        _to_bytes_array("key", keys),
        _to_bytes_array("value", values),
        _to_optional_array("headers", headers),
        make_integers(BLOCK_SCHEMA.field("timestamp").type, timestamps),
        _to_optional_array("epoch", epochs),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BLOCK_SCHEMA)


class _Columns:
    """The columns of a record batch as they are added: `nodes` has the length and the number of nulls of each array,
    `buffers` its buffers."""

    def __init__(self, count: int) -> None:
        self._count, self.flags = count, 0
        self._nodes: list[int] = []
        self._buffers: list[bytes] = []

    def add_optional(self, name: str, values: Sequence[Any], add: Callable[[Sequence[Any]], None]) -> None:
        """Add the column, unless it is null throughout."""
        if values.count(None) == self._count:
            self.flags |= get_absent_flag(name)
        else:
            add(values)

    def add_repeating(self, name: str, values: Sequence[Any], add: Callable[[Sequence[Any]], None]) -> None:
        """Add the column, as runs where there are few."""
        if name == "key" and values.count(None) == self._count:
            self.flags |= get_absent_flag(name)
        elif self._is_worth_runs(values):
            runs = [(value, sum(1 for _ in group)) for value, group in groupby(values)]
            self._add_runs(name, [length for _, length in runs])
            add([value for value, _ in runs])
        else:
            add(values)

    def add_epochs(self, epochs: Sequence[Epoch | None]) -> None:
        """Add the epochs, of which one that is for all is stored once."""
        if self._count >= MIN_EPOCH_RUN and None not in epochs and epochs.count(epochs[0]) == self._count:
            self._add_runs("epoch", [self._count])
            self._add_lists(epochs[:1])
            self.add_integers([number for epoch in epochs[:1] for number in epoch or ()])
        else:
            self.add_optional("epoch", epochs, self._add_each_epoch)

    def add_bytes(self, values: Sequence[bytes | None]) -> None:
        """Add an array of bytes or text."""
        self._add_lists(values)
        self._buffers.append(b"".join(filter(None, values)))

    def add_integers(self, values: Sequence[int]) -> None:
        """Add an array of integers without nulls."""
        self._nodes += (len(values), 0)
        self._buffers += (b"", struct.pack(f"<{len(values)}q", *values))

    def add_headers(self, headers: Sequence[list[Header] | None]) -> None:
        """Add lists of pairs."""
        self._add_lists(headers)
        pairs = list(chain.from_iterable(filter(None, headers)))
        self._nodes += (len(pairs), 0)
        self._buffers.append(b"")
        self.add_bytes([name.encode() for name, _ in pairs])
        self.add_bytes([value for _, value in pairs])

    def to_payload(self) -> pa.Buffer:
        """Return the record batch message."""
        spans, parts, end = list[int](), list[bytes](), 0
        for buffer in self._buffers:
            spans += (end, len(buffer))
            padding = _PADDING[len(buffer) % 8]
            parts += (buffer, padding)
            end += len(buffer) + len(padding)
        header = make_header_template(self.flags).write(self._count, end, self._nodes, spans)
        return pa.py_buffer(b"".join((header, *parts)))

    def _is_worth_runs(self, values: Sequence[Any]) -> bool:
        if is_few_runs(self._count, 1):  # long enough for runs
            nulls = values.count(None)
            changes = sum(previous != value for previous, value in pairwise(values) if None not in (previous, value))
            return is_few_runs(self._count, changes + nulls + 1)
        return False

    def _add_runs(self, name: str, lengths: Iterable[int]) -> None:
        """Begin a column of runs, whose values follow."""
        self.flags |= get_runs_flag(name)
        ends = list(accumulate(lengths))
        self._nodes += (self._count, 0, len(ends), 0)
        self._buffers += (b"", struct.pack(f"<{len(ends)}i", *ends))

    def _add_lists(self, values: Sequence[Any]) -> None:
        """Begin an array of lists, bytes or text, whose elements follow."""
        nulls = values.count(None)
        self._nodes += (len(values), nulls)
        self._buffers += (_encode_bitmap(values) if nulls else b"", _encode_ends(values, nulls))

    def _add_each_epoch(self, epochs: Sequence[Epoch | None]) -> None:
        self._add_lists(epochs)
        self.add_integers(list(chain.from_iterable(filter(None, epochs))))


def _encode_bitmap(values: Sequence[object]) -> bytes:
    """Return which are not null, a bit for each."""
    bits = int("".join("01"[value is not None] for value in reversed(values)), 2)
    return bits.to_bytes((len(values) + 7) // 8, "little")


def _encode_ends(values: Sequence[Any], nulls: int) -> bytes:
    """Return where each of the values, some of which may be null, ends in what they are joined to, after a 0."""
    ends = accumulate(map(len, values) if not nulls else (len(value or b"") for value in values))
    return struct.pack(f"<{len(values) + 1}i", 0, *ends)


def _to_bytes_array(name: str, values: Sequence[bytes | None]) -> pa.Array:
    nulls = values.count(None)
    present = pa.py_buffer(_encode_bitmap(values)) if nulls else None
    ends, data = pa.py_buffer(_encode_ends(values, nulls)), pa.py_buffer(b"".join(filter(None, values)))
    return pa.Array.from_buffers(BLOCK_SCHEMA.field(name).type, len(values), [present, ends, data], nulls)


def _to_optional_array(name: str, values: Sequence[Any]) -> pa.Array:
    field = BLOCK_SCHEMA.field(name)
    return make_nulls(field, len(values)) if values.count(None) == len(values) else pa.array(values, field.type)


def _compute_bounds(epochs: Sequence[Epoch | None]) -> BlockEpochRange | None:
    distinct = set(epochs)
    has_unset = None in distinct
    distinct.discard(None)
    known_epochs = [epoch for epoch in distinct if epoch is not None]
    if not known_epochs:
        return None
    least, greatest = LowerFrontier.from_epochs(known_epochs).least, UpperFrontier.from_epochs(known_epochs).greatest
    return BlockEpochRange(least, greatest, has_unset)
