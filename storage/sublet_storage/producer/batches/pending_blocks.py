"""Messages on their way from a call to a block."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from sublet_protocol.domain.epochs import Epoch
from sublet_storage.log.block import Packed, pack
from sublet_storage.log.column_layout import BLOCK_SCHEMA
from sublet_storage.producer.batches.columns import MESSAGE_OVERHEAD_BYTES
from sublet_storage.producer.delivery import Rows, Span, Ticket

Header = tuple[str, bytes | None]


class Piece:
    """Consecutive messages of one stream, in Arrow already."""

    __slots__ = ("batch", "packed", "rows", "size", "ticket")

    def __init__(self, batch: pa.RecordBatch, rows: Rows, ticket: Ticket) -> None:
        self.batch, self.rows, self.ticket = batch, rows, ticket
        self.packed: Packed | None = None
        self.size: int = batch.nbytes + MESSAGE_OVERHEAD_BYTES * batch.num_rows

    @property
    def count(self) -> int:
        """Messages in it."""
        return len(self.rows)

    def cut(self, count: int) -> tuple[Piece, Piece]:
        """The first `count` messages, and the rest."""
        first = Piece(self.batch.slice(0, count), _part(self.rows, 0, count), self.ticket)
        rest = self.count - count
        return first, Piece(self.batch.slice(count), _part(self.rows, count, rest), self.ticket)

    def sealed(self) -> Piece:
        """Itself: the counterpart of `Growing.sealed`."""
        return self


class Growing:
    """Messages published one by one to one stream, until the sender takes them or a block is full."""

    __slots__ = ("_epochs", "_headers", "_keys", "_timestamps", "_topics", "_values", "count", "size", "ticket")

    def __init__(self) -> None:
        self.ticket = Ticket(0)
        self.count = self.size = 0
        self._topics: list[str] = []
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._headers: list[list[Header] | None] = []
        self._timestamps: list[int] = []
        self._epochs: list[Epoch | None] = []

    def add(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: list[Header] | None,
        timestamp_us: int,
        epoch: Epoch | None,
    ) -> int:
        """Add a message; its number in the ticket."""
        self._topics.append(topic)
        self._keys.append(key)
        self._values.append(value)
        self._headers.append(headers)
        self._timestamps.append(timestamp_us)
        self._epochs.append(epoch)
        self.count += 1
        return self.ticket.grow()

    def sealed(self) -> Piece:
        """The messages in Arrow."""
        lists = [self._topics, self._keys, self._values, self._headers, self._timestamps, self._epochs]
        columns = [pa.array(each, field.type) for each, field in zip(lists, BLOCK_SCHEMA, strict=True)]
        piece = Piece(pa.RecordBatch.from_arrays(columns, schema=BLOCK_SCHEMA), range(self.count), self.ticket)
        piece.size = self.size
        return piece


class Load:
    """What goes into one block of one stream."""

    __slots__ = ("pieces", "size", "stream_id")

    def __init__(self, stream_id: int, pieces: list[Piece]) -> None:
        self.stream_id, self.pieces = stream_id, pieces
        self.size = sum(piece.size for piece in pieces)

    @property
    def count(self) -> int:
        """Messages in it."""
        return sum(piece.count for piece in self.pieces)

    def packed(self, compression: str) -> Packed:
        """The block, which the caller may have encoded already."""
        if len(self.pieces) == 1 and self.pieces[0].packed is not None:
            return self.pieces[0].packed
        return pack(self.batch(), compression)

    def batch(self) -> pa.RecordBatch:
        """Its messages, piece after piece."""
        if len(self.pieces) == 1:
            return self.pieces[0].batch
        table = pa.Table.from_batches([piece.batch for piece in self.pieces])
        return table.combine_chunks().to_batches()[0]

    def stored(self, first_offset: int) -> None:
        """Tell every ticket where its messages lie."""
        for piece in self.pieces:
            piece.ticket.stored(Span(self.stream_id, first_offset, piece.rows))
            first_offset += piece.count

    def failed(self, error: Exception) -> None:
        """Tell every ticket what went wrong."""
        for piece in self.pieces:
            piece.ticket.failed(piece.count, error)


def fitting(piece: Piece | Growing, messages: int, size: int) -> int:
    """How many messages of the piece fit into so many messages and bytes, by their average size."""
    return min(messages, piece.count, piece.count * max(0, size) // piece.size)


def blocks(piece: Piece, messages: int, size: int) -> Iterator[Piece]:
    """Cut a piece into as many as it will take blocks."""
    while (count := max(1, fitting(piece, messages, size))) < piece.count:
        first, piece = piece.cut(count)
        yield first
    yield piece


def _part(rows: Rows, start: int, count: int) -> Rows:
    return rows[start : start + count] if isinstance(rows, range) else rows.slice(start, count)
