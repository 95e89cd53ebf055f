"""Reads spaces and streams; `sublet_storage.spaces.space_changes` changes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from sublet_protocol.domain.errors import UnknownSpace
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.spaces.routing import GenerationTopicFilters, Space, StreamCatalogRow

DEFAULT_SPACE = "default"

_SPACE = "space_id, name, filter, shards, retention_s, rollover_s, compression, payload_location, tier_after_s"
_ROUTING = """
select s.stream_id, s.space_id, s.generation_id, s.hash_from::text, s.hash_to::text, s.head,
       'block'::regclass in (select pg_partition_ancestors(to_regclass('block_' || s.generation_id))),
       p.name, p.filter, p.shards, p.retention_s, p.rollover_s, p.compression,
       p.payload_location, p.tier_after_s
  from stream s join space p using (space_id)
 where s.state = 'open' order by s.stream_id"""

# From each filter to the next one by the index: there are few, whatever the number of generations.
_FILLED = """
with recursive filled as (
  (select filter from generation order by filter limit 1)
  union all
  select (select g.filter from generation g where g.filter > filled.filter order by g.filter limit 1)
    from filled where filled.filter is not null)
select f.filter, exists (select from generation g where g.filter = f.filter and g.state = 'open'),
       (select max(generation_id) from generation)
  from filled f where f.filter is not null"""

# `oldest` states by a value what the planner cannot estimate of a column: how few generations are newer.
UNNOTICED_STREAMS = """
    from unnest(%(pair_groups)s::bigint[], %(filters)s::text[], %(matching)s::boolean[])
         as u (group_id, filter, matching)
    join consumer_group g using (group_id)
    join generation n on n.filter = u.filter and n.generation_id > g.after_generation and n.generation_id > %(oldest)s
    join stream s on s.generation_id = n.generation_id and (u.matching or s.state = 'closed')
   where not exists (select from lending k where k.group_id = u.group_id and k.stream_id = s.stream_id)"""
"""Streams that came after a group began and that no leader has noticed: the next one makes rows at 0 for them. With
`to_pairs` as parameters, and `oldest`: all come after this generation."""

MAY_MATCH = "n.filter = any(case when s.state = 'open' then %(open)s::text[] else %(closed)s::text[] end)"
"""Whether stream `s` of generation `n` may have messages that match: with `read_matching_filters` as parameters."""

STARTING_OFFSET = """case %({policy})s
           when 'earliest' then 0
           when 'offset' then least(%({value})s::bigint, s.head)
           when 'time' then coalesce(offset_at_time(s.generation_id, s.stream_id,
             timestamptz 'epoch' + %({value})s::bigint * interval '1 microsecond'),
             case when check_partition(s.generation_id, s.stream_id) then s.head end)
           else s.head end"""
"""The offset of a `StartingPosition` in stream `s`, given the names of its parameters. A time is that of the first
message that was appended then or later."""

_FILTERS_OF_LIVE = "select space_id, former_filters || filter from space where dropped_at is null"


def list_spaces(conn: psycopg.Connection[Any], include_dropped: bool = False) -> list[Space]:
    """Return the spaces by name; if requested also dropped ones, whose messages may still be retained."""
    condition = "" if include_dropped else "where dropped_at is null"
    return [
        _make_space(*row) for row in conn.execute(f"select {_SPACE} from space {condition} order by name, space_id")
    ]


def find_space(conn: psycopg.Connection[Any], name: str) -> Space:
    """Return the space of that name. Raise `UnknownSpace`, which names those that exist."""
    return find_space_in(name, list_spaces(conn))


def find_space_in(name: str, spaces: list[Space]) -> Space:
    """Return the space of that name among spaces read before, as `find_space` does."""
    for space in spaces:
        if space.name == name:
            return space
    have = ", ".join(space.name for space in spaces) or "none"
    raise UnknownSpace(f"space {name!r}: there is no such space. There are: {have}. Create it, or correct the name.")


def find_spaces_that_matched(conn: psycopg.Connection[Any], filter: TopicFilter) -> list[int]:
    """Return the live spaces that may have had messages for the filter at any time, also from another space's shadow.

    Such streams of theirs as are still to come may have the rest of an epoch that has begun there.
    """
    rows = conn.execute(_FILTERS_OF_LIVE).fetchall()
    return [space_id for space_id, filters in rows if any(TopicFilter(text).intersects(filter) for text in filters)]


def read_routing_table(conn: psycopg.Connection[Any]) -> tuple[tuple[Space, ...], tuple[StreamCatalogRow, ...]]:
    """Return the live spaces and their open streams that are attached, of one instant: what a publisher routes by. A
    space without one of its streams takes no messages."""
    spaces: dict[int, Space] = {}
    streams = []
    for stream_id, space_id, generation_id, low, high, head, is_attached, *settings in conn.execute(_ROUTING):
        if is_attached:
            streams.append(StreamCatalogRow(stream_id, space_id, generation_id, int(low), int(high), head))
        if space_id not in spaces:
            spaces[space_id] = _make_space(space_id, *settings)
    return tuple(spaces.values()), tuple(streams)


def read_generation_filters(conn: psycopg.Connection[Any]) -> GenerationTopicFilters:
    """Return the filters of all generations, in one statement and so of one instant."""
    rows = conn.execute(_FILLED).fetchall()
    return GenerationTopicFilters(
        filters=tuple(TopicFilter(text) for text, _, _ in rows),
        open=frozenset(TopicFilter(text) for text, open, _ in rows if open),
        newest_generation_id=max((newest for _, _, newest in rows), default=0),
    )


def read_matching_filters(conn: psycopg.Connection[Any], filter: TopicFilter) -> dict[str, list[str]]:
    """Return the filters of generations with messages that match, of those that get such messages now (`open`), and of
    all (`closed`)."""
    matching = read_generation_filters(conn).matching(filter)
    return {
        "open": [filter.text for filter, is_current in matching.items() if is_current],
        "closed": [filter.text for filter in matching],
    }


def to_pairs(filters_by_group: Mapping[int, Mapping[TopicFilter, bool]]) -> dict[str, list[Any]]:
    """Return the parameters of `UNNOTICED_STREAMS`, from what `GenerationTopicFilters.matching` has of each group."""
    pairs = [(group, filter, match) for group, each in filters_by_group.items() for filter, match in each.items()]
    return {
        "pair_groups": [group for group, _, _ in pairs],
        "filters": [filter.text for _, filter, _ in pairs],
        "matching": [matching for _, _, matching in pairs],
    }


def _make_space(space_id: int, name: str, filter: str, *settings: Any) -> Space:
    return Space(space_id, name, TopicFilter(filter), *settings)
