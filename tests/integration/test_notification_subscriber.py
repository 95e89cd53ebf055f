"""Receiving notifications, reading what was not received, and what a node's hub passes on; over a real Postgres,
with real drivers and threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from sublet_leader.node.notification_hub import PER_TURN, NotificationHub
from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES, MAX_QUEUED_NOTIFICATION_BYTES
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub.model import Channel, Subscribe
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine
from sublet_protocol.pubsub.node_side_replies import PollReply
from sublet_protocol.pubsub.server import make_node_side_machine
from sublet_storage.db.connect import connect
from sublet_storage.node_directory import NodeIncarnation, register
from sublet_storage.notify.catch_up_reads import (
    make_snapshot_reader,
    read_epochs,
    read_groups,
    read_nodes,
    read_spaces,
    read_streams,
)
from sublet_storage.notify.changes import (
    GROUP,
    KINDS,
    STREAM,
    CatchUpSnapshot,
    ChangeNotification,
    NotifySettings,
    ObjectChange,
    group_change,
    space_change,
    stream_change,
)
from sublet_storage.notify.codec import encode
from sublet_storage.notify.drivers.registry import load_driver
from sublet_storage.notify.publisher import NotificationPublisher, publish_once
from sublet_storage.notify.version_cache import ChangeNovelty, VersionCache
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, drop_space, rollover
from tests.integration.log_kit import Connection, put, stream_of
from tests.integration.notify_kit import (
    NODE,
    SETTINGS,
    Bench,
    Loose,
    Received,
    listening,
    threads,
    wait_until_caught_up,
)
from tests.integration.session_kit import until
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
    assert (node.key, node.data) == (NODE.name, {"incarnation": "one", "address": NODE.address, "http_address": None})
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


# --- a hub ------------------------------------------------------------------------------------------------------------


HUB_SETTINGS = NotifySettings().scaled(4)
ODD: list[dict[str, Any] | None] = [
    {"group_id": "7", "revision": 1},
    {"group_id": 7, "revision": "x"},
    {"group_id": 7},
    {"revision": 3},
    {},
    None,
]


def heads(publisher: NodeSideMachine, name: str) -> list[object]:
    found = publisher.poll(name, 0, "", 0.0, 0.0)
    return [delivery.body for delivery in found.deliveries] if isinstance(found, PollReply) else []


@pytest.mark.conforms("P1", "D6", "E21")
def test_a_hub_passes_on_what_is_followed(database: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(conn: Connection) -> None:
        publisher = make_node_side_machine("n1#1")
        grown: list[int] = []
        changed: list[bool] = []
        ordered: list[int] = []
        hub = NotificationHub(
            database,
            load_driver("postgres")(database),
            publisher,
            lambda _: changed.append(True),
            ordered.append,
            grown.append,
            HUB_SETTINGS,
        )
        publisher.on_interest = lambda channel, key, wanted: hub.set_interest(str(key), wanted)
        conn.execute(
            "insert into node (name, incarnation, address, protocol_version, notify_endpoint, expires_at)"
            " values ('n1', 'n1#1', 'h:1', 1, %s, clock_timestamp() + interval '1 hour')",
            (hub.endpoint,),
        )
        try:
            publisher.receive("a", 1, [Subscribe(Channel.STREAM, "1")], 0.0)
            await until(lambda: heads(publisher, "a"))  # no notification came: it was read
            changes: list[ObjectChange] = [stream_change(1, 40, closed=False), stream_change(2, 50, closed=False)]
            await asyncio.to_thread(publish_once, database, changes)
            await until(lambda: {1, 2} <= set(grown))
            assert heads(publisher, "a")[-1] == StreamHead(1, 40)
            nonsense = [ObjectChange("stream", key, 2**62) for key in ("1", "x", "9" * 19, "9" * 90, "٣")]
            await asyncio.to_thread(publish_once, database, [*nonsense, stream_change(3, 60, closed=False)])
            await until(lambda: 3 in grown)
            publisher.receive("b", 1, [Subscribe(Channel.STREAM, "2")], 0.0)
            assert heads(publisher, "b") == [StreamHead(2, 50)], "it was received before"
            publisher.receive("c", 1, [Subscribe(Channel.STREAM, "x"), Subscribe(Channel.STREAM, None)], 0.0)
            stored = [head.stream_id for head in heads(publisher, "c") if isinstance(head, StreamHead)]
            assert stored == [1, 2], "of others nothing is kept"
            assert hub.subscribed_stream_count == 2, "x is no stream"
            odd = [ObjectChange("group", f"$share/g{n}/#", 1, data=data) for n, data in enumerate(ODD)]
            wanted = [group_change("$share/g/#", 7), group_change("$share/h/#", 8, revision=2)]
            await asyncio.to_thread(publish_once, database, [*odd, *wanted])
            await until(lambda: ordered)
            assert ordered == [8]
            assert not caplog.records
            before = len(changed)
            await asyncio.to_thread(create_space, conn, "eu", "eu/#")
            hub.subscriber.request_catch_up("space")
            await until(lambda: len(changed) > before)
        finally:
            await asyncio.to_thread(hub.close)

    with connect(database) as conn:
        asyncio.run(story(conn))


class Forged:
    """A hub, and what it has passed on. Changes are delivered as one publisher's."""

    def __init__(self, url: str) -> None:
        self.driver = Loose()
        self.publisher = make_node_side_machine("n1#1")
        self.looks: list[int] = []
        self.grown: list[int] = []
        self.hub = NotificationHub(
            url, self.driver, self.publisher, self.looks.append, self.looks.append, self.grown.append, HUB_SETTINGS
        )
        self._sent = 0

    def deliver(self, channel: str, *changes: ObjectChange) -> None:
        self._sent += 1
        self.driver.deliver(encode(ChangeNotification(channel, "i", channel, self._sent, self._sent - 1, changes)))

    def wait_until_taken(self) -> None:
        """Let the subscriber's thread take all of them while the loop stands still, as a busy one does."""
        self.deliver(STREAM)  # all before it have been handed on when it is taken
        eventually(lambda: self.hub.subscriber.counters()["received"] == self._sent)

    async def close(self) -> None:
        await asyncio.to_thread(self.hub.close)


