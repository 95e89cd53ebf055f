"""Pending rows and blocks: messages between a call and the log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, Protocol

import pyarrow as pa

from sublet_storage.log.block_encoder import MAX_PACKED_BYTES, PackedBlock, pack
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer.batches.fast_small_block_packer import SMALL_BLOCK, Message, pack_messages, to_record_batch
from sublet_storage.producer.batches.input_conversion import MESSAGE_OVERHEAD_BYTES
from sublet_storage.producer.delivery import AppendedSpan, Rows, SharedPublishResult

MAX_ESTIMATED_BYTES: Final = 1 << 20
"""Up to this size in bytes messages in Arrow are estimated from above."""

_MAX_UTF8_BYTES: Final = 4
_MAX_OVERHEAD_BYTES: Final = 1024
"""What a message takes in Arrow at most beyond its values: it has few headers, and an epoch of few numbers."""


_FIXED_BYTES: Final = 34
"""Of a message in Arrow: its timestamp, and for five columns an offset and whether it is there."""


class PendingArrowBatch:
    """Consecutive messages of one stream, already in Arrow. `nbytes`: an upper bound of the size of the batch."""

    __slots__ = ("_batch", "nbytes", "packed", "rows", "size", "ticket")

    def __init__(
        self, batch: pa.RecordBatch, rows: Rows, ticket: SharedPublishResult, nbytes: int | None = None
    ) -> None:
        self._batch, self.rows, self.ticket = batch, rows, ticket
        self.packed: PackedBlock | None = None
        self.nbytes: int = batch.nbytes if nbytes is None else nbytes
        self.size: int = self.nbytes + MESSAGE_OVERHEAD_BYTES * batch.num_rows

    @property
    def batch(self) -> pa.RecordBatch:
        """Return the messages."""
        return self._batch

    @property
    def count(self) -> int:
        """Return the number of messages."""
        return len(self.rows)

    def pack(self, compression: str) -> PackedBlock:
        """Return them as a block, which the caller may have encoded already."""
        return self.packed or pack(self.batch, compression)

    def split(self, count: int) -> tuple[PendingArrowBatch, PendingArrowBatch]:
        """Return the first `count` messages, and the rest."""
        first = PendingArrowBatch(self.batch.slice(0, count), _slice_rows(self.rows, 0, count), self.ticket)
        remaining_count = self.count - count
        return first, PendingArrowBatch(
            self.batch.slice(count), _slice_rows(self.rows, count, remaining_count), self.ticket
        )

    def seal(self) -> PendingArrowBatch:
        """Return itself: the counterpart of `PendingMessageBatch.seal`."""
        return self


class PendingTupleBatch(PendingArrowBatch):
    """Consecutive messages of one stream that are converted to Arrow on request: a few are packed without it."""

    __slots__ = ("_messages",)

    def __init__(self, messages: Sequence[Message], rows: range, ticket: SharedPublishResult, size: int) -> None:
        self._messages, self.rows, self.ticket, self.size = messages, rows, ticket, size
        self._batch, self.packed = None, None
        self.nbytes = _MAX_UTF8_BYTES * size + _MAX_OVERHEAD_BYTES * len(messages)
        if self.nbytes > MAX_ESTIMATED_BYTES:
            self.nbytes = self.batch.nbytes

    @property
    def batch(self) -> pa.RecordBatch:
        """Return the messages."""
        if self._batch is None:
            self._batch = to_record_batch(self._messages)
        return self._batch

    def pack(self, compression: str) -> PackedBlock:
        """Return them as a block."""
        is_small = self.count < SMALL_BLOCK and self._batch is None
        return pack_messages(self._messages) if is_small else super().pack(compression)


class PendingMessageBatch:
    """Messages published one by one to one stream, until the sender takes them or a block is full."""

    __slots__ = ("_messages", "count", "size", "ticket")

    def __init__(self) -> None:
        self.ticket = SharedPublishResult(0)
        self.count = self.size = 0
        self._messages: list[Message] = []

    def add(self, message: Message, size: int) -> None:
        """Add a message, the last of its ticket."""
        self._messages.append(message)
        self.size += size
        self.count += 1
        self.ticket.expect(self.count)

    def cut_back(self, count: int, size: int) -> None:
        """Cut back to the state with `count` messages, however much of another has been added since."""
        del self._messages[count:]
        self.count, self.size = count, size
        self.ticket.expect(count)

    def seal(self) -> PendingTupleBatch:
        """Return the messages, to which none can be added."""
        return PendingTupleBatch(self._messages, range(self.count), self.ticket, self.size)


class PendingBlock:
    """The messages of one block of one stream."""

    __slots__ = ("pieces", "size", "stream_id")

    def __init__(self, stream_id: int, pieces: list[PendingArrowBatch]) -> None:
        self.stream_id, self.pieces = stream_id, pieces
        self.size = sum(piece.size for piece in pieces)

    @property
    def count(self) -> int:
        """Return the number of messages."""
        return sum(piece.count for piece in self.pieces)

    def pack(self, compression: str) -> PackedBlock:
        """Return the block."""
        if len(self.pieces) == 1:
            return self.pieces[0].pack(compression)
        return pack(self.to_batch(), compression)

    def to_batch(self) -> pa.RecordBatch:
        """Return its messages, piece after piece."""
        if len(self.pieces) == 1:
            return self.pieces[0].batch
        table = pa.Table.from_batches([piece.batch for piece in self.pieces])
        return table.combine_chunks().to_batches()[0]

    def complete(self, first_offset: int) -> None:
        """Settle every ticket with the offsets of its messages."""
        for piece in self.pieces:
            piece.ticket.complete_span(AppendedSpan(self.stream_id, first_offset, piece.rows))
            first_offset += piece.count

    def fail(self, error: Exception) -> None:
        """Fail every ticket."""
        for piece in self.pieces:
            piece.ticket.fail(piece.count, error)


class BlockSender(Protocol):
    """What a caller may send a block by, on its own thread, while the sender's waits for work."""

    @property
    def is_ready(self) -> bool:
        """Return whether that can be tried."""

    def send_at_once(self, load: PendingBlock) -> None:
        """Send it, without waiting for anything."""


