"""Attempts of tasks as executors run them, on a real node and Postgres: long calls, ends in the middle of a call."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.consumer.runner import RetryPolicy, run
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import UserFunctionFailed
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.producer import Publisher
from tests.integration.log_kit import everything
from tests.kit import eventually
from tests.kit_nodes import SPEED, Delivered, Fleet, Process

ALL = "$share/g/#"
WAIT_S = 40.0
LEADER, BORROWER = LeaderSettings().scaled(SPEED), BorrowerSettings().scaled(SPEED)


class Place:
    """A node, attempts that it lends to, and what the database says of them."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory = url, directory
        self.fleet = Fleet(url, directory)
        self.store = PostgresGroupStore(url)
        self.connection = connect(url)

    def serve(self) -> None:
        """Start the node."""
        node = self.fleet.node("n1")
        eventually(lambda: "serves on" in node.output(), WAIT_S, node.output)

    def attempt(self, name: str, work: str, seconds: float) -> Process:
        """Start one, and wait until it holds all that there is."""
        arguments = (self.url, ALL, str(self.record(name)), work, str(seconds))
        process = Process("tests.processes.attempt", *arguments, log=self.directory / f"{name}.log", speed=SPEED)
        self.fleet.consumers[name] = process
        eventually(lambda: len(self.grants()) == 16, WAIT_S, process.output)
        return process

    def publish(self, count: int = 1) -> None:
        """As many messages as are asked for, each a block and so a batch of its own."""
        with Publisher(self.url, block_messages=1) as publisher:
            for number in range(count):
                publisher.publish("t", str(number).encode(), key=b"k%d" % number)

    def working(self, name: str) -> Delivered:
        """The first thing that it has begun to work on."""
        return eventually(lambda: self.fleet.delivered(name), WAIT_S)[0]

    def done(self, name: str) -> int:
        """How often its function has returned."""
        return self.record(name).read_text().count('{"done": true}\n')

    def grants(self) -> dict[int, int]:
        """{stream: grant id} of all that is held."""
        found = self.connection.execute("select stream_id, grant_id from lending where status = 'held'")
        return dict(found.fetchall())

    def progress(self) -> dict[int, int]:
        """{stream: durable position} of all that has moved."""
        found = self.connection.execute("select stream_id, position from lending where position > 0")
        return dict(found.fetchall())

    def forced(self) -> list[HistoryRecord]:
        """The moves that may have something done twice."""
        group = self.store.open_group(Subscription.parse(ALL))
        return [line for line in self.store.history(group.group_id) if line.is_forced]

    def record(self, name: str) -> Path:
        """Where it writes."""
        return self.directory / f"{name}.jsonl"

    def close(self) -> None:
        """End all of it."""
        self.fleet.close()
        self.store.close()
        self.connection.close()


@pytest.fixture
def place(database: str, tmp_path: Path) -> Iterator[Place]:
    """A place with a node that serves."""
    place = Place(database, tmp_path)
    try:
        place.serve()
        yield place
    finally:
        place.close()


# --- long calls -----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E28")
def test_a_call_longer_than_every_timeout_costs_nothing(place: Place) -> None:
    longest = max(
        LEADER.eviction_timeout_s,
        LEADER.reclaim_grace_s,
        LEADER.lease_duration_s,
        BORROWER.disconnect_timeout_s,
        LEADER.poll_hold_s,
    )
    place.attempt("a", "sleep", 1.5 * longest)
    before = place.grants()
    place.publish()
    place.working("a")
    eventually(lambda: place.progress(), WAIT_S)
    assert place.done("a") == 1
    assert place.grants() == before
    assert place.forced() == []
    assert len(place.fleet.delivered()) == 1


@pytest.mark.conforms("E28")
def test_a_call_that_holds_the_interpreter_beyond_the_ping_timeout_costs_nothing(place: Place) -> None:
    """Up to the eviction time less what may have passed since the last ping: what docs/heartbeats.md promises."""
    hold_s = (BORROWER.ping_timeout_s + LEADER.eviction_timeout_s - BORROWER.ping_interval_s) / 2
    assert hold_s > BORROWER.ping_timeout_s
    place.attempt("a", "hold", hold_s)
    before = place.grants()
    place.publish()
    place.working("a")
    eventually(lambda: place.progress(), WAIT_S)
    assert place.grants() == before
    assert place.forced() == []
    assert len(place.fleet.delivered()) == 1


