"""Real nodes, real sessions, real Postgres, killed for real: who consumes what, in which order, and what is lost."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, rollover
from tests.deliveries import judge
from tests.integration.log_kit import Connection, everything
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, Background, eventually
from tests.kit_nodes import Fleet


@pytest.mark.conforms("E1", "E18", "E29")
def test_each_message_goes_to_one_of_those_who_share(stage: Stage) -> None:
    stage.serve("n1")
    stage.scene.publish(2_000)
    stage.share("a", "b", pause_s=0.02)
    stage.scene.publish(2_000, 2_000)
    assert stage.verdict().explained == []
    assert all(stage.fleet.delivered(name) for name in ("a", "b"))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("leaves", marks=[pytest.mark.conforms("E8", "E31"), pytest.mark.long]),
        pytest.param("is killed", marks=pytest.mark.conforms("E10", "E17")),
    ],
)
def test_the_streams_of_one_that_ends_move_on(stage: Stage, end: str) -> None:
    """Who leaves in the middle of a batch repeats nothing; what one that was killed had in hand may be seen again."""
    stage.serve("n1")
    stage.share("a", "b", pause_s=0.05)
    stage.scene.publish(6_000)
    eventually(lambda: stage.fleet.delivered("a") and stage.fleet.delivered("b"), WAIT_S)
    if end == "leaves":
        assert stage.fleet.consumers["a"].stop() == 0
    else:
        stage.fleet.consumers["a"].kill()
    stage.scene.publish(1_000, 6_000)
    verdict = stage.verdict()
    assert stage.scene.shares() == [16]
    if end == "leaves":
        assert verdict.explained == []
    else:
        assert any(line.is_forced for line in stage.scene.history())


@pytest.mark.conforms("E5", "E15", "E16")
def test_a_killed_leader_costs_those_who_live_nothing(stage: Stage) -> None:
    scene = stage.scene
    stage.serve("n1", "n2")
    stage.share("a", "b", pause_s=0.05)
    scene.publish(8_000)
    eventually(lambda: len(stage.fleet.delivered()) > 5, WAIT_S)
    grants = {line.grant_id for line in scene.history() if line.event == "grant"}
    before, leader = stage.leader()
    leader.kill()
    lease_ended_us = scene.us("expires_at")
    scene.publish(2_000, 8_000)
    after = stage.next_leader(before)
    assert after.node.name != before.node.name
    # A term is the database's time of the claim, in microseconds.
    assert after.term <= lease_ended_us + 2_000_000
    assert stage.verdict().explained == []
    assert grants == {line.grant_id for line in scene.history() if line.event == "grant"}, "a stream changed hands"


@pytest.mark.conforms("E15")
def test_a_leader_that_stops_hands_over(stage: Stage) -> None:
    """Before its lease is over."""
    stage.serve("n1", "n2")
    stage.share("a")
    (before, leader), lease_ends_us = stage.leader(), stage.scene.us("expires_at")
    assert leader.stop() == 0
    assert stage.next_leader(before).term < lease_ends_us
    stage.scene.publish(500)
    assert stage.verdict().explained == []


TOPICS = ("eu/1", "eu/2", "us/1")
KEYS = [f"{key}@{topic}".encode() for key in range(6) for topic in TOPICS]


class Load(Background):
    """Publishes a counted value under every key in each round."""

    def __init__(self, database: str) -> None:
        super().__init__(self._publish)
        self._publisher = self.resources.enter_context(Publisher(database, block_messages=20))

    def _publish(self) -> None:
        value = b"%d" % self.done
        for key in KEYS:
            topic = key.decode().split("@")[1]
            if self.done % 2:
                self._publisher.publish_batch({"topic": topic, "value": [value], "key": key})
            else:
                self._publisher.publish(topic, value, key=key)
        self._publisher.flush(30)


@pytest.mark.shards(3)
@pytest.mark.conforms("W3", "E29")
def test_each_key_is_consumed_in_order(database: str, conn: Connection, fleet: Fleet) -> None:
    """Its space may be altered, resharded, rolled over or dropped meanwhile."""
    fleet.nodes["n1"].await_serving()
    for name in ("a", "b"):
        fleet.consumer(name, "$share/g/#")
    changes: list[Callable[[], object]] = [
        lambda: create_space(conn, "eu", "eu/#", shards=2),
        lambda: reshard(conn, "default", 5),
        lambda: alter_space(conn, "eu", filter="+/1"),
        lambda: rollover(conn, "eu"),
        lambda: reshard(conn, "eu", 3),
        lambda: drop_space(conn, "eu"),
        lambda: rollover(conn, "default"),
    ]
    with Load(database) as load:
        load.more(5)
        for change in changes:
            change()
            load.more(5)
    eventually(lambda: _unconsumed(conn) == [], WAIT_S, lambda: str(_unconsumed(conn)))
    heads = dict(conn.execute("select stream_id, head from stream").fetchall())
    store = PostgresGroupStore(database)
    history = store.history(store.open_group(Subscription.parse("$share/g/#")).group_id)
    store.close()
    verdict = judge(heads, fleet.delivered(), history)
    assert (verdict.lost, verdict.unexplained, verdict.explained, verdict.crossed) == ([], [], [], [])
    every_round = [b"%d" % number for number in range(load.done)]
    assert _delivered(conn, fleet) == dict.fromkeys(KEYS, every_round)
    moved = [len(streams) for streams in _streams_of_keys(conn).values()]
    assert min(moved) >= 4, "every key has moved several times"


def _unconsumed(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute(
        "select s.stream_id, s.head, l.status, l.position from stream s left join lending l using (stream_id)"
        " where l.position is distinct from s.head and s.head > 0"
    ).fetchall()


def _delivered(conn: Connection, fleet: Fleet) -> dict[bytes, list[bytes]]:
    """The values of each key in the order in which consumers had them."""
    log = {(stream, message["offset"]): message for stream, found in everything(conn).items() for message in found}
    values: dict[bytes, list[bytes]] = defaultdict(list)
    for batch in fleet.delivered():
        for offset in batch.offsets:
            message = log[batch.stream, offset]
            values[message["key"]].append(message["value"])
    return dict(values)


def _streams_of_keys(conn: Connection) -> dict[bytes, set[int]]:
    streams: dict[bytes, set[int]] = defaultdict(set)
    for stream, messages in everything(conn).items():
        for key, _ in itertools.groupby(messages, key=lambda message: bytes(message["key"])):
            streams[key].add(stream)
    return streams
