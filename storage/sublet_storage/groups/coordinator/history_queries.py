"""The history of groups and grants: reads it for people, and deletes what is old."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import UsageError
from sublet_storage.db.clock import format_microseconds
from sublet_storage.groups.model.records import READABLE, TAKEOVER, UNREADABLE, HistoryRecord

STEP = 10_000
"""How many lines are deleted in one transaction, so that none is long."""
MAX_S = 10.0
"""A cleanup ends soon after this time; the next goes on."""

RECENT_WINDOW_S, MAX_RECENT_MOVES = 86_400.0, 20
"""The age and number of a group's newest forced moves that count as recent."""

RECORD = (
    f"{format_microseconds('at')}, group_id, stream_id, event, reason, grant_id, borrower_id, agent, position, term,"
    " forced, redelivery_end, session"
)
"""Of `lending_history`: a `HistoryRecord`."""

_NEWEST = f"""
with selected as not materialized (select * from lending_history where {{}})
select {RECORD}, (select count(*) from selected)
  from (select * from selected order by history_id desc limit %(limit)s) as newest
 order by history_id"""

_READ = _NEWEST.format("group_id = %(group)s and (%(stream)s::bigint is null or stream_id = %(stream)s)")

_FORCED = _NEWEST.format(
    "group_id = %(group)s and forced and at > clock_timestamp() - make_interval(secs => %(window_s)s)"
)

# The lines of a stream are written under the lock of its row: they follow each other as their ids do.
_LAST = f"""
select distinct on (stream_id) {RECORD} from lending_history
 where group_id = %(group)s and at <= timestamptz 'epoch' + %(at)s::bigint * interval '1 microsecond'
   and case when stream_id = 0 then event = '{TAKEOVER}' else %(stream)s::bigint is null or stream_id = %(stream)s end
 order by stream_id, history_id desc"""

_HOLDING = ("grant", "reclaim", "revoke", UNREADABLE, READABLE)
"""Events after which the grant that they are about is in force."""

# Why a stream is blocked, or cannot be read on, is retained as long as it is.
_FORGET = f"""
delete from lending_history where history_id in (
  select h.history_id from lending_history h
   where h.at < now() - make_interval(secs => %(older)s)
     and not (h.event = 'block' and exists (
       select from lending l where l.group_id = h.group_id and l.stream_id = h.stream_id and l.status = 'blocked'))
     and not (h.event = '{UNREADABLE}' and exists (
       select from lending l where l.group_id = h.group_id and l.stream_id = h.stream_id and l.status = 'held'
          and l.grant_id = h.grant_id and l.borrower_id = h.borrower_id)
       and not exists (
         select from lending_history a where a.group_id = h.group_id and a.stream_id = h.stream_id
            and a.event = '{READABLE}' and a.history_id > h.history_id))
   order by h.at limit %(limit)s)"""


# No stream is held under that name, or reserved for it. The row without names remembers the highest.
_FORGET_EPOCHS = """
with forgotten as (
  delete from session_epoch e
   where e.drawn_at < now() - make_interval(secs => %(older)s) and e.session <> '' and not exists (
     select from lending l join consumer_group g using (group_id)
      where l.unfinished and g.deleted_at is null and l.session = e.session
        and '$' || g.kind || '/' || g.name || '/' || g.filter = e.subscription)
  returning e.last)
insert into session_epoch as e (subscription, session, last) select '', '', max(last) from forgotten having count(*) > 0
    on conflict (subscription, session) do update set last = greatest(e.last, excluded.last)"""


# What a snapshot did not see, and nothing else; not by the numbers, which are drawn before a commit. A transaction that
# this snapshot does not have was one of another server, whose dump this is: there before any read.
_NEW_RECORDS = f"""
with present as materialized (select timeline_number() || '/' || pg_current_snapshot() as next)
select present.next, recent.* from present left join (
  select history_id, {RECORD} from lending_history where group_id = %(group)s {{}}
   order by history_id desc limit %(limit)s) as recent on true
 order by history_id"""
_FIRST = _NEW_RECORDS.format("")
_BEHIND = _NEW_RECORDS.format("""
     and xact >= pg_snapshot_xmin(%(behind)s::pg_snapshot) and xact < pg_snapshot_xmax(pg_current_snapshot())
     and not pg_visible_in_snapshot(xact, %(behind)s::pg_snapshot)""")


