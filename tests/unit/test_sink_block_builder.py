"""Messages gathered into blocks: how large these are, that nothing is lost, and the order in them."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest

from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.log.append import BlockAppend
from sublet_storage.log.arrow_batch_decoder import decode_block
from sublet_storage.producer.batches import sink_block_builder
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.batches.sink_block_builder import BLOCK_BYTES, BLOCK_MESSAGES, SinkBlockBuilder
from sublet_storage.spaces.routing import Space, StreamCatalogRow, split_ring
from tests.integration.log_kit import batch

COUNT = 20_000


def routes(streams: int) -> PublisherRoutingTable:
    """One space with so many streams."""
    cut = enumerate(split_ring(streams), 1)
    open_ones = [StreamCatalogRow(number, 1, 1, low, high, 0) for number, (low, high) in cut]
    return PublisherRoutingTable([Space(1, "default", TopicFilter("#"), streams)], open_ones, None)


def messages(first: int, count: int, size: int = 8) -> pa.RecordBatch:
    """Consecutive numbers under 500 keys."""
    values = [(b"%08d" % number).ljust(size, b".") for number in range(first, first + count)]
    plain = batch(values)
    keys = pa.array([b"k%d" % (number % 500) for number in range(first, first + count)], pa.binary())
    return plain.set_column(1, plain.schema.field(1), keys)


def gathered(streams: int, sizes: list[int], each: int) -> tuple[list[BlockAppend], list[BlockAppend]]:
    """Blocks that came as they were full, and those of the end; nothing is lost, and streams keep the order."""
    found = SinkBlockBuilder(routes(streams))
    full: list[BlockAppend] = []
    for number, size in enumerate(sizes):
        full += found.add(messages(number * each, each, size))
    rest = list(found.flush())
    by_stream = [numbers(full + rest, stream_id) for stream_id in range(1, streams + 1)]
    assert all(low < high for one in by_stream for low, high in pairwise(one)), "the order they came in"
    assert sorted(number for one in by_stream for number in one) == list(range(len(sizes) * each))
    return full, rest


def numbers(blocks: list[BlockAppend], stream_id: int) -> list[int]:
    mine = [block.block for block in blocks if block.stream_id == stream_id]
    return [
        int(value[:8])
        for one in mine
        for value in decode_block(one.codec, one.payload, 1, one.count, one.count).column("value").to_pylist()
    ]


@pytest.mark.parametrize(("streams", "each"), [(5, 1), (64, 37), (1, 10_000), (64, 10_000)])
def test_blocks_are_full_but_for_the_last(streams: int, each: int) -> None:
    full, rest = gathered(streams, [8] * (min(COUNT, 1000 * each) // each), each)
    assert {block.block.count for block in full} <= {BLOCK_MESSAGES}
    assert len({block.stream_id for block in rest}) == len(rest) <= streams


def test_large_messages_make_small_blocks() -> None:
    full, rest = gathered(2, [100, 30_000, 100, 5000], 200)
    assert max(len(block.block.payload) for block in full + rest) < 3 * BLOCK_BYTES


def test_what_waits_is_bounded_over_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_block_builder, "WAITING_BYTES", 100_000)
    _, rest = gathered(256, [1000] * 20, 50)
    assert sum(len(block.block.payload) for block in rest) < 150_000


@pytest.mark.conforms("X4")
def test_waiting_rows_hold_no_batch() -> None:
    builder, before, held = SinkBlockBuilder(routes(2)), pa.total_allocated_bytes(), list[int]()
    for _ in range(60):
        values = [(b"%08d" % row).ljust(1000, b".") for row in range(2000)]
        plain = batch(values)
        keys = pa.array([b"k1"] * 1999 + [b"k3"], pa.binary())
        list(builder.add(plain.set_column(1, plain.schema.field(1), keys)))
        del plain
        held.append(pa.total_allocated_bytes() - before)
    assert max(held) < 20_000_000, "of 120 MB"
