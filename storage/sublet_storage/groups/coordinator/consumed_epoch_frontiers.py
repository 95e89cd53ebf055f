"""Consumed frontiers of atomic groups: the first ones, and how they advance.

A frontier begins with the group for each space that has had messages for it, also where others take them now: what has
begun there stays begun when its topics come back. A space without a frontier came after the group, which gets all.

What is completed in a space is read before the rows and heads that it is compared with. So whatever was published in a
completed epoch has a stream with a row by then, and lies below that stream's head.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import Struct

from sublet_protocol.domain import limits
from sublet_protocol.domain.epoch_frontiers import (
    Epoch,
    GroupFrontier,
    LowerFrontier,
    UpperFrontier,
    have_same_dimensions,
    lower_frontier_from_json,
    lower_frontier_from_text,
    upper_frontier_from_json,
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.clock import NOW
from sublet_storage.db.connect import prune_to
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator.lending_statements import Key
from sublet_storage.groups.coordinator.lending_write_batch import LendingWriteBatch
from sublet_storage.groups.model.history_record_builder import consumption_record
from sublet_storage.groups.model.progress_rules import initial_frontier, merge_consumed_frontier
from sublet_storage.groups.model.records import StartingPosition
from sublet_storage.spaces.space_queries import MAY_MATCH, find_spaces_that_matched, read_matching_filters

# Those that the groups may get rows in are of generations that came after them. A day after a space was dropped every
# leader has read how its epochs ended.
_SPACES = f"""
select space_id, name, lower_frontier::text, coalesce(dropped_at < {NOW} - interval '1 day', false) from space
 where space_id in (select f.space_id from consumed_frontier f where f.group_id = any(%(groups)s::bigint[])
                    union select g.space_id from generation g where g.generation_id > %(oldest)s)"""

_SPACES_OF_ROWS = """
select distinct s.space_id from lending l join stream s using (stream_id) where l.group_id = %(group)s"""

# Of no others blocks are looked at.
_PARTLY_READ = """
select distinct s.generation_id from lending l join stream s using (stream_id)
 where l.group_id = %(group)s and l.position > 0 and (s.state = 'open' or l.position < s.head)"""

# What had begun before the start positions; of streams without a row, which are consumed, gone, deleted or not the
# group's, all that had, unless they have nothing for it. A group at the end starts behind all that has begun by now: to
# leave out what began while its rows were written, all blocks would have to be looked at.
_BEGUN = f"""
select u.space_id, space.lower_frontier, before.greatest
  from stream_upper_frontier u join space using (space_id) join consumer_group g on g.group_id = %(group)s
  left join stream s using (stream_id) left join generation n using (generation_id)
  left join lending l on l.group_id = %(group)s and l.stream_id = s.stream_id
  cross join lateral (
    select case when %(at_the_end)s or s.stream_id is null or l.position >= s.head then u.upper_frontier
      when l.stream_id is null then case when n.generation_id <= g.after_generation
        and {MAY_MATCH} then u.upper_frontier end
      when l.position > 0 and check_partition(s.generation_id, s.stream_id) then (
      select jsonb_agg(epoch) from block b, jsonb_array_elements(b.epoch_bounds -> 'greatest') as greatest(epoch)
       where b.generation_id = any(%(generations)s::bigint[]) and b.generation_id = s.generation_id
         and b.stream_id = s.stream_id and b.end_offset - b.count < l.position
    ) end as greatest) as before
 where u.space_id = any(%(spaces)s::bigint[])"""

_INSERT = f"""
insert into consumed_frontier (group_id, space_id, least, updated_at, has_streams)
select %(group)s, u.space_id, u.least, {NOW}, exists (
         select from lending l join stream s using (stream_id)
          where l.group_id = %(group)s and s.space_id = u.space_id and not (l.status = 'finished' and s.state = 'open'))
  from unnest(%(spaces)s::bigint[], %(least)s::jsonb[]) as u (space_id, least)"""

_BEGIN = """
update lending l set consumed = jsonb_build_object('upto', l.position, 'least', f.least)
  from stream s, consumed_frontier f
 where s.stream_id = l.stream_id and f.group_id = l.group_id and f.space_id = s.space_id and l.group_id = %(group)s"""

_ADD = f"""
insert into consumed_frontier (group_id, space_id, least, updated_at)
select distinct u.group_id, s.space_id, 'null'::jsonb, {NOW}
  from unnest(%(groups)s::bigint[], %(streams)s::bigint[]) as u (group_id, stream_id) join stream s using (stream_id)
    on conflict (group_id, space_id) do update set has_streams = true where not consumed_frontier.has_streams"""

_KNOWN = """
select group_id, space_id, nullif(least, 'null')::text, has_streams from consumed_frontier
 where group_id = any(%(groups)s::bigint[]) order by group_id, space_id"""

# Of epochs of one number the least of all streams is enough, also where a space has others; else each distinct one, and
# whatever else a row has than one such epoch. Where the rows have more than is read at a time, nothing of it is, not
# even by the server.
_HELD_BACK = """
with stored as (
  select l.group_id, s.space_id, l.consumed,
         sum(pg_column_size(l.consumed)) over (partition by l.group_id, s.space_id) <= %(max_bytes)s as is_readable
    from lending l join stream s using (stream_id)
   where l.group_id = any(%(groups)s::bigint[]) and l.unfinished and l.position <> s.head
     and l.consumed is not null
), held_back as materialized (
  select group_id, space_id, case when is_readable then consumed -> 'least' else 'null' end as least
    from stored
), behind as (
  select *, jsonb_path_match(least, 'strict $.size() == 1 && $[0].size() == 1', '{}', true) as is_number
    from held_back)
