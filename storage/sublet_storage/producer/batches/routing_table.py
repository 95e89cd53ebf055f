"""The publisher's routing table: spaces and their open streams at one instant."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import psycopg
import pyarrow as pa

from sublet_protocol.domain.errors import InvalidTopic, MalformedRow, ProducerFenced, UnknownSpace, UsageError
from sublet_protocol.domain.topics import check_topic
from sublet_storage.log.deleted_streams import find_deleted_streams
from sublet_storage.producer.delivery import Rows
from sublet_storage.spaces.routing import (
    ARC_SHIFT,
    HashRing,
    Space,
    StreamCatalogRow,
    find_space_for,
    hash_key,
    hash_keys,
)
from sublet_storage.spaces.space_queries import read_routing_table
from sublet_storage.util import arrow_compute as pc

_CACHED_TOPICS = 100_000

_REFUSED_S = 1.0
"""For how long a topic is refused without another look: its space may be made, or mended, meanwhile."""

_SAME = """
select s.stream_id, s.generation_id, p.space_id, p.name, p.filter, s.hash_from::text, s.hash_to::text
  from stream s join space p using (space_id) where s.stream_id = any(%s::bigint[])"""

RoutedRows: TypeAlias = tuple[int, pa.RecordBatch, Rows]
"""The messages of a batch that go to one stream: (stream id, messages, their numbers in their ticket)."""


class PublisherRoutingTable:
    """A table that finds the stream of a message, or of many. `only`: the name of the one space that may be published
    to. A space with malformed rows accepts no messages; others do."""

    def __init__(self, spaces: Sequence[Space], streams: Sequence[StreamCatalogRow], only: str | None) -> None:
        self._spaces, self._streams = {space.space_id: space for space in spaces}, streams
        self._rings: dict[int, HashRing] = {}
        self._space_of_stream = {stream.stream_id: stream.space_id for stream in streams}
        self._topics: dict[str, int] = {}
        self._only = only
        self._read_at = time.monotonic()

    @classmethod
    def load(cls, conn: psycopg.Connection[Any], only: str | None = None) -> PublisherRoutingTable:
        """Read the table as it is now."""
        spaces, streams = read_routing_table(conn)
        if not spaces:
            raise UnknownSpace("there is no space in this database, not even `default`. Run `sublet migrate`.")
        return cls(spaces, streams, only)

    def check_timeline(self, conn: psycopg.Connection[Any], producer_id: str) -> None:
        """Raise `ProducerFenced` unless these streams are the same on the present timeline of the database: one that
        was opened last may be missing there, and its number, or its space's, another's. One that was deleted takes no
        more, and its number is given to no other."""
        stream_ids = [each.stream_id for each in self._streams]
        rows = conn.execute(_SAME, (stream_ids,)).fetchall()
        stored_streams = {(*row[:5], int(row[5]), int(row[6])) for row in rows}
        deleted = find_deleted_streams(conn, stream_ids)
        spaces = set(conn.execute("select space_id, name, filter from space").fetchall())
        for each in self._streams:
            space = self._spaces[each.space_id]
            names = (space.space_id, space.name, space.filter.text)
            if each.stream_id in deleted and names in spaces:
                continue
            if (each.stream_id, each.generation_id, *names, each.hash_from, each.hash_to) not in stored_streams:
                raise ProducerFenced(
                    f"producer {producer_id!r}: the database has gone over to another timeline, where stream "
                    f"{each.stream_id} is missing or another. What had no answer by then may be stored or not: open a "
                    "new publisher, and look before you publish it again."
                )

    def without_space_limit(self) -> PublisherRoutingTable:
        """Return the same table for messages accepted before: they go where their topic belongs now."""
        return PublisherRoutingTable(list(self._spaces.values()), self._streams, None)

    @property
    def may_be_outdated(self) -> bool:
        """Return whether it is so old that a topic that it refuses may be taken by now."""
        return time.monotonic() >= self._read_at + _REFUSED_S

    def is_open(self, stream_id: int) -> bool:
        """Return whether the stream accepted messages when the table was read."""
        return stream_id in self._space_of_stream

    def get_compression(self, stream_id: int) -> str:
        """Return how the blocks of the stream's space are compressed."""
        return self._spaces[self._space_of_stream[stream_id]].compression

    def find_stream(self, topic: str, key: bytes | None) -> int:
        """Return the open stream of one message. Raise `InvalidTopic`, `UsageError` for a topic of another space, or
        `MalformedRow`."""
        return self._rings[self._find_space_id(topic)].find_stream_id(hash_key(key, topic))

    def check(self, batch: pa.RecordBatch) -> None:
        """Raise what `find_stream` raises for the first topic that may not be published to."""
        topics = batch.column("topic")
        for topic in [topics[0].as_py()] if _is_constant(topics) else topics.unique().to_pylist():
            self._find_space_id(topic)

    def partition_rows(self, batch: pa.RecordBatch, rows: Rows) -> list[RoutedRows]:
        """Return a batch split by stream, the order within each preserved. No Python per message, only per distinct
        key."""
        targets = self._find_streams(batch)
        if isinstance(targets, int):
            return [(targets, batch, rows)]
        order = pc.sort_indices(targets)
        runs = pc.run_end_encode(targets.take(order))
        batch = batch.take(order)
        rows = order if isinstance(rows, range) and rows.start == 0 else pick_rows(rows, order)
        parts, start = [], 0
        for stream_id, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            parts.append((stream_id, batch.slice(start, end - start), rows.slice(start, end - start)))
            start = end
        return parts

    def _find_streams(self, batch: pa.RecordBatch) -> int | pa.Array:
        """Return the stream of each message; one number where it is the same for all."""
        topics, keys = batch.column("topic"), batch.column("key")
        keyless = keys.null_count == len(keys)
        if _is_constant(topics) and (keyless or _is_constant(keys)):
            return self.find_stream(topics[0].as_py(), keys[0].as_py())
        topics = topics.dictionary_encode()
        names = topics.dictionary.to_pylist()
        spaces = [self._find_space_id(name) for name in names]
        if len(self._space_of_stream) == 1:
            return self.find_stream(names[0], None)
        by_key = None
        if not keyless:
            keys = keys.dictionary_encode()
            by_key = self._find_streams_by_key(spaces, topics.indices, keys.dictionary.to_pylist(), keys.indices)
            if not keys.null_count:
                return by_key
        by_topic = pa.array([self.find_stream(name, None) for name in names], pa.int64()).take(topics.indices)
        return by_topic if by_key is None else pc.coalesce(by_key, by_topic)

    def _find_streams_by_key(
        self, spaces: list[int], topic_indices: pa.Array, keys: list[bytes], key_indices: pa.Array
    ) -> pa.Array:
        """Look up every distinct key in the ring of each space concerned, which are those of the distinct topics; null
        where there is no key."""
        hashes = hash_keys(keys)
        stream_ids: pa.Array | None = None
        for space_id in sorted(set(spaces)):
            streams = find_stream_ids(self._rings[space_id], hashes).take(key_indices)
            if stream_ids is None:
                stream_ids = streams
            else:
                in_space = pa.array([each == space_id for each in spaces]).take(topic_indices)
                stream_ids = pc.if_else(in_space, streams, stream_ids)
        return stream_ids

    def _find_space_id(self, topic: str) -> int:
        space_id = self._topics.get(topic)
        return self._cache_topic(topic) if space_id is None else space_id

    def _cache_topic(self, topic: str) -> int:
        if not isinstance(topic, str):
            raise InvalidTopic(f"topic {topic!r}: a topic is text, not {type(topic).__name__}.")
        space = find_space_for(check_topic(topic), self._spaces.values())
        if space is None:
            raise UnknownSpace(f"topic {topic!r} is in no space. Create a space with a filter that matches it.")
        if self._only not in (None, space.name):
            raise UsageError(
                f"topic {topic!r} belongs to space {space.name!r}, and this publisher is for space {self._only!r}. "
                "Use another publisher, or leave its space out."
            )
        self._build_ring(space)
        if len(self._topics) >= _CACHED_TOPICS:
            self._topics.clear()
        self._topics[topic] = space.space_id
        return space.space_id

    def _build_ring(self, space: Space) -> None:
        """Build the ring of a space where a topic is found in it for the first time."""
        if space.space_id not in self._rings:
            try:
                ring = HashRing(each for each in self._streams if each.space_id == space.space_id)
            except MalformedRow as error:
                raise MalformedRow(f"space {space.name!r}: {error}") from None
            self._rings[space.space_id] = ring


def find_stream_ids(ring: HashRing, hashes: array[int]) -> pa.Array:
    """Return the `find_stream_id` of each hash; without Python for each, unless the ring is cut into uncommon parts."""
    if not ring.by_arc:
        return pa.array(map(ring.find_stream_id, hashes), pa.int64())
    by_arc = pa.Array.from_buffers(pa.int64(), len(ring.by_arc), [None, pa.py_buffer(ring.by_arc)])
    arcs = pa.Array.from_buffers(pa.uint64(), len(hashes), [None, pa.py_buffer(hashes)])
    return by_arc.take(pc.shift_right(arcs, pa.scalar(ARC_SHIFT, pa.uint64())))


def _is_constant(column: pa.Array) -> bool:
    """Return whether all values are the same, and none is null."""
    if column.null_count or column[0] != column[len(column) - 1]:
        return False
    is_constant: bool = pc.all(pc.equal(column, column[0])).as_py()
    return is_constant


def pick_rows(rows: Rows, order: pa.Array) -> pa.Array:
    """Return the numbers at these places."""
    if isinstance(rows, range):
        return pc.add(order.cast(pa.int64()), rows.start)
    return rows.take(order)
