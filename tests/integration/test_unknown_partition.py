"""A server process that does not know a generation's partition: it was attached while the process looked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.admin.reset_transaction import plan_reset
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.model.records import Group, GroupOptions, StartingPosition
from sublet_storage.log.fetch import offset_at_time
from sublet_storage.objects import unreferenced_objects
from sublet_storage.producer import Publisher
from sublet_storage.spaces import payload_restore
from sublet_storage.spaces.space_changes import alter_space
from tests.integration.log_kit import Connection, generation_of, stream_of
from tests.kit import WAIT_S
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, move

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
AT_A_TIME = StartingPosition.parse(LONG_AGO.isoformat())
SUBSCRIPTION = Subscription.parse("$share/g/eu/#")


def make_group(conn: Connection, start: StartingPosition, atomic: bool = False) -> Group:
    with conn.transaction():
        group = group_lifecycle.create(conn, SUBSCRIPTION, GroupOptions(start, atomic=atomic), None)
    assert group is not None
    return group


@contextmanager
def unknowing(database: str, conn: Connection, *streams: int) -> Iterator[Connection]:
    """Yield a connection whose server process does not know the partitions of these streams: it has listed the
    partitions while they were not in the catalog."""
    partitions = [f"block_{generation_of(conn, stream)}" for stream in streams]
    is_of_them = "inhrelid::regclass::text = any(%s)"
    rows = conn.execute(f"select inhrelid, inhparent, inhseqno from pg_inherits where {is_of_them}", (partitions,))
    inherits = rows.fetchall()
    conn.execute(f"delete from pg_inherits where {is_of_them}", (partitions,))
    with connect(database) as other:
        other.execute("select from block").fetchall()
        for row in inherits:
            conn.execute(
                "insert into pg_inherits (inhrelid, inhparent, inhseqno, inhdetachpending) values (%s, %s, %s, false)",
                row,
            )
        yield other


@pytest.mark.conforms("W2", "W8")
@pytest.mark.parametrize(
    "look",
    [
        lambda conn, stream: offset_at_time(conn, stream, LONG_AGO),
        lambda conn, _: make_group(conn, AT_A_TIME),
        lambda conn, _: make_group(conn, StartingPosition("offset", 1), atomic=True),
        lambda conn, _: plan_reset(conn, make_group(conn, StartingPosition.LATEST), ResetTarget.at_epoch(1)),
        lambda conn, _: payload_restore.restore_payloads(conn, space_of(conn)),
        lambda conn, _: unreferenced_objects.delete_expired_objects(conn, grace_s=0.0),
    ],
    ids=["position", "group at a time", "atomic group", "reset to an epoch", "restore", "deletion of objects"],
)
def test_it_ends_before_it_takes_a_stream_for_empty(
    database: str, conn: Connection, world: LocalWorld, look: Callable[[Connection, int], object]
) -> None:
    """It would know it at the next change of the table only, in an hour with hourly rollovers."""
    space = a_space(conn, world)
    stream = a_closed_stream(conn, 2)
    growing = stream_of(conn, "eu")
    with Publisher(database, space="eu") as publisher:
        publisher.advance(1)
        for _ in range(2):
            publisher.in_epoch(1).publish("eu/t", b"").result(WAIT_S)
    move(conn, space)
    alter_space(conn, "eu", payload_location=None)
    conn.execute(
        "insert into payload_object (uri, space_id, generation_id, stream_id, end_offset, orphaned_at)"
        " select uri, %s, generation_id, stream_id, end_offset, '-infinity' from block where uri is not null",
        (space.space_id,),
    )
    objects = world.names()
    with unknowing(database, conn, stream, growing) as other:
        with pytest.raises(psycopg.OperationalError, match="terminating connection"):
            look(other, stream)
        assert other.closed
    assert world.names() == objects


@pytest.mark.conforms("W2")
def test_a_process_that_sees_nothing_there_lives(database: str, conn: Connection, world: LocalWorld) -> None:
    """Of an empty stream, and of one whose messages retention has taken, also in a snapshot of before."""
    a_space(conn, world)
    stream = a_closed_stream(conn, 1)
    generation = generation_of(conn, stream)
    empty = "select check_partition(generation_id, stream_id) from stream where head = 0"
    assert {row[0] for row in conn.execute(empty)} == {True}
    check = "select check_partition(%s, %s)"
    with connect(database) as other, other.transaction():
        other.execute("set transaction isolation level repeatable read")
        other.execute("select from space")
        conn.execute("update generation set state = 'gone' where generation_id = %s", (generation,))
        conn.execute(f"alter table block detach partition block_{generation}")
        assert other.execute(check, (generation, stream)).fetchone() == (True,)
        conn.execute(f"drop table block_{generation}")
        assert other.execute(check, (generation, stream)).fetchone() == (True,)
    assert conn.execute(check, (generation, stream)).fetchone() == (True,)


def space_of(conn: Connection) -> int:
    ((space_id,),) = conn.execute("select space_id from space where name = 'eu'").fetchall()
    return int(space_id)
