"""Groups in the database: who leads, who holds what, and how far behind; reads only.

Lag counts offsets between a group's position and the head of its stream, messages that its filter skips included. It is
unknown (None), never 0, where the rows do not show it: a blocked stream, a position beyond the head, messages that
retention has taken. A stream that was opened after the group and that no leader has noticed yet is unread from 0.

A stream is unreadable if its holder has reported so under the grant that is in force. The holder's last report counts,
under the leader that got it: the next leader gets it again. An index finds these lines, which are few.

Members that hold nothing are in their leader's memory only, and so not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from msgspec.structs import fields
from psycopg import sql
from psycopg.rows import class_row

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator.history_queries import read_recent_forced_moves
from sublet_storage.groups.model.group_errors import group_not_found_error
from sublet_storage.groups.model.records import LendingStatus
from sublet_storage.groups.status.overview_model import (
    NO_STREAMS,
    GroupFrontierRow,
    GroupOverview,
    LeaderRow,
    StoredGroup,
    StreamCounts,
    StreamView,
)
from sublet_storage.spaces.space_queries import UNNOTICED_STREAMS, read_generation_filters, to_pairs

_LINE = """
select distinct on (h.group_id, h.stream_id) h.group_id, h.stream_id, h.event, h.grant_id, h.borrower_id, h.reason
  from lending_history h where h.event in ('unreadable', 'readable') and {groups}
 order by h.group_id, h.stream_id, h.history_id desc"""

UNREADABLE_NOW = f"""
select h.group_id, h.stream_id, h.reason, (
         select min(b.at) from lending_history b
          where b.group_id = h.group_id and b.stream_id = h.stream_id and b.event = 'unreadable'
            and b.grant_id = h.grant_id and b.history_id > coalesce((
              select max(a.history_id) from lending_history a
               where a.group_id = h.group_id and a.stream_id = h.stream_id and a.event = 'readable'), 0)) as since
  from ({_LINE}) h
  join lending l on l.group_id = h.group_id and l.stream_id = h.stream_id
 where h.event = 'unreadable' and l.status = 'held' and l.grant_id = h.grant_id and l.borrower_id = h.borrower_id"""
"""In SQL: group_id, stream_id, what hinders (`reason`) and `since` when, of `{groups}`, a condition on `h.group_id`."""


STATEMENT_TIMEOUT_S = 10.0
PAGE = 2000
"""Streams of one statement. The age of what each waits for takes a look at its blocks, and all of a group of tens of
thousands would take longer than a statement may."""

NEW = "new"
"""Status of a stream that the group has no row for yet; its next leader will add it."""


_OF_GROUP = len(fields(StoredGroup))

COLUMNS = """g.group_id, g.kind, g.name, g.filter, g.starting_position, g.options::text, g.desired_state::text,
       case when extract(year from g.created_at) between 1 and 9998 then g.created_at end, g.after_generation,
       led.leadership_id, led.node, led.address, led.term,
       extract(epoch from led.expires_at - clock_timestamp())::float8"""
TABLES = "consumer_group g left join leadership led on led.leadership_id = g.group_id"
"""A group and its leader: a `StoredGroup` and a `LeaderRow`, for `overviews`."""

_GROUPS = f"select {COLUMNS} from {TABLES} where g.deleted_at is null order by g.name, g.filter, g.kind"

_ONE = f"""
select {COLUMNS} from {TABLES}
 where g.kind = %(kind)s and g.name = %(name)s and g.filter = %(filter)s and g.deleted_at is null"""

_LEADERLESS = f"""
select {COLUMNS}, count(*) over () from {TABLES}
 where g.deleted_at is null and (led.expires_at is null or led.expires_at <= clock_timestamp())
 order by g.group_id limit %(limit)s"""

_UNHELD = f"""
select {COLUMNS} from {TABLES}
 where g.deleted_at is null and not g.desired_state ? 'paused'
   and not exists (select from lending k where k.group_id = g.group_id and k.unfinished and k.status = 'held')"""

# What a CTE `line` of lending rows comes to beside their streams: the rule of what lag is, and where it is unknown.
SEEN = """seen as (
  select line.*, s.space_id, s.generation_id, s.head, s.state, n.state = 'gone' as gone,
         case when line.status = 'finished' then 0
              when line.status = 'blocked' or line.position > s.head then null
              when n.state = 'gone' and line.position < s.head then null
              else s.head - line.position end as lag,
         case when n.state = 'gone' and line.status <> 'finished' then greatest(s.head - line.position, 0)
              else 0 end as gone_messages
    from line join stream s using (stream_id) join generation n using (generation_id)
)"""

# Rows, and those that a leader would make. Groups null: of all, which have rows as long as they are not deleted.
# `finished`: also of what is.
_LINES = f"""
with line as (
  select l.group_id, l.stream_id, l.status, l.position, l.borrower_id, l.agent, l.session, l.granted_at, l.grant_id,
         l.lost_message_count, l.held_until
    from lending l
   where (%(groups)s::bigint[] is null or l.group_id = any(%(groups)s::bigint[])) and (%(finished)s or l.unfinished)
  union all
  select u.group_id, s.stream_id, 'new', 0, null, null, null, null, 0, 0, null{UNNOTICED_STREAMS}
), {SEEN}
"""

_STATUSES = sorted((*LendingStatus, NEW))

SUM_OF_LAGS = "least(coalesce(sum(lag), 0), 9223372036854775807)::bigint"

_COUNTS = f"""{_LINES}, sums as (
  select group_id, {SUM_OF_LAGS} as lag, max(lag) as largest,
         count(*) filter (where lag is null) as unknown,
         {", ".join(f'count(*) filter (where status = $${status}$$) as "{status}"' for status in _STATUSES)}
    from seen group by group_id
), stuck as (
  select group_id, count(*) as stuck
    from ({UNREADABLE_NOW.format(groups="(%(groups)s::bigint[] is null or h.group_id = any(%(groups)s::bigint[]))")}) u
   group by group_id
)
select group_id, lag, largest, unknown, coalesce(stuck, 0), array[{", ".join(f'"{status}"' for status in _STATUSES)}]
  from sums left join stuck using (group_id)"""

_STREAMS = (
    _LINES
    + """
