"""Retention: drops messages that are too old, generation by generation.

A closed generation older than its space's retention is first declared gone, and that is committed: from then on every
read says so. Then its partition is detached and dropped, which holds up no reader, and takes no scan but of the rows,
without payloads, of a space that has had a location for these: what they name there is orphaned. Every step can be
repeated: a pass that was interrupted, or did not get a lock in time, is finished by the next one.

Unfinished `$queue` groups hold their messages back, as does any group with the option `holds_retention`. Creating or
resetting a group excludes this by a lock on the table `space`: so retention sees the group with its positions, or the
group sees that they are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from sublet_protocol.domain.errors import SubletError, format_error
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.store_connection import Guard
from sublet_storage.log.partition_reads import format_partition_name
from sublet_storage.spaces.rollover import partition_table
from sublet_storage.spaces.space_queries import read_generation_filters
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count
from sublet_storage.util.name_list import format_names

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 2.0
POSTPONED_LOG_INTERVAL_S = 3600.0
PRODUCER_RETENTION_S = 7 * 86400.0
PRODUCERS_STEP = 1000
"""How many rows of producers are looked at at a time."""
MAX_PRODUCER_STEPS = 10
"""How many steps are taken in one pass, where each finds that half of what it looks at can be deleted."""

_LATER = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.ObjectInUse,
    psycopg.errors.ObjectNotInPrerequisiteState,  # the detach of another partition is pending
    psycopg.errors.UndefinedTable,  # another process was faster
)

# From one space with a closed generation to the next: dropped ones that have none left are never looked at.
_ENDING = """
with recursive ended (space_id) as (
  select min(space_id) from generation where state = 'closed'
  union all
  select (select min(g.space_id) from generation g where g.state = 'closed' and g.space_id > e.space_id)
    from ended e where e.space_id is not null
), retained as (
  select space_id, (select s.retention_s from space s where s.space_id = ended.space_id) as retention_s from ended
)
select space_id, retention_s from retained where retention_s is not null order by space_id"""

_HOLDERS = """
select group_id, filter from consumer_group
 where deleted_at is null and (kind = 'queue' or options ->> 'holds_retention' = 'true')"""

# Of one space: expired ones are few of many, which the planner can only estimate from the time.
# A position beyond the head, or blocked for that, does not count for what came in place of what was lost.
# A holder without a row for a stream of a younger generation has not noticed it yet: it needs all of it.
_DECLARE_GONE = """
update generation g set state = 'gone'
 where g.space_id = %(space)s and g.state = 'closed' and g.closed_at <= now() - make_interval(secs => %(retention)s)
   and not exists (
     select from stream s
       join unnest(%(filters)s::text[], %(groups)s::bigint[]) as held(filter, group_id) on held.filter = g.filter
       join consumer_group c on c.group_id = held.group_id
       left join lending l on l.group_id = held.group_id and l.stream_id = s.stream_id
      where s.generation_id = g.generation_id
        and case when l.stream_id is null then s.head > 0 and g.generation_id > c.after_generation
                 else l.status = 'blocked' or l.status <> 'finished' and l.position <> s.head end)
returning g.generation_id"""

# A table has one pending detach at most, and while there is one no other can begin: it is finished first. The role is
# the owner, as whom a member of `sublet_node` detaches and drops; null where the user has the right itself.
_LEFTOVERS = """
select g.generation_id, i.inhrelid is not null, coalesce(i.inhdetachpending, false),
       case when not pg_has_role(t.relowner, 'usage') and pg_has_role(t.relowner, 'member')
            then t.relowner::regrole::text end
  from generation g
  join pg_class t on t.oid = to_regclass('block_' || g.generation_id)
  left join pg_inherits i on i.inhrelid = t.oid and i.inhparent = 'block'::regclass
 where g.state = 'gone' and g.is_past is not true
   and (coalesce(i.inhdetachpending, false)
        or not exists (select from stream s where s.generation_id = g.generation_id and s.state = 'open'))
 order by coalesce(i.inhdetachpending, false) desc, g.generation_id"""

# Those of `block` itself, which each detach waits for, only where nobody has one of the partitions.
_LOCK_HOLDERS = """
select l.relation::regclass::text, l.pid, a.usename from pg_locks l join pg_stat_activity a using (pid)
 where l.locktype = 'relation' and l.granted and l.pid <> pg_backend_pid()
   and a.datname = current_database() and l.database = a.datid
   and l.relation in (select to_regclass(name) from unnest(%s::text[] || '{block}'::text[]) as named (name))
 group by l.relation, l.pid, a.usename
 order by l.relation = 'block'::regclass fetch first row with ties"""

_postponed_log_throttle = LogThrottle(POSTPONED_LOG_INTERVAL_S)

_FIRST = ("", -1)
"""Before all producers and their streams."""

# By age they cannot be found: an index over a time that each append moves would make each write to the indexes. The
# registration of a name (stream 0) is deleted when nothing else of it is left.
_FORGET_PRODUCERS = """
with few as materialized (
  select producer_id, stream_id from producer where (producer_id, stream_id) > (%(after)s, %(stream)s)
   order by producer_id, stream_id limit %(step)s
), forgotten as (
  delete from producer p using few
   where (p.producer_id, p.stream_id) = (few.producer_id, few.stream_id)
     and p.updated_at < clock_timestamp() - make_interval(secs => %(idle)s)
     and (p.stream_id <> 0 or not exists (
       select from producer other where other.producer_id = p.producer_id and other.stream_id <> 0)) returning 1)