def test_one_that_holds_the_interpreter_longer_is_evicted_and_the_repeat_is_reported(place: Place) -> None:
    place.attempt("a", "hold", 2 * LEADER.eviction_timeout_s)
    before = place.grants()
    place.publish()
    first = place.working("a")
    again = eventually(lambda: place.fleet.delivered()[1:], WAIT_S)[0]
    eventually(lambda: place.progress() == {first.stream: 1}, WAIT_S)
    assert (again.stream, again.offsets) == (first.stream, first.offsets)
    assert again.grant > first.grant
    assert {(line.stream_id, line.grant_id) for line in place.forced()} == set(before.items())
    assert {line.reason for line in place.forced()} == {"evicted: no ping in time"}


# --- processes that are told to end ---------------------------------------------------------------------------------


@pytest.mark.conforms("E8", "E25")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_told_to_end_finishes_its_call_and_hands_over_exactly(place: Place, number: signal.Signals) -> None:
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
    assert place.grants() == {}
    assert place.forced() == []
    assert process.stop() == 128 + number, "Spark would take it for finished"


@pytest.mark.conforms("E25")
@pytest.mark.parametrize("work", ["sleep", "dodge"])
def test_a_call_that_takes_too_long_is_cut_off_and_its_stream_alone_may_repeat(place: Place, work: str) -> None:
    process = place.attempt("a", work, 3 * BORROWER.unsubscribe_timeout_s)
    place.publish()
    stuck = place.working("a")
    reported_at = time.monotonic()
    process.signal(signal.SIGHUP)
    eventually(lambda: place.grants() == {}, WAIT_S, process.output)
    assert time.monotonic() - reported_at < 1.5 * BORROWER.unsubscribe_timeout_s
    assert place.progress() == {}
    eventually(lambda: not process.alive, WAIT_S, process.output)
    forced = {(line.stream_id, line.position): line.reason for line in place.forced()}
    assert forced[stuck.stream, 0] == "left in the middle of a batch"
    assert len(forced) == 1, "what it was not at work on was handed over exactly"
    assert place.done("a") == (0 if work == "sleep" else 1)


# --- functions that raise -------------------------------------------------------------------------------------------


def test_a_session_whose_function_keeps_raising_stops_before_the_record_and_the_next_one_begins_there(
    place: Place,
) -> None:
    with Publisher(place.url, block_messages=100) as publisher:
        for number in range(100):
            publisher.publish("t", str(number).encode(), key=b"k")
    done: list[int] = []

    def work(batch: object) -> None:
        values = [int(value) for value in batch.table.column("value").to_pylist()]  # type: ignore[attr-defined]
        if 37 in values and not mended:
            raise ValueError("not 37")
        done.extend(values)

    mended = False
    policy = RetryPolicy(max_attempts=2, backoff_s=0.01, max_backoff_s=0.01)
    with (
        pytest.raises(UserFunctionFailed, match=r"offset 37 \(topic 't', key 'k'\): ValueError: not 37") as failed,
        Session(ALL, place.url, starting_position="earliest", auto_ack=False, settings=BORROWER) as session,
    ):
        run(session, work, policy=policy)
    assert place.progress() == {failed.value.stream_id: 37}
    assert place.grants() == {}
    mended = True
    with Session(ALL, place.url, auto_ack=False, settings=BORROWER) as session:
        batch = session.poll(WAIT_S)
        assert batch is not None
        assert batch.first == 37
        work(batch)
        batch.ack()
    assert done == list(range(100))
    assert place.progress() == {failed.value.stream_id: 100}


