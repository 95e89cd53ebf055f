"""Creating, finding and deleting groups.

Whatever creates a generation excludes others by a lock on the table `space`. Creating a group takes that lock shared:
so no rollover is half done, the start positions are those of one instant, and every generation that comes later has a
larger id than `after_generation`.
"""

from __future__ import annotations

from typing import Any

from protocol.words import Filter, Subscription
from storage.catalogue import filled
from storage.groups import leadership
from storage.groups.channel import Connection
from storage.groups.model import Group, Start
from storage.groups.sql import NOW

_LIVE = """
select group_id, kind, name, filter, start from consumer_group
 where kind = %(kind)s and name = %(name)s and filter = %(filter)s and deleted_at is null"""

_FIND = """
select group_id, kind, name, filter, start from consumer_group where group_id = %(group)s and deleted_at is null"""

_CREATE = f"""
insert into consumer_group (kind, name, filter, start, after_generation, created_at)
values (%(kind)s, %(name)s, %(filter)s, %(start)s, (select coalesce(max(generation_id), 0) from generation), {NOW})
    on conflict (kind, name, filter) where deleted_at is null do nothing returning group_id"""

_BEGIN = f"""
insert into lending (group_id, stream_id, position, updated_at)
select %(group)s, s.stream_id, case when %(start)s = 'latest' then s.head else 0 end, {NOW}
  from stream s join generation n using (generation_id)
 where n.state <> 'gone'
   and n.filter = any(case when s.state = 'open' then %(open)s::text[] else %(closed)s::text[] end)"""

_DELETE = f"update consumer_group set deleted_at = {NOW} where group_id = %(group)s and deleted_at is null returning 1"


def find_live(connection: Connection, subscription: Subscription) -> Group | None:
    """The group of that subscription that is not deleted."""
    return _group(connection.execute(_LIVE, _names(subscription)).fetchone())


def find(connection: Connection, group_id: int) -> Group | None:
    """The group of that id unless it is deleted."""
    return _group(connection.execute(_FIND, {"group": group_id}).fetchone())


def create(connection: Connection, subscription: Subscription, start: Start, now_us: int | None) -> Group | None:
    """The new group with its rows; None where somebody else was faster."""
    connection.execute("lock table space in share mode")
    parameters = {**_names(subscription), "start": start.value, "now_us": now_us}
    created = connection.execute(_CREATE, parameters).fetchone()
    if created is None:
        return None
    parameters |= {"group": created[0], **_first_filters(connection, subscription.filter, start)}
    connection.execute(_BEGIN, parameters)
    return Group(created[0], subscription, start)


def delete(connection: Connection, group_id: int, now_us: int | None) -> bool:
    """Mark it deleted, drop its rows and end its leader's lease; False where somebody else was faster."""
    leadership.lock(connection, (group_id,), now_us)
    deleted = connection.execute(_DELETE, {"group": group_id, "now_us": now_us})
    connection.execute("delete from lending where group_id = %(group)s", {"group": group_id})
    leadership.expire(connection, (group_id,), now_us)
    return deleted.fetchone() is not None


def _first_filters(connection: Connection, filter: Filter, start: Start) -> dict[str, list[str]]:
    """The open streams with messages for it; closed ones are consumed, unless the group starts at the earliest."""
    wanted = filled(connection).wanted(filter)
    return {
        "open": [one.text for one, now in wanted.items() if now],
        "closed": [one.text for one in wanted] if start is Start.EARLIEST else [],
    }


def _names(subscription: Subscription) -> dict[str, Any]:
    return {"kind": subscription.kind, "name": subscription.group, "filter": subscription.filter.text}


def _group(record: tuple[Any, ...] | None) -> Group | None:
    if record is None:
        return None
    group_id, kind, name, filter, start = record
    return Group(group_id, Subscription(kind, name, Filter(filter)), Start(start))
