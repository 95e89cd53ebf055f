"""Statements on lending rows: lock, read the streams' facts, write, record.

Facts are read in a statement after the one that locks. In one statement the lock could return a newer version of a row
(a user's transaction had just moved it) beside an older head of its stream, and a good position would look as if it
were beyond the head.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, lower_frontier_from_text
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_storage.db.clock import NOW, format_microseconds
from sublet_storage.db.connect import newest_stream
from sublet_storage.db.liveness_lock import LOCK_CLASS, compute_lock_key
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator.history_queries import RECORD
from sublet_storage.groups.coordinator.leadership import IS_ALIVE
from sublet_storage.groups.model.group_errors import RowLockHolder
from sublet_storage.groups.model.lending_row import FAILED_OVER, LendingRow, StreamFacts
from sublet_storage.groups.model.records import AT_REST, AdvancePosition, HistoryRecord, LendingStatus

Key = tuple[int, int]
"""(group_id, stream_id)"""

PAGE = 2000
"""Rows of one statement over all rows of a group: a leader's statements are canceled after a short time, however far
behind the group is."""
BEHIND_PAGE = f"""
   and (l.group_id, l.stream_id) > (%(after_group)s, %(after_stream)s) order by l.group_id, l.stream_id limit {PAGE}"""

_ROW = (
    "l.group_id, l.stream_id, l.status, l.position, l.grant_id, l.borrower_id, l.agent, l.session, l.losses,"
    " l.lost_position, l.session_epoch, (extract(epoch from l.held_until) * 1000000)::bigint, l.lost_message_count,"
    " case when l.lock_borrower_id = l.borrower_id then l.lock_valid_s end, {key}, l.consumed, l.in_doubt"
)
ROW = _ROW.format(key="l.grant_key, null::bytea")
KEYLESS_ROW = _ROW.format(key="null::bytea, l.grant_key_sha256")
"""With the hash of the grant's key in its place: for what operators do, too, who may not read keys."""
FACTS = (
    "s.stream_id, s.generation_id, s.hash_from::text, s.hash_to::text, s.head, s.state = 'closed', n.state = 'gone',"
    " (select p.lower_frontier::text from space p where p.space_id = s.space_id)"
)
_ROW_WIDTH, _FACTS_WIDTH = ROW.count(",") + 1, FACTS.count(",") + 1

_LOCK = """
select {row} from lending l
  join unnest(%(groups)b::bigint[], %(streams)b::bigint[]) as u (group_id, stream_id) using (group_id, stream_id)
 order by l.group_id, l.stream_id for no key update of l skip locked"""
_LOCK_WITH_KEYS, _LOCK_KEYLESS = _LOCK.format(row=ROW), _LOCK.format(row=KEYLESS_ROW)

_EXISTING = """
select l.group_id, l.stream_id from lending l
  join unnest(%(groups)b::bigint[], %(streams)b::bigint[]) as u (group_id, stream_id) using (group_id, stream_id)"""

_LOCKER = f"""
select a.pid, a.usename, a.application_name, {format_microseconds("a.xact_start")}
  from (select xmax from lending where group_id = %(group)s
        union select xmax from leadership where leadership_id = %(group)s
        union select xmax from consumer_group where group_id = %(group)s) as row
  join pg_locks k on k.granted and k.transactionid = row.xmax
  join pg_stat_activity a using (pid)
 where a.pid <> pg_backend_pid() order by a.xact_start limit 1"""

_FACTS = f"""
select {FACTS}
  from unnest(%(streams)b::bigint[]) as u (stream_id) cross join lateral {newest_stream("u.stream_id")} s
  join generation n using (generation_id)"""

# Of the table of blocks only the partitions of these generations are planned for and locked, if it is planned anew.
# Where more blocks wait for their epochs, those behind them are not read: a leader's statements end soon.
_UNREAD_UNSET = """
select u.group_id, u.stream_id
  from unnest(%(groups)s::bigint[], %(streams)s::bigint[], %(generations)s::bigint[], %(upto)s::bigint[])
       as u (group_id, stream_id, generation_id, upto)
 where exists (
         select from (
           select b.epoch_bounds from block b
            where b.generation_id = any(%(generations)s::bigint[]) and b.generation_id = u.generation_id
              and b.stream_id = u.stream_id and b.end_offset > u.upto
            order by b.end_offset limit 1000) next
          where next.epoch_bounds is null or (next.epoch_bounds ->> 'has_unset')::boolean)
    or not check_partition(u.generation_id, u.stream_id)"""

