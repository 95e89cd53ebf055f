"""Access rules of principals, in the table `access`; every change is in `access_history`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from sublet_protocol.domain.access.rights import AccessRule, Right
from sublet_protocol.domain.errors import Conflict, NotFound
from sublet_protocol.domain.topics import TopicFilter

MAX_ROWS = 100_000
"""The maximum number of rules, and of tokens: each node has all of them in memory."""

_FULL = "select count(*) >= %s from (select from {} limit %s) as found"

_REJECTED = "SB002"

_ALLOW = "select allow_access(%s, %s, %s, %s)"
_REVOKE = "select revoke_access(%s, %s, %s, %s)"
_FORGET = "select forget_access_history(make_interval(secs => %s))"
_LIST = """
select principal, may, filter, group_name, granted_by, granted_at from access
 where %(principal)s::text is null or principal in (%(principal)s, '*') order by 1, 2, 3, 4 limit %(limit)s"""


@dataclass(frozen=True, slots=True)
class GrantedRule:
    """A rule, with who granted it and when."""

    rule: AccessRule
    granted_by: str
    granted_at: datetime


def allow(conn: psycopg.Connection[Any], rule: AccessRule) -> bool:
    """Add a rule; return False if it exists already. Raises `Conflict` if there are too many, or too many changes."""
    check_room(conn, "access")
    return insert_right(conn, _ALLOW, _to_row(rule)) == (True,)


def revoke(conn: psycopg.Connection[Any], rule: AccessRule) -> None:
    """Delete a rule. Raises `NotFound` if it does not exist."""
    if conn.execute(_REVOKE, _to_row(rule)).fetchone() != (True,):
        raise NotFound(
            f"rule {str(rule)!r}: there is none, and what is revoked has to be a rule as it was given. "
            f"`sublet access list {rule.principal}` shows those that there are."
        )


def list_rules(conn: psycopg.Connection[Any], principal: str | None = None) -> list[GrantedRule]:
    """Return all rules, or those of this principal and those of every principal."""
    rows = conn.execute(_LIST, {"principal": principal, "limit": MAX_ROWS + 1}).fetchall()
    return [GrantedRule(AccessRule(w, Right(m), TopicFilter(f), g), by, at) for w, m, f, g, by, at in rows]


def check_room(conn: psycopg.Connection[Any], table: str) -> None:
    """Raise `Conflict` where the table has as many rows as nodes read."""
    (row,) = conn.execute(_FULL.format(table), (MAX_ROWS, MAX_ROWS)).fetchall()
    if row[0]:
        raise Conflict(
            f"table {table} has {MAX_ROWS} rows, which is the limit: every node has them all in memory. Delete some "
            "first; a rule for a wider filter does the work of many, and tokens that are over are of no use."
        )


def insert_right(conn: psycopg.Connection[Any], statement: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
    """Return the row of a statement that gives a right. Raises `Conflict` where the database rejects it."""
    try:
        return conn.execute(statement, values).fetchone()
    except psycopg.Error as error:
        if error.sqlstate != _REJECTED:
            raise
        raise Conflict(f"{error.diag.message_primary} {error.diag.message_hint}") from error


def delete_past_changes(conn: psycopg.Connection[Any], older_than_s: float) -> int:
    """Delete changes of access that are older than that and than a day, except the last; return their number."""
    ((count,),) = conn.execute(_FORGET, (older_than_s,)).fetchall()
    return int(count)


def _to_row(rule: AccessRule) -> tuple[str, str, str, str]:
    return rule.principal, rule.right, rule.filter.text, rule.group
