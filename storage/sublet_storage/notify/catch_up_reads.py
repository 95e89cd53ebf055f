"""Reads the present state of objects for a catch-up; each function is one statement.

The result does not have deleted objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import psycopg

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import newest_stream
from sublet_storage.notify.changes import (
    EPOCHS,
    GROUP,
    NODE,
    SPACE,
    STREAM,
    CatchUpSnapshot,
    ObjectChange,
    epochs_change,
    group_change,
    node_change,
    space_change,
    stream_change,
)

_EPOCHS = "select space_id, frontier_move_count from space where dropped_at is null and frontier_move_count > 0"

Connection = psycopg.Connection[Any]
ReadSnapshot = Callable[[Connection, str], CatchUpSnapshot]
"""Reads what there is of one kind of object."""

_STREAMS = f"""
select s.stream_id, s.head, s.state = 'closed'
  from unnest(%s::bigint[]) as u (stream_id)
  cross join lateral {newest_stream("u.stream_id", "stream_id, head, state")} s"""

_SPACES = """
select p.name, g.generation_id, p.filter, p.shards
  from space p cross join lateral (
    select generation_id from generation g where g.space_id = p.space_id order by ordinal desc limit 1) g
 where p.dropped_at is null"""

_GROUPS = "select kind, name, filter, group_id, desired_state_version from consumer_group where deleted_at is null"

_NODES = """
select name, (extract(epoch from started_at) * 1000000)::bigint, incarnation, address, http_address
  from node where expires_at > clock_timestamp()"""


def read_streams(conn: Connection, ids: Collection[int]) -> list[ObjectChange]:
    """Return the heads of those streams."""
    return [stream_change(*row) for row in conn.execute(_STREAMS, (list(ids),))]


def read_spaces(conn: Connection) -> list[ObjectChange]:
    """Return all spaces, with their newest generations."""
    return [
        space_change(name, newest, data={"filter": filter, "shards": shards})
        for name, newest, filter, shards in conn.execute(_SPACES)
    ]


def read_groups(conn: Connection) -> list[ObjectChange]:
    """Return all groups, by subscription."""
    return [
        group_change(str(Subscription(kind, name, TopicFilter(filter))), group_id, revision=revision)
        for kind, name, filter, group_id, revision in conn.execute(_GROUPS)
    ]


def read_nodes(conn: Connection) -> list[ObjectChange]:
    """Return the nodes whose leases live."""
    return [
        node_change(name, started_us, data={"incarnation": incarnation, "address": address, "http_address": http})
        for name, started_us, incarnation, address, http in conn.execute(_NODES)
    ]


def read_epochs(conn: Connection) -> list[ObjectChange]:
    """Return how often the lower frontiers of the spaces that have one have moved."""
    return [epochs_change(space_id, moves) for space_id, moves in conn.execute(_EPOCHS)]


def make_snapshot_reader(list_streams: Callable[[], Collection[int]]) -> ReadSnapshot:
    """Return a `ReadSnapshot` of all kinds; of the streams, those of `list_streams` when it is read."""

    def read(conn: Connection, kind: str) -> CatchUpSnapshot:
        if kind == STREAM:
            ids = frozenset(list_streams())
            changes = read_streams(conn, ids) if ids else []
            return CatchUpSnapshot(tuple(changes), frozenset(map(str, ids)))
        return CatchUpSnapshot(
            tuple({SPACE: read_spaces, GROUP: read_groups, NODE: read_nodes, EPOCHS: read_epochs}[kind](conn))
        )

    return read
