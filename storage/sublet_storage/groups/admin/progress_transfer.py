"""Exports a group's progress as a value, and creates groups that begin with it.

It is of one instant: positions, and in an atomic group what is consumed in entire epochs. Streams that are held, in
doubt or unreadable are free in the new group, at the durable position.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct, structs
from psycopg.rows import class_row

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier, lower_frontier_from_json
from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.bounded_connection import check_timeline, get_timeline
from sublet_storage.db.clock import NOW, format_microseconds
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator import consumed_epoch_frontiers, group_lifecycle, lending_statements
from sublet_storage.groups.model.group_errors import group_not_found_error
from sublet_storage.groups.model.history_record_builder import reason_with_user
from sublet_storage.groups.model.options import GroupOptions, OnDataLoss
from sublet_storage.groups.model.records import CREATE, Group, HistoryRecord, LendingStatus
from sublet_storage.groups.status.overview import NEW
from sublet_storage.log.deleted_streams import find_deleted_streams
from sublet_storage.spaces.space_queries import read_generation_filters

_TAKE = """
select g.after_generation,
       (select coalesce(jsonb_agg(jsonb_build_object('stream_id', l.stream_id, 'position', l.position,
                 'status', case when l.status = 'free' and s.state = 'closed' and l.position = s.head then 'finished'
                   else l.status end, 'consumed', l.consumed) order by l.stream_id), '[]')
          from lending l join stream s using (stream_id)
         where l.group_id = g.group_id
           and not (l.status = 'finished' and (s.state = 'open' or l.position < s.head))),
       (select coalesce(jsonb_agg(jsonb_build_object('space_id', f.space_id, 'least', f.least)
                 order by f.space_id), '[]')
          from consumed_frontier f where f.group_id = g.group_id)
  from consumer_group g where g.group_id = %(group)s and g.deleted_at is null"""
"""In one statement, and so of one instant. What is read to its end is finished, whether or not a leader has seen that:
its rows may be deleted. Streams in a shadow, which alone are finished before their ends, are left out: none is read."""

_KNOWN = """
select s.stream_id, s.head, n.filter from stream s join generation n using (generation_id)
 where s.stream_id = any(%(streams)s::bigint[])"""

_LAST = "select coalesce(max(generation_id), 0) from generation"

_GONE = """
select u.stream_id, u.position
  from unnest(%(streams)s::bigint[], %(positions)s::bigint[]) as u (stream_id, position)
  join stream s using (stream_id) join generation n using (generation_id)
 where n.state = 'gone' and u.position < s.head order by u.stream_id"""

_LOST = """
select filter, generation_id from lost_generation where generation_id > %(after)s
union all
select n.filter, n.generation_id from generation n
 where n.state = 'gone' and n.generation_id > %(after)s and exists (
   select from stream s
    where s.generation_id = n.generation_id and s.head > 0 and s.stream_id <> all(%(streams)s::bigint[]))
 order by filter, generation_id"""
"""Of generations that are deleted, and of those that are gone and not deleted yet."""

_LATER = """
select stream_id from stream
 where stream_id = any(%(streams)s::bigint[]) and (generation_id > %(after)s or (state = 'closed' and head = 0))"""
"""Streams of which nothing is consumed by who has not moved: they came later, or ended empty, as in a shadow."""

_DELETED_LATER = "select filter, stream_id from lost_generation where generation_id > %(after)s"

_SPACES = "select space_id from space where space_id = any(%(spaces)s::bigint[])"

_LEND = f"""
insert into lending (group_id, stream_id, status, position, consumed, updated_at)
select %(group)s, u.stream_id, u.status, u.position, u.consumed, {NOW}
  from unnest(%(streams)s::bigint[], %(statuses)s::text[], %(positions)s::bigint[], %(consumed)s::jsonb[])
       as u (stream_id, status, position, consumed)"""

_NOW = f"select {format_microseconds(NOW)}"


class ExportedPosition(Struct, frozen=True):
    """The position of a group in a stream; `consumed` is set in an atomic group."""

    stream_id: int
    position: int
    status: LendingStatus
    consumed: ConsumedFrontier | None = None

    @property
    def to_initial(self) -> ExportedPosition:
        """Return it as a new group begins with it."""
        is_over = self.status is LendingStatus.FINISHED
        return self if is_over else structs.replace(self, status=LendingStatus.FREE)

    @property
    def is_unread(self) -> bool:
        """Return whether nothing of the stream is consumed."""
        return self.position == 0 and (self.consumed is None or self.consumed.upto == 0)


@dataclass(frozen=True, slots=True)
class ExportedProgress:
    """Positions in the order of their streams, and {space_id: the least epochs that are not consumed} of an atomic
    group.

    Streams of generations up to `after_generation` without a position are not the group's; later ones are read
    completely. `timeline`: of the database at that time, where it is known.
    """

    after_generation: int
    positions: tuple[ExportedPosition, ...]
    frontiers: tuple[tuple[int, LowerFrontier | None], ...] = ()
    timeline: str | None = field(default=None, compare=False)

    @property
    def to_initial(self) -> ExportedProgress:
        """Return it as a new group begins with it."""
        return replace(self, positions=tuple(row.to_initial for row in self.positions))


class _Stream(Struct, frozen=True):
    stream_id: int
    head: int
    filter: str


def read_progress(connection: Connection, group: Group) -> ExportedProgress:
    """Return where the group is. Raise `NotFound` where it was deleted meanwhile."""
    row = connection.execute(_TAKE, {"group": group.group_id}).fetchone()
    if row is None:
        raise group_not_found_error(group.subscription)
    after_generation, lendings, frontiers = row
    return ExportedProgress(
        after_generation,
        tuple(map(_position_from_json, lendings)),
        tuple(map(_frontier_from_json, frontiers)),
        get_timeline(connection),
    )


def list_moved_streams(connection: Connection, group: Group, progress: ExportedProgress) -> list[int]:
    """Return in which streams the group is elsewhere than the progress says, in their order. Raise `NotFound` where it
    was deleted meanwhile.

    Not those that came later and are unread, nor those of the progress that were finished and are deleted; but those
    that came later and are deleted, of which one is returned for all.
    """
    rows = _without_status(read_progress(connection, group)) ^ _without_status(progress)
    streams = [row.stream_id for row in rows]
    after = {"after": progress.after_generation}
    later = {stream_id for (stream_id,) in connection.execute(_LATER, {**after, "streams": streams}).fetchall()}
    finished = {row.stream_id for row in progress.positions if row.status is LendingStatus.FINISHED}
    deleted = find_deleted_streams(connection, streams)
    consumed = {stream_id for stream_id, had_messages in deleted.items() if not had_messages or stream_id in finished}
    moved = {row.stream_id for row in rows if not (row.is_unread and row.stream_id in later)} - consumed
    for filter, stream_id in connection.execute(_DELETED_LATER, after).fetchall():
        if TopicFilter(filter).intersects(group.subscription.filter):
            moved.add(stream_id)
    return sorted(moved)


def _without_status(progress: ExportedProgress) -> set[ExportedPosition]:
    """Return the positions alike where they are free and where they are finished, as they are once a stream that is
    consumed is closed."""
    return {structs.replace(row, status=LendingStatus.FREE) for row in progress.positions}


def clone(
    connection: Connection, source: Subscription, subscription: Subscription, user: str
) -> tuple[Group, ExportedProgress]:
    """Return a new group that goes on from where another is, in the transaction that is open. Raise `NotFound`, and
    what `begin` does."""
    group_lifecycle.lock_generations(connection)  # what is taken must be there still when the new group is
    source_group = group_lifecycle.get_live(connection, source)
    progress = read_progress(connection, source_group)
    reason = reason_with_user(f"a clone of {source}, group {source_group.group_id}", user)
    options = source_group.options
    return create_from_progress(connection, subscription, options, progress, reason, accepts_loss=True), progress


def create_from_progress(
    connection: Connection,
    subscription: Subscription,
    options: GroupOptions,
    progress: ExportedProgress,
    reason: str,
    *,
    accepts_loss: bool = False,
) -> Group:
    """Return a new group that goes on from there, in the transaction that is open. Raise `Conflict` where there is one
    by that name, and, unless it skips what is gone or `accepts_loss`, where messages that it was to get are gone;
    `UsageError` where the progress is none of this database's, and `PositionBeyondHead` where it is of another
    timeline."""
    check_timeline(connection, progress.timeline, "the file")
    group_id = group_lifecycle.insert(connection, subscription, options, None, progress.after_generation)
    if group_id is None:
        raise Conflict(
            f"{subscription} exists already, and has its own progress. To move it, `sublet groups reset`; to lose it, "
            f"`sublet groups delete {shlex.quote(str(subscription))}` first."
        )
    absent = find_deleted_streams(connection, [row.stream_id for row in progress.positions])
    existing = replace(progress, positions=tuple(row for row in progress.positions if row.stream_id not in absent))
    _check(connection, subscription, options, existing)
    if options.on_data_loss is OnDataLoss.FAIL and not accepts_loss:
        _check_nothing_lost(connection, subscription, progress, absent, is_atomic=options.atomic)
    _lend(connection, group_id, existing.positions)
    group_lifecycle.set_revoked_at(connection, [group_id], None)
    if options.atomic:
        consumed_epoch_frontiers.insert_exported_frontiers(
            connection, group_id, subscription.filter, dict(progress.frontiers)
        )
    ((now_us,),) = connection.execute(_NOW, {"now_us": None}).fetchall()
    record = HistoryRecord(now_us, group_id, 0, CREATE, reason, 0, None, None, 0, 0, is_forced=False)
    lending_statements.write_history(connection, [record], now_us)
    return Group(group_id, subscription, options)


def _check_nothing_lost(
    connection: Connection,
    subscription: Subscription,
    progress: ExportedProgress,
    absent: dict[int, bool],
    *,
    is_atomic: bool,
) -> None:
    """Raise `Conflict` if messages that the group was to get are gone. `absent`: {deleted stream: whether it had
    messages}."""
    unfinished = [row for row in progress.positions if row.status is not LendingStatus.FINISHED]
    keys = [(row.stream_id, row.position) for row in unfinished]
    lost = [key for key in keys if absent.get(key[0])]
    streams, positions = [stream_id for stream_id, _ in keys], [position for _, position in keys]
    lost += connection.execute(_GONE, {"streams": streams, "positions": positions}).fetchall()
    for stream_id, position in lost:
        data = f"stream {stream_id}: what there was from offset {position} on"
        raise _gone_error(data, subscription, is_atomic=is_atomic)
    parameters = {"after": progress.after_generation, "streams": [row.stream_id for row in progress.positions]}
    for filter, generation_id in connection.execute(_LOST, parameters).fetchall():
        if TopicFilter(filter).intersects(subscription.filter):
            data = f"what spaces of filter {filter} had up to generation {generation_id}"
            raise _gone_error(data, subscription, is_atomic=is_atomic)


def _gone_error(data: str, subscription: Subscription, *, is_atomic: bool) -> Conflict:
    skip = "" if is_atomic else ", give it the option on_data_loss skip,"  # atomic groups refuse that option
    return Conflict(
        f"{data} is gone by retention, and {subscription} has not consumed it by this progress. Take a later one{skip} "
        "or create the group anew with --from earliest."
    )


def _lend(connection: Connection, group_id: int, rows: Sequence[ExportedPosition]) -> None:
    parameters = {
        "group": group_id,
        "streams": [row.stream_id for row in rows],
        "statuses": [row.to_initial.status.value for row in rows],
        "positions": [row.position for row in rows],
        "consumed": [None if row.consumed is None else json.dumps(row.consumed.to_json()) for row in rows],
        "now_us": None,
    }
    connection.execute(_LEND, parameters)


def _check(
    connection: Connection, subscription: Subscription, options: GroupOptions, progress: ExportedProgress
) -> None:
    """Check that it fits: an export of another database, or of another group, must not become rows."""
    filters = {filter.text for filter in read_generation_filters(connection).matching(subscription.filter)}
    with connection.cursor(row_factory=class_row(_Stream)) as cursor:
        stream_ids = [row.stream_id for row in progress.positions]
        known_streams = {stream.stream_id: stream for stream in cursor.execute(_KNOWN, {"streams": stream_ids})}
    for row in progress.positions:
        _check_position(subscription, row, known_streams.get(row.stream_id), filters)
        if (row.consumed is not None) is not options.atomic:
            raise UsageError(
                f"stream {row.stream_id}: what is consumed in whole epochs is there exactly where a group is atomic."
                " Export it again."
            )
    ((last_generation,),) = connection.execute(_LAST).fetchall()
    space_ids = [space_id for space_id, _ in progress.frontiers]
    known_spaces = {row[0] for row in connection.execute(_SPACES, {"spaces": space_ids}).fetchall()}
    if progress.after_generation > last_generation or set(space_ids) - known_spaces:
        raise UsageError(f"{subscription}: its progress is of another database than this one. Export it from this one.")


def _check_position(
    subscription: Subscription, row: ExportedPosition, stream: _Stream | None, filters: set[str]
) -> None:
    if stream is None or stream.filter not in filters:
        raise UsageError(
            f"stream {row.stream_id}: it is none of {subscription} in this database. Export it from this one."
        )
    furthest = row.position if row.consumed is None else max(row.position, row.consumed.upto)
    if furthest > stream.head:
        raise UsageError(
            f"stream {row.stream_id}: offset {furthest} is beyond its end, {stream.head}. Was it of another database,"
            " or of a time that a backup has undone? Take a lower one."
        )


def progress_from_json(document: Any) -> ExportedProgress:
    """Return the progress that `progress_to_json` wrote; streams that are new to the group are left to its leader.
    Raise `TypeError`, `KeyError`, `AttributeError` or `ValueError` for what that never writes."""
    rows = sorted(
        (_position_from_json(stream) for stream in document["streams"] if stream["status"] != NEW),
        key=lambda p: p.stream_id,
    )
    if len({row.stream_id for row in rows}) < len(rows):
        raise ValueError("a stream occurs twice")
    timeline = document.get("timeline")
    if not isinstance(timeline, str | None):
        raise ValueError(f"timeline {timeline!r}")
    return ExportedProgress(
        _check_integer(document["after_generation"]),
        tuple(rows),
        tuple(map(_frontier_from_json, document["epochs"])),
        timeline,
    )


def progress_to_json(progress: ExportedProgress) -> dict[str, Any]:
    """Return the progress as a JSON object, for a file."""
    return {
        "timeline": progress.timeline,
        "after_generation": progress.after_generation,
        "streams": [_position_to_json(row) for row in progress.positions],
        "epochs": [
            {"space_id": space_id, "least": None if frontier is None else frontier.least}
            for space_id, frontier in progress.frontiers
        ],
    }


def _position_to_json(row: ExportedPosition) -> dict[str, Any]:
    shown = {"stream_id": row.stream_id, "position": row.position, "status": row.status.value}
    return shown if row.consumed is None else {**shown, "consumed": row.consumed.to_json()}


def _position_from_json(document: Any) -> ExportedPosition:
    consumed = document.get("consumed")
    return ExportedPosition(
        _check_integer(document["stream_id"]),
        _check_integer(document["position"]),
        LendingStatus(document["status"]),
        None if consumed is None else ConsumedFrontier.from_json(consumed),
    )


def _check_integer(value: Any) -> int:
    """Return the value unchanged; raise if it is no integer."""
    if type(value) is not int or not 0 <= value <= MAX_OFFSET:
        raise ValueError(f"{value!r} is no whole number from 0 to {MAX_OFFSET}")
    return value


def _frontier_from_json(document: Any) -> tuple[int, LowerFrontier | None]:
    return _check_integer(document["space_id"]), lower_frontier_from_json(document["least"])
