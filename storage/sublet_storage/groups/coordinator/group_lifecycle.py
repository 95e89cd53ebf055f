"""Creates, finds and deletes groups.

Whatever creates a generation, or declares one gone, excludes others by a lock on the table `space`. Creating a group
takes that lock shared: so no rollover is half done, the start positions are those of one instant, every generation that
comes later has a larger id than `after_generation`, and retention takes nothing that the group begins with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from sublet_protocol.domain.limits import MAX_GROUPS_PER_MINUTE
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.clock import NOW, format_microseconds
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator import consumed_epoch_frontiers, leadership, lending_statements
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.group_errors import group_not_found_error, too_many_groups_error
from sublet_storage.groups.model.history_record_builder import command_record, deletion_records
from sublet_storage.groups.model.records import Group, GroupDesiredState, GroupOptions, StartingPosition
from sublet_storage.spaces.space_queries import MAY_MATCH, STARTING_OFFSET, read_matching_filters

_COLUMNS = "group_id, kind, name, filter, starting_position, options, desired_state, desired_state_version"

_LIVE = f"""
select {_COLUMNS} from consumer_group
 where kind = %(kind)s and name = %(name)s and filter = %(filter)s and deleted_at is null"""

_FIND = f"""
select {_COLUMNS} from consumer_group where group_id = %(group)s and deleted_at is null"""

_RECENT = f"""
select count(*) from consumer_group
 where created_by = %(principal)s and created_at > {NOW} - interval '1 minute'"""

_CREATE = f"""
insert into consumer_group (kind, name, filter, starting_position, options, after_generation, created_at, created_by)
values (%(kind)s, %(name)s, %(filter)s, %(start)s, %(options)s::jsonb,
        coalesce(%(after)s::bigint, (select max(generation_id) from generation), 0), {NOW}, %(principal)s)
    on conflict (kind, name, filter) where deleted_at is null do nothing returning group_id"""

# An open stream is complete, since retention takes closed generations: each of its offsets can be read.
_BEGIN = f"""
insert into lending (group_id, stream_id, position, updated_at)
select %(group)s, stream_id, position, {NOW} from (
  select s.stream_id, s.state, s.head, {STARTING_OFFSET.format(policy="policy", value="value")} as position
    from stream s join generation n using (generation_id)
   where n.state <> 'gone' and {MAY_MATCH}
  ) as begun
 where not (%(policy)s = 'time' and state = 'closed' and position = head)"""

_STATEMENT = NOW.replace("clock_timestamp", "statement_timestamp")
# No line of a group is younger than its deletion: of one deleted earlier none is read. The time is that of the
# statement: one that changes while it runs is not looked up in an index.
_FORMER = f"""
update lending l set held_until = former.at
  from (select g.group_id, h.stream_id, max(h.at) as at
          from consumer_group g join consumer_group f using (kind, name, filter) join lending_history h
            on h.group_id = f.group_id and h.event in ('delete', 'reset', 'block') and h.at > {NOW} - interval '1 hour'
         where g.group_id = any(%(groups)s::bigint[]) and f.deleted_at > {_STATEMENT} - interval '1 hour'
           and (h.event = 'delete' or h.forced)
         group by g.group_id, h.stream_id) as former
 where l.group_id = former.group_id and l.stream_id = former.stream_id and l.grant_id = 0 and l.held_until is null"""

_LOCK_DESIRED_STATE = f"""
select g.desired_state, g.desired_state_version, coalesce(l.term, 0), {format_microseconds(NOW)}
  from consumer_group g left join leadership l on l.leadership_id = g.group_id
 where g.group_id = %(group)s and g.deleted_at is null for no key update of g"""

_UPDATE_DESIRED_STATE = """
update consumer_group set desired_state = %(desired_state)s::jsonb, desired_state_version = desired_state_version + 1
 where group_id = %(group)s"""

_DROP = f"""
with locked as materialized (
  select {lending_statements.KEYLESS_ROW} from lending l where l.group_id = %(group)s order by l.stream_id for update
), dropped as (
  delete from lending l using locked where l.group_id = locked.group_id and l.stream_id = locked.stream_id)
