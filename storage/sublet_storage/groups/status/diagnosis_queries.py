"""Reads the facts about streams that stand still for `diagnosis`, from the database alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import fields
from psycopg.rows import class_row

from sublet_protocol.domain.epoch_frontiers import format_frontier, lower_frontier_from_json
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator import lending_statements
from sublet_storage.groups.model.group_errors import stream_not_found_error
from sublet_storage.groups.model.options import OnDataLoss
from sublet_storage.groups.status.diagnosis import StallDiagnosis, diagnose
from sublet_storage.groups.status.diagnosis_facts import (
    AwaitedEpochs,
    GroupDiagnosisFacts,
    ParentStream,
    StreamDiagnosisFacts,
)
from sublet_storage.groups.status.overview import read_overview, snapshot_transaction
from sublet_storage.groups.status.overview_model import GroupOverview, StoredGroup, StreamView
from sublet_storage.node_directory import list_nodes

# A revoke is in force as long as the grant is that it is about, so the stream's last one counts. For
# `stream_id = X` the planner would drop the order by stream, which one index has alone, and could read all lines.
_MORE = """
select s.stream_id, s.space_id, r.reason as revoke_reason,
       extract(epoch from clock_timestamp() - l.updated_at)::float8 as idle_s,
       case when l.status = 'reserved' then extract(epoch from l.held_until - clock_timestamp())::float8
            end as reserved_s,
       case when l.session is null then extract(epoch from clock_timestamp() - l.held_until)::float8 end as taken_s,
       coalesce(jsonb_typeof(l.consumed -> 'least') = 'array' and not exists (
         select from jsonb_array_elements(l.consumed -> 'least') as first(epoch)
          where not frontier_admits(p.lower_frontier, first.epoch)), false) as is_waiting,
       case when p.dropped_at is not null then p.name end as dropped
  from stream s join space p using (space_id)
  left join lending l on l.group_id = %(group)s and l.stream_id = s.stream_id
  left join lateral (
    select h.grant_id, h.reason from lending_history h
     where h.group_id = l.group_id and h.stream_id between l.stream_id and l.stream_id and h.event = 'revoke'
     order by h.stream_id desc, h.history_id desc limit 1) r on r.grant_id = l.grant_id
 where s.stream_id = any(%(streams)s::bigint[])"""

_FRONTIERS = """
select p.space_id, p.name, p.lower_frontier as least, coalesce(array_agg(c.producer_id order by c.producer_id)
         filter (where c.producer_id is not null), '{}') as holders
  from space p left join capability c on c.space_id = p.space_id and c.expired_at is null and exists (
         select from jsonb_array_elements(c.least) as held(epoch)
           join jsonb_array_elements(p.lower_frontier) as first(epoch) on first.epoch = held.epoch)
 where p.space_id = any(%(spaces)s::bigint[]) group by p.space_id"""


_VIEW_FIELDS = tuple(field.name for field in fields(StreamView))


class StreamDiagnosis(Struct, frozen=True):
    """The diagnosis of one stream."""

    stream: StreamView
    diagnosis: StallDiagnosis


class _StreamDetails(Struct, frozen=True):
    stream_id: int
    space_id: int
    revoke_reason: str | None
    idle_s: float | None
    reserved_s: float | None
    taken_s: float | None
    is_waiting: bool
    dropped: str | None


class _Space(Struct, frozen=True):
    space_id: int
    name: str
    least: list[list[int]] | None
    holders: list[str]


def diagnose_group(
    connection: Connection, subscription: Subscription, stream_id: int | None = None
) -> tuple[StoredGroup, tuple[StreamDiagnosis, ...]]:
    """Return the group, and a reason for each of its streams, or for this one. Raise `NotFound`."""
    with snapshot_transaction(connection):
        overview = read_overview(connection, subscription)
        group = _build_group_facts(connection, overview)
        streams = [stream for stream in overview.streams if stream_id in (None, stream.stream_id)]
        if stream_id is not None and not streams:
            raise stream_not_found_error(subscription, stream_id)
        states = _read_stream_facts(connection, overview, streams)
    answers = (StreamDiagnosis(stream, diagnose(group, state)) for stream, state in zip(streams, states, strict=True))
    return overview.group, tuple(answers)


def _build_group_facts(connection: Connection, overview: GroupOverview) -> GroupDiagnosisFacts:
    leader, live = overview.leader, [each for each in list_nodes(connection) if each.remaining_s > 0]
    draining = tuple(each.node.name for each in live if each.is_draining)
    return GroupDiagnosisFacts(
        subscription=overview.group.subscription,
        paused=overview.group.desired_state.pause_reason,
        leader=leader.node if leader and overview.has_leader else None,
        last_leader=leader.node if leader else None,
        nodes=len(live) - len(draining),
        draining=draining,
        held=overview.statuses.get("held", 0),
        may_skip_lost_data=overview.group.options.on_data_loss is OnDataLoss.SKIP,
        is_atomic=overview.group.options.atomic,
    )


def _read_stream_facts(
    connection: Connection, overview: GroupOverview, streams: Sequence[StreamView]
) -> list[StreamDiagnosisFacts]:
    parameters = {"group": overview.group.group_id, "streams": [stream.stream_id for stream in streams]}
    with connection.cursor(row_factory=class_row(_StreamDetails)) as cursor:
        details = {row.stream_id: row for row in cursor.execute(_MORE, parameters)}
    spaces = {row.space_id for row in details.values() if row.is_waiting}
    with connection.cursor(row_factory=class_row(_Space)) as cursor:
        frontiers = {
            row.space_id: _decode_frontier(row) for row in cursor.execute(_FRONTIERS, {"spaces": list(spaces)})
        }
    parent_streams = {
        row.stream_id: ParentStream(row.stream_id, row.status, row.position, row.head) for row in overview.streams
    }
    keys = [(stream.group_id, stream.stream_id) for stream in streams if stream.status != "finished"]
    ancestors = lending_statements.read_ancestor_pages(connection, keys)
    parents = {
        stream_id: tuple(parent_streams[ancestor_id] for ancestor_id in ancestor_ids)
        for (_, stream_id), ancestor_ids in ancestors.items()
    }
    return [
        _build_stream_facts(stream, details[stream.stream_id], frontiers, parents.get(stream.stream_id, ()))
        for stream in streams
    ]


def _decode_frontier(space: _Space) -> AwaitedEpochs:
    frontier = lower_frontier_from_json(space.least)
    return AwaitedEpochs(space.name, "none" if frontier is None else format_frontier(frontier), tuple(space.holders))


def _build_stream_facts(
    stream: StreamView,
    details: _StreamDetails,
    frontiers: Mapping[int, AwaitedEpochs],
    parents: tuple[ParentStream, ...],
) -> StreamDiagnosisFacts:
    reserved_s = stream.reserved_s if details.reserved_s is None else details.reserved_s
    return StreamDiagnosisFacts(
        **{name: getattr(stream, name) for name in _VIEW_FIELDS} | {"reserved_s": reserved_s},
        idle_s=details.idle_s,
        taken_s=details.taken_s,
        revoke_reason=details.revoke_reason,
        parents=parents,
        waits_for=frontiers[details.space_id] if details.is_waiting else None,
        dropped_space=details.dropped,
    )
