"""Reading on in a group's history, while several write it."""

from __future__ import annotations

import pytest

from sublet_storage.groups.coordinator import group_lifecycle, leadership
from sublet_storage.groups.coordinator.history_queries import read_behind
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import PauseGroup
from tests.contract.group_world import ONE, SHARE
from tests.interleavings.harness import Connection, Interleavings, Run, in_transaction

ALL = 1000


@pytest.mark.conforms("A7")
def test_who_reads_on_is_given_each_line_once(orders: Interleavings, conn: Connection) -> None:
    PostgresGroupStore(lambda: conn).declare_group(SHARE)

    def pause(conn: Connection) -> None:
        group = group_lifecycle.get_live(conn, SHARE)
        with conn.transaction():
            group_lifecycle.apply_command(conn, group, PauseGroup("x"), None)

    def judge(run: Run) -> None:
        assert not run.errors
        first = run.answers["look"]
        later = read_behind(run.conn, 1, first.next, ALL)
        seen = [number for number, _ in (*first.lines, *later.lines)]
        assert sorted(seen) == [number for number, _ in read_behind(run.conn, 1, None, ALL).lines]
        assert len(seen) == 2
        assert read_behind(run.conn, 1, later.next, ALL).lines == ()

    lead = in_transaction(lambda conn: leadership.claim(conn, 1, ONE, 30, None))
    orders.explore({"pause": pause, "lead": lead, "look": lambda conn: read_behind(conn, 1, None, ALL)}, judge)
