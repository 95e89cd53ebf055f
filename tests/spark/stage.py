"""What a test of Spark asks of the database, and of the files that its tasks write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.producer import Publisher
from tests.deliveries import Verdict, judge
from tests.kit_nodes import Delivered, Fleet
from tests.spark.work import AttemptRecord, attempts

SPEED = 2.5
"""How many times faster than the defaults these tests live: a borrower is evicted after 4 s."""

ALL = "$share/spark/#"
WAIT_S = 60.0


class Stage:
    """Nodes on a database of the test's own, a directory for its tasks' records."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.records = directory / "records"
        self.records.mkdir()
        self.fleet = Fleet(url, directory, SPEED)
        self.store = PostgresGroupStore(url)
        self.connection = connect(url)

    def serve(self, *names: str) -> None:
        """Start these nodes and wait until they serve."""
        self.fleet.serve(*names)

    def publish(self, count: int, first: int = 0) -> None:
        """Numbered messages under many keys in small blocks; durable when it returns."""
        with Publisher(self.url, block_messages=50) as publisher:
            for number in range(first, first + count):
                publisher.publish(f"t/{number % 5}", str(number).encode(), key=b"k%d" % (number % 97))

    def heads(self) -> dict[int, int]:
        """{stream: head}."""
        return dict(self.connection.execute("select stream_id, head from stream").fetchall())

    def rows(self) -> dict[int, tuple[str, int, int, str | None]]:
        """{stream: (status, position, grant id, session)} of the group."""
        found = self.connection.execute("select stream_id, status, position, grant_id, session from lending")
        return {row[0]: row[1:] for row in found.fetchall()}

    def holders(self) -> dict[str | None, int]:
        """{session: how many streams it holds}."""
        held: dict[str | None, int] = {}
        for status, _, _, session in self.rows().values():
            if status == "held":
                held[session] = held.get(session, 0) + 1
        return held

    def consumed(self) -> bool:
        """Every stream's durable progress is at its head."""
        heads, rows = self.heads(), self.rows()
        return len(rows) == len(heads) and all(row[1] == heads[stream] for stream, row in rows.items())

    def history(self) -> tuple[HistoryRecord, ...]:
        """Every grant and end of a grant."""
        return self.store.history(self.store.open_group(Subscription.parse(ALL)).group_id)

    def attempts(self) -> list[AttemptRecord]:
        """What every task attempt has written."""
        return attempts(self.records)

    def delivered(self) -> list[Delivered]:
        """All batches of all attempts, by time."""
        found = [
            Delivered(a.session, line["stream"], line["grant"], tuple(line["offsets"]), line["at"])
            for a in self.attempts()
            for line in a.lines
        ]
        return sorted(found, key=lambda delivered: delivered.at)

    def verdict(self) -> Verdict:
        """Nothing is lost, no repeat is unexplained, no two attempts worked under one grant."""
        verdict = judge(self.heads(), self.delivered(), self.history())
        assert verdict.lost == []
        assert verdict.unexplained == []
        assert verdict.crossed == []
        return verdict

    def close(self) -> None:
        """End all of it."""
        self.fleet.close()
        self.store.close()
        self.connection.close()


@contextmanager
def a_stage(url: str, directory: Path) -> Iterator[Stage]:
    """A stage for one test."""
    stage = Stage(url, directory)
    try:
        yield stage
    finally:
        stage.close()
