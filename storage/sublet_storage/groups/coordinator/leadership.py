"""Terms and leases of leaders, judged by the database's clock.

A leadership row is inserted once and never deleted, so a term cannot come back. Claimers look before they claim: the
losers of a race then neither lock the row nor write to the database's log. A node that takes a group over from another,
or leads it first, is recorded in its history, by the statement that claims it.

A leader that has declared an advisory lock may be succeeded sooner: when its lock was found free, and is free in the
very statement that claims. The leader has then ended in all likelihood. Its writes are rejected as after any claim, and
how long it may still answer its borrowers is stored for the next leaders.

A term is over, too, where the database has changed to another timeline: a standby was promoted, and what was committed
last, grants among it, may be missing. A leader discards all that it has in memory from the former one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import StaleTerm
from sublet_storage.db.clock import NOW, format_microseconds
from sublet_storage.db.liveness_lock import LOCK_CLASS
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.model.lending_row import MICROSECONDS
from sublet_storage.groups.model.records import MAINTENANCE, TAKEOVER, LeaderLivenessLock, Leadership, OnDataLoss
from sublet_storage.node_directory import NodeIncarnation

_SAME_TIMELINE = "coalesce(timeline = (select timeline_now()), true)"
IS_ALIVE = f"expires_at > {NOW} and {_SAME_TIMELINE}"
"""Whether a leader may write."""

_READ = f"""
select leadership_id, node, incarnation, address, term,
       case when {_SAME_TIMELINE} then {format_microseconds("expires_at")} - {format_microseconds(NOW)} else 0 end,
       lock_key, greatest({format_microseconds("deposed_until")} - {format_microseconds(NOW)}, 0)
  from leadership where leadership_id = any(%(ids)s::bigint[]) order by leadership_id"""

_CLAIM = f"""
with claimed as (
insert into leadership as l (leadership_id, node, incarnation, address, term, expires_at, timeline, lock_key)
values (%(id)s, %(node)s, %(incarnation)s, %(address)s, {format_microseconds(NOW)} + timeline_ahead(),
        {NOW} + %(lease_us)s * interval '1 microsecond', timeline_now(), %(lock_key)s)
on conflict (leadership_id) do update
   set node = excluded.node, incarnation = excluded.incarnation, address = excluded.address,
       term = greatest(l.term + 1, excluded.term),
       expires_at = {NOW} + %(lease_us)s * interval '1 microsecond',
       previous_node = l.node, previous_incarnation = l.incarnation,
       timeline = excluded.timeline, previous_timeline = l.timeline, lock_key = excluded.lock_key,
       deposed_until = case when l.expires_at > {NOW} then greatest(l.deposed_until, l.expires_at)
                            else l.deposed_until end
 where l.expires_at <= {NOW} or not coalesce(l.timeline = excluded.timeline, true)
    or case when l.incarnation = %(rival)s::text and l.lock_key = %(rival_key)s::integer
            then pg_try_advisory_xact_lock_shared({LOCK_CLASS}, l.lock_key) end
returning *)
insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)
select {NOW}, leadership_id, 0, '{TAKEOVER}',
       'node ' || node || ' leads; ' || coalesce('before: ' || previous_node, 'first leader'), 0, 0, term
  from claimed
 where leadership_id <> {MAINTENANCE} and previous_incarnation is distinct from incarnation"""

# The time is read above the lock: after the wait for it. It is then held to the end of the transaction. What a group
# does about messages that are gone is never changed, and so needs no lock.
_LOCK = f"""
with locked as materialized (
  select leadership_id, incarnation, term, expires_at, timeline from leadership
   where leadership_id = any(%(ids)s::bigint[]) order by leadership_id for no key update {{skip}}
)
select leadership_id, incarnation, term, {IS_ALIVE}, {format_microseconds(NOW)},
       coalesce(g.options->>'on_data_loss', '{OnDataLoss.FAIL}')
  from locked left join consumer_group g on g.group_id = leadership_id"""

_WAIT = _LOCK.format(skip="")
_SKIP = _LOCK.format(skip="skip locked")

_RENEW = f"""
update leadership set expires_at = {NOW} + %(lease_us)s * interval '1 microsecond', lock_key = %(lock_key)s
 where leadership_id = any(%(ids)s::bigint[])"""

_RELEASE = "update leadership set expires_at = timestamptz 'epoch' where leadership_id = any(%(ids)s::bigint[])"

_EXPIRE = "select end_leaderships(%(ids)s::bigint[])"

_FIRST_HERE = """
select l.timeline <> coalesce(l.previous_timeline, g.created_timeline)
  from leadership l left join consumer_group g on g.group_id = l.leadership_id where l.leadership_id = %(id)s"""

# What is granted under this term or a later one has an id that is not below it.
_OLDER_GRANTS = """
select l.stream_id, l.grant_id from leadership d join lending l on l.group_id = d.leadership_id
 where d.leadership_id = %(id)s and l.status = 'held' and l.grant_id < d.term"""


class LockedLeadership(Struct, frozen=True):
    """A leadership row locked by this transaction, at the time of the lock, with the policy of its group."""

    incarnation: str
    term: int
    is_alive: bool
    now_us: int
    on_data_loss: OnDataLoss


def read_leaderships(connection: Connection, ids: Iterable[int], now_us: int | None) -> dict[int, Leadership]:
    """Return the rows as they are, without a lock."""
    rows = connection.execute(_READ, {"ids": sorted(set(ids)), "now_us": now_us}).fetchall()
    return {row[0]: _to_leadership(row) for row in rows}


def claim(
    connection: Connection,
    leadership_id: int,
    node: NodeIncarnation,
    lease_s: float,
    now_us: int | None,
    lock_key: int | None = None,
    rival: LeaderLivenessLock | None = None,
) -> Leadership:
    """Take the row if its lease has run out, it is new, or its leader is the `rival`, whose lock is free; return the
    row as it then is, locked to the end of the transaction."""
    parameters = {
        "id": leadership_id,
        "node": node.name,
        "incarnation": node.incarnation,
        "address": node.address,
        "lease_us": round(lease_s * MICROSECONDS),
        "now_us": now_us,
        "lock_key": lock_key,
        "rival": None if rival is None else rival.incarnation,
        "rival_key": None if rival is None else rival.key,
    }
    connection.execute(_CLAIM, parameters)
    return read_leaderships(connection, (leadership_id,), now_us)[leadership_id]


def is_first_here(connection: Connection, leadership_id: int) -> bool:
    """Return whether the previous leader was elected on another timeline; or, without one, the group was created on
    another: then it may have had a leader there that is unknown here."""
    return connection.execute(_FIRST_HERE, {"id": leadership_id}).fetchall() == [(True,)]


def read_older_grants(connection: Connection, leadership_id: int) -> list[tuple[int, int]]:
    """Return (stream, grant id) of what was granted before the term in force."""
    return [(stream, grant) for stream, grant in connection.execute(_OLDER_GRANTS, {"id": leadership_id}).fetchall()]


def lock(connection: Connection, ids: Iterable[int], now_us: int | None, *, wait: bool = True) -> psycopg.Cursor[Any]:
    """Lock the rows in the order of their ids; read the cursor with `locked`, statements may be queued meanwhile."""
    return connection.execute(_WAIT if wait else _SKIP, {"ids": sorted(set(ids)), "now_us": now_us})


def fetch_locked(cursor: psycopg.Cursor[Any]) -> dict[int, LockedLeadership]:
    """Return what `lock` got."""
    return {row[0]: LockedLeadership(row[1], row[2], row[3], row[4], OnDataLoss(row[5])) for row in cursor.fetchall()}


def renew(
    connection: Connection,
    node: NodeIncarnation,
    terms: Mapping[int, int],
    lease_s: float,
    now_us: int | None,
    lock_key: int | None = None,
    *,
    wait: bool,
) -> frozenset[int]:
    """Extend the leases of this incarnation, at their terms and unexpired, and declare its lock; return their ids.
    Without `wait`, rows that others have locked are left."""
    rows = fetch_locked(lock(connection, terms, now_us, wait=wait))
    renewed = [i for i, row in rows.items() if row.is_alive and _is_own(row, node, terms[i])]
    lease_us = round(lease_s * MICROSECONDS)
    connection.execute(_RENEW, {"ids": renewed, "lease_us": lease_us, "now_us": now_us, "lock_key": lock_key})
    return frozenset(renewed)


def release(
    connection: Connection, node: NodeIncarnation, terms: Mapping[int, int], now_us: int | None
) -> frozenset[int]:
    """Expire the leases that are still this incarnation's at their terms; return their ids."""
    own = [i for i, row in fetch_locked(lock(connection, terms, now_us)).items() if _is_own(row, node, terms[i])]
    connection.execute(_RELEASE, {"ids": own})
    return frozenset(own)


def expire(connection: Connection, ids: Sequence[int]) -> None:
    """End others' leases, of rows that this transaction has locked, for good; next leaders read how long these may
    still answer."""
    connection.execute(_EXPIRE, {"ids": list(ids)})


def check_term(connection: Connection, leadership_id: int, term: int, now_us: int | None = None) -> None:
    """Lock the row for the rest of the transaction; raise `StaleTerm` unless the term is this one and alive."""
    row = fetch_locked(lock(connection, (leadership_id,), now_us)).get(leadership_id)
    if row is None or row.term != term or not row.is_alive:
        raise StaleTerm(f"leadership {leadership_id}: term {term} is over. Step down.")


def _is_own(row: LockedLeadership, node: NodeIncarnation, term: int) -> bool:
    return row.incarnation == node.incarnation and row.term == term


def _to_leadership(row: Sequence[Any]) -> Leadership:
    leadership_id, name, incarnation, address, term, remaining_us, lock_key, previous_leader_us = row
    node = NodeIncarnation(name, incarnation, address)
    return Leadership(
        leadership_id, node, term, remaining_us / MICROSECONDS, lock_key, previous_leader_us / MICROSECONDS
    )
