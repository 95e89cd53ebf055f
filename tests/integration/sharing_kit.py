"""A group with real nodes and consumers: what a test does to it, and what it asks of the database."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import Unavailable
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import Group, HistoryRecord, Leadership
from sublet_storage.producer import Publisher
from tests.deliveries import DeliveryVerdict, check
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet, Process

ALL = "$share/g/#"
LEADER = LeaderSettings().scaled(SPEED)


class Load:
    """Numbered messages under many keys in small blocks, published by a thread until `stop()`."""

    def __init__(self, url: str, every_s: float) -> None:
        self._url, self._every_s = url, every_s
        self._stop = threading.Event()
        self.acknowledged = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def stop(self) -> int:
        """Stop publishing; return the number of durable messages, which are all that were published."""
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        return self.acknowledged

    def _publish(self) -> None:
        try:
            with Publisher(self._url, block_messages=10) as publisher:
                while not self._stop.wait(self._every_s):
                    numbers = range(self.acknowledged, self.acknowledged + 20)
                    deliveries = [
                        publisher.publish(f"t/{n % 5}", str(n).encode(), key=b"k%d" % (n % 97)) for n in numbers
                    ]
                    for delivery in deliveries:
                        delivery.result()
                    self.acknowledged += len(deliveries)
        except BaseException as error:  # noqa: BLE001 raised by `stop`
            self.failure = error


class Scene:
    """What a test asks of the database, beside the processes; over another connection if one was lost."""

    def __init__(self, url: str, subscription: str = ALL) -> None:
        self.url, self.subscription = url, Subscription.parse(subscription)
        self.store = PostgresGroupStore(url)
        self.connection = connect(url)
        self._group: Group | None = None

    def close(self) -> None:
        self.store.close()
        self.connection.close()

    def ask(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a statement; an AssertionError, which is "not yet" to `eventually`, where nobody answers."""
        for _ in range(2):
            try:
                if self.connection.closed:
                    self.connection = connect(self.url)
                return self.connection.execute(statement, parameters).fetchall()
            except (psycopg.OperationalError, Unavailable):
                self.connection.close()
        raise AssertionError("the database is away")

    # --- messages ---------------------------------------------------------------------------------------------------

    def publish(self, count: int, first: int = 0) -> None:
        """Numbered messages under many keys in small blocks, each a batch to a consumer; durable when it returns."""
        with Publisher(self.url, block_messages=50) as publisher:
            for number in range(first, first + count):
                publisher.publish(f"t/{number % 5}", str(number).encode(), key=b"k%d" % (number % 97))

    @contextmanager
    def load(self, url: str | None = None, every_s: float = 0.4) -> Iterator[Load]:
        """Messages come in all the time; afterwards they are all durable, and stored once."""
        load = Load(url or self.url, every_s)
        try:
            yield load
        finally:
            published = load.stop()
        assert sum(self.heads().values()) == published

    def heads(self) -> dict[int, int]:
        return dict(self.ask("select stream_id, head from stream"))

    # --- the group --------------------------------------------------------------------------------------------------

    def group(self) -> Group:
        """The group under test, created where it is not."""
        if self._group is None:
            self._group = self.store.open_group(self.subscription)
        return self._group

    def claim(self) -> Leadership:
        try:
            found = self.store.read_leaderships([self.group().group_id])
        except Unavailable as error:
            raise AssertionError("the database is away") from error
        assert found, "nobody has claimed the group"
        return found[self.group().group_id]

    def rows(self) -> list[tuple[int, str, int, str | None]]:
        """Return (stream, status, position, agent)."""
        return self.ask("select stream_id, status, position, agent from lending order by stream_id")

    def grants(self) -> dict[int, int]:
        """Return {stream: grant id} of all held streams."""
        return dict(self.ask("select stream_id, grant_id from lending where status = 'held'"))

    def shares(self) -> list[int]:
        """Return how many streams each agent holds, ascending."""
        held: dict[str | None, int] = defaultdict(int)
        for _, status, _, agent in self.rows():
            if status == "held":
                held[agent] += 1
        return sorted(held.values())

    def consumed(self) -> bool:
        heads = self.heads()
        rows = self.rows()
        return len(rows) == len(heads) and all(position == heads[stream] for stream, _, position, _ in rows)

    def history(self) -> tuple[HistoryRecord, ...]:
        return self.store.history(self.group().group_id)

    def us(self, what: str) -> int:
        """A time of the group's leadership row, in microseconds."""
        statement = f"select (extract(epoch from {what}) * 1e6)::bigint from leadership where leadership_id = %s"
        return int(self.ask(statement, (self.group().group_id,))[0][0])


class Stage:
    """A scene and the fleet that acts in it. `extra`: settings of the processes beside their times."""

    def __init__(self, url: str, directory: Path, extra: Mapping[str, str] | None = None) -> None:
        self.fleet, self.scene = Fleet(url, directory, extra=extra), Scene(url)

    def close(self) -> None:
        self.fleet.close()
        self.scene.close()

    def serve(self, *names: str, url: str | None = None) -> None:
        """Start nodes, and wait until they serve."""
        self.fleet.serve(*names, url=url)

    def share(self, *names: str, pause_s: float = 0.01, url: str | None = None) -> None:
        """Start consumers, and wait until the 16 streams are shared among all that there are."""
        for name in names:
            self.fleet.consumer(name, ALL, pause_s, url)
        members = len(self.fleet.consumers)
        eventually(lambda: self.scene.shares() == [16 // members] * members, WAIT_S, self.said)

    def said(self) -> str:
        """Who holds what, and the end of the output of every process, for a test that fails."""
        processes = {**self.fleet.nodes, **self.fleet.consumers}
        columns = "stream_id, status, position, borrower_id, lock_borrower_id, term, grant_id"
        rows = self.scene.ask(f"select {columns} from lending order by stream_id")
        outputs = (f"\n--- {name}:\n{process.output()[-1500:]}" for name, process in processes.items())
        return "".join((f"{self.scene.claim()}\n{columns}: {rows}", *outputs))

    def more(self, count: int = 20, *, of: str | None = None) -> None:
        """Wait until so many more batches are delivered, by all or by one."""
        least = len(self.fleet.delivered(of)) + count
        eventually(lambda: len(self.fleet.delivered(of)) >= least, WAIT_S, self.said, 0.05)

    def next_leader(self, before: Leadership) -> Leadership:
        return eventually(
            lambda: self.scene.claim() if self.scene.claim().term > before.term else None, WAIT_S, self.said
        )

    def leader(self) -> tuple[Leadership, Process]:
        claim = self.scene.claim()
        return claim, self.fleet.nodes[claim.node.name]

    def verdict(self) -> DeliveryVerdict:
        """Once all is consumed: nothing is lost, and every repeat lies in the window of a move that was reported."""
        eventually(self.scene.consumed, WAIT_S, lambda: f"{self.scene.rows()}{self.said()}")
        return check(self.scene.heads(), self.fleet.delivered(), self.scene.history())

    def written_by_one_at_a_time(self) -> None:
        """Assert that no line of history is of an earlier term than the line before it."""
        terms = [line.term for line in self.scene.history()]
        assert terms == sorted(terms)


def last(seconds: float) -> None:
    """Let something last so long; how long is what the test is about."""
    end = time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= end, seconds + 1.0)