select group_id, stream_id, p.name as space, generation_id, status, position, head,
       case when gone then 'gone' else state end as head_state, lag,
       case when lag > 0 then extract(epoch from clock_timestamp() - appended_at(generation_id, stream_id, position)
            )::float8 end as age_s,
       borrower_id, agent, case when status <> 'free' or held_until > now() then session end as session,
       case when status = 'free' and held_until > now() then extract(epoch from held_until - now())::float8
            end as reserved_s,
       grant_id, lost_message_count + gone_messages as lost_message_count,
       case when status = 'blocked' then (
         select h.reason from lending_history h
          where h.group_id = seen.group_id and h.stream_id = seen.stream_id and h.event = 'block'
          order by h.history_id desc limit 1) end as blocked_reason,
       u.reason as unreadable_reason,
       extract(epoch from clock_timestamp() - u.since)::float8 as unreadable_s
  from seen join space p using (space_id)
  left join ("""
    + UNREADABLE_NOW.format(groups="h.group_id = any(%(groups)s::bigint[])")
    + """) u using (group_id, stream_id)
 where stream_id > %(after)s order by stream_id limit %(limit)s"""
)


_EPOCHS = """
select p.name as space, f.least as consumed, p.lower_frontier as completed, f.updated_at as moved_at
  from consumed_frontier f join space p using (space_id) where f.group_id = %(group)s and f.has_streams
 order by p.name"""


def list_groups(connection: Connection) -> tuple[GroupOverview, ...]:
    """Return all groups that are not deleted, by name, without their single streams."""
    with snapshot_transaction(connection):
        return build_overviews(connection, connection.execute(_GROUPS).fetchall(), are_all=True)


def list_groups_without_holder(connection: Connection) -> tuple[GroupOverview, ...]:
    """Return groups that are not paused and hold no stream, without what they have finished."""
    with snapshot_transaction(connection):
        return build_overviews(connection, connection.execute(_UNHELD).fetchall(), finished=False)


def list_leaderless_groups(connection: Connection, limit: int) -> tuple[tuple[GroupOverview, ...], int]:
    """Return groups that have no leader at this moment, the oldest first, `limit` at most, and how many there are;
    without what they have finished."""
    with snapshot_transaction(connection):
        rows = connection.execute(_LEADERLESS, {"limit": max(limit, 1)}).fetchall()  # each row has the number of all
        shown = [row[:-1] for row in rows[:limit]]
        return build_overviews(connection, shown, finished=False), rows[0][-1] if rows else 0


def describe_group(connection: Connection, subscription: Subscription) -> GroupOverview:
    """Return one group with each of its streams. Raise `NotFound`."""
    with snapshot_transaction(connection):
        return read_overview(connection, subscription)


def read_overview(connection: Connection, subscription: Subscription) -> GroupOverview:
    """Return the same, in `snapshot_transaction` that is under way."""
    name = {"kind": subscription.kind, "name": subscription.group, "filter": subscription.filter.text}
    rows = connection.execute(_ONE, name).fetchall()
    if not rows:
        raise group_not_found_error(subscription)
    (overview,) = build_overviews(connection, rows)
    group = overview.group
    streams = _read_streams(connection, group)
    forced = read_recent_forced_moves(connection, group.group_id)
    with connection.cursor(row_factory=class_row(GroupFrontierRow)) as cursor:
        epochs = cursor.execute(_EPOCHS, {"group": group.group_id}).fetchall()
    return GroupOverview(group, overview.leader, overview.counts, tuple(streams), forced, tuple(epochs))


def _read_streams(connection: Connection, group: StoredGroup) -> list[StreamView]:
    parameters = _make_parameters(connection, [group]) | {"after": 0, "limit": PAGE}
    streams: list[StreamView] = []
    with connection.cursor(row_factory=class_row(StreamView)) as cursor:
        while True:
            page = cursor.execute(_STREAMS, parameters, prepare=False).fetchall()
            streams += page
            if len(page) < PAGE:
                return streams
            parameters["after"] = page[-1].stream_id


@contextmanager
def snapshot_transaction(connection: Connection) -> Iterator[None]:
    """Execute the block's statements on one snapshot, with a bound on how long it can be held."""
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        connection.execute(sql.SQL("set local statement_timeout = {}").format(sql.Literal(f"{STATEMENT_TIMEOUT_S:g}s")))
        yield


