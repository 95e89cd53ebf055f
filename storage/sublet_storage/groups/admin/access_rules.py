"""Access rules of principals, in the table `access`; every change is in `access_history`."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.access.rights import AccessRule, parse_right
from sublet_protocol.domain.errors import Conflict, NotFound, UsageError
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import map_rejection

log = logging.getLogger(__name__)

MAX_ROWS = 100_000
"""The maximum number of rules, and of tokens, as in SQL: each node has all of them in memory."""
MAX_NAMED = 5
"""Maximum number of unreadable rules that are named in the log at a time."""

_ALLOW = "select allow_access(%s, %s, %s, %s)"
_REVOKE = "select revoke_access(%s, %s, %s, %s)"
_FORGET = "select forget_access_history(make_interval(secs => %s))"
_LIST = """
select principal, may, filter, group_name, granted_by, granted_at from access
 where %(principal)s::text is null or principal in (%(principal)s, '*') order by 1, 2, 3, 4 limit %(limit)s"""


class AccessRuleRecord(Struct, frozen=True):
    """A rule, with who granted it and when."""

    rule: AccessRule
    granted_by: str
    granted_at: datetime


def allow(conn: psycopg.Connection[Any], rule: AccessRule) -> bool:
    """Add a rule; return False if it exists already. Raise `Conflict` if there are too many, or too many changes."""
    return insert_right(conn, _ALLOW, _to_row(rule)) == (True,)


def revoke(conn: psycopg.Connection[Any], rule: AccessRule) -> None:
    """Delete a rule. Raise `NotFound` if it does not exist."""
    if conn.execute(_REVOKE, _to_row(rule)).fetchone() != (True,):
        raise NotFound(
            f"rule {str(rule)!r}: there is none, and what is revoked has to be a rule as it was given. "
            f"`sublet access list {rule.principal}` shows those that there are."
        )


class UnreadableRule(Struct, frozen=True):
    """A row that is no rule, which allows nothing, with the reason."""

    row: str
    granted_by: str
    reason: str


class StoredAccessRules(Struct, frozen=True):
    """The rows of the table, those that are no rules apart."""

    rules: list[AccessRuleRecord]
    unreadable: list[UnreadableRule]


def list_rules(conn: psycopg.Connection[Any], principal: str | None = None) -> list[AccessRuleRecord]:
    """Return all rules, or those of this principal and those of every principal. Rows that are no rules are named in
    the log."""
    stored = read_rules(conn, principal)
    for each in stored.unreadable[:MAX_NAMED]:
        log.warning("access rule not readable, allows nothing: granted_by=%s: %s: %s", *_format_unreadable(each))
    if len(stored.unreadable) > MAX_NAMED:
        log.warning("access rules not readable: count=%d: `sublet access list` shows all", len(stored.unreadable))
    return stored.rules


def read_rules(conn: psycopg.Connection[Any], principal: str | None = None) -> StoredAccessRules:
    """Return the same, with the rows that are no rules: whoever writes the table could have left them there."""
    stored = StoredAccessRules([], [])
    rows = conn.execute(_LIST, {"principal": principal, "limit": MAX_ROWS + 1}).fetchall()
    for whose, right, filter, group, granted_by, granted_at in rows:
        try:
            rule = AccessRule(whose, parse_right(right), TopicFilter(filter), group)
        except UsageError as error:
            row = " ".join(each[:80] for each in (whose, right, filter, group))
            stored.unreadable.append(UnreadableRule(row, granted_by, str(error)))
        else:
            stored.rules.append(AccessRuleRecord(rule, granted_by, granted_at))
    return stored


def insert_right(conn: psycopg.Connection[Any], statement: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
    """Return the row of a statement that gives a right. Raise `Conflict` where the database rejects it."""
    with map_rejection(Conflict):
        return conn.execute(statement, values).fetchone()


def delete_past_changes(conn: psycopg.Connection[Any], older_than_s: float) -> int:
    """Delete changes of access that are older than that and than a day; return their number."""
    ((count,),) = conn.execute(_FORGET, (older_than_s,)).fetchall()
    return int(count)


def _to_row(rule: AccessRule) -> tuple[str, str, str, str]:
    return rule.principal, rule.right, rule.filter.text, rule.group


def _format_unreadable(unreadable: UnreadableRule) -> tuple[str, str, str]:
    return ascii(unreadable.granted_by), ascii(unreadable.row), unreadable.reason
