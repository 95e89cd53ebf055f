"""A group that is created while messages are published and spaces change sees all that comes after the call."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import Group, GroupWrites, StartingPosition
from sublet_storage.node_directory import NodeRef
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, rollover
from tests.kit import eventually

TOPICS = ("eu/1", "eu/2", "us/1")
FILTERS = ("#", "eu/#", "+/1", "us/1")
NODE = NodeRef("n1", "n1-1", "127.0.0.1:1")

Sent = tuple[float, str, int, int]
"""When it was begun, its topic, and where it lies."""


@pytest.fixture
def store(database: str) -> Iterator[PostgresGroupStore]:
    store = PostgresGroupStore(database, lock_timeout_s=10, statement_timeout_s=20)
    yield store
    store.close()


class Load:
    """A publisher that notes each message, and somebody who changes the spaces, until the test has enough."""

    def __init__(self, database: str) -> None:
        self.sent: list[Sent] = []
        self._database, self._stop = database, threading.Event()
        self._threads = [threading.Thread(target=self._publish), threading.Thread(target=self._change)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _publish(self) -> None:
        with Publisher(self._database) as publisher:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                begun, topic = time.monotonic(), TOPICS[number % len(TOPICS)]
                at = publisher.publish(topic, b"%d" % number, key=b"%d" % (number % 7)).result(30)
                self.sent.append((begun, topic, at.stream, at.offset))

    def _change(self) -> None:
        with connect(self._database) as conn:
            changes: tuple[Callable[[], object], ...] = (
                lambda: rollover(conn, "default"),
                lambda: create_space(conn, "eu", "eu/#", shards=2),
                lambda: reshard(conn, "default", 2),
                lambda: alter_space(conn, "eu", filter="+/1"),
                lambda: rollover(conn, "eu"),
                lambda: drop_space(conn, "eu"),
                lambda: reshard(conn, "default", 3),
            )
            for change in itertools.cycle(changes):
                if self._stop.is_set():
                    return
                change()
                time.sleep(0.01)


@pytest.mark.conforms("W6")
def test_a_group_at_latest_misses_nothing_later(
    database: str, conn: psycopg.Connection[Any], store: PostgresGroupStore
) -> None:
    created: list[tuple[float, Group]] = []
    with Load(database) as load:
        for number, text in zip(range(16), itertools.cycle(FILTERS)):
            group = store.open_group(Subscription.parse(f"$share/g{number}/{text}"), StartingPosition.LATEST)
            created.append((time.monotonic(), group))
            least = len(load.sent) + 20
            eventually(lambda least=least: len(load.sent) >= least, 30)  # type: ignore[misc]
    for at, group in created:
        _renew(store, group)
        assert _missed(conn, group, at, load.sent) == []
        assert _begun_late(conn, group) == []


def _renew(store: PostgresGroupStore, group: Group) -> None:
    claim = store.claim(group.group_id, NODE, 30)
    (result,) = store.commit([GroupWrites(group.group_id, claim.term, (), True)])
    assert not result.has_stale_term


def _missed(conn: psycopg.Connection[Any], group: Group, at: float, sent: list[Sent]) -> list[Sent]:
    """Of the messages begun after `at` that the group wants, those that it will never be lent."""
    query = "select stream_id, position, status from lending where group_id = %s"
    rows = {stream_id: (position, status) for stream_id, position, status in conn.execute(query, (group.group_id,))}
    wanted = [each for each in sent if each[0] > at and group.subscription.filter.matches(each[1])]
    assert wanted or group.subscription.filter != TopicFilter("#")
    return [
        (begun, topic, stream, offset)
        for begun, topic, stream, offset in wanted
        if stream not in rows or rows[stream][0] > offset or rows[stream][1] == "finished"
    ]


def _begun_late(conn: psycopg.Connection[Any], group: Group) -> list[tuple[Any, ...]]:
    """Streams of generations opened after the group was created that it was not given from their start."""
    return conn.execute(
        "select l.stream_id, l.position from lending l join stream s using (stream_id) join consumer_group g"
        " using (group_id) where g.group_id = %s and s.generation_id > g.after_generation and l.position > 0",
        (group.group_id,),
    ).fetchall()
