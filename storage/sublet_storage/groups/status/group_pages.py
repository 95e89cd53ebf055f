"""Pages of very many groups, searched, sorted and cut by the database; reads only."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.status.overview import COLUMNS, SEEN, TABLES, build_overviews, snapshot_transaction
from sublet_storage.groups.status.overview_model import GroupOverview

_WHERE = """
 where g.deleted_at is null
   and (%(visible)s::bigint[] is null or g.group_id = any(%(visible)s))
   and (%(search)s = '' or strpos(lower('$' || g.kind || '/' || g.name || '/' || g.filter), lower(%(search)s)) > 0)"""

_NAMES = f"select g.group_id, g.name, g.filter from consumer_group g {_WHERE}"
_TOTAL = f"select count(*) from consumer_group g {_WHERE}"

_BY_ROW = f"select {COLUMNS} from {TABLES} {_WHERE} order by"

# By what is in the rows of lendings: streams that no leader has noticed yet do not count for the order.
_BY_LENDINGS = f"""
with line as (
  select l.group_id, l.stream_id, l.status, l.position from lending l join consumer_group g using (group_id) {_WHERE}
), {SEEN},
sums as (
  select group_id, count(*) as streams, case when count(lag) = count(*) then sum(lag) end as lag
    from seen group by group_id
)
select {COLUMNS} from {TABLES} left join sums on sums.group_id = g.group_id {_WHERE} order by"""

_NAME = "g.name {0}, g.filter {0}, g.kind {0}"


class GroupSort(StrEnum):
    """The sort key of groups; an unknown lag is larger than any other."""

    NAME = "name"
    LAG = "lag"
    STREAMS = "streams"
    CREATED = "created"


class GroupListPage(Struct, frozen=True):
    """A page of `total` groups."""

    groups: tuple[GroupOverview, ...]
    total: int


def list_group_page(
    connection: Connection,
    search: str = "",
    sort: GroupSort = GroupSort.NAME,
    descending: bool = False,
    limit: int = 50,
    offset: int = 0,
    is_visible: Callable[[str, TopicFilter], bool] | None = None,
) -> GroupListPage:
    """Return the groups whose subscription contains `search`, upper or lower case, from number `offset` on; only those
    whose name and filter are visible (None: all)."""
    parameters: dict[str, Any] = {"search": search, "limit": limit, "offset": offset, "visible": None}
    with snapshot_transaction(connection):
        if is_visible is not None:
            names = connection.execute(_NAMES, parameters).fetchall()
            parameters["visible"] = [id for id, name, filter in names if is_visible(name, TopicFilter(filter))]
        (total,) = connection.execute(_TOTAL, parameters).fetchone() or (0,)
        statement = f"{_format_statement(sort, 'desc' if descending else 'asc')} limit %(limit)s offset %(offset)s"
        rows = connection.execute(statement.encode(), parameters, prepare=False).fetchall()
        return GroupListPage(build_overviews(connection, rows), total)


def _format_statement(sort: GroupSort, direction: str) -> str:
    by_name = _NAME.format(direction)
    match sort:
        case GroupSort.NAME:
            return f"{_BY_ROW} {by_name}"
        case GroupSort.CREATED:
            return f"{_BY_ROW} g.created_at {direction}, {by_name}"
        case GroupSort.LAG:
            nulls = "first" if direction == "desc" else "last"
            return f"{_BY_LENDINGS} sums.lag {direction} nulls {nulls}, {by_name}"
        case GroupSort.STREAMS:
            return f"{_BY_LENDINGS} coalesce(sums.streams, 0) {direction}, {by_name}"
