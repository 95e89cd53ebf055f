"""Laws of blocks and routes over random input."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.log.arrow_batch_decoder import decode_block
from sublet_storage.log.block_encoder import COMPRESSIONS, add_position_columns, encode, filter_by_topic
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer.batches.pending_block import count_slice_bytes
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.spaces import routing

LEVEL = st.sampled_from(["a", "b", "c"])
TOPIC = st.lists(LEVEL, min_size=1, max_size=4).map("/".join)
FILTER = st.builds(
    lambda levels, rest: TopicFilter("/".join([*levels, *rest]) or "#"),
    st.lists(st.sampled_from(["a", "b", "c", "+"]), max_size=3),
    st.sampled_from([[], ["#"]]),
)
BYTES = st.none() | st.binary(max_size=12)
HEADER = st.fixed_dictionaries({"key": st.text(max_size=4), "value": BYTES})
MESSAGE = st.fixed_dictionaries(
    {
        "topic": TOPIC,
        "key": BYTES,
        "value": BYTES,
        "headers": st.none() | st.lists(HEADER, max_size=2),
        "timestamp": st.integers(0, 3) | st.integers(-(2**50), 2**50),
        "epoch": st.none() | st.lists(st.integers(-5, 5), min_size=2, max_size=2),
    }
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=40) | st.builds(
    lambda one, count: [one] * count, MESSAGE, st.just(80)
)


def batch(messages: list[dict[str, object]]) -> pa.RecordBatch:
    arrays = [pa.array([each[field.name] for each in messages], field.type) for field in BLOCK_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=BLOCK_SCHEMA)


@given(MESSAGES, st.sampled_from(COMPRESSIONS), st.integers(0, 39))
def test_a_block_comes_back_from_any_slice(messages: list[dict[str, object]], compression: str, skip: int) -> None:
    entire = batch(messages)
    part = entire.slice(min(skip, entire.num_rows - 1))
    codec, payload = encode(part, compression)
    assert decode_block(codec, payload.to_pybytes(), 1, part.num_rows, part.num_rows).equals(part)


@given(MESSAGES, FILTER, st.booleans())
def test_filtering_a_block_is_filtering_its_messages(
    messages: list[dict[str, object]], filter: TopicFilter, indexed: bool
) -> None:
    topics = [str(each["topic"]) for each in messages]
    found = filter_by_topic(
        add_position_columns(batch(messages), 1, 10), filter, sorted(set(topics)) if indexed else None
    )
    assert found.column("offset").to_pylist() == [10 + i for i, topic in enumerate(topics) if filter.matches(topic)]


def streams_of(spaces: list[routing.Space]) -> list[routing.StreamCatalogRow]:
    return [
        routing.StreamCatalogRow(space.space_id * 100 + index, space.space_id, space.space_id, low, high, 0)
        for space in spaces
        for index, (low, high) in enumerate(routing.split_ring(space.shards))
    ]


SPACES = st.lists(st.tuples(FILTER, st.integers(1, 5)), max_size=4, unique_by=lambda each: each[0].text).map(
    lambda extra: [
        routing.Space(index, f"s{index}", filter, shards)
        for index, (filter, shards) in enumerate([(TopicFilter("#"), 3), *[e for e in extra if e[0].text != "#"]])
    ]
)


@given(SPACES, MESSAGES, st.integers(0, 5))
@settings(max_examples=200)
def test_routing_by_columns_is_routing_one_by_one(
    spaces: list[routing.Space], messages: list[dict[str, object]], start: int
) -> None:
    routes, given_batch = PublisherRoutingTable(spaces, streams_of(spaces), None), batch(messages)
    seen: dict[int, int] = {}
    for stream_id, part, rows in routes.partition_rows(given_batch, range(start, start + len(messages))):
        numbers = list(rows) if isinstance(rows, range) else rows.to_pylist()
        assert numbers == sorted(numbers)
        assert part.equals(given_batch.take([number - start for number in numbers]))
        seen |= dict.fromkeys(numbers, stream_id)
    key = [(each["topic"], each["key"]) for each in messages]
    assert seen == {start + i: routes.find_stream(topic, key) for i, (topic, key) in enumerate(key)}  # type: ignore[arg-type]


@given(SPACES, TOPIC, FILTER)
def test_wanted_topics_lie_under_candidate_filters(
    spaces: list[routing.Space], topic: str, filter: TopicFilter
) -> None:
    space = routing.find_space_for(topic, spaces)
    if space is not None and filter.matches(topic):
        assert space.filter in routing.find_candidate_filters(filter, [each.filter for each in spaces])


@given(st.integers(1, 40), st.integers(1, 40), BYTES, TOPIC)
def test_after_a_reshard_a_keys_streams_overlap(before: int, after: int, key: bytes | None, topic: str) -> None:
    hashed = routing.hash_key(key, topic)
    place = [
        routing.HashRing(
            [routing.StreamCatalogRow(i, 1, 1, *each, 0) for i, each in enumerate(routing.split_ring(shards))]
        ).find_stream_id(hashed)
        for shards in (before, after)
    ]
    assert routing.ranges_overlap(routing.split_ring(before)[place[0]], routing.split_ring(after)[place[1]])


@given(MESSAGES, st.lists(st.integers(1, 20), min_size=1), st.integers(0, 5))
def test_slices_are_as_large_as_arrow_says(messages: list[dict[str, object]], counts: list[int], skipped: int) -> None:
    entire = batch([*messages, *messages]).slice(skipped)
    ends = [end for end in accumulate(counts) if end < entire.num_rows]
    slices = [entire.slice(start, end - start) for start, end in pairwise([0, *ends, entire.num_rows])]
    for each, size in zip(slices, count_slice_bytes(slices), strict=True):
        assert each.nbytes <= size <= each.nbytes + 34 * (each.num_rows + 1)
