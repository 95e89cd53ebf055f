"""Stream sync of groups: inserts rows for opened streams, and finishes or blocks ended ones.

Streams of generations opened after the group was created get rows at position 0, whatever was the group's start. Which
generations can matter is decided by the filter that each was filled under, which its space may have changed since. An
open stream in the shadow of a more specific space gets a row that is finished from the start, so that it is not taken
for an unread one once it is closed. Shadows are judged for the generations that were there at that instant and no later
ones: whatever ends a shadow opens a new generation, and that one must not be finished by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import GroupFrontier
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.clock import NOW
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator import consumed_epoch_frontiers, group_lifecycle, lending_statements
from sublet_storage.groups.coordinator.lending_statements import BEHIND_PAGE, FACTS, PAGE, ROW, Key
from sublet_storage.groups.coordinator.lending_write_batch import LendingWriteBatch
from sublet_storage.groups.model.lending_row import to_lending
from sublet_storage.groups.model.lending_rules import close_out
from sublet_storage.groups.model.records import GroupDesiredState, Lending, LendingStatus, OnDataLoss
from sublet_storage.spaces.space_queries import read_generation_filters, to_pairs

_FILTERS = """
select group_id, filter, coalesce((options ->> 'atomic')::boolean, false), desired_state, after_generation
  from consumer_group
 where group_id = any(%(groups)s::bigint[]) and deleted_at is null"""

# `oldest` states by a value what the planner cannot estimate of a column: how few generations are newer. They are
# locked, so that none is deleted before the rows are committed; one that is being deleted is waited for, and left out.
# `until`: the last generation that each group gets.
_ADD = f"""
insert into lending as l (group_id, stream_id, status, position, updated_at, consumed)
select u.group_id, s.stream_id, case when s.state = 'closed' or u.matching then 'free' else 'finished' end, 0, {NOW},
       case when (g.options ->> 'atomic')::boolean then jsonb_build_object('upto', 0, 'least', f.least) end
  from unnest(%(pair_groups)s::bigint[], %(filters)s::text[], %(matching)s::boolean[], %(until)s::bigint[])
       as u (group_id, filter, matching, until)
  join consumer_group g on g.group_id = u.group_id and g.deleted_at is null
  join generation n on n.filter = u.filter and n.generation_id > g.after_generation
   and n.generation_id > %(oldest)s and n.generation_id <= u.until
  join stream s on s.generation_id = n.generation_id
  left join consumed_frontier f on f.group_id = u.group_id and f.space_id = s.space_id
   for key share of n
    on conflict do nothing
returning l.group_id, l.stream_id, l.status"""

_ADDED = """
update consumer_group g set after_generation = u.until
  from unnest(%(groups)s::bigint[], %(until)s::bigint[]) as u (group_id, until)
 where g.group_id = u.group_id"""

# A group far behind gets the oldest generations first, and the next ones as it reads on, since each sync reads all its
# unfinished rows. At least one comes with each sync, so that streams that stand still keep nothing out. Groups that are
# synced together do not count for each other: one that stands still would delay all others.
_UNTIL = f"""
with behind as (
  select g.group_id, g.after_generation,
         (select count(*) from lending l where l.group_id = g.group_id and l.unfinished) as rows
    from consumer_group g where g.group_id = any(%(groups)s::bigint[])
)
select b.group_id, min(m.generation_id) - 1
  from behind b
  cross join lateral (
    select n.generation_id, sum(s.streams) over (order by n.generation_id) - s.streams as before,
           row_number() over (order by n.generation_id) as number
      from generation n,
           lateral (select count(*) as streams from stream s where s.generation_id = n.generation_id) s
     where n.generation_id > b.after_generation and n.generation_id between %(oldest)s and %(newest)s) m
 where b.rows + m.before >= {PAGE} and m.number > 1
 group by b.group_id"""

_UNTIDY = f"""
select {ROW} from lending l join stream s using (stream_id) join generation n using (generation_id)
 where l.group_id = any(%(groups)s::bigint[]) and l.unfinished and l.status in ('free', 'held')
   and (greatest(l.position, (l.consumed ->> 'upto')::bigint, (l.in_doubt ->> 'end')::bigint) > s.head
        or s.state = 'closed' and (n.state = 'gone' or (l.position = s.head and l.status = 'free'))){BEHIND_PAGE}
   for no key update of l skip locked"""

_CLOSED = f"""
select {ROW}, {FACTS} from lending l join stream s using (stream_id) join generation n using (generation_id)
 where l.group_id = any(%(groups)s::bigint[]) and l.unfinished and s.state = 'closed'{BEHIND_PAGE}"""

_TOUCHED = f"""
select {ROW}, {FACTS}
  from unnest(%(groups)s::bigint[], %(streams)s::bigint[]) as u (group_id, stream_id)
  join lending l using (group_id, stream_id) join stream s using (stream_id) join generation n using (generation_id)
 where l.status = 'finished' or s.state <> 'closed'"""


SyncResult: TypeAlias = tuple[tuple[Lending, ...], tuple[GroupFrontier, ...], GroupDesiredState | None]
"""Rows to look at, how far an atomic group has come, and the group's desired state (None: it is deleted)."""

NOTHING: SyncResult = (), (), None


class _SyncedGroup(Struct, frozen=True):
    group_id: int
    filter: str
    is_atomic: bool
    desired_state: Mapping[str, Any]
    after_generation: int


