"""Which space, which stream, and what is lost with a space."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from sublet_protocol.domain.errors import InvalidSetting, MalformedRow, UnknownSpace
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable, find_stream_ids
from sublet_storage.spaces.drop_check import MAX_LOSSES, DropAffectedGroup, SpaceDropImpact
from sublet_storage.spaces.routing import (
    RING,
    GenerationTopicFilters,
    HashRing,
    Space,
    StreamCatalogRow,
    find_candidate_filters,
    find_space_for,
    hash_key,
    ranges_overlap,
    split_ring,
)


def spaces(*filters: str) -> list[Space]:
    return [Space(index, text, TopicFilter(text), 1) for index, text in enumerate(filters)]


def test_the_hash_is_xxh3_64_of_key_or_topic() -> None:
    assert hash_key(b"", "a") == 0x2D06800538D394C2  # the published value for no bytes and seed 0
    assert hash_key(None, "a") == hash_key(b"a", "other")
    assert hash_key(b"key", "a") == hash_key(b"key", "b")


@pytest.mark.parametrize("shards", [1, 2, 3, 16, 4096])
def test_ranges_tile_the_ring(shards: int) -> None:
    cut = split_ring(shards)
    assert cut[0][0] == 0
    assert cut[-1][1] == RING
    assert all(one[1] == two[0] for one, two in pairwise(cut))
    sizes = {high - low for low, high in cut}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shards", [0, -1, 4097])
def test_the_number_of_shards_is_limited(shards: int) -> None:
    with pytest.raises(InvalidSetting, match=f"shards {shards}: must be from 1 to 4096"):
        split_ring(shards)


def test_ranges_that_only_touch_do_not_overlap() -> None:
    assert not ranges_overlap((0, 5), (5, 9))
    assert ranges_overlap((0, 6), (5, 9))


@pytest.mark.parametrize(
    ("topic", "expected"), [("a", "a"), ("a/b", "a/b"), ("a/c", "a/+"), ("a/c/d", "a/#"), ("b/b", "+/b"), ("x", "#")]
)
def test_the_most_specific_space_wins(topic: str, expected: str) -> None:
    found = find_space_for(topic, spaces("#", "+/b", "a/#", "a/+", "a/b", "a"))
    assert found is not None
    assert found.name == expected


def test_without_a_catch_all_a_topic_may_have_no_space() -> None:
    assert find_space_for("b", spaces("a/#")) is None
    with pytest.raises(UnknownSpace, match="topic 'b' is in no space"):
        PublisherRoutingTable(spaces("a/#"), [StreamCatalogRow(1, 0, 1, 0, RING, 0)], None).find_stream("b", None)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("#", {"#", "a/#", "a/b/#", "c"}), ("a/#", {"a/#", "a/b/#"}), ("a/b", {"a/b/#"}), ("+/b", {"#", "a/b/#", "a/#"})],
)
def test_candidates_intersect_and_are_not_covered(wanted: str, expected: set[str]) -> None:
    have = [TopicFilter(text) for text in ("#", "a/#", "a/b/#", "c")]
    assert {found.text for found in find_candidate_filters(TopicFilter(wanted), have)} == expected


def test_a_generation_has_the_filter_it_was_filled_by() -> None:
    every = tuple(TopicFilter(text) for text in ("#", "a/#", "a/b/#", "c"))
    filled = GenerationTopicFilters(every, open=frozenset(every) - {TopicFilter("a/b/#")}, newest_generation_id=9)
    for topic, found in (("a/b", {"#": False, "a/#": True, "a/b/#": False}), ("d", {"#": True})):
        assert filled.matching(TopicFilter(topic)) == {TopicFilter(text): is_open for text, is_open in found.items()}


@pytest.mark.parametrize("shards", [1, 3, 4, 4096])
def test_a_ring_finds_streams_at_their_edges(shards: int) -> None:
    cut = split_ring(shards)
    ring = HashRing([StreamCatalogRow(index, 1, 1, low, high, 0) for index, (low, high) in enumerate(cut)][::-1])
    edges = {edge: index for index, (low, high) in enumerate(cut) for edge in (low, high - 1)}
    assert [ring.find_stream_id(edge) for edge in edges] == list(edges.values())
    assert find_stream_ids(ring, array("Q", edges)).to_pylist() == list(edges.values())


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("ranges", [[], [(0, RING - 1)], [(1, RING)], [(0, 9), (8, RING)], [(0, 8), (9, RING)]])
def test_a_malformed_space_affects_no_other(ranges: list[tuple[int, int]]) -> None:
    streams = [StreamCatalogRow(2 + index, 1, 1, *each, 0) for index, each in enumerate(ranges)]
    table = PublisherRoutingTable(spaces("a/#", "b/#"), [StreamCatalogRow(1, 0, 1, 0, RING, 0), *streams], None)
    for _ in range(2):
        with pytest.raises(MalformedRow, match=r"space 'b/#': the open streams do not tile the ring"):
            table.find_stream("b/1", b"key")
        assert table.find_stream("a/1", b"key") == 1
        assert table.without_space_limit().find_stream("a/2", None) == 1


# --- what operators are shown of who uses a space ---------------------------------------------------------------------


def test_of_many_losses_the_first_are_named() -> None:
    """The others are counted."""
    groups = [
        DropAffectedGroup("$share/done/#", 1, 0, 0),
        *(DropAffectedGroup(f"$share/g{n}/#", 0, 2, n) for n in range(1, MAX_LOSSES + 6)),
    ]
    lines = SpaceDropImpact(100, tuple(groups), ()).describe_losses()
    assert lines[0] == "$share/g1/# loses 1 unread messages, in 2 streams"
    assert len(lines) == MAX_LOSSES + 1
    assert lines[-1] == "and 5 more groups lose some"
    assert SpaceDropImpact(100, tuple(groups[: MAX_LOSSES + 1]), ()).describe_losses() == lines[:-1]
