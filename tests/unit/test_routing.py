"""Which space, which stream."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.topics import TopicFilter
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
    assert find_space_for(topic, spaces("#", "+/b", "a/#", "a/+", "a/b", "a")).name == expected


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
    assert filled.matching(TopicFilter("a/b")) == {
        TopicFilter("#"): False,
        TopicFilter("a/#"): True,
        TopicFilter("a/b/#"): False,
    }
    assert filled.matching(TopicFilter("d")) == {TopicFilter("#"): True}


@pytest.mark.parametrize("shards", [1, 3, 4, 4096])
def test_a_ring_finds_streams_at_their_edges(shards: int) -> None:
    cut = split_ring(shards)
    ring = HashRing([StreamCatalogRow(index, 1, 1, low, high, 0) for index, (low, high) in enumerate(cut)][::-1])
    edges = {edge: index for index, (low, high) in enumerate(cut) for edge in (low, high - 1)}
    assert [ring.find_stream_id(edge) for edge in edges] == list(edges.values())
    assert ring.find_stream_ids(edges) == list(edges.values())


def test_a_ring_with_a_hole_is_our_own_broken_rule() -> None:
    with pytest.raises(ValueError, match="do not tile"):
        HashRing([StreamCatalogRow(1, 1, 1, 0, RING - 1, 0)])