def sync_streams(
    connection: Connection, terms: Mapping[int, int], on_data_loss: Mapping[int, OnDataLoss], buffer: LendingWriteBatch
) -> dict[int, SyncResult]:
    """Sync the streams of the groups {group_id: term}, whose leadership is locked; return the result for each
    leader."""
    groups = _read_groups(connection, terms)
    atomic = {group.group_id: terms[group.group_id] for group in groups if group.is_atomic}
    spaces = {}
    if atomic:
        oldest = min(group.after_generation for group in groups if group.is_atomic)
        spaces = consumed_epoch_frontiers.read_space_frontiers(connection, atomic, oldest, buffer.now_us)
    added = _add_streams(connection, groups, buffer.now_us)
    touched = added | _tidy_up(connection, terms, on_data_loss, buffer)
    epochs = consumed_epoch_frontiers.advance_frontiers(connection, atomic, spaces, buffer) if atomic else {}
    lendings = _read_report(connection, terms, touched, buffer.now_us)
    desired = {group.group_id: GroupDesiredState.from_json(group.desired_state) for group in groups}
    return {
        group_id: (lendings.get(group_id, ()), epochs.get(group_id, ()), desired.get(group_id)) for group_id in terms
    }


def _read_report(
    connection: Connection, terms: Mapping[int, int], touched: set[Key], now_us: int
) -> dict[int, tuple[Lending, ...]]:
    records: list[Any] = []
    if touched:
        keys = {"groups": [group for group, _ in touched], "streams": [stream for _, stream in touched]}
        records = connection.execute(_TOUCHED, keys).fetchall()
    records += lending_statements.read_pages(connection, _CLOSED, {"groups": list(terms)})
    latest = {record[:2]: record for record in records}  # one that was closed meanwhile is in both
    rows = list(lending_statements.read_rows_with_facts(latest[key] for key in sorted(latest)))
    ancestors = lending_statements.read_unfinished_ancestors(connection, (row for row, _ in rows))
    report: dict[int, list[Lending]] = {}
    for row, stream in rows:
        parents = ancestors.get((row.group_id, row.stream_id), ())
        report.setdefault(row.group_id, []).append(to_lending(row, stream, now_us, parents))
    return {group_id: tuple(lendings) for group_id, lendings in report.items()}


def add_streams(
    connection: Connection, group_ids: Sequence[int], now_us: int | None, *, adds_all: bool = True
) -> set[Key]:
    """Insert the rows that these groups do not have yet, or (not `adds_all`) those that a sync would; return the keys
    of those with something to read."""
    return _add_streams(connection, _read_groups(connection, group_ids), now_us, adds_all=adds_all)


def _read_groups(connection: Connection, group_ids: Iterable[int]) -> list[_SyncedGroup]:
    return [_SyncedGroup(*row) for row in connection.execute(_FILTERS, {"groups": list(group_ids)}).fetchall()]


def _add_streams(
    connection: Connection, groups: list[_SyncedGroup], now_us: int | None, *, adds_all: bool = False
) -> set[Key]:
    """Insert missing rows: of some streams, oldest first, or of all (`adds_all`). An atomic group has all, as an epoch
    may have messages in any. Return the keys of those that are free."""
    generations = read_generation_filters(connection)
    groups = [group for group in groups if group.after_generation < generations.newest_generation_id]
    if not groups:
        return set()
    oldest, newest = min(group.after_generation for group in groups), generations.newest_generation_id
    until = {group.group_id: newest for group in groups}
    if paged := [group.group_id for group in groups if not (adds_all or group.is_atomic)]:
        behind = {"groups": paged, "oldest": oldest, "newest": newest}
        until |= connection.execute(_UNTIL, behind).fetchall()
    pairs = to_pairs({group.group_id: generations.matching(TopicFilter(group.filter)) for group in groups})
    pairs["until"] = [until[group] for group in pairs["pair_groups"]]
    added = connection.execute(_ADD, {**pairs, "oldest": oldest, "now_us": now_us}).fetchall()
    connection.execute(_ADDED, {"groups": list(until), "until": list(until.values())})
    if added:
        group_lifecycle.set_revoked_at(connection, [group.group_id for group in groups], now_us)
    atomic = {group.group_id for group in groups if group.is_atomic}
    free_keys = {(group, stream) for group, stream, status in added if status == LendingStatus.FREE}
    if keys := [key for key in free_keys if key[0] in atomic]:
        consumed_epoch_frontiers.add_spaces(connection, keys, now_us)
    return free_keys


def _tidy_up(
    connection: Connection, terms: Mapping[int, int], on_data_loss: Mapping[int, OnDataLoss], buffer: LendingWriteBatch
) -> set[Key]:
    """Finish or block rows of streams that are closed, or end before the row's position; return the keys of those that
    changed."""
    untidy = list(
        lending_statements.read_rows(lending_statements.read_pages(connection, _UNTIDY, {"groups": list(terms)}))
    )
    if not untidy:
        return set()
    facts = lending_statements.read_facts(lending_statements.query_facts(connection, (row.stream_id for row in untidy)))
    touched = set()
    for row in untidy:
        transition = close_out(row, facts[row.stream_id], buffer.now_us, on_data_loss[row.group_id])
        if transition:
            buffer.add(row, transition, terms[row.group_id])
            touched.add((row.group_id, row.stream_id))
    buffer.flush(connection)
    return touched
