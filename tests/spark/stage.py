"""What a test of Spark asks of the database, and of the files that its tasks write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deliveries import DeliveryVerdict, check
from tests.integration.sharing_kit import Scene
from tests.kit_nodes import Delivered, Fleet
from tests.spark.work import AttemptRecord, attempts

SPEED = 2.5
"""How many times faster than the defaults these tests live: a borrower is evicted after 4 s."""

ALL = "$share/spark/#"
WAIT_S = 180.0
"""A JVM that starts on a busy machine takes a minute."""


class Stage(Scene):
    def __init__(self, url: str, directory: Path) -> None:
        super().__init__(url, ALL)
        self.records = directory / "records"
        self.records.mkdir()
        self.fleet = Fleet(url, directory, SPEED)

    def serve(self, *names: str) -> None:
        self.fleet.serve(*names)

    def lendings(self) -> dict[int, tuple[str, int, int, str | None]]:
        """{stream: (status, position, grant id, session)} of the group."""
        found = self.connection.execute("select stream_id, status, position, grant_id, session from lending")
        return {row[0]: row[1:] for row in found.fetchall()}

    def holders(self) -> Counter[str | None]:
        """{session: how many streams it holds}."""
        return Counter(session for status, _, _, session in self.lendings().values() if status == "held")

    def attempts(self) -> list[AttemptRecord]:
        return attempts(self.records)

    def delivered(self) -> list[Delivered]:
        """All batches of all attempts, by time."""
        found = [
            Delivered(a.session, line["stream"], line["grant"], tuple(line["offsets"]), line["at"])
            for a in self.attempts()
            for line in a.lines
        ]
        return sorted(found, key=lambda delivered: delivered.at)

    def verdict(self) -> DeliveryVerdict:
        """Nothing is lost, no repeat is unexplained, no two attempts worked under one grant."""
        return check(self.heads(), self.delivered(), self.history())

    def close(self) -> None:
        self.fleet.close()
        super().close()


@contextmanager
def a_stage(url: str, directory: Path) -> Iterator[Stage]:
    stage = Stage(url, directory)
    try:
        yield stage
    finally:
        stage.close()