select * from locked where status = 'held'"""

_DELETE = f"update consumer_group set deleted_at = {NOW} where group_id = %(group)s and deleted_at is null returning 1"


def find_live(connection: Connection, subscription: Subscription) -> Group | None:
    """Return the group of that subscription that is not deleted."""
    return _decode_group(connection.execute(_LIVE, _to_parameters(subscription)).fetchone())


def get_live(connection: Connection, subscription: Subscription) -> Group:
    """Return the same, where there must be one. Raise `NotFound`."""
    group = find_live(connection, subscription)
    if group is None:
        raise group_not_found_error(subscription)
    return group


def find_by_id(connection: Connection, group_id: int) -> Group | None:
    """Return the group of that id unless it is deleted."""
    return _decode_group(connection.execute(_FIND, {"group": group_id}).fetchone())


def create(
    connection: Connection,
    subscription: Subscription,
    options: GroupOptions,
    now_us: int | None,
    principal: str | None = None,
) -> Group | None:
    """Return the new group with its rows; None if another process was faster. Raise `TooManyGroups`."""
    if principal is not None:
        recent = connection.execute(_RECENT, {"principal": principal, "now_us": now_us}).fetchone()
        if recent is not None and recent[0] >= MAX_GROUPS_PER_MINUTE:
            raise too_many_groups_error(principal)
    group_id = insert(connection, subscription, options, now_us, principal=principal)
    if group_id is None:
        return None
    start = options.starting_position
    parameters = {"group": group_id, "policy": start.policy, "value": start.value, "now_us": now_us}
    connection.execute(_BEGIN, {**parameters, **filters_at_start(connection, subscription.filter, start)})
    set_revoked_at(connection, [group_id], now_us)
    if options.atomic:
        consumed_epoch_frontiers.initialize_frontiers(connection, group_id, subscription.filter, start, now_us)
    return Group(group_id, subscription, options)


def set_revoked_at(connection: Connection, group_ids: Sequence[int], now_us: int | None) -> None:
    """Set when the new rows of these groups were taken from members of former groups of that name, which may still use
    them: a leader grants them once those may begin no more calls."""
    connection.execute(_FORMER, {"groups": list(group_ids), "now_us": now_us})


def lock_generations(connection: Connection) -> None:
    """Prevent generations from being opened or declared gone until the transaction ends. Only the lock of a leadership
    is acquired before this one."""
    connection.execute("lock table space in share mode")


def insert(
    connection: Connection,
    subscription: Subscription,
    options: GroupOptions,
    now_us: int | None,
    after_generation: int | None = None,
    principal: str | None = None,
) -> int | None:
    """Return the id of a new group without rows, while no generation begins; None if there is one. `after_generation`:
    the last generation of which it has all its rows, by default the newest. `principal`: for whom it is created."""
    lock_generations(connection)
    parameters = {
        **_to_parameters(subscription),
        "start": str(options.starting_position),
        "options": json.dumps(options.to_row()),
        "after": after_generation,
        "principal": principal,
        "now_us": now_us,
    }
    created = connection.execute(_CREATE, parameters).fetchone()
    return None if created is None else int(created[0])


def delete(connection: Connection, group_id: int, now_us: int | None, user: str = "") -> bool:
    """Mark it deleted, drop its rows and end its leader's lease; return False if another process was faster.

    The history records the end of each grant, from the row as it was dropped; no others are read. A group that
    never had a leader has no grants.
    """
    locking = leadership.lock(connection, (group_id,), now_us)
    deleted = connection.execute(_DELETE, {"group": group_id, "now_us": now_us})
    dropping = connection.execute(_DROP, {"group": group_id})
    consumed_epoch_frontiers.delete_frontiers(connection, group_id)
    leadership.expire(connection, (group_id,))
    leader = leadership.fetch_locked(locking).get(group_id)
    if leader is not None:
        records = deletion_records(lending_statements.read_rows(dropping), leader.term, leader.now_us, user)
        lending_statements.write_history(connection, records, leader.now_us)
    return deleted.fetchone() is not None


def apply_command(
    connection: Connection, group: Group, command: GroupCommand, now_us: int | None, user: str = ""
) -> Group | None:
    """Change its desired state; return None if it was deleted meanwhile."""
    row = connection.execute(_LOCK_DESIRED_STATE, {"group": group.group_id, "now_us": now_us}).fetchone()
    if row is None:
        return None
    document, revision, term, at_us = row
    former_state = GroupDesiredState.from_json(document)
    state = former_state.apply(command)
    if state == former_state:
        return replace(group, desired_state=former_state, revision=revision)
    connection.execute(_UPDATE_DESIRED_STATE, {"group": group.group_id, "desired_state": json.dumps(state.to_json())})
    lending_statements.write_history(connection, [command_record(group.group_id, command, term, at_us, user)], at_us)
    return replace(group, desired_state=state, revision=revision + 1)


def filters_at_start(connection: Connection, filter: TopicFilter, start: StartingPosition) -> dict[str, list[str]]:
    """Return the open streams with messages for it; closed ones are consumed, unless the group goes back in time."""
    filters = read_matching_filters(connection, filter)
    return filters if start.policy in ("earliest", "time") else {**filters, "closed": []}


def _to_parameters(subscription: Subscription) -> dict[str, Any]:
    return {"kind": subscription.kind, "name": subscription.group, "filter": subscription.filter.text}


def _decode_group(record: tuple[Any, ...] | None) -> Group | None:
    if record is None:
        return None
    group_id, kind, name, filter, start, options, desired_state, revision = record
    options = GroupOptions.from_row(start, options)
    return Group(
        group_id,
        Subscription(kind, name, TopicFilter(filter)),
        options,
        GroupDesiredState.from_json(desired_state),
        revision,
    )