@pytest.mark.conforms("E17")
def test_records_that_cannot_be_done_are_kept_once_and_all_others_are_done(place: Place) -> None:
    bad = {0, 37, 38, 99}
    with Publisher(place.url, block_messages=25) as publisher:
        for number in range(100):
            publisher.publish(
                "t", None if number == 38 else b"\0%d" % number, key=b"k", headers=[("h", b"\xff"), ("n", None)]
            )
    with Publisher(place.url) as publisher:
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
    with Session("$share/g/+", place.url, starting_position="earliest", auto_ack=False, settings=BORROWER) as session:
        summary = run(session, work, policy=policy)
    assert (summary.messages, summary.dead_lettered) == (101, 4)
    assert done == [offset for offset in range(101) if offset not in bad]
    (stream_id, position), *_ = place.progress().items()
    assert position == 101

    def retained() -> list[dict[str, Any]]:
        rows = [row for rows in everything(place.connection).values() for row in rows]
        return [row for row in rows if row["topic"] == "failed/orders"]

    found = eventually(lambda: retained() if len(retained()) >= 4 else [], WAIT_S)
    assert [(row["key"], row["value"]) for row in found] == [
        (b"k", None if number == 38 else b"\0%d" % number) for number in sorted(bad)
    ]
    for row, offset in zip(found, sorted(bad), strict=True):
        origin = [(f"sublet.{name}", value) for name, value in (("topic", b"t"), ("stream", b"%d" % stream_id))]
        origin += [("sublet.offset", b"%d" % offset), ("sublet.error", "ValueError: cannot \ufffd".encode())]
        assert [(header["key"], header["value"]) for header in row["headers"]] == [("h", b"\xff"), ("n", None), *origin]


def test_a_record_whose_stream_is_taken_away_is_not_kept(place: Place) -> None:
    place.publish(1)

    def work(batch: Batch) -> None:
        place.connection.execute("update lending set grant_id = grant_id + 1 where stream_id = %s", (batch.stream_id,))
        session.drain()
        raise ValueError("cannot")

    policy = RetryPolicy(max_attempts=1, dead_letter_topic="failed/orders")
    with Session("$share/g/+", place.url, starting_position="earliest", auto_ack=False, settings=BORROWER) as session:
        summary = run(session, work, policy=policy)
    assert (summary.dead_lettered, summary.lost_batches) == (0, 1)
    assert place.connection.execute("select count(*) from outbox").fetchone() == (0,)


def test_what_a_loop_raises_leaves_the_session_and_its_batch_is_given_again(place: Place) -> None:
    place.publish()

    def consume() -> None:
        with Session(ALL, place.url, starting_position="earliest", settings=BORROWER) as session:
            for _ in session:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert place.progress() == {}
    with Session(ALL, place.url, settings=BORROWER) as session:
        batch = session.poll(WAIT_S)
        assert batch is not None
        assert batch.first == 0


def test_a_batch_that_was_not_acknowledged_is_given_again_whatever_was_done_after_it(place: Place) -> None:
    _three_blocks(place)
    with Session(
        ALL, place.url, starting_position="earliest", max_batch_bytes=1, auto_ack=False, settings=BORROWER
    ) as session:
        first, second = _next(session), _next(session)
        assert (first.first, second.first) == (0, 1)
        second.ack()
    with Session(ALL, place.url, settings=BORROWER) as session:
        assert _next(session).first == 0


def test_asking_for_the_next_batch_acknowledges_the_one_before(place: Place) -> None:
    _three_blocks(place)
    with closing(
        Session(ALL, place.url, starting_position="earliest", max_batch_bytes=1, settings=BORROWER)
    ) as session:
        assert [_next(session).first for _ in range(3)] == [0, 1, 2]
    with Session(ALL, place.url, settings=BORROWER) as session:
        assert _next(session).first == 2


def _three_blocks(place: Place) -> None:
    """In one stream, so that they are given one after the other."""
    with Publisher(place.url) as publisher:
        for number in range(3):
            publisher.publish("t", str(number).encode(), key=b"k").result(WAIT_S)


def _next(session: Session) -> Batch:
    batch = session.poll(WAIT_S)
    assert batch is not None
    return batch
