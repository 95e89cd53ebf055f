"""Hearing, and reading what was not heard; over a real Postgres, with real drivers and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sublet_storage.db.connect import connect
from sublet_storage.nodes import NodeRef, register
from sublet_storage.notify.changes import KINDS, Change, Snapshot, space_change, stream_change
from sublet_storage.notify.publisher import Teller
from sublet_storage.notify.snapshot import groups, nodes, reading, spaces, streams
from sublet_storage.spaces.spaces import create_space, drop_space, rollover
from tests.integration.log_kit import put, stream_of
from tests.integration.notify_kit import NODE, SETTINGS, Bench, Heard, listening, threads
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as conn:
        yield conn


@pytest.fixture
def teller(database: str) -> Iterator[Teller]:
    teller = Teller(database, settings=SETTINGS)
    yield teller
    teller.close()


@pytest.mark.conforms("D6")
def test_a_snapshot_is_the_present_state(conn: psycopg.Connection[Any]) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    stream = stream_of(conn, "eu")
    put(conn, stream, b"a", b"b", topic="eu/x")
    assert streams(conn, [stream, 10**9]) == [stream_change(stream, 2, False)]
    before = {change.key: change for change in spaces(conn)}
    assert before.keys() == {"default", "eu"}
    assert before["eu"].data == {"filter": "eu/#", "shards": 1}
    rollover(conn, "eu")
    assert streams(conn, [stream]) == [stream_change(stream, 2, True)]
    assert {change.key: change for change in spaces(conn)}["eu"].rank > before["eu"].rank
    drop_space(conn, "eu")
    assert [change.key for change in spaces(conn)] == ["default"]


def test_a_snapshot_of_groups_and_nodes(conn: psycopg.Connection[Any]) -> None:
    conn.execute("insert into consumer_group (kind, name, filter) values ('share', 'g', 'a/#'), ('queue', 'q', '#')")
    conn.execute("update consumer_group set deleted_at = clock_timestamp() where name = 'q'")
    (group,) = groups(conn)
    assert (group.key, group.deleted) == ("$share/g/a/#", False)
    register(conn, NODE, 60, 1)
    (node,) = nodes(conn)
    assert (node.key, node.data) == (
        NODE.name,
        {"incarnation": "one", "address": NODE.address, "http_address": None},
    )
    conn.execute("update node set expires_at = clock_timestamp()")
    assert nodes(conn) == []
    register(conn, NodeRef(NODE.name, "two", "127.0.0.1:2"), 60, 1)
    assert nodes(conn)[0].version > node.version


@pytest.mark.conforms("D2", "D3")
@pytest.mark.parametrize("driver", ["postgres", "zmq"])
def test_what_is_told_is_heard_whole_by_every_node(database: str, driver: str, teller: Teller) -> None:
    space = space_change("eu", 3, data={"filter": "eu/\0\xff/#" * 20})
    with listening(database, driver) as one, listening(database, driver, NodeRef("other", "x", "h:1")) as two:
        teller.tell([stream_change(5, 1, False), space])
        for heard in (one, two):
            eventually(lambda heard=heard: heard.of("space", "eu"))  # type: ignore[misc]
            assert heard.of("space", "eu")[0] == space
            assert heard.of("stream", "5") == [stream_change(5, 1, False)]
            assert heard.ears.get("stream", "5") == stream_change(5, 1, False)
            assert "5" in heard.ears.objects("stream")


@pytest.mark.conforms("D1")
def test_without_push_what_changes_is_found_later_and_telling_costs_nothing(
    database: str, conn: psycopg.Connection[Any], teller: Teller
) -> None:
    stream = stream_of(conn, "default")
    with listening(database, "poll", read=reading(lambda: [stream])) as heard:
        end = put(conn, stream, b"a")
        teller.tell([stream_change(stream, end, False)])
        eventually(lambda: heard.ears.get("stream", str(stream)) == stream_change(stream, end, False))
        eventually(lambda: teller._deaf_until > time.monotonic())
        assert teller.sent == 0
        assert not teller._voices
        assert not {name for name in threads() if "look" in name}
        teller._deaf_until = time.monotonic() + 60
        for _ in range(1000):
            teller.tell([stream_change(stream, end, False)])
        assert not teller._told


@pytest.mark.conforms("D6")
def test_what_changes_between_subscribing_and_the_first_read_is_seen(
    database: str, conn: psycopg.Connection[Any], teller: Teller
) -> None:
    """The first read is held up until a change has been committed and told; the read itself does not see it."""
    stream = stream_of(conn, "default")
    reading_now, told = threading.Event(), threading.Event()

    def read(conn: psycopg.Connection[Any], kind: str) -> Snapshot:
        if kind != "stream":
            return Snapshot(())
        found = Snapshot(tuple(streams(conn, [stream])), frozenset([str(stream)]))
        reading_now.set()
        assert told.wait(10)
        return found

    heard = Heard(database, read=read)
    try:
        register(conn, NODE, 60, 1, notify=heard.ears.endpoint)
        assert reading_now.wait(10)
        end = put(conn, stream, b"a")
        teller.tell([stream_change(stream, end, False)])
        eventually(lambda: teller.sent >= 2)
        eventually(lambda: heard.ears.counters()["received"] >= 2)
        told.set()
        assert heard.ears.wait_caught_up(10)
        assert heard.ears.get("stream", str(stream)) == stream_change(stream, end, False)
    finally:
        told.set()
        heard.ears.close()


@pytest.mark.conforms("D6")
def test_what_changed_while_the_connection_was_cut_is_read_when_it_is_back(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    stream = stream_of(conn, "default")
    with (
        PostgresProxy(database) as proxy,
        listening(database, through=proxy.url, read=reading(lambda: [stream])) as heard,
    ):
        end = put(conn, stream, b"a")  # told by nobody
        proxy.hang_up()
        eventually(lambda: heard.ears.get("stream", str(stream)) == stream_change(stream, end, False))
        assert heard.ears.counters()["losses"] == 1


@pytest.mark.conforms("D1", "D9")
def test_a_database_that_is_away_for_a_while_is_got_over(database: str, conn: psycopg.Connection[Any]) -> None:
    stream = stream_of(conn, "default")
    with (
        PostgresProxy(database) as proxy,
        listening(database, through=proxy.url, read=reading(lambda: [stream])) as heard,
    ):
        proxy.go_away()
        eventually(lambda: heard.ears.counters().get("catch_ups_failed", 0) >= 2)
        end = put(conn, stream, b"a")
        proxy.resume()
        eventually(lambda: heard.ears.get("stream", str(stream)) == stream_change(stream, end, False))


@pytest.fixture
def bench(database: str, conn: psycopg.Connection[Any]) -> Iterator[Bench]:
    bench = Bench(database, stream_of(conn, "default"))
    yield bench
    bench.ears.close()


@pytest.mark.conforms("D4")
def test_a_dropped_event_costs_exactly_one_read(bench: Bench, conn: psycopg.Connection[Any]) -> None:
    before = bench.ears.counters()["catch_ups"]
    for number in range(1, 4):
        put(conn, bench.stream, b"x")
        if number != 2:
            bench.hear(number)
    eventually(lambda: bench.ears.counters().get("catch_ups_gap") == 1)
    bench.hear(4)
    eventually(lambda: bench.knows(4))
    counters = bench.ears.counters()
    assert (counters["gaps"], counters["unhealed"], counters["catch_ups"]) == (1, 1, before + 1)


@pytest.mark.conforms("D4", "D7")
def test_swapped_and_repeated_events_cost_nothing(bench: Bench) -> None:
    before = bench.ears.counters()["catch_ups"]
    for number in (1, 3, 2, 2, 1, 3):
        bench.hear(number)
    eventually(lambda: bench.ears.counters()["repeated"] == 3)
    assert bench.knows(3)
    counters = bench.ears.counters()
    assert (counters["gaps"], counters["healed"], counters["old_versions"]) == (1, 1, 1)
    assert counters["catch_ups"] == before


@pytest.mark.conforms("D9")
def test_a_handler_that_raises_and_noise_do_not_stop_the_loop(database: str, conn: psycopg.Connection[Any]) -> None:
    def fail(change: Change) -> None:
        raise ValueError("no")

    bench = Bench(database, stream_of(conn, "default"), fail)
    try:
        for number in (1, 2, 3):
            bench.hear(number)
            bench.driver.deliver(b"noise")
        eventually(lambda: bench.knows(3))
        eventually(lambda: bench.ears.counters()["malformed"] == 3)
        assert bench.ears.counters()["handler_failures"] >= 3
    finally:
        bench.ears.close()


@pytest.mark.conforms("D9")
def test_a_reader_that_raises_is_asked_again(database: str) -> None:
    calls: list[str] = []

    def read(conn: psycopg.Connection[Any], kind: str) -> Snapshot:
        calls.append(kind)
        if len(calls) <= len(KINDS):
            raise KeyError(kind)
        return Snapshot(())

    with listening(database, read=read) as heard:
        assert heard.ears.counters()["catch_ups_failed"] == len(KINDS)


def test_who_asks_is_read_for(bench: Bench) -> None:
    bench.ears.ask("stream")
    eventually(lambda: bench.ears.counters().get("catch_ups_asked") == 1)


def test_ears_close_in_time_and_leave_nothing(database: str) -> None:
    before = threads()
    with PostgresProxy(database) as proxy:
        heard = Heard(proxy.url)
        assert heard.ears.wait_caught_up(10)
        proxy.hold()
        heard.ears.ask("space")
        eventually(lambda: heard.ears.counters().get("catch_ups_asked"))
        began = time.monotonic()
        heard.ears.close()
        heard.ears.close()
        assert time.monotonic() - began < 5
        proxy.resume()
        eventually(lambda: threads() <= before)
