"""Groups that are atomic: sessions in this process, real nodes, a real Postgres."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from borrower.batch import Batch
from borrower.session import Session
from borrower.settings import BorrowerSettings
from protocol.epochs import GroupFrontier, LowerFrontier
from protocol.words import Start, Subscription
from storage.groups.model import GroupOptions
from storage.groups.postgres import PostgresGroups
from storage.publish import Publisher
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet

GROUP = "$share/g/#"
FAST = BorrowerSettings().scaled(SPEED)


@pytest.fixture
def fleet(database: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database, tmp_path)
    fleet.node("n1")
    yield fleet
    fleet.close()


def declare(url: str, start: str = "latest") -> None:
    store = PostgresGroups(url)
    store.declare_group(Subscription.parse(GROUP), GroupOptions(start=Start.parse(start), atomic=True))
    store.close()


class Reader:
    """A session, what it was given by epoch, and what was announced to it."""

    def __init__(self, url: str, batch_bytes: int = 4_000_000, auto_ack: bool = True) -> None:
        self.announced: list[GroupFrontier] = []
        self.session = Session(
            GROUP, url, settings=FAST, on_epoch=self.announced.append, batch_bytes=batch_bytes, auto_ack=auto_ack
        )
        self.batches: list[Batch] = []

    def until(self, fact: Callable[[], bool]) -> None:
        """Read until it is true."""

        def read_on() -> bool:
            batch = self.session.next_batch(0.05)
            self.batches += [batch] if batch is not None else []
            return fact()

        eventually(read_on, 20.0, lambda: f"given {self.given()}, announced {self.announced}")

    def given(self) -> dict[int | None, int]:
        """{epoch: how many messages}."""
        counts: dict[int | None, int] = {}
        for batch in self.batches:
            for epoch in batch.table.column("epoch").to_pylist():
                key = None if epoch is None else epoch[0]
                counts[key] = counts.get(key, 0) + 1
        return counts

    def reached(self) -> LowerFrontier | None:
        return self.announced[-1].consumed if self.announced else None


def publish(publisher: Publisher, epoch: int, count: int) -> None:
    for number in range(count):
        publisher.at(epoch).publish("t", b"%d" % number, key=b"%d" % number)
    publisher.flush()


def test_an_epoch_is_given_out_when_it_is_completed_and_announced_when_it_is_consumed(
    database: str, fleet: Fleet
) -> None:
    declare(database)
    reader = Reader(database)
    with reader.session, Publisher(database, space="default") as publisher:
        publisher.advance(7)
        publish(publisher, 7, 100)
        publish(publisher, 8, 100)
        publish(publisher, 7, 50)
        publisher.publish("t", b"in no epoch").result()
        reader.until(lambda: reader.given() == {None: 1})
        publisher.advance(8)
        reader.until(lambda: reader.given() == {None: 1, 7: 150})
        reader.until(lambda: reader.reached() == LowerFrontier(((8,),)))
        publisher.advance(9)
        reader.until(lambda: reader.given() == {None: 1, 7: 150, 8: 100})
        reader.until(lambda: reader.reached() == LowerFrontier(((9,),)))
        publisher.advance(20)
        reader.until(lambda: reader.reached() == LowerFrontier(((20,),)))
    again = Reader(database)
    with again.session, Publisher(database, space="default") as publisher:
        publisher.advance(20)
        publish(publisher, 20, 10)
        publisher.advance(21)
        again.until(lambda: again.given() == {20: 10})
