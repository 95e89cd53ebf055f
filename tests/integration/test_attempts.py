"""Attempts of tasks as executors run them, on a real node and Postgres: long calls, ends in the middle of a call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.consumer.runner import RetryPolicy, run
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_leader.settings import LeaderSettings
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.producer import Publisher
from tests.integration.log_kit import everything
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Delivered, Process

LEADER, BORROWER = LeaderSettings().scaled(SPEED), BorrowerSettings().scaled(SPEED)


class OutputStage(Stage):
    """A node, attempts that it grants streams to, and what the database says of them."""

    def attempt(self, name: str, work: str, seconds: float) -> Process:
        """Start one, and wait until it holds all that there is."""
        record, log = self.fleet.directory / f"{name}.jsonl", self.fleet.directory / f"{name}.log"
        arguments = (self.scene.url, ALL, str(record), work, str(seconds))
        process = Process("tests.processes.attempt", *arguments, log=log, speed=SPEED)
        self.fleet.consumers[name] = process
        eventually(lambda: len(self.scene.grants()) == 16, WAIT_S, process.output)
        return process

    def publish(self, count: int = 1) -> None:
        """Publish that many messages, each a block and so a batch of its own."""
        with Publisher(self.scene.url, block_messages=1) as publisher:
            for number in range(count):
                publisher.publish("t", str(number).encode(), key=b"k%d" % number)

    def session(self) -> Session:
        """One that is given topics of one level: nothing of what is kept of those that fail."""
        return Session("$share/g/+", self.scene.url, starting_position="earliest", auto_ack=False, settings=BORROWER)

    def working(self, name: str) -> Delivered:
        """The first thing that it has begun to work on."""
        return eventually(lambda: self.fleet.delivered(name), WAIT_S)[0]

    def done(self, name: str) -> int:
        """Return how often its function has returned."""
        return (self.fleet.directory / f"{name}.jsonl").read_text().count('{"done": true}\n')

    def progress(self) -> dict[int, int]:
        """Return {stream: durable position} of all that have moved."""
        return dict(self.scene.ask("select stream_id, position from lending where position > 0"))

    def forced(self) -> list[HistoryRecord]:
        """The moves that may have something done twice."""
        return [line for line in self.scene.history() if line.is_forced]


@pytest.fixture
def place(database: str, tmp_path: Path) -> Iterator[OutputStage]:
    place = OutputStage(database, tmp_path)
    try:
        place.serve("n1")
        yield place
    finally:
        place.close()


# --- long calls -----------------------------------------------------------------------------------------------------


MAX_LIMIT_S = max(
    LEADER.eviction_timeout_s,
    LEADER.reclaim_grace_s,
    LEADER.lease_duration_s,
    BORROWER.disconnect_timeout_s,
    LEADER.poll_hold_s,
)
HOLD_S = (BORROWER.ping_timeout_s + LEADER.eviction_timeout_s - BORROWER.ping_interval_s) / 2
"""Beyond the ping timeout, and within the eviction time less what may have passed since the last ping: what
docs/heartbeats.md promises of a call that holds the interpreter."""


@pytest.mark.conforms("E28")
@pytest.mark.parametrize(("work", "seconds"), [("sleep", 1.5 * MAX_LIMIT_S), ("hold", HOLD_S)])
@pytest.mark.long
def test_a_long_call_costs_nothing(place: OutputStage, work: str, seconds: float) -> None:
    assert seconds > BORROWER.ping_timeout_s
    place.attempt("a", work, seconds)
    before = place.scene.grants()
    place.publish()
    eventually(lambda: place.progress(), WAIT_S)
    assert place.done("a") == 1
    assert place.scene.grants() == before
    assert place.forced() == []
    assert len(place.fleet.delivered()) == 1


@pytest.mark.long
def test_one_that_holds_it_longer_is_evicted(place: OutputStage) -> None:
    place.attempt("a", "hold", 2 * LEADER.eviction_timeout_s)
    before = place.scene.grants()
    place.publish()
    first = place.working("a")
    again = eventually(lambda: place.fleet.delivered()[1:], WAIT_S)[0]
    eventually(lambda: place.progress() == {first.stream: 1}, WAIT_S)
    assert (again.stream, again.offsets) == (first.stream, first.offsets)
    assert again.grant > first.grant
    assert {(line.stream_id, line.grant_id) for line in place.forced()} == set(before.items())
    assert {line.reason for line in place.forced()} == {"evicted: no ping in time"}


# --- processes that get SIGTERM -------------------------------------------------------------------------------------


@pytest.mark.conforms("E8", "E25")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.long
def test_a_process_asked_to_end_hands_over_exactly(place: OutputStage, number: signal.Signals) -> None:
    process = place.attempt("a", "sleep", 0.4 * BORROWER.unsubscribe_timeout_s)
    place.publish(20)
    place.working("a")
    process.signal(number)
    process.signal(signal.SIGTERM)  # Spark may say it twice
    eventually(lambda: not process.alive, WAIT_S, process.output)
    delivered = place.fleet.delivered()
    assert 0 < len(delivered) < 20
    assert place.done("a") == len(delivered), "a call was cut off"
    done = {one.stream: 1 + max(one.offsets) for one in delivered}
    assert place.progress() == done
    assert place.scene.grants() == {}
    assert place.forced() == []
    assert process.stop() == 128 + number, "Spark would take it for finished"


@pytest.mark.conforms("E25")
@pytest.mark.parametrize("work", ["sleep", "dodge"])
@pytest.mark.long
def test_a_call_that_takes_too_long_is_cut_off(place: OutputStage, work: str) -> None:
    """Its stream alone may repeat."""
    process = place.attempt("a", work, 3 * BORROWER.unsubscribe_timeout_s)
    place.publish()
    stuck = place.working("a")
    process.signal(signal.SIGHUP)
    eventually(lambda: place.scene.grants() == {}, WAIT_S, process.output)
    assert (place.progress(), place.done("a")) == ({}, 0)
    eventually(lambda: not process.alive, WAIT_S, process.output)
    forced = {(line.stream_id, line.position): line.reason for line in place.forced()}
    assert forced[stuck.stream, 0] == "left in the middle of a batch"
    assert len(forced) == 1, "what it was not at work on was handed over exactly"
    assert place.done("a") == (0 if work == "sleep" else 1)


# --- functions that raise -------------------------------------------------------------------------------------------


@pytest.mark.conforms("E17")
def test_records_that_fail_are_stored_and_others_done(place: OutputStage) -> None:
    bad = {0, 37, 38, 99}
    with Publisher(place.scene.url, block_messages=25) as publisher:
        for number in range(100):
            publisher.publish(
                "t", None if number == 38 else b"\0%d" % number, key=b"k", headers=[("h", b"\xff"), ("n", None)]
            )
    with Publisher(place.scene.url) as publisher:
        publisher.publish("u", b"last", key=b"k")
    done: list[int] = []

    def work(batch: Batch) -> None:
        offsets = batch.table.column("offset").to_pylist()
        if bad.intersection(offsets):
            raise ValueError("cannot \0")
        done.extend(offsets)
        if done[-1] == 100:
            session.drain()

    policy = RetryPolicy(max_attempts=2, backoff_s=0.01, max_backoff_s=0.01, dead_letter_topic="failed/orders")
    with place.session() as session:
        summary = run(session, work, policy=policy)
    assert (summary.messages, summary.dead_lettered) == (101, 4)
    assert done == [offset for offset in range(101) if offset not in bad]
    (stream_id, position), *_ = place.progress().items()
    assert position == 101

    def retained() -> list[dict[str, Any]]:
        rows = [row for rows in everything(place.scene.connection).values() for row in rows]
        return [row for row in rows if row["topic"] == "failed/orders"]

    found = eventually(lambda: retained() if len(retained()) >= 4 else [], WAIT_S)
    assert [(row["key"], row["value"]) for row in found] == [
        (b"k", None if number == 38 else b"\0%d" % number) for number in sorted(bad)
    ]
    for row, offset in zip(found, sorted(bad), strict=True):
        origin = [(f"sublet.{name}", value) for name, value in (("topic", b"t"), ("stream_id", b"%d" % stream_id))]
        origin += [("sublet.offset", b"%d" % offset), ("sublet.error", "ValueError: cannot \ufffd".encode())]
        assert [(header["key"], header["value"]) for header in row["headers"]] == [("h", b"\xff"), ("n", None), *origin]


def test_a_record_of_a_lost_stream_is_not_stored(place: OutputStage) -> None:
    place.publish(1)

    def work(batch: Batch) -> None:
        regranted = "update lending set grant_id = grant_id + 1 where stream_id = %s"
        place.scene.connection.execute(regranted, (batch.stream_id,))
        session.drain()
        raise ValueError("cannot")

    policy = RetryPolicy(max_attempts=1, dead_letter_topic="failed/orders")
    with place.session() as session:
        summary = run(session, work, policy=policy)
    assert (summary.dead_lettered, summary.lost_batches) == (0, 1)
    assert place.scene.connection.execute("select count(*) from outbox").fetchone() == (0,)
