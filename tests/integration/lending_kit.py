"""A group that a test leads by hand: what leaders write is there without their clocks and threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GrantStream, GroupOptions, GroupWrites, Lending, LendingChange
from sublet_storage.groups.status import diagnosis_queries
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.node_directory import NodeIncarnation, register
from sublet_storage.producer import Publisher
from tests.integration.log_kit import Connection
from tests.kit import eventually
from tests.kit_nodes import SPEED

GROUP = "$share/billing/orders/#"
SUBSCRIPTION = Subscription.parse(GROUP)
NODE = NodeIncarnation("n1", "a life of n1", "127.0.0.1:1")


class World:
    """A group with two streams and ten messages, led by hand."""

    def __init__(self, url: str, conn: Connection, **options: Any) -> None:
        self.store, self.conn = PostgresGroupStore(url), conn
        self.group = self.store.declare_group(SUBSCRIPTION, GroupOptions(**options)).group_id
        self.publish(url)
        self.term = 0

    def publish(self, url: str, count: int = 10) -> None:
        with Publisher(url) as publisher:
            for number in range(count):
                publisher.publish("orders/eu", b"x", key=b"%d" % number).result(60)

    def lead(self, listed: bool = True) -> None:
        if listed:
            register(self.conn, NODE, 60, PROTOCOL_VERSION)
        self.term = self.store.claim(self.group, NODE, 60).term

    def write(self, entry: LendingChange) -> Lending:
        (result,) = self.store.commit([GroupWrites(self.group, self.term, (entry,))])[0].results
        if result.lending is not None:
            return result.lending
        return next(row for row in self.store.load(self.group, self.term) if row.stream_id == entry.stream_id)

    def lend(self, stream_id: int, session: str | None = "etl", epoch: int | None = None) -> Lending:
        return self.write(GrantStream(stream_id, "b1", "host:1:x", session, "allocated", epoch))

    def rest(self) -> None:
        """Make all timestamps a minute older."""
        self.conn.execute("update lending set updated_at = updated_at - interval '1 minute'")
        self.conn.execute("update block set appended_at = appended_at - interval '1 minute'")

    def why(self) -> dict[int, StallReason]:
        return {
            answer.stream.stream_id: answer.diagnosis.reason
            for answer in diagnosis_queries.diagnose_group(self.conn, SUBSCRIPTION)[1]
        }

    def because(self, stream_id: int) -> str:
        (answer,) = diagnosis_queries.diagnose_group(self.conn, SUBSCRIPTION, stream_id)[1]
        return answer.diagnosis.detail

    def now_us(self) -> int:
        (row,) = self.conn.execute("select (extract(epoch from clock_timestamp()) * 1000000)::bigint").fetchall()
        return int(row[0])


class NumberConsumer:
    """A session in this process, and the numbers that it was given."""

    def __init__(self, url: str, group: str = GROUP, **arguments: Any) -> None:
        self.session = Session(group, url, settings=BorrowerSettings().scaled(SPEED), **arguments)
        self.seen: list[int] = []

    def read(self, timeout_s: float = 0.05) -> bool:
        """Return whether there was a batch; acknowledge the one before it."""
        batch = self.session.poll(timeout_s)
        if batch is not None:
            self.seen += [int(value) for value in batch.table.column("value").to_pylist()]
        return batch is not None

    def until(self, count: int) -> None:
        """Read until it has been given so many."""

        def there() -> bool:
            self.read()
            return len(self.seen) >= count

        eventually(there, 60.0, lambda: f"{len(self.seen)} of {count} seen: {sorted(self.seen)}")


def publish_numbers(url: str, numbers: range, topic: str = "orders/eu") -> None:
    """Publish in small blocks, under 20 keys; durable when it returns."""
    with Publisher(url, block_messages=10) as publisher:
        for number in numbers:
            publisher.publish(topic, b"%d" % number, key=b"%d" % (number % 20))


def open_streams(conn: Connection) -> tuple[int, ...]:
    """Return the open streams of all spaces."""
    return tuple(row[0] for row in conn.execute("select stream_id from stream where state = 'open' order by 1"))


@contextmanager
def a_world(url: str, conn: Connection, **options: Any) -> Iterator[World]:
    """A `World` that is closed."""
    world = World(url, conn, **options)
    try:
        yield world
    finally:
        world.store.close()
