"""Lags of many groups, for metrics and lag histories; reads only.

Lag is as in `sublet_storage.groups.status.overview`. Streams that no leader has noticed yet are not counted: a leader
looks for them every few seconds. Nor are those that are finished, which have no lag: their number depends on how long
messages are retained.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from psycopg.rows import class_row

from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.status.overview import SEEN, SUM_OF_LAGS, list_groups_without_holder

_LENDINGS = f"""
with line as (
  select group_id, stream_id, status, position from lending
   where group_id = any(%(groups)s::bigint[]) and unfinished),
{SEEN}"""

_STREAMS = f"""{_LENDINGS}
select group_id, stream_id, p.name as space, status, position, head, lag
  from seen join space p using (space_id) order by group_id, stream_id"""

_SUMS = f"""{_LENDINGS}
select group_id, status, count(*)::bigint as streams, {SUM_OF_LAGS} as lag, max(lag) as largest,
       count(*) filter (where lag is null)::bigint as unknown
  from seen group by group_id, status order by group_id, status"""

# A group that was deleted has no rows.
_ALL = f"""
with line as (
  select group_id, stream_id, status, position from lending where unfinished),
{SEEN}
select g.group_id, case when count(lag) = count(stream_id) then {SUM_OF_LAGS} end
  from consumer_group g left join seen using (group_id)
 where exists (select from lending l where l.group_id = g.group_id) group by g.group_id"""


class StreamLag(Struct, frozen=True):
    """The lag of a stream of a group; None: unknown."""

    group_id: int
    stream_id: int
    space: str
    status: str
    position: int
    head: int
    lag: int | None


class LagByStatus(Struct, frozen=True):
    """The streams of a group in one status: their number, the number with unknown lag, and the sum and maximum of the
    known lags (None: none is known)."""

    group_id: int
    status: str
    streams: int
    lag: int
    largest: int | None
    unknown: int


def read_stream_lags(connection: Connection, group_ids: Sequence[int]) -> list[StreamLag]:
    """Return the lag of each unfinished stream of these groups, in one statement."""
    with connection.cursor(row_factory=class_row(StreamLag)) as cursor:
        return cursor.execute(_STREAMS, {"groups": list(group_ids)}, prepare=False).fetchall()


def read_lags_by_status(connection: Connection, group_ids: Sequence[int]) -> list[LagByStatus]:
    """Return these groups' unfinished streams in sums, in one statement."""
    with connection.cursor(row_factory=class_row(LagByStatus)) as cursor:
        return cursor.execute(_SUMS, {"groups": list(group_ids)}, prepare=False).fetchall()


def read_total_lags(connection: Connection) -> dict[int, int | None]:
    """Return {group id: its total lag, None while a part is unknown} of all groups that have streams."""
    return dict(connection.execute(_ALL).fetchall())


def list_unconsumed_groups(connection: Connection) -> list[tuple[str, int]]:
    """Return (subscription, lag) of groups that are not paused, have messages and hold no stream, the furthest behind
    first. Streams that no leader has noticed yet count, as such a group may have no leader."""
    lags = ((each.group.subscription, each.counts.known_lag) for each in list_groups_without_holder(connection))
    return sorted((each for each in lags if each[1]), key=lambda each: (-each[1], each[0]))


def sum_by_status(streams: Sequence[StreamLag]) -> list[LagByStatus]:
    """Return the sums of these streams, as `read_lags_by_status` has them."""
    lags_by_status: dict[tuple[int, str], list[StreamLag]] = {}
    for stream in streams:
        lags_by_status.setdefault((stream.group_id, stream.status), []).append(stream)
    return [_sum(group_id, status, group_lags) for (group_id, status), group_lags in sorted(lags_by_status.items())]


def _sum(group_id: int, status: str, streams: Sequence[StreamLag]) -> LagByStatus:
    known_lags = [stream.lag for stream in streams if stream.lag is not None]
    return LagByStatus(
        group_id, status, len(streams), sum(known_lags), max(known_lags, default=None), len(streams) - len(known_lags)
    )