class NewestHistory(Struct, frozen=True):
    """The newest records, oldest first, of `total` that there are of their kind."""

    records: tuple[HistoryRecord, ...] = ()
    total: int = 0

    @property
    def is_truncated(self) -> bool:
        """Return whether there are older ones."""
        return self.total > len(self.records)


class GroupHistoryPage(Struct, frozen=True):
    """The records as (number, record), oldest first, and `next`: after which number to continue."""

    lines: tuple[tuple[int, HistoryRecord], ...]
    next: str


class HistoricalGroupState(Struct, frozen=True):
    """A group at a time in the past: its last records until then of a leader, if one is known, and of each stream."""

    leader: HistoryRecord | None
    streams: tuple[HistoryRecord, ...]


def has_owner(record: HistoryRecord) -> bool:
    """Return whether the stream is held after this record: by its session, or agent."""
    return record.event in _HOLDING


def read_group_at(
    conn: psycopg.Connection[Any], group_id: int, at_us: int, stream_id: int | None = None
) -> HistoricalGroupState:
    """Return how it was at that time, of all streams that had been granted or touched by then, or of this one."""
    rows = conn.execute(_LAST, {"group": group_id, "at": at_us, "stream": stream_id}).fetchall()
    records = [HistoryRecord(*row) for row in rows]
    return HistoricalGroupState(
        next((record for record in records if not record.stream_id), None),
        tuple(record for record in records if record.stream_id),
    )


def read_history(
    conn: psycopg.Connection[Any], group_id: int, stream_id: int | None = None, limit: int | None = None
) -> NewestHistory:
    """Return the newest `limit` lines of a group, or of one of its streams. Stream 0 is the group itself."""
    return _decode_page(conn.execute(_READ, {"group": group_id, "stream": stream_id, "limit": limit}))


def read_behind(conn: psycopg.Connection[Any], group_id: int, behind: str | None, limit: int) -> GroupHistoryPage:
    """Return a group's newest `limit` lines of those after `behind`, or of all; for repeated reads. Each is returned
    once, also one that was being written meanwhile; a `behind` of another timeline of the database, whose transactions
    had other numbers, is as none. Raise `UsageError` for a `behind` that was never returned as `next`."""
    timeline, _, snapshot = (behind or "").partition("/")
    parameters = {"group": group_id, "behind": snapshot, "limit": limit}
    try:
        rows = conn.execute(_FIRST if behind is None else _BEHIND, parameters).fetchall()
        if behind is not None and rows[0][0].partition("/")[0] != timeline:
            rows = conn.execute(_FIRST, parameters).fetchall()
    except psycopg.DataError:
        raise UsageError(f"{behind!r:.60} is no position in a history: give what an answer had as `next`.") from None
    records = tuple((row[1], HistoryRecord(*row[2:])) for row in rows if row[1] is not None)
    return GroupHistoryPage(records, rows[0][0])


def read_recent_forced_moves(conn: psycopg.Connection[Any], group_id: int) -> NewestHistory:
    """Return the recent moves after which messages in [position, redelivery_end) may have been seen twice."""
    return _decode_page(
        conn.execute(_FORCED, {"group": group_id, "window_s": RECENT_WINDOW_S, "limit": MAX_RECENT_MOVES})
    )


def delete_old_history(
    conn: psycopg.Connection[Any], older_than_s: float, limit: int = STEP, most_s: float = MAX_S
) -> int:
    """Delete the lines older than that, at most `limit` in one statement, of all groups, for about `most_s`; return
    their number.

    On an autocommit connection each statement is a transaction of its own.
    """
    forgotten, deadline = 0, time.monotonic() + most_s
    while True:
        deleted = conn.execute(_FORGET, {"older": older_than_s, "limit": limit}).rowcount
        forgotten += deleted
        if deleted < limit or time.monotonic() >= deadline:
            return forgotten


def delete_old_session_epochs(conn: psycopg.Connection[Any], older_than_s: float) -> None:
    """Delete the epochs that sessions drew longer ago than that, unless they have streams; those drawn later are
    above them for ever."""
    conn.execute(_FORGET_EPOCHS, {"older": older_than_s})


def _decode_page(cursor: psycopg.Cursor[Any]) -> NewestHistory:
    rows = cursor.fetchall()
    return NewestHistory(tuple(HistoryRecord(*row[:-1]) for row in rows), rows[0][-1] if rows else 0)