# Upwards from each stream, through those that the group has finished or never had. Ids grow from parent to child, so
# that there is nothing to be found below the oldest stream that it has not finished.
_ANCESTORS = """
with recursive asked as (
  select u.group_id, u.stream_id from unnest(%(groups)b::bigint[], %(streams)b::bigint[]) as u (group_id, stream_id)
), oldest as materialized (
  select g.group_id,
         (select min(l.stream_id) from lending l where l.group_id = g.group_id and l.unfinished) as stream_id
    from (select distinct group_id from asked) g
), up (group_id, stream_id, ancestor, is_unfinished) as (
  select group_id, stream_id, stream_id, false from asked
  union
  select up.group_id, up.stream_id, p.ancestor, exists (
           select from lending l where l.group_id = up.group_id and l.stream_id = p.ancestor and l.unfinished)
    from up join stream s on s.stream_id = up.ancestor join oldest o on o.group_id = up.group_id
    cross join lateral unnest(s.parents) as p (ancestor)
   where not up.is_unfinished and p.ancestor >= o.stream_id
)
select group_id, stream_id, ancestor from up where is_unfinished order by ancestor"""

# The common progress in one statement, without a row that travels here and back. What it leaves out, because of its
# leader, its row, its stream or a lock, is decided by the rules. A head older than the row only leaves more out; so
# does the ctid of a row that was written since the statement began.
# The status is written because Postgres, up to 18 at least, parses a table's generated columns anew for each row of an
# update that changes nothing they are made of: a quarter of this statement.
_ADVANCE = f"""
with said as materialized (
  select * from unnest(%(groups)s::bigint[], %(streams)s::bigint[], %(terms)s::bigint[], %(grants)s::bigint[],
                       %(positions)s::bigint[]) as u (group_id, stream_id, term, grant_id, position)
), locked as materialized (
  select l.row_id, u.stream_id, u.term, u.position
    from said u join leadership d on d.leadership_id = u.group_id and d.term = u.term and {IS_ALIVE}
    cross join lateral (
      select l.ctid as row_id from lending l
       where l.group_id = u.group_id and l.stream_id between u.stream_id and u.stream_id
         and l.status = 'held' and l.grant_id = u.grant_id and l.position < u.position
       order by l.stream_id desc limit 1 for no key update skip locked) l
), moved as (
  update lending l set position = k.position, status = l.status, term = k.term, updated_at = {NOW}
    from locked k cross join lateral {newest_stream("k.stream_id", "head, state")} s
   where l.ctid = k.row_id and (k.position < s.head or k.position = s.head and s.state = 'open')
  returning l.group_id, l.stream_id
)
select group_id, stream_id from said where (select count(*) from moved) < (select count(*) from said)
except select group_id, stream_id from moved"""

_CHANGE = f"""
update lending l
   set position = u.position, term = u.term, status = u.status, grant_id = u.grant_id, borrower_id = u.borrower_id,
       agent = u.agent, session = u.session, losses = u.losses, lost_position = u.lost_position,
       session_epoch = u.session_epoch, held_until = timestamptz 'epoch' + u.held_until * interval '1 microsecond',
       lost_message_count = u.lost_message_count, consumed = u.consumed, in_doubt = u.in_doubt,
       planned_by = case when u.in_doubt = l.in_doubt then l.planned_by when u.in_doubt is not null then u.session end,
       planned_at = case when u.in_doubt = l.in_doubt then l.planned_at when u.in_doubt is not null then {NOW} end,
       grant_key = u.grant_key, lock_valid_s = u.lock_valid_s,
       lock_borrower_id = case when u.borrower_id = l.borrower_id then l.lock_borrower_id
         when not pg_try_advisory_xact_lock_shared({LOCK_CLASS}, u.lock_key) then u.borrower_id end,
       granted_at = case when u.status = 'held' and u.grant_id <> l.grant_id then {NOW} else l.granted_at end,
       updated_at = {NOW}
  from unnest(%(groups)b::bigint[], %(streams)b::bigint[], %(terms)b::bigint[], %(positions)b::bigint[],
              %(statuses)s::text[], %(grants)b::bigint[], %(borrowers)s::text[], %(agents)s::text[],
              %(sessions)s::text[], %(losses)b::integer[], %(lost)b::bigint[], %(epochs)b::bigint[],
              %(held_until)b::bigint[], %(lost_message_count)b::bigint[], %(consumed)s::jsonb[], %(in_doubt)s::jsonb[],
              %(grant_keys)b::bytea[], %(lock_valid_s)b::double precision[], %(lock_keys)b::integer[])
       as u (group_id, stream_id, term, position, status, grant_id, borrower_id, agent, session, losses, lost_position,
             session_epoch, held_until, lost_message_count, consumed, in_doubt, grant_key, lock_valid_s, lock_key)
 where l.group_id = u.group_id and l.stream_id = u.stream_id"""

