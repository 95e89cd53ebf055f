"""Reading on in a group's history, while several write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator import group_lifecycle, leadership
from sublet_storage.groups.coordinator.history_queries import GroupHistoryPage, read_behind
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import PauseGroup
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.node_directory import NodeIncarnation
from tests.interleavings.harness import Connection, Interleavings, Run

GROUP = Subscription.parse("$share/g/eu/#")
NODE = NodeIncarnation("n1", "n1-1", "127.0.0.1:1")
ALL = 1000


@pytest.fixture
def orders(conn: Connection, database: str) -> Iterator[Interleavings]:
    with closing(PostgresGroupStore(database)) as store:
        store.declare_group(GROUP, GroupOptions())
    with Interleavings(database) as orders:
        yield orders


def pause(conn: Connection) -> None:
    group = group_lifecycle.get_live(conn, GROUP)
    with conn.transaction():
        group_lifecycle.apply_command(conn, group, PauseGroup("x"), None)


def lead(conn: Connection) -> None:
    with conn.transaction():
        leadership.claim(conn, 1, NODE, 30, None)


def look(conn: Connection) -> GroupHistoryPage:
    return read_behind(conn, 1, None, ALL)


@pytest.mark.conforms("A7")
def test_who_reads_on_is_given_each_line_once(orders: Interleavings) -> None:
    def judge(run: Run) -> None:
        assert not run.errors
        first = run.answers["look"]
        later = read_behind(run.conn, 1, first.next, ALL)
        seen = [number for number, _ in (*first.lines, *later.lines)]
        assert sorted(seen) == [number for number, _ in read_behind(run.conn, 1, None, ALL).lines]
        assert len(seen) == 2
        assert read_behind(run.conn, 1, later.next, ALL).lines == ()

    assert orders.explore({"pause": pause, "lead": lead, "look": look}, judge) > 1
