"""Plans the offset ranges of a batch read, at one instant, without a group."""

from __future__ import annotations

from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.spaces.space_queries import MAY_MATCH, STARTING_OFFSET, read_matching_filters

_OFFSET_RANGES = f"""
select s.stream_id, s.generation_id, p.name, n.filter, p.epoch_dimensions,
       {STARTING_OFFSET.format(policy="start", value="start_value")},
       {STARTING_OFFSET.format(policy="end", value="end_value")}
  from stream s join generation n using (generation_id) join space p on p.space_id = s.space_id
 where n.state <> 'gone' and {MAY_MATCH}
 order by s.generation_id, s.stream_id"""


class OffsetRange(Struct, frozen=True):
    """The messages [start, end) of a stream, some of which match. `generation_filter`: the filter of its generation;
    `epoch_dimensions`: the number of dimensions of its space's epochs, None if it has none."""

    stream_id: int
    generation_id: int
    space: str
    generation_filter: TopicFilter
    epoch_dimensions: int | None
    start: int
    end: int


def list_offset_ranges(
    conn: psycopg.Connection[Any], filter: TopicFilter, start: StartingPosition, end: StartingPosition
) -> list[OffsetRange]:
    """Return what lies between the two in all streams that retention has left and that can match, open or closed, in
    the order of their generations; all of one snapshot."""
    with conn.transaction():
        conn.execute("set transaction isolation level repeatable read, read only")
        parameters = {
            **read_matching_filters(conn, filter),
            "start": start.policy,
            "start_value": start.value,
            "end": end.policy,
            "end_value": end.value,
        }
        rows = conn.execute(_OFFSET_RANGES, parameters).fetchall()
    return [_make_offset_range(*row) for row in rows]


def _make_offset_range(stream_id: int, generation_id: int, space: str, filled: str, *offsets: Any) -> OffsetRange:
    return OffsetRange(stream_id, generation_id, space, TopicFilter(filled), *offsets)
