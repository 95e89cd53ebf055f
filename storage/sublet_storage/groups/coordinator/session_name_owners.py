"""Names of sessions in a group: the last epoch drawn under each, and its principal.

Where nodes authenticate callers, a name belongs to the first principal that used it, until maintenance deletes it (no
epoch was drawn under it for long, and it holds nothing) or an operator with access to the database releases it. The
number of names per principal is limited.
"""

from __future__ import annotations

from typing import Any

import psycopg

from sublet_protocol.domain.errors import NotFound
from sublet_protocol.domain.limits import MAX_SESSION_NAMES_OF_PRINCIPAL
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.model.group_errors import (
    anothers_session_error,
    session_name_locked_error,
    too_many_session_names_error,
)

Connection = psycopg.Connection[Any]

_OWNER = "select principal from session_epoch where subscription = %s and session = %s"
_BIND = """
update session_epoch set principal = %s where (subscription, session) = (
    select subscription, session from session_epoch
    where subscription = %s and session = %s and principal is null for no key update skip locked)
returning true"""
_COUNT = "select count(*) from (select from session_epoch where principal = %s limit %s) as owned"
_DRAW_TIMEOUT = "set local lock_timeout = '1s'"
"""Any user of a database may keep a name locked; calls must not wait for it on the connections that all share."""
_RELEASE = "select release_session(%s, %s)"


def read_last_epoch(connection: Connection, subscription: Subscription, session: str) -> int:
    """Return the highest epoch that a process of that name in that group may have."""
    row = connection.execute("select last_session_epoch(%s, %s)", (str(subscription), session)).fetchone()
    return 0 if row is None else int(row[0])


def bind(connection: Connection, subscription: Subscription, session: str, principal: str) -> None:
    """Bind the name to the principal, if it is unbound. A name for which no epoch was drawn stays unbound. Raise
    `PermissionDenied` if it is another principal's, or the principal has too many; `SessionRowLocked`, without
    waiting, if another transaction has locked it."""
    name = str(subscription), session
    row = connection.execute(_OWNER, name).fetchone()
    if row == (None,):
        ((count,),) = connection.execute(_COUNT, (principal, MAX_SESSION_NAMES_OF_PRINCIPAL)).fetchall()
        if count >= MAX_SESSION_NAMES_OF_PRINCIPAL:
            raise too_many_session_names_error(session, principal)
        if connection.execute(_BIND, (principal, *name)).fetchone() is not None:
            return
        row = connection.execute(_OWNER, name).fetchone()  # another was faster
        if row == (None,):
            raise session_name_locked_error(subscription, session)
    if row is not None and row[0] != principal:
        raise anothers_session_error(subscription, session)


def next_session_epoch(connection: Connection, subscription: Subscription, session: str, principal: str | None) -> int:
    """Return a number above all that were drawn before for that name, which is bound to the principal; None: the caller
    is not authenticated. Raise what `bind` does, and nothing is drawn then."""
    try:
        with connection.transaction():
            connection.execute(_DRAW_TIMEOUT)
            epoch = consumer_progress.next_session_epoch(connection, subscription, session)
            if principal is not None:
                bind(connection, subscription, session, principal)
    except psycopg.errors.LockNotAvailable as error:
        raise session_name_locked_error(subscription, session) from error
    return epoch


def release(connection: Connection, subscription: Subscription, session: str) -> str:
    """Unbind the name, and return its former principal. Raise `NotFound`."""
    ((principal,),) = connection.execute(_RELEASE, (str(subscription), session)).fetchall()
    if principal is None:
        raise NotFound(
            f"session {session!r:.100} of {subscription}: the name is no principal's, and there is nothing to release. "
            "Write the group as `sublet groups describe` shows it, and the session's name itself."
        )
    return str(principal)
