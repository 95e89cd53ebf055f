"""Names of sessions that several would have, or release, at once."""

from __future__ import annotations

from sublet_protocol.domain.errors import NotFound
from sublet_storage.groups.coordinator import session_name_owners
from tests.contract.group_world import SHARE
from tests.interleavings.harness import Connection, Interleavings, Run, in_transaction


def test_of_two_releases_of_a_name_one_has_it(orders: Interleavings, conn: Connection) -> None:
    """And recorded in the history of rights."""
    session_name_owners.next_session_epoch(conn, SHARE, "etl", "user:a")
    release = in_transaction(lambda conn: session_name_owners.release(conn, SHARE, "etl"))

    def judge(run: Run) -> None:
        assert {type(answer) for answer in run.answers.values()} == {str, NotFound}
        assert run.conn.execute("select from access_history").rowcount == 1

    orders.explore({"release": release, "release again": release}, judge)