def find_entered_at(loads: Iterable[PendingBlock]) -> float:
    """Return when the oldest of their messages was handed to the publisher; now, if there are none."""
    return min((piece.ticket.entered_at for load in loads for piece in load.pieces), default=time.monotonic())


def count_slice_bytes(slices: Sequence[pa.RecordBatch]) -> list[int]:
    """Return the size, or an upper bound, of each of these contiguous slices of a batch in `BLOCK_SCHEMA`. Querying the
    size of each from Arrow takes as long as routing them."""
    counts = [each.num_rows for each in slices]
    sizes = [count * _FIXED_BYTES + _FIXED_BYTES for count in counts]
    for index, field in enumerate(BLOCK_SCHEMA):
        if field.name == "timestamp":
            continue
        column = slices[0].column(index)
        offsets = memoryview(column.buffers()[1]).cast("i")
        ends = [offsets[end] for end in accumulate(counts, initial=column.offset)]
        if not pa.types.is_list(field.type):
            column_sizes = [end - start for start, end in pairwise(ends)]
        elif ends[0] < ends[-1]:
            column_sizes = [each.column(index).nbytes for each in slices]
        else:
            continue
        sizes = [size + column_size for size, column_size in zip(sizes, column_sizes, strict=True)]
    return sizes


def count_fitting(piece: PendingArrowBatch | PendingMessageBatch, messages: int, size: int) -> int:
    """Return how many messages of the piece fit into a number of messages and bytes, by their average size."""
    return min(messages, piece.count, piece.count * max(0, size) // piece.size)


def count_packable(piece: PendingArrowBatch, count: int, room: int = MAX_PACKED_BYTES) -> int:
    """Return `count`, halved until the first `count` messages fit into `room` bytes.

    Their average size is no estimate where a few messages are much larger than the others.
    """
    while count and piece.nbytes > room and piece.batch.slice(0, count).nbytes > room:
        count //= 2
    return count


def split_into_blocks(piece: PendingArrowBatch, messages: int, size: int) -> Iterator[PendingArrowBatch]:
    """Split a piece into parts of one block each."""
    while (count := max(1, count_packable(piece, count_fitting(piece, messages, size)))) < piece.count:
        first, piece = piece.split(count)
        yield first
    yield piece


def _slice_rows(rows: Rows, start: int, count: int) -> Rows:
    return rows[start : start + count] if isinstance(rows, range) else rows.slice(start, count)