_RECORD = f"""
insert into lending_history (at, group_id, stream_id, event, reason, grant_id, borrower_id, agent, session, position,
                             term, forced, redelivery_end, grant_key_sha256)
select {NOW}, u.* from
  rows from (unnest(%(groups)b::bigint[], %(streams)b::bigint[], %(events)s::text[], %(reasons)s::text[],
              %(grants)b::bigint[], %(borrowers)s::text[], %(agents)s::text[], %(sessions)s::text[],
              %(positions)b::bigint[], %(terms)b::bigint[], %(forced)b::boolean[], %(redelivery_end)b::bigint[],
              %(key_digests)b::bytea[]))
       as u (group_id, stream_id, event, reason, grant_id, borrower_id, agent, session, position, term, forced,
             redelivery_end, grant_key_sha256)"""

_UNFINISHED = f"""
select {ROW}, {FACTS}, {format_microseconds(NOW)}
  from lending l join stream s using (stream_id) join generation n using (generation_id)
 where l.group_id = %(group)s and l.unfinished{BEHIND_PAGE}"""

_NOTE_FAILOVER = f"""
with page as materialized (
  select l.group_id, l.stream_id, l.grant_id, l.grant_key_sha256, l.borrower_id, l.agent, l.session, l.position, s.head
    from lending l join stream s using (stream_id)
   where l.group_id = %(group)s and l.unfinished and l.stream_id > %(after)s order by l.stream_id limit %(page)s
), marked as (
  update lending l set grant_id = 1
    from page p where l.group_id = p.group_id and l.stream_id = p.stream_id and p.grant_id = 0
), recorded as (
  insert into lending_history (at, group_id, stream_id, event, reason, grant_id, borrower_id, agent, session, position,
                               term, forced, redelivery_end, grant_key_sha256)
  select {NOW}, group_id, stream_id, 'failover', %(reason)s, greatest(grant_id, 1), borrower_id, agent, session,
         position, %(term)s, true, head, grant_key_sha256
    from page where position < head and stream_id <> all(%(recorded)s::bigint[])
)
select max(stream_id) from page"""

_HISTORY = f"""
select {RECORD} from lending_history where group_id = %(group)s order by history_id"""


def lock_rows(connection: Connection, keys: Iterable[Key]) -> psycopg.Cursor[Any]:
    """Lock the rows of these keys, in order; those locked by others are left out."""
    return connection.execute(_LOCK_WITH_KEYS, _encode_keys(keys))


def lock_keyless_rows(connection: Connection, keys: Iterable[Key]) -> psycopg.Cursor[Any]:
    """Lock the same rows, and read them without the keys of their grants: a row that is written then has none."""
    return connection.execute(_LOCK_KEYLESS, _encode_keys(keys))


def advance_positions(
    connection: Connection, changes: Sequence[tuple[int, int, AdvancePosition]], now_us: int | None
) -> psycopg.Cursor[Any]:
    """Write each (group, term, progress) that moves the position of a held row on, within its stream and not to the end
    of a closed one; read the cursor for the keys that it left out. The progress says nothing else."""
    parameters = {
        "groups": _format_array([group_id for group_id, _, _ in changes]),
        "streams": _format_array([change.stream_id for _, _, change in changes]),
        "terms": _format_array([term for _, term, _ in changes]),
        "grants": _format_array([change.grant_id for _, _, change in changes]),
        "positions": _format_array([change.position for _, _, change in changes]),
        "now_us": now_us,
    }
    return connection.execute(_ADVANCE, parameters)


def find_existing(connection: Connection, keys: Iterable[Key]) -> set[Key]:
    """Return which of these keys have a row, locked or not."""
    return set(connection.execute(_EXISTING, _encode_keys(keys)).fetchall())


