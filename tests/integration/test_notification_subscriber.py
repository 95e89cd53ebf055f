"""Receiving notifications, and reading what was not received; over a real Postgres, with real drivers and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES, MAX_QUEUED_NOTIFICATION_BYTES
from sublet_storage.node_directory import NodeIncarnation, register
from sublet_storage.notify.catch_up_reads import (
    make_snapshot_reader,
    read_epochs,
    read_groups,
    read_nodes,
    read_spaces,
    read_streams,
)
from sublet_storage.notify.changes import KINDS, CatchUpSnapshot, ObjectChange, space_change, stream_change
from sublet_storage.notify.publisher import NotificationPublisher
from sublet_storage.notify.version_cache import ChangeNovelty, VersionCache
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, drop_space, rollover
from tests.integration.log_kit import Connection, put, stream_of
from tests.integration.notify_kit import NODE, SETTINGS, Bench, Received, listening, threads, wait_until_caught_up
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy


@pytest.fixture
def notifier(database: str) -> Iterator[NotificationPublisher]:
    notifier = NotificationPublisher(database, settings=SETTINGS)
    yield notifier
    notifier.close()


@pytest.mark.conforms("D6")
def test_a_snapshot_is_the_present_state(conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    stream = stream_of(conn, "eu")
    put(conn, stream, b"a", b"b", topic="eu/x")
    assert read_streams(conn, [stream, 10**9]) == [stream_change(stream, 2, False)]
    before = {change.key: change for change in read_spaces(conn)}
    assert before.keys() == {"default", "eu"}
    assert before["eu"].data == {"filter": "eu/#", "shards": 1}
    rollover(conn, "eu")
    assert read_streams(conn, [stream]) == [stream_change(stream, 2, True)]
    assert {change.key: change for change in read_spaces(conn)}["eu"].order_key > before["eu"].order_key
    drop_space(conn, "eu")
    assert [change.key for change in read_spaces(conn)] == ["default"]


@pytest.mark.conforms("D6")
def test_epochs_of_a_reused_space_name_are_new(database: str, conn: Connection) -> None:
    """Their frontier has moved less often than that of the space that was dropped."""
    cache = VersionCache(tombstone_s=60.0)
    for last in (9, 1):
        create_space(conn, "eu", "eu/#", shards=1)
        with Publisher(database, space="eu") as publisher:
            for epoch in range(last + 1):
                publisher.advance(epoch)
        (change,) = read_epochs(conn)
        assert cache.apply(change, 0.0) is ChangeNovelty.NEWER
        drop_space(conn, "eu")


def test_a_snapshot_of_groups_and_nodes(conn: Connection) -> None:
    conn.execute("insert into consumer_group (kind, name, filter) values ('share', 'g', 'a/#'), ('queue', 'q', '#')")
    conn.execute("update consumer_group set deleted_at = clock_timestamp() where name = 'q'")
    (group,) = read_groups(conn)
    assert (group.key, group.is_deleted) == ("$share/g/a/#", False)
    register(conn, NODE, 60, 1)
    (node,) = read_nodes(conn)
    assert (node.key, node.data) == (
        NODE.name,
        {"incarnation": "one", "address": NODE.address, "http_address": None},
    )
    conn.execute("update node set expires_at = clock_timestamp()")
    assert read_nodes(conn) == []
    register(conn, NodeIncarnation(NODE.name, "two", "127.0.0.1:2"), 60, 1)
    assert read_nodes(conn)[0].version > node.version


@pytest.mark.conforms("D2", "D3")
@pytest.mark.parametrize("driver", ["postgres", "zmq"])
def test_what_is_sent_is_received_by_every_node(database: str, driver: str, notifier: NotificationPublisher) -> None:
    space = space_change("eu", 3, data={"filter": "eu/\0\xff/#" * 20})
    with listening(database, driver) as one, listening(database, driver, NodeIncarnation("other", "x", "h:1")) as two:
        notifier.publish([stream_change(5, 1, False), space])
        for received in (one, two):
            eventually(lambda received=received: received.of("space", "eu"))  # type: ignore[misc]
            assert received.of("space", "eu")[0] == space
            assert received.of("stream", "5") == [stream_change(5, 1, False)]
            assert received.subscriber.get("stream", "5") == stream_change(5, 1, False)


@pytest.mark.conforms("D1")
@pytest.mark.parametrize("driver", ["poll", "postgres"])
def test_without_push_changes_are_found_later(
    database: str, conn: Connection, notifier: NotificationPublisher, driver: str
) -> None:
    """Behind a pooler nothing would arrive, and without a word: the node polls as if it could not listen."""
    stream = stream_of(conn, "default")
    with PostgresProxy(database) as proxy:
        proxy.pool()
        with listening(database, driver, through=proxy.url, read=make_snapshot_reader(lambda: [stream])) as received:
            end = put(conn, stream, b"a")
            notifier.publish([stream_change(stream, end, False)])
            eventually(lambda: received.subscriber.get("stream", str(stream)) == stream_change(stream, end, False))
            assert received.subscriber.counters()["received"] == 0
            assert driver == "postgres" or notifier.sent == 0


@pytest.mark.conforms("D6")
def test_a_change_before_the_first_read_is_seen(
    database: str, conn: Connection, notifier: NotificationPublisher
) -> None:
    """The first read is held up until a change has been committed and published; the read itself does not see it."""
    stream = stream_of(conn, "default")
    reading_now, reported = threading.Event(), threading.Event()

    def read(conn: Connection, kind: str) -> CatchUpSnapshot:
        if kind != "stream":
            return CatchUpSnapshot(())
        found = CatchUpSnapshot(tuple(read_streams(conn, [stream])), frozenset([str(stream)]))
        reading_now.set()
        assert reported.wait(10)
        return found

    received = Received(database, read=read)
    try:
        register(conn, NODE, 60, 1, notify_endpoint=received.subscriber.endpoint)
        assert reading_now.wait(10)
        end = put(conn, stream, b"a")
        notifier.publish([stream_change(stream, end, False)])
        eventually(lambda: notifier.sent >= 2)
        eventually(lambda: received.subscriber.counters()["received"] >= 2)
        reported.set()
        wait_until_caught_up(received.subscriber)
        assert received.subscriber.get("stream", str(stream)) == stream_change(stream, end, False)
    finally:
        reported.set()
        received.subscriber.close()


@pytest.mark.conforms("D1", "D6", "D9")
@pytest.mark.parametrize("trouble", ["cut", "away"])
def test_what_changed_without_a_connection_is_read(database: str, conn: Connection, trouble: str) -> None:
    """Nobody publishes it: it is read when the connection, or the whole database, is back."""
    stream = stream_of(conn, "default")
    with (
        PostgresProxy(database) as proxy,
        listening(database, through=proxy.url, read=make_snapshot_reader(lambda: [stream])) as received,
    ):
        if trouble == "cut":
            end = put(conn, stream, b"a")
            proxy.hang_up()
        else:
            proxy.go_away()
            eventually(lambda: received.subscriber.counters().get("catch_ups_retry", 0) >= 2)
            end = put(conn, stream, b"a")
            proxy.resume()
        eventually(lambda: received.subscriber.get("stream", str(stream)) == stream_change(stream, end, False))
        assert trouble == "away" or received.subscriber.counters()["disconnects"] == 1


@pytest.fixture
def bench(database: str, conn: Connection) -> Iterator[Bench]:
    bench = Bench(database, stream_of(conn, "default"))
    yield bench
    bench.subscriber.close()


@pytest.mark.conforms("D4")
def test_a_dropped_event_costs_exactly_one_read(bench: Bench, conn: Connection) -> None:
    before = bench.subscriber.counters()["catch_ups"]
    for number in range(1, 4):
        put(conn, bench.stream, b"x")
        if number != 2:
            bench.receive(number)
    eventually(lambda: bench.subscriber.counters().get("catch_ups_gap") == 1)
    bench.receive(4)
    eventually(lambda: bench.knows(4))
    counters = bench.subscriber.counters()
    assert (counters["gaps"], counters["expired_gaps"], counters["catch_ups"]) == (1, 1, before + 1)


@pytest.mark.conforms("D9")
def test_a_failing_handler_and_noise_stop_nothing(database: str, conn: Connection) -> None:
    def fail(change: ObjectChange) -> None:
        raise ValueError("no")

    bench = Bench(database, stream_of(conn, "default"), fail)
    try:
        for number in (1, 2, 3):
            bench.receive(number)
            bench.driver.deliver(b"noise")
        eventually(lambda: bench.knows(3))
        eventually(lambda: bench.subscriber.counters()["malformed"] == 3)
        assert bench.subscriber.counters()["handler_failures"] >= 3
    finally:
        bench.subscriber.close()


@pytest.mark.conforms("D9")
def test_a_reader_that_raises_is_asked_again(database: str) -> None:
    calls: list[str] = []

    def read(conn: Connection, kind: str) -> CatchUpSnapshot:
        calls.append(kind)
        if len(calls) <= len(KINDS):
            raise KeyError(kind)
        return CatchUpSnapshot(())

    with listening(database, read=read) as received:
        assert received.subscriber.counters()["catch_ups_retry"] == len(KINDS)


def test_closing_leaves_no_thread(database: str) -> None:
    """Also while a read is under way that nobody answers."""
    before = threads()
    with PostgresProxy(database) as proxy:
        received = Received(proxy.url)
        wait_until_caught_up(received.subscriber)
        proxy.hold()
        received.subscriber.request_catch_up("space")
        eventually(lambda: received.subscriber.counters().get("catch_ups_requested"))
        received.subscriber.close()
        received.subscriber.close()
        proxy.resume()
        eventually(lambda: threads() <= before)


@pytest.mark.conforms("X4")
def test_messages_that_wait_are_bounded_by_bytes(database: str) -> None:
    """What is more is dropped, and is found by reading."""
    is_held, resumed = threading.Event(), threading.Event()

    def hold(change: ObjectChange) -> None:
        is_held.set()
        assert resumed.wait(60)

    bench = Bench(database, 10**9, hold)
    try:
        bench.receive(1)
        assert is_held.wait(60)
        reads = bench.subscriber.counters().get("catch_ups_requested", 0)
        longest, room = b"x" * MAX_NOTIFICATION_BYTES, MAX_QUEUED_NOTIFICATION_BYTES // MAX_NOTIFICATION_BYTES
        for _ in range(room + 100):
            bench.driver.deliver(longest)
        assert bench.subscriber.counters()["dropped"] >= 100
        resumed.set()
        eventually(lambda: bench.subscriber.counters().get("catch_ups_requested", 0) > reads)
        assert bench.subscriber.counters()["malformed"] <= room
    finally:
        resumed.set()
        bench.subscriber.close()
