"""Resets a group that may be live, and so is paused meanwhile.

One reset of a group at a time: a second one has no pause of its own, and would be ended by the end of the first. A
reset holds an advisory lock for that, in a transaction that does nothing else: it ends with its process, holds nothing
up that the server vacuums, and stays with one connection of the server through any pooler.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from shlex import quote
from typing import Final

from sublet_protocol.domain.errors import Conflict, NotFound
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_storage.db.clock import read_database_user
from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.admin import reset_transaction
from sublet_storage.groups.admin.admin import send_command
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.admin.reset_transaction import PositionChange
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.model.desired_state import FOR_A_RESET, PauseGroupForReset, ResumeGroup
from sublet_storage.groups.model.history_record_builder import reason_with_user
from sublet_storage.groups.model.records import Group

_CLASS: Final = zlib.crc32(b"sublet resets") & 0x7FFFFFFF

_WITHOUT_TIMEOUTS = """
select set_config(name, '0', true) from pg_settings
 where name in ('idle_in_transaction_session_timeout', 'transaction_timeout')"""
"""Those of the server, or the role, would end the guard before the reset. The second came with Postgres 17."""

_TAKE = "select pg_try_advisory_xact_lock(%(class)s, %(object)s)"

_HOLDER = """
select a.usename, a.pid, (extract(epoch from a.xact_start) * 1000000)::bigint, g.desired_state ->> 'paused'
  from pg_locks l join pg_stat_activity a using (pid)
  left join consumer_group g on g.group_id = %(group)s
 where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and l.classid = %(class)s and l.objid = %(object)s
   and l.database = (select oid from pg_database where datname = current_database())"""


@contextmanager
def hold_reset_lock(url: str, group: Group) -> Iterator[None]:
    """Exclude other resets of the group meanwhile. Raise `Conflict`, which names the one under way."""
    lock_name = f"{resolve_schema_name()} {group.group_id}"
    lock = {"class": _CLASS, "object": zlib.crc32(lock_name.encode()) & 0x7FFFFFFF, "group": group.group_id}
    with closing(connect(url, application_name="sublet reset", idle_in_transaction_timeout_s=None)) as guard:
        guard.execute("begin")
        guard.execute(_WITHOUT_TIMEOUTS)
        (row,) = guard.execute(_TAKE, lock).fetchall()
        if not row[0]:
            raise _reset_running_error(group, guard.execute(_HOLDER, lock).fetchone())
        yield  # what becomes of the guard meanwhile, or afterwards, does not change what was done


def _reset_running_error(group: Group, holder: tuple[str | None, int, int | None, str | None] | None) -> Conflict:
    """Return the error for a reset while another one is under way; `holder` is None if that has ended since."""
    user, pid, since_us, reason = holder or (None, None, None, None)
    by = f" by database user {user}, process {pid} of the server" if user else ""
    since = f", since {StartingPosition.at_time(since_us)}" if since_us is not None else ""
    detail = f" ({reason})" if reason else ""
    end = f" If that machine is gone: select pg_terminate_backend({pid})." if pid is not None else ""
    return Conflict(
        f"{group.subscription}: it is being reset already{by}{since}{detail}; nothing was changed. Wait for the end of "
        f"that, see where the group is then (`sublet groups describe {quote(str(group.subscription))}`), and reset "
        f"it again if need be.{end}"
    )


def _resumed_error(group: Group) -> Conflict:
    name = quote(str(group.subscription))
    return Conflict(
        f"{group.subscription}: it was resumed while its members were to hand over for this reset; nothing was "
        f"changed. `sublet groups history {name}` says by whom: agree with them, and reset it again."
    )


POLL_INTERVAL_S = 0.2
"""Between two checks whether members have released their streams."""

LEADER_SYNC_INTERVAL_S = 5.0
"""How long it takes at most until a leader reads a pause without a notification (`stream_sync_interval_s`)."""


def reset_live_group(
    url: str,
    connection: Connection,
    group: Group,
    target: ResetTarget,
    streams: Collection[int],
    *,
    force: bool,
    drain_timeout_s: float,
    waiting: Callable[[int], None] = lambda held_count: None,
) -> tuple[PositionChange, ...]:
    """Reset the group to the target; return what moved. `connection` is in autocommit, on the database of `url`.

    `force` does not wait for members, which otherwise have `drain_timeout_s`; `waiting` is called with the number of
    streams that they still hold. Raise `Conflict` where another reset is under way, where they have not handed over in
    time, and what `reset_transaction.execute_reset` raises: nothing was changed then.
    """
    with hold_reset_lock(url, group), pause_during_reset(url, group, target):
        if not force:
            _wait(connection, group, streams, drain_timeout_s, waiting)
        try:
            with connection.transaction():
                reason = reason_with_user(f"reset to {target}", read_database_user(connection))
                return reset_transaction.execute_reset(connection, group, target, streams, reason=reason, force=force)
        except Conflict as error:
            if force or drain_timeout_s > LEADER_SYNC_INTERVAL_S:
                raise
            hint = (
                f"A leader may take {LEADER_SYNC_INTERVAL_S:g} s to read of the pause: wait for longer than "
                f"{drain_timeout_s:g} s."
            )
            raise Conflict(f"{error} {hint}") from None


@contextlib.contextmanager
def pause_during_reset(url: str, group: Group, target: ResetTarget) -> Iterator[None]:
    """Pause the group meanwhile; whatever happens, it is resumed afterwards unless it was paused by another command."""
    subscription, reason = group.subscription, f"{FOR_A_RESET}{target}"
    paused_group, _ = send_command(url, subscription, PauseGroupForReset(reason))
    try:
        if paused_group.group_id != group.group_id:
            raise NotFound(
                f"group {str(subscription)!r} was deleted and made anew meanwhile. Look at it, and try again."
            )
        yield
    finally:
        send_command(url, subscription, ResumeGroup(only=reason))


def _wait(
    connection: Connection,
    group: Group,
    streams: Collection[int],
    drain_timeout_s: float,
    waiting: Callable[[int], None],
) -> None:
    """Wait until none of these streams, nor one that follows them, is held (none: of all), or the time is over: then
    the next step reports what is still granted. Raise `Conflict` where the group was resumed, whose members then hand
    nothing over."""
    deadline, last_count = time.monotonic() + drain_timeout_s, -1
    while (held_count := reset_transaction.count_held(connection, group, streams)) and time.monotonic() < deadline:
        live_group = group_lifecycle.find_by_id(connection, group.group_id)
        if live_group is not None and live_group.desired_state.pause_reason is None:
            raise _resumed_error(group)
        if held_count != last_count:
            waiting(held_count)
            last_count = held_count
        time.sleep(POLL_INTERVAL_S)
