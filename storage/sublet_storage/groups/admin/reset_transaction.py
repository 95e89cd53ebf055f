"""Sets new positions of a group's retained streams, in one transaction that ends its leader's term.

No generation begins or is declared gone in that transaction: what is retained at its beginning is at its end, and from
then on the group holds it back, if it is one that does.

No stream may be granted meanwhile: a group is paused first, so that its members give up what they have and no message
is delivered under an old position afterwards. Every row has a new grant id after it, and the next leader loads the rows
anew: streams that were consumed may be granted again, and their descendants then wait for them once more. Of those,
what is granted in a reset of single streams is taken back in the same transaction, and stays where it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from msgspec import Struct
from psycopg.rows import class_row

from sublet_protocol.domain.epoch_frontiers import check_epoch
from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_storage.db.bounded_connection import check_timeline
from sublet_storage.db.clock import NOW, format_microseconds
from sublet_storage.db.connect import prune_to
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator import consumed_epoch_frontiers, group_lifecycle, leadership, lending_statements
from sublet_storage.groups.coordinator.lending_write_batch import LendingWriteBatch
from sublet_storage.groups.coordinator.stream_sync import add_streams
from sublet_storage.groups.model.group_errors import group_not_found_error, row_locked_error, stream_not_found_error
from sublet_storage.groups.model.lending_reset import apply_reset
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import Group, LendingStatus, StartingPosition
from sublet_storage.spaces.space_queries import MAY_MATCH, STARTING_OFFSET

_OF_GROUP = f"""
  from stream s join generation n using (generation_id)
  left join lending l on l.group_id = %(group)s and l.stream_id = s.stream_id
  cross join lateral (
    select g.after_generation < n.generation_id as is_later from consumer_group g where g.group_id = %(group)s) as came
  cross join lateral (select coalesce(l.position, case when is_later then 0 end) as position) as now
  left join unnest(%(given_streams)s::bigint[], %(given_offsets)s::bigint[]) as g (stream_id, place)
         on g.stream_id = s.stream_id
 where (l.stream_id is not null or ((n.state <> 'gone' or is_later) and {MAY_MATCH}))"""
"""Of the streams that the group may have, and of those of its rows that lie in a shadow.

