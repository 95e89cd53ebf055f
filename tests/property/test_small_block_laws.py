"""Laws of blocks that are packed and decoded without Arrow: they are those that Arrow would have made."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.domain.limits import MAX_DIMENSIONS
from sublet_storage.log.arrow_batch_decoder import FIRST_US, LAST_US, decode_block
from sublet_storage.log.block_encoder import PackedBlock, add_position_columns, pack
from sublet_storage.log.column_encoding import BLOCK_SCHEMA, has_one_epoch
from sublet_storage.log.fast_small_block_decoder import decode_small_blocks
from sublet_storage.producer.batches.fast_small_block_packer import SMALL_BLOCK, Message, pack_messages, to_record_batch

TOPIC = st.sampled_from(["a", "b/ü", "c/d"]) | st.text(
    st.characters(codec="utf-8", exclude_characters="+#\0"), max_size=6
)
BYTES = st.none() | st.sampled_from([b"", b"a", b"\0"]) | st.binary(max_size=12)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=3), BYTES), max_size=3)
TIMESTAMP = st.integers(0, 3) | st.integers(FIRST_US, LAST_US)
NUMBER = st.integers(0, 2) | st.integers(-(2**63), 2**63 - 1)


def messages(dimensions: int) -> st.SearchStrategy[list[Message]]:
    """Draw messages, some of which repeat."""
    epoch = st.none() | st.tuples(*[NUMBER] * dimensions)
    one = st.tuples(TOPIC, BYTES, BYTES, HEADERS, TIMESTAMP, epoch)
    repeated = st.lists(st.tuples(one, st.integers(1, 16)), min_size=1, max_size=8)
    return st.lists(one, min_size=1, max_size=SMALL_BLOCK - 1) | repeated.map(
        lambda runs: [one for one, count in runs for _ in range(count)][: SMALL_BLOCK - 1]
    )


def row_of(block: PackedBlock) -> tuple[Any, ...]:
    span = block.first_timestamp, block.last_timestamp
    return block.count, *span, block.topics, block.codec, block.epochs


@given((st.integers(1, 3) | st.just(MAX_DIMENSIONS)).flatmap(messages))
@settings(max_examples=400, deadline=None)
def test_a_small_block_is_that_of_arrow(given_messages: list[Message]) -> None:
    fields = zip(*given_messages, strict=True)
    arrays = [pa.array(each, field.type) for each, field in zip(fields, BLOCK_SCHEMA, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=BLOCK_SCHEMA)
    converted = to_record_batch(given_messages)
    converted.validate(full=True)
    assert converted.equals(batch)
    small, entire = pack_messages(given_messages), pack(batch)
    assert row_of(small) == row_of(entire)
    count, stored = len(given_messages), small.payload.to_pybytes()
    assert decode_block(small.codec, stored, 1, count, count).equals(batch)
    if not has_one_epoch(small.codec):  # of which Arrow stores some copies that nobody reads
        assert stored == entire.payload.to_pybytes()


@given(st.lists(messages(1), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**40))
@settings(max_examples=400, deadline=None)
def test_small_blocks_are_decoded_as_by_arrow(blocks: list[list[Message]], is_plain: bool, first: int) -> None:
    """Those of one codec together; plain ones, which have a value and no headers and epochs, without Arrow."""
    plain = [[(topic, None, value or b"", None, at, None) for topic, _, value, _, at, _ in each] for each in blocks]
    packed = [pack_messages(each) for each in (plain if is_plain else blocks)]
    packed = [each for each in packed if each.codec == packed[0].codec]
    stored = [(each.count, each.payload.to_pybytes()) for each in packed]
    decoded = decode_small_blocks(packed[0].codec, stored, 7, first)
    assert decoded is not None or not is_plain
    if decoded is not None:
        entire = [decode_block(packed[0].codec, payload, 7, count, count) for count, payload in stored]
        (together,) = pa.Table.from_batches(entire).combine_chunks().to_batches()
        assert decoded.equals(add_position_columns(together, 7, first))
