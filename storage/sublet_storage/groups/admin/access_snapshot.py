"""Snapshots of all rules and valid tokens, which a node keeps in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.access.rights import AccessRules, AccessSnapshot, ValidToken
from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.admin.access_rules import MAX_ROWS, list_rules

CHANNEL = "sublet_access"
"""The channel of the NOTIFY for changes, whose payload is the schema."""

_VERSION = "select pg_current_snapshot()::text"
# A row is of a change since then if the snapshot of then does not include its transaction, and that of now does: one of
# a database that was restored into another server may have the number of a future transaction.
_SINCE = """
  from access_history where xact >= pg_snapshot_xmin(%(after)s::pg_snapshot)
   and not pg_visible_in_snapshot(xact, %(after)s::pg_snapshot)"""
_CHANGED = f"select exists (select {_SINCE} and pg_visible_in_snapshot(xact, pg_current_snapshot()))"
_CHANGES = f"""
select by, event, principal || ' ' || object {_SINCE} and pg_visible_in_snapshot(xact, %(upto)s::pg_snapshot)
 order by number desc limit %(limit)s"""
_TOKENS = """
select token_id, digest, principal, extract(epoch from expires_at - clock_timestamp())::float8 from token
 where revoked_at is null and expires_at > clock_timestamp() limit %s"""
_GROUPS = """
select group_id, name, filter from consumer_group
 where deleted_at is null and group_id in (select l.group_id from lending l where l.stream_id = any(%s::bigint[]))"""
_DELETED_GROUPS = """
select name, filter from consumer_group where deleted_at > statement_timestamp() - interval '1 minute'"""
_STREAMS = """
select u.stream_id, l.group_id from unnest(%s::bigint[]) as u (stream_id) cross join lateral (
  select group_id from lending where stream_id = u.stream_id and group_id = any(%s::bigint[]) limit 1) as l"""
_USED = """
update token set last_used = current_date
 where token_id = any(%s) and last_used is distinct from current_date"""


def read_version(conn: psycopg.Connection[Any]) -> str:
    """Return which transactions have committed by now, for this server alone."""
    ((version,),) = conn.execute(_VERSION).fetchall()
    return str(version)


def listen_for_changes(conn: psycopg.Connection[Any]) -> None:
    """Have the connection receive a notification of each change of rules and tokens."""
    conn.execute(f"listen {CHANNEL}")


def has_changed(conn: psycopg.Connection[Any], version: str) -> bool:
    """Return whether a change of rules or tokens has committed since that version, in whichever order they began."""
    ((changed,),) = conn.execute(_CHANGED, {"after": version}).fetchall()
    return bool(changed)


def read_access(conn: psycopg.Connection[Any]) -> AccessSnapshot:
    """Return all of it. Raise `Conflict` where it is more than a node takes into memory."""
    version = read_version(conn)  # first: what is changed meanwhile is read again
    rules = list_rules(conn)
    tokens = conn.execute(_TOKENS, (MAX_ROWS + 1,)).fetchall()
    for table, rows in (("access", rules), ("token", tokens)):
        if len(rows) > MAX_ROWS:
            raise Conflict(
                f"table {table} has more than {MAX_ROWS} rows, which is the limit: a node has them all in memory. "
                "Delete some with `sublet access`."
            )
    return AccessSnapshot(
        version,
        AccessRules(each.rule for each in rules),
        {row[0]: ValidToken(bytes(row[1]), *row[2:]) for row in tokens},
    )


class AccessHistoryRecord(Struct, frozen=True):
    """A change of access: `event` and `object` as in the table `access_history`, the principal that it is about
    first."""

    by: str
    event: str
    object: str


def read_changes(
    conn: psycopg.Connection[Any], from_version: str, to_version: str, limit: int
) -> list[AccessHistoryRecord]:
    """Return what was changed between two versions, oldest first; of more than `limit` the newest."""
    rows = conn.execute(_CHANGES, {"after": from_version, "upto": to_version, "limit": limit}).fetchall()
    return [AccessHistoryRecord(*row) for row in reversed(rows)]


def record_use(conn: psycopg.Connection[Any], token_ids: Collection[str]) -> None:
    """Write that these tokens were used today."""
    conn.execute(_USED, (list(token_ids),))


def read_groups_of_streams(
    conn: psycopg.Connection[Any], stream_ids: Collection[int]
) -> list[tuple[int, str, TopicFilter]]:
    """Return id, name and filter of each group that reads one of the streams."""
    filters: dict[str, TopicFilter] = {}
    return [
        (group_id, name, filters.get(text) or filters.setdefault(text, TopicFilter(text)))
        for group_id, name, text in conn.execute(_GROUPS, (list(stream_ids),), prepare=True).fetchall()
    ]


def read_deleted_groups(conn: psycopg.Connection[Any]) -> list[tuple[str, TopicFilter]]:
    """Return name and filter of each group that was deleted a moment ago: its members may not know yet."""
    return [(name, TopicFilter(text)) for name, text in conn.execute(_DELETED_GROUPS).fetchall()]


def find_streams_of_groups(
    conn: psycopg.Connection[Any], stream_ids: Collection[int], group_ids: Collection[int]
) -> dict[int, int]:
    """Return those of the streams that the groups read, {stream: one that does}."""
    return dict(conn.execute(_STREAMS, (list(stream_ids), list(group_ids)), prepare=True).fetchall())
