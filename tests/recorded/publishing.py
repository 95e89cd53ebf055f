"""A publisher process: `python -m tests.recorded.publishing URL FILE NAME LIFE KIND...`, until SIGTERM.

It has a thread of each KIND: `plain` and `batch` publish without a name, `named` under a name shared by all its
processes, `sql` in transactions, some of which are rolled back.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from sublet_protocol.domain.errors import SubletError
from sublet_storage.producer import Publisher
from tests.recorded.history import Outcome, Record

INTERVAL_S = 0.5
LONGEST = 6
"""Messages that are published at once."""

ROOTS = ("a", "b", "c")
ANSWER_S = 90.0

Ask = tuple[int, str, str | None]
"""(number, topic, key)."""

Notified = tuple[int, Outcome, tuple[int, int] | None]
"""(number, outcome, place)."""


class Origin:
    """Draws messages with growing numbers, and records what is published and its outcome. For one thread.

    Numbers begin at the time, so that those of the next publisher of a name are higher. Created once the name is
    registered: of two processes the one that registers last is the later one, whichever was started first.
    """

    def __init__(self, record: Record, name: str) -> None:
        self._record, self.name, self._next = record, name, time.monotonic_ns() // 1000
        self._chance = random.Random(name)

    def ask(self, *, together: bool = False) -> list[Ask]:
        asked = [self._message() for _ in range(self._chance.randint(1, LONGEST))]
        number = asked[0][0] if together else None
        self._record.write("publish", origin=self.name, together=number, messages=asked)
        return asked

    def reported(self, reported: list[Notified]) -> None:
        self._record.write("published", origin=self.name, messages=reported)

    def value(self, number: int) -> str:
        return f"{self.name}:{number}"

    def is_so(self, share: float) -> bool:
        return self._chance.random() < share

    def _message(self) -> Ask:
        self._next += 1
        root = self._chance.choice(ROOTS)
        key = None if self.is_so(0.2) else f"{root}-key{self._chance.randrange(4)}"
        return self._next, f"{root}/{self._chance.randrange(3)}", key


def one_by_one(publisher: Publisher, origin: Origin) -> None:
    waiting = [(number, publisher.publish(topic, origin.value(number), key)) for number, topic, key in origin.ask()]
    reported: list[Notified] = []
    for number, delivery in waiting:
        try:
            place = delivery.result(ANSWER_S)
            reported.append((number, Outcome.OK, (place.stream, place.offset)))
        except (SubletError, TimeoutError):
            reported.append((number, Outcome.UNKNOWN, None))
    origin.reported(reported)
    if any(outcome is not Outcome.OK for _, outcome, _ in reported):
        raise ConnectionError("what follows has no order with what is unknown: begin anew")


def by_columns(publisher: Publisher, origin: Origin) -> None:
    asked = origin.ask()
    numbers, topics, keys = zip(*asked, strict=True)
    values = [origin.value(number) for number in numbers]
    encoded = [None if key is None else key.encode() for key in keys]
    columns = {"topic": list(topics), "key": encoded, "value": [value.encode() for value in values]}
    outcome = Outcome.OK
    try:
        publisher.publish_batch(columns).result(ANSWER_S)
    except (SubletError, TimeoutError):
        outcome = Outcome.UNKNOWN
    origin.reported([(number, outcome, None) for number in numbers])
    if outcome is not Outcome.OK:
        raise ConnectionError("what follows has no order with what is unknown: begin anew")


def by_sql(connection: psycopg.Connection[Any], origin: Origin) -> None:
    """Publish some messages in a transaction, which is rolled back at random."""
    asked, outcome = origin.ask(together=True), Outcome.UNKNOWN
    try:
        with connection.transaction(force_rollback=origin.is_so(0.15)) as transaction:
            for number, topic, key in asked:
                connection.execute(
                    "select sublet.publish(%s::text, %s::text, %s::text)", (topic, origin.value(number), key)
                )
        outcome = Outcome.FAILED if transaction.force_rollback else Outcome.OK
    finally:
        origin.reported([(number, outcome, None) for number, _, _ in asked])


class Publishing:
    def __init__(self, url: str, record: Record, name: str, life: str) -> None:
        self._url, self._record, self._name, self._life = url, record, name, life
        self.over = threading.Event()

    def run(self, kind: str) -> None:
        """Publish until `stop` is called; restart after an error."""
        for again in itertools.count():
            try:
                self._publish(kind, again)
            except (SubletError, psycopg.Error, ConnectionError) as error:
                self._record.write("trouble", kind=kind, error=f"{type(error).__name__}: {error}")
            if self.over.wait(0.2):
                return

    def _publish(self, kind: str, again: int) -> None:
        named = f"{self._name}-named" if kind == "named" else None
        name = named or f"{self._name}-{kind}.{self._life}.{again}"
        if kind == "sql":
            with psycopg.connect(self._url, autocommit=True) as connection:
                self._repeat(by_sql, connection, Origin(self._record, name))
            return
        with Publisher(self._url, producer=named) as publisher:
            self._repeat(by_columns if kind == "batch" else one_by_one, publisher, Origin(self._record, name))

    def _repeat(self, publish: Callable[[Any, Origin], None], through: Any, origin: Origin) -> None:
        while not self.over.is_set():
            publish(through, origin)
            self.over.wait(INTERVAL_S * random.uniform(0.2, 1.8))


def main(url: str, file: str, name: str, life: str, *kinds: str) -> None:
    publishing = Publishing(url, Record(Path(file)), name, life)
    signal.signal(signal.SIGTERM, lambda *_: publishing.over.set())
    threads = [threading.Thread(target=publishing.run, args=(kind,), name=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
