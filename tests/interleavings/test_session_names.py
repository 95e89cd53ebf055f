"""Names of sessions that several would have, or release, at once."""

from __future__ import annotations

from sublet_protocol.domain.errors import NotFound
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator import session_name_owners
from tests.interleavings.harness import Connection, Interleavings, Run

SHARED = Subscription.parse("$share/g/eu/#")


def test_of_two_releases_of_a_name_one_has_it(conn: Connection, database: str) -> None:
    """And recorded in the history of rights."""
    session_name_owners.next_session_epoch(conn, SHARED, "etl", "user:a")

    def release(conn: Connection) -> str:
        with conn.transaction():
            return session_name_owners.release(conn, SHARED, "etl")

    def judge(run: Run) -> None:
        assert {type(answer) for answer in run.answers.values()} == {str, NotFound}
        assert run.conn.execute("select from access_history").rowcount == 1

    with Interleavings(database) as orders:
        assert orders.explore({"release": release, "release again": release}, judge) > 1