@pytest.mark.conforms("X4")
def test_changes_that_wait_are_one_look_of_a_group(database: str) -> None:
    """However many there are, and under whatever keys; above so many groups it is one look of all."""

    async def story() -> None:
        forged = Forged(database)
        try:
            await until(lambda: forged.looks)  # at the spaces that it has read at first
            forged.looks.clear()
            for message in range(20):
                keys = [f"$share/{message}-{number}/#" for number in range(60)]
                forged.deliver(GROUP, *(group_change(key, 7, revision=1) for key in keys))
            forged.deliver(GROUP, group_change("$share/last/#", 8, revision=1))
            forged.wait_until_taken()
            await until(lambda: 8 in forged.looks)
            assert sorted(forged.looks) == [7, 8]
            forged.looks.clear()
            for first in range(0, 200, 50):
                many = [group_change(f"$share/g{n}/#", n, revision=1) for n in range(first, first + 50)]
                forged.deliver(GROUP, *many)
            forged.wait_until_taken()
            await until(lambda: forged.looks)
            assert forged.looks == [False]
        finally:
            await forged.close()

    asyncio.run(story())


@pytest.mark.conforms("X4")
def test_heads_are_passed_on_in_turns_with_others(database: str) -> None:
    async def story() -> None:
        forged = Forged(database)
        try:
            for first in range(0, 2_000, 100):
                forged.deliver(STREAM, *(stream_change(n, 1, closed=False) for n in range(first, first + 100)))
            forged.wait_until_taken()
            turns = [0]
            while len(forged.grown) < 2_000:
                await asyncio.sleep(0)
                turns.append(len(forged.grown))
            assert max(after - before for before, after in pairwise(turns)) <= PER_TURN
        finally:
            await forged.close()

    asyncio.run(story())


@pytest.mark.conforms("X4", "D6")
def test_a_catch_up_overrules_a_forged_head(database: str, conn: Connection) -> None:
    """True ones are passed on from then on, though all of them are lower."""
    stream = stream_of(conn, "default")
    put(conn, stream, b"a", b"b")

    async def story() -> None:
        forged = Forged(database)
        forged.publisher.on_interest = lambda channel, key, wanted: forged.hub.set_interest(str(key), wanted)

        async def await_head(head: int, *, is_closed: bool = False) -> None:
            await until(lambda: heads(forged.publisher, "a")[-1:] == [StreamHead(stream, head, is_closed)])

        try:
            forged.publisher.receive("a", 1, [Subscribe(Channel.STREAM, str(stream))], 0.0)
            await await_head(2)
            forged.deliver(STREAM, ObjectChange(STREAM, str(stream), 2**64 - 1))
            await await_head(2**63 - 1, is_closed=True)
            forged.hub.subscriber.request_catch_up(STREAM)
            await await_head(2)
            forged.deliver(STREAM, stream_change(stream, 3, closed=False))
            await await_head(3)
        finally:
            await forged.close()

    asyncio.run(story())


@pytest.mark.conforms("X4")
def test_a_turn_counts_each_subscriber_of_a_head(database: str) -> None:
    """Those of one stream have it in one turn."""
    streams, followers = range(20), 50

    async def story() -> None:
        forged = Forged(database)
        forged.publisher.on_interest = lambda channel, key, wanted: forged.hub.set_interest(str(key), wanted)
        ready: list[str] = []
        try:
            for follower in range(followers):
                wanted = [Subscribe(Channel.STREAM, str(stream)) for stream in streams]
                forged.publisher.receive(f"a{follower}", 1, wanted, 0.0)
            forged.publisher.on_ready = ready.append
            forged.deliver(STREAM, *(stream_change(stream, 1, closed=False) for stream in streams))
            forged.wait_until_taken()
            turns = [0]
            while len(ready) < len(streams) * followers:
                await asyncio.sleep(0)
                turns.append(len(ready))
            assert max(after - before for before, after in pairwise(turns)) <= PER_TURN
            assert heads(forged.publisher, "a0") == [StreamHead(stream, 1) for stream in streams]
        finally:
            await forged.close()

    asyncio.run(story())