Where the group is in a stream that it has no row of: at 0, if the stream came since; one that ended before the group
began is none of its own, and what goes from where the group is (current, shift) does not concern it. What retention has
taken of a stream that came since is passed by, whether a leader has noticed the stream or not."""

_GENERATIONS = f"select distinct s.generation_id{_OF_GROUP} and n.state <> 'gone'"

_PLAN = f"""
select s.stream_id, s.state = 'closed' as is_closed, n.state = 'gone' as is_gone, l.status, l.position as before,
       s.head, is_later,
       case when %(kind)s = 'epoch' then exists (
         select from block b where b.generation_id = any(%(generations)s::bigint[])
            and b.generation_id = s.generation_id and b.stream_id = s.stream_id and b.epoch_bounds is not null)
         or not check_partition(s.generation_id, s.stream_id) end as has_epochs,
       case when %(kind)s = 'given' then g.place when n.state = 'gone' then s.head else case %(kind)s
         when 'current' then now.position
         when 'shift' then case when now.position is not null
           then least(greatest(now.position::numeric + %(value)s::bigint, 0), s.head)::bigint end
         when 'epoch' then coalesce((
           select b.end_offset - b.count from block b
            where b.generation_id = any(%(generations)s::bigint[]) and b.generation_id = s.generation_id
              and b.stream_id = s.stream_id and exists (
              select from jsonb_array_elements(b.epoch_bounds -> 'greatest') as e(epoch)
               where epoch_at_or_before(%(epoch)s::jsonb, e.epoch))
            order by b.end_offset limit 1), s.head)
         else {STARTING_OFFSET.format(policy="kind", value="value")} end end as after{_OF_GROUP}
 order by s.stream_id"""

# Upwards from what is granted: ids grow from parent to child.
_HELD = """
with recursive up (stream_id, ancestor) as (
  select stream_id, stream_id from lending where group_id = %(group)s and status = 'held'
  union
  select up.stream_id, p.ancestor
    from up join stream s on s.stream_id = up.ancestor cross join lateral unnest(s.parents) as p (ancestor)
   where p.ancestor >= %(oldest)s::bigint
)
select count(distinct stream_id) from up where %(oldest)s::bigint is null or ancestor = any(%(streams)s::bigint[])"""

_GRANTED = "select stream_id from lending where group_id = %(group)s and status in ('held', 'reserved')"

_NO_LEADER = f"select add_leadership(%(group)s, {format_microseconds(NOW)})"
"""Ensures that there is a row to lock, for which a claim of the group then waits."""

_ADD = f"""
insert into lending (group_id, stream_id, position, consumed, updated_at)
select %(group)s, u.stream_id, 0, %(consumed)s::jsonb, {NOW} from unnest(%(streams)s::bigint[]) as u (stream_id)
    on conflict do nothing"""

_NUMBERS = """
select distinct p.epoch_dimensions from space p join stream s using (space_id)
 where s.stream_id = any(%(streams)s::bigint[])"""

_EXISTS = "select 1 from consumer_group where group_id = %(group)s and deleted_at is null for share"


class PositionChange(Struct, frozen=True):
    """A stream with its position `before` (None: the group had not had it) and after. `head` is its end.

    `redelivered_count`: messages that are delivered once more. `skipped_count`: messages that would have been delivered
    and are not, also of streams opened after the group. `has_epochs`: for a reset to an epoch, whether any of its
    messages is in one.
    """

    stream_id: int
    status: str | None
    before: int | None
    after: int
    head: int
    redelivered_count: int
    skipped_count: int
    has_epochs: bool | None


class _StreamPlan(Struct, frozen=True):
    """A stream that the group may have. `after`: None where the target does not concern it."""

    stream_id: int
    is_closed: bool
    is_gone: bool
    status: str | None
    before: int | None
    head: int
    is_later: bool
    has_epochs: bool | None
    after: int | None

    @property
    def is_shadowed(self) -> bool:
        """Return whether it lies, or lay while it was open, in the shadow of another space, and has nothing for the
        group: no other is finished before its end."""
        return self.status == LendingStatus.FINISHED and (not self.is_closed or (self.before or 0) < self.head)

    @property
    def is_passed(self) -> bool:
        """Return whether it ended before the group began, or is empty, and is to stay where it is. One that came later
        and has ended since is not: it would be read from its beginning once the group has a leader."""
        would_be_given = self.is_later and self.head > 0
        return self.status is None and self.is_closed and self.after == self.head and not would_be_given

    def move(self, position: int) -> PositionChange:
        delivery_start = (0 if self.is_later else position) if self.before is None else self.before
        redelivered_count, skipped_count = max((self.before or 0) - position, 0), max(position - delivery_start, 0)
        return PositionChange(
            self.stream_id,
            self.status,
            self.before,
            position,
            self.head,
            redelivered_count,
            skipped_count,
            self.has_epochs,
        )


def count_held(connection: Connection, group: Group, streams: Collection[int]) -> int:
    """Return how many streams are granted: of these and those that follow them, or of all if there are none."""
    parameters = {"group": group.group_id, "streams": list(streams), "oldest": min(streams, default=None)}
    (row,) = connection.execute(_HELD, parameters).fetchall()
    return int(row[0])


def plan_reset(
    connection: Connection, group: Group, target: ResetTarget, streams: Collection[int] = ()
) -> tuple[PositionChange, ...]:
    """Return what a reset would do now, of all streams or of these. Offsets of streams in a shadow are passed by, as
    files have them. Raise `NotFound` for a stream that it does not have, and `PositionBeyondHead` for offsets of
    another timeline of the database."""
    check_timeline(connection, target.timeline, "the file")
    _check_wholeness(group, target, streams)
    parameters = {
        **target.to_parameters(),
        "epoch": json.dumps(target.epoch),
        "group": group.group_id,
        "generations": prune_to([]),
        **group_lifecycle.filters_at_start(connection, group.subscription.filter, StartingPosition.EARLIEST),
    }
    if target.kind == "epoch":
        parameters["generations"] = prune_to(row[0] for row in connection.execute(_GENERATIONS, parameters).fetchall())
    with connection.cursor(row_factory=class_row(_StreamPlan)) as cursor:
        all_rows = cursor.execute(_PLAN, parameters, prepare=False).fetchall()
    rows = [row for row in all_rows if not row.is_shadowed]
    unknown = set(streams) - {row.stream_id for row in rows}
    unknown |= {stream_id for stream_id, _ in target.offsets_by_stream} - {row.stream_id for row in all_rows}
    if unknown:
        raise stream_not_found_error(group.subscription, min(unknown))
    placed = [
        (row.move(row.after), row)
        for row in rows
        if row.after is not None and (not streams or row.stream_id in streams)
    ]
    for move, row in placed:
        _check_in_range(move, row.is_gone)
    _check_numbers(connection, target, [move.stream_id for move, _ in placed])
    return tuple(move for move, row in placed if not row.is_passed)


def _check_in_range(move: PositionChange, is_gone: bool) -> None:
    if move.after > move.head:
        raise UsageError(
            f"stream {move.stream_id}: offset {move.after} is beyond its end, {move.head}. Give one up to that."
        )
    if is_gone and move.after < move.head:
        raise UsageError(
            f"stream {move.stream_id}: retention has taken offset {move.after}. Leave the stream out, or reset by time."
        )


def _check_wholeness(group: Group, target: ResetTarget, streams: Collection[int]) -> None:
    """Raise `UsageError` if the target is not for all streams of an atomic group, since all their starting positions
    decide which epochs it gets."""
    if group.options.atomic and (streams or target.kind in ("current", "shift", "given")):
        raise UsageError(
            f"{group.subscription} is atomic: single streams, a shift, the current positions or those of a file would "
            "leave parts of epochs out. Reset all of it, to the earliest, the latest, a time, an offset or an epoch."
        )


def _check_numbers(connection: Connection, target: ResetTarget, stream_ids: Sequence[int]) -> None:
    if target.kind != "epoch":
        return
    for (numbers,) in connection.execute(_NUMBERS, {"streams": list(stream_ids)}).fetchall():
        check_epoch(target.epoch, numbers)


def execute_reset(
    connection: Connection,
    group: Group,
    target: ResetTarget,
    streams: Collection[int] = (),
    *,
    reason: str,
    force: bool = False,
    now_us: int | None = None,
) -> tuple[PositionChange, ...]:
    """Reset the group in the open transaction; return what was done. `now_us`: the time, None for the database's.
    Raise `Conflict` while streams are granted, or reserved because something in them is in doubt, unless with `force`:
    then these grants end without final progress."""
    connection.execute(_NO_LEADER, {"group": group.group_id, "now_us": now_us})
    leader = leadership.fetch_locked(leadership.lock(connection, (group.group_id,), now_us))[group.group_id]
    group_lifecycle.lock_generations(connection)
    if connection.execute(_EXISTS, {"group": group.group_id}).fetchone() is None:
        raise group_not_found_error(group.subscription)
    moves = plan_reset(connection, group, target, streams)
    _lock_rows(connection, group, [move.stream_id for move in moves if move.status is not None], force)
    moves = plan_reset(connection, group, target, streams)  # until it was locked, a holder's transaction moved a row
    new_streams = [move.stream_id for move in moves if move.status is None]
    consumed = json.dumps({"upto": 0, "least": None}) if group.options.atomic else None
    connection.execute(_ADD, {"group": group.group_id, "streams": new_streams, "consumed": consumed, "now_us": now_us})
    add_streams(connection, [group.group_id], leader.now_us)  # those that others descend from, too
    group_lifecycle.set_revoked_at(connection, [group.group_id], now_us)
    buffer = LendingWriteBatch(leader.now_us)
    rows = _lock_rows(connection, group, [move.stream_id for move in moves], force)
    facts = lending_statements.read_facts(lending_statements.query_facts(connection, rows))
    for move in moves:
        row = rows[move.stream_id]
        row_reason = f"{reason}; was at {row.position}" if move.status is not None else reason
        buffer.add(row, apply_reset(row, facts[move.stream_id], move.after, row_reason, buffer.now_us), leader.term)
    buffer.flush(connection)
    _revoke_waiting_streams(connection, group, buffer, leader.term, reason=reason, force=force)
    if group.options.atomic:
        _begin_epochs(connection, group, target)
    leadership.expire(connection, (group.group_id,))
    return moves


def _revoke_waiting_streams(
    connection: Connection, group: Group, buffer: LendingWriteBatch, term: int, *, reason: str, force: bool
) -> None:
    """Revoke granted streams that now come after one that is unfinished again: they wait for it."""
    granted = connection.execute(_GRANTED, {"group": group.group_id}).fetchall()
    ancestors = lending_statements.read_ancestors(
        lending_statements.query_ancestors(connection, [(group.group_id, stream_id) for (stream_id,) in granted])
    )
    rows = _lock_rows(connection, group, [stream_id for _, stream_id in ancestors], force)
    facts = lending_statements.read_facts(lending_statements.query_facts(connection, rows))
    for stream_id, row in sorted(rows.items()):
        waited_for = ", ".join(map(str, ancestors[group.group_id, stream_id]))
        row_reason = f"{reason}; waits for {waited_for}, which come before it; was at {row.position}"
        buffer.add(row, apply_reset(row, facts[stream_id], row.position, row_reason, buffer.now_us), term)
    buffer.flush(connection)


def _lock_rows(connection: Connection, group: Group, streams: Collection[int], force: bool) -> dict[int, LendingRow]:
    """Return the rows of these streams, locked."""
    keys = [(group.group_id, stream_id) for stream_id in streams]
    rows = {
        row.stream_id: row
        for row in lending_statements.read_rows(lending_statements.lock_keyless_rows(connection, keys))
    }
    if locked := sorted(set(streams) - rows.keys()):
        locked_rows = f"{len(locked)} of its streams, the first is {locked[0]}, have"
        raise row_locked_error(
            group.subscription, locked_rows, lending_statements.find_locker(connection, group.group_id)
        )
    granted = sorted(
        row.stream_id for row in rows.values() if row.status in (LendingStatus.HELD, LendingStatus.RESERVED)
    )
    if granted and not force:
        raise Conflict(
            f"{group.subscription}: {len(granted)} of its streams are granted, or reserved for a session that left "
            "something in "
            f"doubt; the first is {granted[0]}. Wait until its members have handed them over, or end it by --force: "
            "then "
            "messages that they have in hand may be seen twice."
        )
    return rows


def _begin_epochs(connection: Connection, group: Group, target: ResetTarget) -> None:
    """Make an atomic group read entire epochs from its new positions on."""
    consumed_epoch_frontiers.delete_frontiers(connection, group.group_id)
    consumed_epoch_frontiers.initialize_frontiers(
        connection,
        group.group_id,
        group.subscription.filter,
        target.epoch_start,
        None,
        target.epoch if target.kind == "epoch" else None,
    )
