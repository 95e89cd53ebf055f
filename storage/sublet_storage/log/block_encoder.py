"""Encodes the payload of a block: one Arrow record batch of consecutive messages.

Stored is the IPC record batch message without its schema message: the schema is in
`sublet_storage.log.column_encoding`, and the block's `codec` names its version, so that a block of one message stays
small and an old block stays readable. Stream and offset are not stored but implied by the row that holds the payload.
`arrow_batch_decoder` decodes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache

import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.bounded_cache import BoundedCache
from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import InvalidSetting, ValueTooLarge
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.log import column_encoding
from sublet_storage.log.arrow_batch_decoder import MAX_BLOCK_BYTES, MAX_BLOCK_MESSAGES, MIN_ARROW_VALUES, START
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.util import arrow_compute as pc

DELIVERED_SCHEMA = BLOCK_SCHEMA.append(pa.field("stream", pa.int64(), nullable=False)).append(
    pa.field("offset", pa.int64(), nullable=False)
)
"""What a reader gets: the stored columns, and each message's position."""

MAX_INDEXED_TOPICS = 8
"""More distinct topics than this in a block, and it has no skip index."""

MIN_COMPRESSED = 64
"""Messages below which compression makes a block larger, measured."""

COMPRESSIONS = ("none", "lz4", "zstd")

MAX_PACKED_BYTES = MAX_BLOCK_BYTES - (1 << 20)
"""The most in a block in memory. Padding, and what the decoder estimates from above, come to less than the rest."""


class BlockEpochRange(Struct, frozen=True):
    """The least and the greatest epochs in a block. `has_unset`: there are messages without an epoch among the
    others."""

    least: tuple[Epoch, ...]
    greatest: tuple[Epoch, ...]
    has_unset: bool = False


class PackedBlock(Struct, frozen=True):
    """A batch ready to be appended: its payload, and the columns of the block's row."""

    count: int
    first_timestamp: datetime
    last_timestamp: datetime
    topics: list[str] | None
    codec: int
    payload: pa.Buffer
    epochs: BlockEpochRange | None = None


def pack(batch: pa.RecordBatch, compression: str = "none", *, has_bounds: bool = True) -> PackedBlock:
    """Encode a non-empty batch in `BLOCK_SCHEMA` and describe it; `has_bounds`: with the bounds of its epochs. Raise
    `ValueTooLarge` for one that no reader would decode."""
    is_large = batch.get_total_buffer_size() > MAX_PACKED_BYTES  # of all that it is a part of, which is known at once
    if batch.num_rows > MAX_BLOCK_MESSAGES or (is_large and batch.nbytes > MAX_PACKED_BYTES):
        raise ValueTooLarge(
            f"a block of {batch.num_rows} messages and {batch.nbytes} bytes: it may have {MAX_BLOCK_MESSAGES} and "
            f"{MAX_PACKED_BYTES}. Publish smaller messages."
        )
    codec, payload = encode(batch, compression)
    span = pc.min_max(batch.column("timestamp"))
    first, last = (START + timedelta(microseconds=span[end].value) for end in ("min", "max"))  # `as_py` imports pandas
    epochs = batch["epoch"].slice(0, 1) if column_encoding.has_one_epoch(codec) else batch["epoch"]
    bounds = compute_epoch_bounds(epochs) if has_bounds else None
    return PackedBlock(batch.num_rows, first, last, build_topic_index(batch), codec, payload, bounds)


def encode(batch: pa.RecordBatch, compression: str = "none") -> tuple[int, pa.Buffer]:
    """Return (codec, payload) of a batch in `BLOCK_SCHEMA`; compressed only where that makes it smaller."""
    if compression not in COMPRESSIONS:
        raise InvalidSetting(f"compression {compression!r}: choose one of {', '.join(COMPRESSIONS)}.")
    flags, lean = column_encoding.strip_columns(batch)
    plain: pa.Buffer = lean.serialize()
    if compression != "none" and batch.num_rows >= MIN_COMPRESSED:
        packed = _serialize_compressed(lean, compression)
        if packed.size < plain.size:
            return column_encoding.encode_codec(COMPRESSIONS.index(compression), flags), packed
    return column_encoding.encode_codec(0, flags), plain


def add_position_columns(batch: pa.RecordBatch, stream_id: int, first_offset: int) -> pa.RecordBatch:
    """Add the columns stream and offset to a stored batch whose first message is at `first_offset`."""
    count = batch.num_rows
    if count < MIN_ARROW_VALUES:
        last = first_offset + count
        added = [make_integers(pa.int64(), [stream_id] * count), make_integers(pa.int64(), range(first_offset, last))]
        return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=DELIVERED_SCHEMA)
    streams = pa.repeat(pa.scalar(stream_id, pa.int64()), count)
    offsets = pc.add(_count_up_to(column_encoding.round_up(count)).slice(0, count), pa.scalar(first_offset, pa.int64()))
    return pa.RecordBatch.from_arrays([*batch.columns, streams, offsets], schema=DELIVERED_SCHEMA)