select group_id, space_id, jsonb_build_array(jsonb_build_array(min((least -> 0 ->> 0)::bigint)))
  from behind where is_number group by group_id, space_id
union all
select distinct group_id, space_id, least from behind where is_number is not true"""

_MOVE = f"""
update consumed_frontier f set least = u.least, updated_at = {NOW}
  from unnest(%(groups)s::bigint[], %(spaces)s::bigint[], %(least)s::jsonb[]) as u (group_id, space_id, least)
 where f.group_id = u.group_id and f.space_id = u.space_id"""

_FORGET = "delete from consumed_frontier where group_id = %(group)s"

_FORGET_SPACES = """
delete from consumed_frontier f using unnest(%(groups)s::bigint[], %(spaces)s::bigint[]) as u (group_id, space_id)
 where f.group_id = u.group_id and f.space_id = u.space_id"""

_EXPIRED = """
select space_id, producer_id, least, upper_frontier from capability
 where expired_at is not null and space_id = any(%(spaces)s::bigint[]) order by producer_id"""


class SpaceCompletedEpochs(Struct, frozen=True):
    """The lower frontier of a space when it was read. `is_dropped`: the space was dropped, and not just now."""

    name: str
    lower: LowerFrontier | None
    is_dropped: bool


def read_space_frontiers(
    connection: Connection, groups: Collection[int], oldest: int, now_us: int | None
) -> dict[int, SpaceCompletedEpochs]:
    """Return {space_id: what is completed} of the spaces that these groups have to do with, also of those that were
    dropped. `oldest`: of generations up to this one they all have the rows that they are to have."""
    parameters = {"groups": list(groups), "oldest": oldest, "now_us": now_us}
    return {
        space_id: SpaceCompletedEpochs(name, lower_frontier_from_text(lower), is_past)
        for space_id, name, lower, is_past in connection.execute(_SPACES, parameters).fetchall()
    }


def delete_frontiers(connection: Connection, group_id: int) -> None:
    """Delete the group's frontiers, as it has consumed nothing."""
    connection.execute(_FORGET, {"group": group_id})