def build_overviews(
    connection: Connection, rows: Sequence[Sequence[Any]], are_all: bool = False, finished: bool = True
) -> tuple[GroupOverview, ...]:
    """Return these groups, rows of `COLUMNS`, without their single streams, in this order. `are_all`: there are no
    others. `finished`: streams that are finished count too; how many there are depends on how long messages are
    retained.

    Planned anew each time: a plan for any number of groups is a bad one for thousands.
    """
    groups = [StoredGroup(*row[:_OF_GROUP]) for row in rows]
    leaders = (None if row[_OF_GROUP] is None else LeaderRow(*row[_OF_GROUP:]) for row in rows)
    parameters = _make_parameters(connection, groups) | {"finished": finished}
    if are_all:
        parameters["groups"] = None
    counts = {
        group_id: StreamCounts({status: n for status, n in zip(_STATUSES, streams, strict=True) if n}, *lags)
        for group_id, *lags, streams in connection.execute(
            _COUNTS.encode(), parameters, prepare=False, binary=True
        ).fetchall()
    }
    return tuple(
        GroupOverview(group, leader, counts.get(group.group_id, NO_STREAMS))
        for group, leader in zip(groups, leaders, strict=True)
    )


def _make_parameters(connection: psycopg.Connection[Any], groups: Sequence[StoredGroup]) -> dict[str, Any]:
    """Return the groups' ids, and beside each the filters of the generations that its unnoticed streams may be in. A
    group that no generation has come after has none."""
    generations = read_generation_filters(connection)
    filters_by_group = {
        group.group_id: generations.matching(TopicFilter(group.filter))
        for group in groups
        if group.after_generation < generations.newest_generation_id
    }
    return {
        "groups": [group.group_id for group in groups],
        "oldest": min((group.after_generation for group in groups), default=0),
        "finished": True,
        **to_pairs(filters_by_group),
    }