def find_locker(connection: Connection, group_id: int) -> RowLockHolder | None:
    """Return the oldest transaction that has a row of the group locked; None if that is not visible."""
    row = connection.execute(_LOCKER, {"group": group_id}).fetchone()
    return None if row is None else RowLockHolder(*row)


def query_facts(connection: Connection, stream_ids: Iterable[int]) -> psycopg.Cursor[Any]:
    """Return the streams as they are now; read the cursor with `read_facts`."""
    return connection.execute(_FACTS, {"streams": sorted(set(stream_ids))})


def query_ancestors(connection: Connection, keys: Iterable[Key]) -> psycopg.Cursor[Any]:
    """Return the nearest ancestors that the same group has not finished; read the cursor with `read_ancestors`."""
    return connection.execute(_ANCESTORS, _encode_keys(keys))


def find_unread_unset(connection: Connection, waiting: Sequence[tuple[LendingRow, StreamFacts]]) -> frozenset[Key]:
    """Return the keys of these rows, of atomic groups, behind which messages without an epoch lie."""
    parameters = {
        "groups": [row.group_id for row, _ in waiting],
        "streams": [row.stream_id for row, _ in waiting],
        "generations": [stream.generation_id for _, stream in waiting],
        "upto": [max(row.position, row.consumed.upto if row.consumed else 0) for row, _ in waiting],
    }
    return frozenset(connection.execute(_UNREAD_UNSET, parameters, prepare=False).fetchall())


def read_history(connection: Connection, group_id: int) -> tuple[HistoryRecord, ...]:
    """Return the group's lines, oldest first."""
    return tuple(HistoryRecord(*row) for row in connection.execute(_HISTORY, {"group": group_id}).fetchall())


def read_rows(records: Iterable[Any]) -> Iterator[LendingRow]:
    """Return the lending rows of a result that begins with the columns ROW or KEYLESS_ROW."""
    return map(_decode_row, records)


def read_facts(cursor: psycopg.Cursor[Any]) -> dict[int, StreamFacts]:
    """Return {stream_id: facts} of a result of the columns FACTS."""
    return {record[0]: _decode_facts(record) for record in cursor.fetchall()}


def read_ancestors(cursor: psycopg.Cursor[Any]) -> dict[Key, tuple[int, ...]]:
    """Return {key: these ancestors} of a result of `query_ancestors`; keys without any are absent."""
    ancestors: dict[Key, tuple[int, ...]] = {}
    for group_id, stream_id, ancestor in cursor.fetchall():
        ancestors[group_id, stream_id] = (*ancestors.get((group_id, stream_id), ()), ancestor)
    return ancestors


def read_unfinished_ancestors(connection: Connection, rows: Iterable[LendingRow]) -> dict[Key, tuple[int, ...]]:
    """Return the unfinished ancestors of those of these rows that may be granted, {key: ancestors}."""
    return read_ancestor_pages(connection, [(row.group_id, row.stream_id) for row in rows if row.status in AT_REST])


def read_ancestor_pages(connection: Connection, keys: Sequence[Key]) -> dict[Key, tuple[int, ...]]:
    """Return the nearest ancestors that the same group has not finished, {key: ancestors}, page by page."""
    ancestors: dict[Key, tuple[int, ...]] = {}
    for start in range(0, len(keys), PAGE):
        ancestors |= read_ancestors(query_ancestors(connection, keys[start : start + PAGE]))
    return ancestors


def read_rows_with_facts(records: Iterable[Any]) -> Iterator[tuple[LendingRow, StreamFacts]]:
    """Return rows with the facts of their streams, of a result that begins with the columns ROW, FACTS."""
    return map(_decode_row_and_facts, records)