def initialize_frontiers(
    connection: Connection,
    group_id: int,
    filter: TopicFilter,
    start: StartingPosition,
    now_us: int | None,
    epoch: Epoch | None = None,
) -> None:
    """Set, for a group that has no frontiers, which epochs it gets, in its rows and as its first frontiers. `epoch`:
    the group gets none before that."""
    spaces = {space_id for (space_id,) in connection.execute(_SPACES_OF_ROWS, {"group": group_id}).fetchall()}
    spaces.update(find_spaces_that_matched(connection, filter))
    _insert(connection, group_id, _read_initial_frontiers(connection, group_id, filter, start, spaces, epoch), now_us)
    connection.execute(_BEGIN, {"group": group_id})


def insert_exported_frontiers(
    connection: Connection, group_id: int, filter: TopicFilter, exported: Mapping[int, LowerFrontier | None]
) -> None:
    """Insert the frontiers of a group that goes on from where another was. Where that had none, which may be as its
    filter was another, the group gets no epoch that had begun in streams of before."""
    unexported = set(find_spaces_that_matched(connection, filter)) - exported.keys()
    initial = _read_initial_frontiers(connection, group_id, filter, StartingPosition.EARLIEST, unexported)
    initial = {space_id: frontier for space_id, frontier in initial.items() if frontier is not None}
    _insert(connection, group_id, {**exported, **initial}, None)


def add_spaces(connection: Connection, keys: Collection[Key], now_us: int | None) -> None:
    """Begin frontiers for the spaces of these streams where their groups, which are atomic, have none."""
    parameters = {"groups": [group for group, _ in keys], "streams": [stream for _, stream in keys], "now_us": now_us}
    connection.execute(_ADD, parameters)


def advance_frontiers(
    connection: Connection,
    terms: Mapping[int, int],
    spaces: Mapping[int, SpaceCompletedEpochs],
    buffer: LendingWriteBatch,
) -> dict[int, tuple[GroupFrontier, ...]]:
    """Write how far the groups {group_id: term}, which are atomic and whose leadership is locked, have come, and record
    it in their history; return all their frontiers. Those of a space that is past, and consumed, are deleted."""
    groups = {"groups": list(terms)}
    rows = connection.execute(_KNOWN, groups).fetchall()
    held_back: dict[tuple[int, int], list[LowerFrontier | None]] = {}
    parameters: dict[str, object] = {**groups, "max_bytes": limits.MAX_HELD_BACK_BYTES}
    for group_id, space_id, document in connection.execute(_HELD_BACK, parameters).fetchall():
        # The least of each are not looked for: those of all are.
        frontier = None if document is None else LowerFrontier(tuple(map(tuple, document)))
        held_back.setdefault((group_id, space_id), []).append(frontier)
    moved: dict[tuple[int, int], tuple[LowerFrontier | None, LowerFrontier]] = {}
    frontiers: dict[int, list[GroupFrontier]] = {}
    past_spaces: list[tuple[int, int]] = []
    for group_id, space_id, document, has_streams in rows:
        former, space = lower_frontier_from_text(document), spaces.get(space_id)
        if space is not None and space.is_dropped and (former == space.lower or not has_streams):
            past_spaces.append((group_id, space_id))
            continue
        if space is None or space.lower is None or not has_streams:
            continue
        frontier = merge_consumed_frontier(former, space.lower, held_back.get((group_id, space_id), ()))
        if frontier is None:
            continue
        frontiers.setdefault(group_id, []).append(GroupFrontier(space.name, space_id, frontier, space.lower))
        if frontier != former:
            moved[group_id, space_id] = former, frontier
    if past_spaces:
        parameters = {"groups": [group for group, _ in past_spaces], "spaces": [space for _, space in past_spaces]}
        connection.execute(_FORGET_SPACES, parameters)
    if moved:
        _write(connection, {key: frontier for key, (_, frontier) in moved.items()}, buffer.now_us)
        expired = _read_expired_producers(connection, {space_id for _, space_id in moved})
        for (group_id, space_id), (former, frontier) in moved.items():
            unfinished = {
                producer.producer_id: None
                for producer in expired.get(space_id, ())
                if producer.is_closed_by(former, frontier)
            }
            name, term = spaces[space_id].name, terms[group_id]
            buffer.history.append(consumption_record(group_id, name, frontier, term, buffer.now_us, list(unfinished)))
        buffer.flush(connection)
    return {
        group_id: tuple(sorted(group_frontiers, key=lambda frontier: (frontier.space, frontier.space_id)))
        for group_id, group_frontiers in frontiers.items()
    }