select producer_id, stream_id, (select count(*) from forgotten) from few order by producer_id, stream_id"""

# No row is read of a space that never had a location.
_ORPHAN_OBJECTS = """
insert into payload_object (uri, space_id, generation_id, stream_id, end_offset, orphaned_at)
select b.uri, g.space_id, g.generation_id, b.stream_id, b.end_offset, clock_timestamp()
  from {part} b join generation g on g.generation_id = {generation}
 where b.uri is not null and (
   select payload_locations <> '{{}}' from space join generation using (space_id) where generation_id = {generation})
on conflict (uri) do update set orphaned_at = coalesce(payload_object.orphaned_at, excluded.orphaned_at)"""


def apply_retention(conn: psycopg.Connection[Any], guard: Guard | None = None) -> list[int]:
    """Make one pass over an autocommit connection: declare expired generations gone, and drop gone ones; return the ids
    of both.

    A partition that others have locked, or whose lock is not acquired within 2 s, is left to the next pass, as are
    those that have to wait for its detach; who holds the lock is logged. Other errors with one are raised after all
    others were done.
    """
    declared = mark_expired_gone(conn, guard)
    return sorted({*declared, *drop_gone(conn)})


def mark_expired_gone(conn: psycopg.Connection[Any], guard: Guard | None = None) -> list[int]:
    """Commit state gone for every generation past its retention that no group holds back; return their ids."""
    with conn.transaction():
        if guard is not None:
            guard(conn)
        conn.execute("lock table space in row exclusive mode")  # against processes that hold it shared
        holders = [(group_id, TopicFilter(text)) for group_id, text in conn.execute(_HOLDERS)]
        generations = read_generation_filters(conn).filters
        pairs = [
            (generation.text, group)
            for generation in generations
            for group, filter in holders
            if generation.intersects(filter)
        ]
        parameters = {"filters": [pair[0] for pair in pairs], "groups": [pair[1] for pair in pairs]}
        declared = []
        for space_id, retention_s in conn.execute(_ENDING).fetchall():
            retention_parameters = {**parameters, "space": space_id, "retention": retention_s}
            declared += [generation_id for (generation_id,) in conn.execute(_DECLARE_GONE, retention_parameters)]
        return declared


def drop_gone(conn: psycopg.Connection[Any]) -> list[int]:
    """Detach and drop the partitions of gone generations; return the ids of those dropped. Raise as `apply_retention`
    does."""
    dropped: list[int] = []
    postponed: list[str] = []
    failed: list[tuple[int, psycopg.Error]] = []
    for generation_id, attached, pending, role in conn.execute(_LEFTOVERS).fetchall():
        try:
            with _use_role(conn, role):
                if (not attached or _detach(conn, generation_id, pending)) and _drop(conn, generation_id):
                    dropped.append(generation_id)
                else:
                    postponed.append(format_partition_name(generation_id))
        except psycopg.Error as error:
            if conn.closed:
                raise
            failed.append((generation_id, error))
    _log_postponed(conn, postponed)
    if failed:
        raise SubletError(_format_failures(failed, dropped)) from failed[0][1]
    return dropped


class IdleProducerCleaner:
    """A cleaner whose passes over an autocommit connection take some producers each, from where the last one ended.
    Deletes the last sequences, and then the registrations, of those idle for so long that no retry of theirs, or of
    those that they fence, can be under way."""

    def __init__(self, idle_s: float = PRODUCER_RETENTION_S, step: int = PRODUCERS_STEP) -> None:
        self._idle_s, self._step, self._last_key = idle_s, step, _FIRST

    def __call__(self, conn: psycopg.Connection[Any], guard: Guard | None = None) -> int:
        """Execute one pass; return the number of deleted rows."""
        deleted_count = 0
        for _ in range(MAX_PRODUCER_STEPS):
            deleted_count += (last_count := self._delete_some(conn, guard))
            if 2 * last_count < self._step:
                break
        return deleted_count

    def _delete_some(self, conn: psycopg.Connection[Any], guard: Guard | None) -> int:
        with conn.transaction():
            if guard is not None:
                guard(conn)
            parameters = {
                "after": self._last_key[0],
                "stream": self._last_key[1],
                "step": self._step,
                "idle": self._idle_s,
            }
            rows = conn.execute(_FORGET_PRODUCERS, parameters).fetchall()
        self._last_key = rows[-1][:2] if len(rows) == self._step else _FIRST
        return rows[-1][2] if rows else 0


def _format_failures(failed: list[tuple[int, psycopg.Error]], dropped: list[int]) -> str:
    errors = [f"{format_partition_name(generation_id)}: {format_error(error)}" for generation_id, error in failed]
    return (
        f"{len(failed)} gone partitions could not be dropped, {len(dropped)} were: {format_names(errors, 3)}. "
        "See to these tables."
    )


def _log_postponed(conn: psycopg.Connection[Any], partitions: list[str]) -> None:
    """Log who holds locks of these partitions, if there are any; repeatedly only now and then."""
    rows = conn.execute(_LOCK_HOLDERS, (partitions,)).fetchall() if partitions else []
    if not rows:
        _postponed_log_throttle.reset("postponed")
    elif (before := _postponed_log_throttle.acquire("postponed")) is not None:
        log.warning(
            "drop of gone partitions postponed: partitions=%s locked_by=%s%s",
            format_names(partitions, 3),
            format_names([f"pid {pid} (user {user!r}, {table})" for table, pid, user in rows], 10),
            format_suppressed_count(before),
        )


@contextmanager
def _use_role(conn: psycopg.Connection[Any], role: str | None) -> Iterator[None]:
    if role is not None:
        conn.execute(f"set role {role}")
    try:
        yield
    finally:
        if role is not None and not conn.closed:
            conn.execute("reset role")


def _detach(conn: psycopg.Connection[Any], generation_id: int, pending: bool) -> bool:
    """Detach without blocking readers, or finish an interrupted detach; return whether it was possible now."""
    part = partition_table(generation_id)
    # A detach that waits for a reader of the partition would be left pending, and no other could begin.
    probe = sql.SQL("lock table {} in access exclusive mode nowait; select").format(part)
    if not pending and not _try_execute(conn, probe):
        return False
    mode = sql.SQL("finalize") if pending else sql.SQL("concurrently")
    return _try_execute(conn, sql.SQL("alter table block detach partition {} {}").format(part, mode))


def _drop(conn: psycopg.Connection[Any], generation_id: int) -> bool:
    """Drop the partition, and orphan the objects that its rows name in the same transaction; return whether it was
    possible now."""
    part = partition_table(generation_id)
    steps = [
        sql.SQL("lock table {} in access exclusive mode").format(part),
        sql.SQL(_ORPHAN_OBJECTS).format(part=part, generation=sql.Literal(generation_id)),
        sql.SQL("drop table {}").format(part),
    ]
    return _try_execute(conn, sql.SQL("; ").join(steps))


def _try_execute(conn: psycopg.Connection[Any], statement: sql.Composed) -> bool:
    """Run a statement on its own; return False on a lock timeout, or if a detach is pending."""
    row = conn.execute("select current_setting('lock_timeout')").fetchone()
    assert row is not None
    conn.execute(f"set lock_timeout = '{LOCK_TIMEOUT_S}s'")
    try:
        conn.execute(statement)
        return True
    except _LATER:
        return False
    finally:
        if not conn.closed:
            conn.execute("select set_config('lock_timeout', %s, false)", (row[0],))