def read_pages(connection: Connection, statement: str, parameters: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the records of a statement that ends with BEHIND_PAGE, and begins with the columns of ROW, page by page."""
    after = 0, 0
    while True:
        bounds = {"after_group": after[0], "after_stream": after[1]}
        page = connection.execute(statement, {**parameters, **bounds}).fetchall()
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1][:2]


def read_unfinished(
    connection: Connection, group_id: int, now_us: int | None
) -> list[tuple[LendingRow, StreamFacts, int]]:
    """Return a group's unfinished rows by stream, each beside its stream and with the present time."""
    records = read_pages(connection, _UNFINISHED, {"group": group_id, "now_us": now_us})
    return [(*_decode_row_and_facts(record), record[-1]) for record in records]


def update_rows(connection: Connection, changed: Sequence[tuple[LendingRow, int]], now_us: int) -> None:
    """Write all columns of each (row, term). That an agent holds its lock is kept if it does, in this database."""
    if not changed:
        return
    rows = [row for row, _ in changed]
    parameters = {
        "groups": [row.group_id for row in rows],
        "streams": [row.stream_id for row in rows],
        "terms": [term for _, term in changed],
        "positions": [row.position for row in rows],
        "statuses": [row.status.value for row in rows],
        "grants": [row.grant_id for row in rows],
        "borrowers": [row.borrower_id for row in rows],
        "agents": [row.agent for row in rows],
        "sessions": [row.session for row in rows],
        "losses": [row.losses for row in rows],
        "lost": [row.lost_position for row in rows],
        "epochs": [row.session_epoch for row in rows],
        "held_until": [row.held_until_us for row in rows],
        "lost_message_count": [row.lost_message_count for row in rows],
        "consumed": [None if row.consumed is None else json.dumps(row.consumed.to_json()) for row in rows],
        "in_doubt": [None if row.in_doubt is None else json.dumps(row.in_doubt.to_json()) for row in rows],
        "grant_keys": [None if row.grant_key is None else row.grant_key.reveal() for row in rows],
        "lock_valid_s": [row.lock_valid_s or None for row in rows],
        "lock_keys": [compute_lock_key(row.agent) if row.agent and row.lock_valid_s else None for row in rows],
        "now_us": now_us,
    }
    connection.execute(_CHANGE, parameters)


def write_history(connection: Connection, records: Sequence[HistoryRecord], now_us: int) -> None:
    """Append lines in their order."""
    if not records:
        return
    parameters = {
        "groups": [record.group_id for record in records],
        "streams": [record.stream_id for record in records],
        "events": [record.event for record in records],
        "reasons": [record.reason for record in records],
        "grants": [record.grant_id for record in records],
        "borrowers": [record.borrower_id for record in records],
        "agents": [record.agent for record in records],
        "sessions": [record.session for record in records],
        "positions": [record.position for record in records],
        "terms": [record.term for record in records],
        "forced": [record.is_forced for record in records],
        "redelivery_end": [record.redelivery_end for record in records],
        "key_digests": [record.key_digest for record in records],
        "now_us": now_us,
    }
    connection.execute(_RECORD, parameters)


def note_failover(
    connection: Connection, group_id: int, term: int, recorded: Sequence[int], now_us: int | None
) -> None:
    """Give streams that were never granted, as far as is known on this timeline, an id of the one before, as they may
    have been granted there since; and record that what follows on any position may be seen twice, but for streams of
    which that is `recorded`."""
    parameters = {"group": group_id, "term": term, "reason": FAILED_OVER, "recorded": recorded, "now_us": now_us}
    after = 0
    while after is not None:
        ((after,),) = connection.execute(_NOTE_FAILOVER, {**parameters, "after": after, "page": PAGE}).fetchall()


def _format_array(numbers: list[int]) -> str:
    """Return an array as Postgres reads it: psycopg takes three times as long for one of 10,000 numbers."""
    return "{" + str(numbers)[1:-1] + "}"


def _encode_keys(keys: Iterable[Key]) -> dict[str, list[int]]:
    ordered = sorted(keys)
    return {"groups": [group for group, _ in ordered], "streams": [stream for _, stream in ordered]}


def _decode_row_and_facts(record: Sequence[Any]) -> tuple[LendingRow, StreamFacts]:
    return _decode_row(record[:_ROW_WIDTH]), _decode_facts(record[_ROW_WIDTH : _ROW_WIDTH + _FACTS_WIDTH])


def _decode_row(record: Sequence[Any]) -> LendingRow:
    consumed = None if record[-2] is None else ConsumedFrontier.from_json(record[-2])
    in_doubt = None if record[-1] is None else InDoubtRange.from_json(record[-1])
    grant_key = None if record[-4] is None else GrantSecret(record[-4])
    fields = (*record[3:-5], consumed, in_doubt, grant_key, record[-3], record[-5] or 0.0)
    return LendingRow(record[0], record[1], LendingStatus(record[2]), *fields)


def _decode_facts(record: Sequence[Any]) -> StreamFacts:
    stream_id, generation_id, low, high, head, is_closed, is_gone, lower = record
    return StreamFacts(
        stream_id, generation_id, int(low), int(high), head, is_closed, is_gone, lower_frontier_from_text(lower)
    )
