"""Gathers messages into blocks of a good size, stream by stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from sublet_storage.log.append import BlockAppend
from sublet_storage.log.block_encoder import pack
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, PendingBlock, split_into_blocks
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.delivery import SharedPublishResult

BLOCK_MESSAGES: Final = 1000
BLOCK_BYTES: Final = 256 * 1024
"""About the most in a block."""

WAITING_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of the messages that wait for their stream's block to be full."""


class SinkBlockBuilder:
    """A builder that takes batches of `BLOCK_SCHEMA` and returns blocks; those of a stream have its messages in their
    order."""

    def __init__(self, routes: PublisherRoutingTable) -> None:
        self._routes = routes
        self._waiting: dict[int, list[PendingArrowBatch]] = {}
        self._counts: dict[int, tuple[int, int]] = {}

    def add(self, batch: pa.RecordBatch) -> Iterator[BlockAppend]:
        """Yield the blocks that are full with it. Raise what `PublisherRoutingTable.partition_rows` raises."""
        for stream_id, part, numbers in self._routes.partition_rows(batch, range(batch.num_rows)):
            if part.num_rows * 4 < batch.num_rows:  # a slice that waits would hold all of its batch
                part = part.take(pa.array(range(part.num_rows)))
            piece = PendingArrowBatch(part, numbers, SharedPublishResult(len(numbers)))
            self._waiting.setdefault(stream_id, []).append(piece)
            messages, size = self._counts.get(stream_id, (0, 0))
            self._counts[stream_id] = messages + piece.count, size + piece.size
            if messages + piece.count >= BLOCK_MESSAGES or size + piece.size >= BLOCK_BYTES:
                yield from self._take_blocks(stream_id, keep=True)
        if sum(size for _, size in self._counts.values()) > WAITING_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[BlockAppend]:
        """Yield what waits, in blocks that are not full."""
        for stream_id in sorted(self._waiting):
            yield from self._take_blocks(stream_id, keep=False)

    def _take_blocks(self, stream_id: int, *, keep: bool) -> Iterator[BlockAppend]:
        """Yield all that waits for the stream; with `keep`, what does not fill a block goes on waiting."""
        load = PendingBlock(stream_id, self._waiting.pop(stream_id))
        del self._counts[stream_id]
        entire = PendingArrowBatch(load.to_batch(), range(load.count), SharedPublishResult(load.count))
        pieces = list(split_into_blocks(entire, BLOCK_MESSAGES, BLOCK_BYTES))
        if keep and len(pieces) > 1:
            last = pieces.pop()
            self._waiting[stream_id] = [last]
            self._counts[stream_id] = last.count, last.size
        for piece in pieces:
            yield BlockAppend(stream_id, pack(piece.batch, self._routes.get_compression(stream_id)))
