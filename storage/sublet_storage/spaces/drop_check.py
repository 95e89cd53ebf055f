"""Checks the users of a space before it is dropped, and lists dropped spaces."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.space_queries import UNNOTICED_STREAMS, read_generation_filters, to_pairs
from sublet_storage.util.name_list import format_names

RECENT_WINDOW_S = 3600.0
"""A producer that has published within this time counts as a user of the space."""
MAX_LOSSES = 20

_MESSAGES = """
select coalesce(sum(s.head), 0) from stream s join generation g using (generation_id)
 where g.space_id = %(space)s and g.state <> 'gone'"""

_GROUPS = """
select c.group_id, c.kind, c.name, c.filter, count(l.stream_id) filter (where l.status in ('held', 'reserved'))
  from consumer_group c
  left join (lending l join stream s on s.stream_id = l.stream_id and s.space_id = %(space)s) using (group_id)
 where c.deleted_at is null group by c.group_id order by c.name, c.filter, c.kind"""

# As lag is counted (sublet_storage.groups.status.overview). A blocked stream's messages are unread as well.
_UNREAD = f"""
with line as (
  select l.group_id, l.stream_id, l.status, l.position
    from lending l join stream s using (stream_id) where s.space_id = %(space)s
  union all
  select u.group_id, s.stream_id, 'new', 0{UNNOTICED_STREAMS} and n.space_id = %(space)s)
select line.group_id, count(*), sum(s.head - line.position)
  from line join stream s using (stream_id) join generation n using (generation_id)
 where n.state <> 'gone' and line.status <> 'finished' and line.position < s.head
 group by line.group_id"""

# Python has no time after the year 9999: the longest retention leads there from 9000.
_LEFT = """
select p.space_id, p.name, p.filter, p.shards, p.retention_s, p.rollover_s, p.compression, p.payload_location,
       p.tier_after_s,
       p.dropped_at, sum(s.head),
       least(max(g.closed_at) filter (where s.head > 0), '9000-01-01') + make_interval(secs => p.retention_s)
  from space p join generation g using (space_id) join stream s using (generation_id)
 where p.dropped_at is not null and g.state <> 'gone'
 group by p.space_id having sum(s.head) > 0 order by p.name, p.space_id"""

_PRODUCERS = """
select p.producer_id from producer p join stream s using (stream_id)
 where s.space_id = %(space)s and p.updated_at > clock_timestamp() - make_interval(secs => %(window_s)s)
 union
select producer_id from capability where space_id = %(space)s and expired_at is null
 order by 1"""


class DropAffectedGroup(Struct, frozen=True):
    """A group with messages from the space; some of its streams are granted to members, or reserved for them.

    `unread_messages`, in `unread_streams`, would be lost to it with the space, including those that its filter skips.
    """

    subscription: str
    granted_streams: int
    unread_streams: int
    unread_messages: int


class SpaceDropImpact(Struct, frozen=True):
    """The messages and users of a space. `messages` may be fewer by now in an open generation, never more."""

    messages: int
    groups: tuple[DropAffectedGroup, ...]
    producers: tuple[str, ...]

    def describe_losses(self) -> list[str]:
        """Return the losses of groups by dropping the space's messages, for people: a line for each group, up to
        `MAX_LOSSES`."""
        losing = [group for group in self.groups if group.unread_messages]
        texts = [
            f"{group.subscription} loses {group.unread_messages} unread messages, in {group.unread_streams} streams"
            for group in losing[:MAX_LOSSES]
        ]
        return texts + ([f"and {len(losing) - MAX_LOSSES} more groups lose some"] if len(losing) > MAX_LOSSES else [])

    def describe(self) -> list[str]:
        """Return what there is of it, for people."""
        groups = [f"{group.subscription} ({group.granted_streams} of its streams granted)" for group in self.groups]
        return [
            *([f"it holds {self.messages} messages"] if self.messages else []),
            *([f"groups use it: {format_names(groups)}"] if groups else []),
            *([f"producers publish to it: {format_names(self.producers)}"] if self.producers else []),
        ]


class RetainedDroppedSpace(Struct, frozen=True):
    """A space that was dropped and still holds messages. `retained_until`: when its retention takes the last of them,
    if no group holds it up; None: never."""

    space: Space
    dropped_at: datetime
    messages: int
    retained_until: datetime | None


def list_dropped_spaces(conn: psycopg.Connection[Any]) -> list[RetainedDroppedSpace]:
    """Return the spaces that were dropped and hold messages still, by name; of one name there may be several."""
    return [
        RetainedDroppedSpace(
            Space(space_id, name, TopicFilter(filter), *settings), dropped_at, int(messages), retained_until
        )
        for space_id, name, filter, *settings, dropped_at, messages, retained_until in conn.execute(_LEFT).fetchall()
    ]


def read_usage(conn: psycopg.Connection[Any], space: Space) -> SpaceDropImpact:
    """Return the present users of the space."""
    parameters = {"space": space.space_id, "window_s": RECENT_WINDOW_S}
    ((messages,),) = conn.execute(_MESSAGES, parameters).fetchall()
    generations, rows = read_generation_filters(conn), conn.execute(_GROUPS, parameters).fetchall()
    filters_by_group = {group_id: generations.matching(TopicFilter(filter)) for group_id, _, _, filter, _ in rows}
    unread = _count_unread(conn, space, filters_by_group)
    groups = []
    for group_id, kind, name, filter, granted in rows:
        streams, behind = unread.get(group_id, (0, 0))
        # what it holds under an older filter of the space concerns only groups that have not read it
        if granted or behind or filters_by_group[group_id].get(space.filter):
            groups.append(
                DropAffectedGroup(str(Subscription(kind, name, TopicFilter(filter))), granted, streams, behind)
            )
    producers = tuple(row[0] for row in conn.execute(_PRODUCERS, parameters))
    return SpaceDropImpact(int(messages), tuple(groups), producers)


def _count_unread(
    conn: psycopg.Connection[Any], space: Space, filters_by_group: Mapping[int, Mapping[TopicFilter, bool]]
) -> dict[int, tuple[int, int]]:
    """Return {group: (streams, messages)} of those that have not read all that the space holds for them."""
    parameters = {"space": space.space_id, "oldest": 0, **to_pairs(filters_by_group)}
    rows = conn.execute(_UNREAD, parameters).fetchall()
    return {group_id: (streams, int(messages)) for group_id, streams, messages in rows}


def check_unused(conn: psycopg.Connection[Any], space: Space) -> None:
    """Raise `Conflict`, with the groups that use it and a hint."""
    if uses := read_usage(conn, space).describe():
        raise Conflict(
            f"space {space.name!r} is in use: {'; '.join(uses)}. Give --keep, and nothing is lost: its groups "
            "consume what is there until its retention takes it. Or give --force: its messages are gone then, groups "
            "that are behind are blocked, and publishers that are bound to it are refused."
        )
