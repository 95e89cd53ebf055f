"""Routes messages to spaces by topic, and to streams by key hash; pure.

A topic belongs to the most specific space whose filter matches it. Inside the space, the 64-bit hash of the key (of the
topic, for a message without a key) falls into the half-open range of exactly one open stream.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

import xxhash
from msgspec import Struct

from sublet_protocol.domain.errors import InvalidSetting, MalformedRow
from sublet_protocol.domain.topics import TopicFilter

RING = 1 << 64
"""The number of points of the hash ring; ranges are [from, to) with 0 <= from < to <= RING."""

MAX_SHARDS = 4096

_ARC = RING // MAX_SHARDS
ARC_SHIFT = _ARC.bit_length() - 1
"""A hash without this many of its lowest bits is the number of its arc: one of `MAX_SHARDS` equal parts of the ring."""

HashRange = tuple[int, int]


class Space(Struct, frozen=True):
    """A named part of the topic tree. Durations are seconds; None means "for ever" and "only when asked".

    `payload_location`: the location outside of Postgres that payloads of closed generations are moved to, and those of
    open ones that are older than `tier_after_s`; None: they stay in Postgres.
    """

    space_id: int
    name: str
    filter: TopicFilter
    shards: int
    retention_s: int | None = None
    rollover_s: int | None = None
    compression: str = "none"
    payload_location: str | None = None
    tier_after_s: int | None = None


class StreamCatalogRow(Struct, frozen=True):
    """A row of the stream catalogue. `head` is the next offset to be written."""

    stream_id: int
    space_id: int
    generation_id: int
    hash_from: int
    hash_to: int
    head: int


def hash_key(key: bytes | None, topic: str) -> int:
    """Return the place of a message on the ring: xxh3_64 with seed 0 of its key, or of its topic if it has none."""
    return xxhash.xxh3_64_intdigest(topic.encode() if key is None else key)


def hash_keys(keys: Iterable[bytes]) -> array[int]:
    """Return the `hash_key` of each key."""
    hashes = array("Q", b"".join(map(xxhash.xxh3_64_digest, keys)))  # which are big-endian
    if sys.byteorder == "little":
        hashes.byteswap()
    return hashes


def split_ring(shards: int) -> list[HashRange]:
    """Return `shards` half-open ranges that make up the ring, whose sizes differ by at most one."""
    if not 1 <= shards <= MAX_SHARDS:
        raise InvalidSetting(f"shards {shards}: must be from 1 to {MAX_SHARDS}. Most spaces do well with 16.")
    cuts = [index * RING // shards for index in range(shards + 1)]
    return list(pairwise(cuts))


def ranges_overlap(first: HashRange, second: HashRange) -> bool:
    """Return whether the two half-open ranges share a point."""
    return first[0] < second[1] and second[0] < first[1]


def has_moved_topics(former: Space, successor: Space, changed: int) -> bool:
    """Return whether topics of the space `former` are in `successor` once the space `changed` is another: topics move
    only from it or to it."""
    is_concerned = changed in (former.space_id, successor.space_id) and former.filter.intersects(successor.filter)
    return former.space_id == successor.space_id or is_concerned


def find_space_for(topic: str, spaces: Iterable[Space]) -> Space | None:
    """Return the most specific space that matches; None only where there is no catch-all space."""
    matching = (space for space in spaces if space.filter.matches(topic))
    return min(matching, key=lambda space: space.filter.specificity, default=None)


def find_candidate_filters(filter: TopicFilter, filters: Iterable[TopicFilter]) -> frozenset[TopicFilter]:
    """Return, of the live spaces' filters, those under which messages published now may match a group's filter.

    Those that intersect it, minus those in the shadow of a more specific one that covers it entirely.
    """
    intersecting = [candidate for candidate in filters if candidate.intersects(filter)]
    covering = [candidate.specificity for candidate in intersecting if candidate.covers(filter)]
    return frozenset(
        candidate for candidate in intersecting if not any(key < candidate.specificity for key in covering)
    )


class GenerationTopicFilters(Struct, frozen=True):
    """The filters of all generations, at one instant.

    A generation keeps the filter that its space had when it was opened: the space's own may be another by now. Every
    live space has one open generation, so that the filters in `open` are those of the live spaces.
    """

    filters: tuple[TopicFilter, ...]
    open: frozenset[TopicFilter]
    newest_generation_id: int
    """The largest generation id; 0 if there is none."""

    def matching(self, filter: TopicFilter) -> dict[TopicFilter, bool]:
        """Return {filter of generations with messages for a group: True if an open one of it gets such messages too}.

        A closed generation may have been in a shadow that is gone, or not in one that is there now: it is always
        included, at the price of reads without a match.
        """
        candidates = find_candidate_filters(filter, self.open)
        return {
            generation_filter: generation_filter in candidates
            for generation_filter in self.filters
            if generation_filter.intersects(filter)
        }


class HashRing:
    """The open streams of one space, ready to be looked up by hash. Raises `MalformedRow` where not each hash has one
    of them, as after a change by SQL."""

    def __init__(self, streams: Iterable[StreamCatalogRow]) -> None:
        self.streams = sorted(streams, key=lambda stream: stream.hash_from)
        self._starts = [stream.hash_from for stream in self.streams]
        self._ids = [stream.stream_id for stream in self.streams]
        ends = [stream.hash_to for stream in self.streams]
        if not ends or self._starts != [0, *ends[:-1]] or ends[-1] != RING:
            shown = ", ".join(f"{each.stream_id}: {each.hash_from} to {each.hash_to}" for each in self.streams[:8])
            raise MalformedRow(
                f"the open streams do not tile the ring ({shown or 'none'}): not each key has one of them. Who writes "
                "rows by SQL did this: `sublet spaces rollover` opens others."
            )
        self.by_arc = self._compute_arcs()
        """The stream of each arc; empty if one is cut."""

    def find_stream_id(self, hashed: int) -> int:
        """Return the id of the stream whose range contains the hash."""
        return self._ids[bisect_right(self._starts, hashed) - 1]

    def _compute_arcs(self) -> array[int]:
        if any(start % _ARC for start in self._starts):
            return array("q")
        cuts = zip(self._ids, pairwise([*self._starts, RING]), strict=True)
        return array("q", [id for id, (start, end) in cuts for _ in range((end - start) // _ARC)])