def _read_initial_frontiers(
    connection: Connection,
    group_id: int,
    filter: TopicFilter,
    start: StartingPosition,
    spaces: Collection[int],
    epoch: Epoch | None = None,
) -> dict[int, LowerFrontier | None]:
    parameters = {
        "group": group_id,
        "at_the_end": start.policy == "latest",
        "spaces": list(spaces),
        "generations": prune_to(row[0] for row in connection.execute(_PARTLY_READ, {"group": group_id}).fetchall()),
        **read_matching_filters(connection, filter),
    }
    lowers: dict[int, LowerFrontier | None] = {}
    begun_epochs: dict[int, set[Epoch]] = {}
    for space_id, lower, upper in connection.execute(_BEGUN, parameters, prepare=False):
        lowers[space_id] = lower_frontier_from_json(lower)
        begun_epochs.setdefault(space_id, set()).update(map(tuple, upper or ()))
    frontiers = {
        space_id: initial_frontier(start, lower, UpperFrontier.from_epochs(begun_epochs[space_id]))
        for space_id, lower in lowers.items()
    }
    if epoch is not None:
        epoch_frontier = LowerFrontier((epoch,))
        for space_id, lower in lowers.items():
            if lower is not None and have_same_dimensions(lower, epoch_frontier):
                former = frontiers[space_id]
                frontiers[space_id] = epoch_frontier if former is None else former.intersect(epoch_frontier)
    return frontiers


def _insert(
    connection: Connection, group_id: int, frontiers: Mapping[int, LowerFrontier | None], now_us: int | None
) -> None:
    parameters = {
        "group": group_id,
        "spaces": list(frontiers),
        "least": _encode_frontiers(frontiers.values()),
        "now_us": now_us,
    }
    connection.execute(_INSERT, parameters)


class _ExpiredProducer(Struct, frozen=True):
    """A producer whose lease has run out: the frontier that it `held`, and which epochs had `begun` by then."""

    producer_id: str
    held: LowerFrontier
    begun: UpperFrontier

    def is_closed_by(self, former: LowerFrontier | None, frontier: LowerFrontier) -> bool:
        """Return whether a step consumes some of the epochs that it left unfinished."""
        unfinished = self.held if former is None else self.held.intersect(former)
        return any(self.begun.covers(epoch) and not frontier.admits(epoch) for epoch in unfinished.least)


def _read_expired_producers(connection: Connection, space_ids: Iterable[int]) -> dict[int, list[_ExpiredProducer]]:
    """Return the producers whose leases ran out recently, by space."""
    expired: dict[int, list[_ExpiredProducer]] = {}
    for space_id, producer_id, held, upper in connection.execute(_EXPIRED, {"spaces": list(space_ids)}).fetchall():
        held_frontier = LowerFrontier.from_epochs(map(tuple, held))
        expired.setdefault(space_id, []).append(
            _ExpiredProducer(producer_id, held_frontier, upper_frontier_from_json(upper))
        )
    return expired


def _write(connection: Connection, moved: Mapping[tuple[int, int], LowerFrontier], now_us: int) -> None:
    parameters: dict[str, Any] = {
        "groups": [group_id for group_id, _ in moved],
        "spaces": [space_id for _, space_id in moved],
        "least": _encode_frontiers(moved.values()),
        "now_us": now_us,
    }
    connection.execute(_MOVE, parameters)


def _encode_frontiers(frontiers: Iterable[LowerFrontier | None]) -> list[str]:
    return [json.dumps(None if each is None else each.least) for each in frontiers]