def make_integers(type_: pa.DataType, values: Sequence[int]) -> pa.Array:
    """Return a few integers as an array: sooner than Arrow does it."""
    data = pa.py_buffer(struct.pack(f"<{len(values)}q", *values))
    return pa.Array.from_buffers(type_, len(values), [None, data])


@lru_cache
def _count_up_to(count: int) -> pa.Array:
    """Return 0, 1, 2 and so on: cached, as to count takes longer than to add."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), start=-1)


def drop_before(batch: pa.RecordBatch, first_offset: int, offset: int) -> pa.RecordBatch:
    """Drop the messages before `offset`: a reader may begin in the middle of a block."""
    return batch.slice(max(0, offset - first_offset))


def build_topic_index(batch: pa.RecordBatch) -> list[str] | None:
    """Return the distinct topics of a block, None when they are too many to be worth a look."""
    column = batch.column("topic")
    if len(column.slice(0, 8 * MAX_INDEXED_TOPICS).unique()) > MAX_INDEXED_TOPICS:
        return None
    topics = column.unique()
    return topics.to_pylist() if len(topics) <= MAX_INDEXED_TOPICS else None


def compute_epoch_bounds(column: pa.ListArray) -> BlockEpochRange | None:
    """Return the bounds of the epochs of a block; None if no message has one. All epochs have the same number of
    dimensions."""
    if column.null_count == len(column):
        return None
    low, high = _find_ends(column)
    least, greatest = LowerFrontier.from_epochs(low).least, UpperFrontier.from_epochs(high).greatest
    return BlockEpochRange(least, greatest, column.null_count > 0)


def _find_ends(column: pa.ListArray) -> tuple[list[Epoch], list[Epoch]]:
    """Return distinct epochs, among which are the least, or the greatest; of several numbers that may be any."""
    numbers = pc.list_flatten(column)
    if len(numbers) == len(column) - column.null_count:
        ends = pc.min_max(numbers)
        return [(ends["min"].as_py(),)], [(ends["max"].as_py(),)]
    distinct = list({tuple(epoch) for epoch in column.drop_null().to_pylist()})
    return distinct, distinct


def check_epoch_bounds(stored: str | None, batch: pa.RecordBatch) -> None:
    """Raise `ValueError` if a stored batch has epochs that are not within the bounds that its row has: what is read in
    whole epochs is planned by these."""
    if (index := batch.schema.get_field_index("epoch")) < 0:
        return
    column = batch.column(index)
    epochs = column.values if isinstance(column, pa.RunEndEncodedArray) else column
    if epochs.null_count == len(epochs):
        return
    bounds = None if stored is None else parsed_epoch_bounds.get(stored)
    if bounds is not None:  # else nothing of the epochs is compared: whoever may write may write any number of them
        low, high = _find_ends(epochs)
        admitted = LowerFrontier(bounds.least).find_admitted(low)
        if len(admitted) == len(low) and len(UpperFrontier(bounds.greatest).find_covered(high)) == len(high):
            return
    raise ValueError("it has epochs that its row does not have")


def _parse_epoch_bounds(stored: str) -> BlockEpochRange:
    document = json.loads(stored)
    least, greatest = (tuple(tuple(epoch) for epoch in document[end]) for end in ("least", "greatest"))
    return BlockEpochRange(least, greatest, document["has_unset"])


parsed_epoch_bounds = BoundedCache(_parse_epoch_bounds, max_entries=1024)
"""The bounds of rows, by their text."""


def filter_by_topic(batch: pa.RecordBatch, filter: TopicFilter, topics: Sequence[str] | None = None) -> pa.RecordBatch:
    """Keep the messages whose topic matches. `topics`, the block's skip index, decides most blocks unseen."""
    if filter.text == "#" or (topics is not None and all(map(filter.matches, topics))):
        return batch
    coded = batch.column("topic").dictionary_encode()
    return batch.filter(pc.match_substring_regex(coded.dictionary, filter.regex).take(coded.indices))


def _serialize_compressed(lean: pa.RecordBatch, compression: str) -> pa.Buffer:
    """Return a compressed message: `RecordBatch.serialize` cannot compress, so this writes a stream and cuts off its
    schema and its end marker."""
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, lean.schema, options=pa.ipc.IpcWriteOptions(compression=compression))
    writer.write_batch(lean)
    end = sink.tell()
    writer.close()
    start = lean.schema.serialize().size
    return sink.getvalue().slice(start, end - start)
