"""Reading through nodes: real Postgres, real gRPC, nodes killed and frozen for real."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest

import sublet_leader.feed.head_poller as watching
from sublet_borrower.node_client import feed_reader
from sublet_borrower.node_client.feed_client import Feed
from sublet_leader.feed import history_and_follow
from sublet_leader.feed.database_threads import DatabaseThreads
from sublet_leader.feed.history_and_follow import encode
from sublet_leader.feed.service import FeedLimits
from sublet_protocol.domain.errors import InvalidFilter, PositionBeyondHead, PositionGone, Unavailable, UsageError
from sublet_protocol.domain.limits import MAX_BOOKMARK_STREAMS
from sublet_protocol.domain.subscriptions import Bookmark
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA
from sublet_storage.log.fetch import read_heads
from sublet_storage.producer import Publisher
from sublet_storage.readers.tail import MultiStreamReader
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import create_space, reshard, rollover
from tests.integration.feed_kit import Serving, address_of, follow_request, read_values, refused, serving, stub, values
from tests.integration.log_kit import Connection, put, stream_of, with_a_short_lived_space
from tests.interrupted_calls import run_interrupted
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

pytestmark = pytest.mark.shards(1)

NO_READ_AHEAD = [("grpc.http2.bdp_probe", 0)]
"""A client that takes nothing gets 64 kB."""


@pytest.fixture
def server(database: str, conn: Connection) -> Iterator[Serving]:
    with serving(database) as server:
        yield server


@pytest.fixture
def feed(server: Serving) -> Iterator[Feed]:
    with Feed(server.address) as feed:
        yield feed


@pytest.fixture
def stream(conn: Connection) -> int:
    return stream_of(conn, "default")


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


# --- history ----------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P1")
def test_a_position_leads_to_all_that_comes_once(feed: Feed, conn: Connection, stream: int) -> None:
    put(conn, stream, b"before")
    feed.history("#", "latest")
    position = feed.bookmark
    for number in range(100):
        put(conn, stream, b"%d" % number)
    with feed.follow("#", position) as reader:
        assert read_values(reader, 100) == numbers(0, 100)
        put(conn, stream, b"100", b"101")
        assert read_values(reader, 2) == numbers(100, 102)
        assert reader.read(0.2) is None
        assert reader.bookmark.offsets == {stream: 103}


@pytest.mark.conforms("P1")
def test_a_read_that_is_broken_off_misses_nothing(feed: Feed, conn: Connection, stream: int) -> None:
    """By an exception of a signal handler: the next read gives it, and no bookmark lies behind it before that."""
    client = Path(feed_reader.__file__)
    with feed.follow("#", "latest") as reader:
        for line in itertools.count(1):
            put(conn, stream, b"%d" % line)
            table, broken = run_interrupted(lambda: reader.read(WAIT_S), line, client, leave_out=["_undo"])
            if broken:
                assert reader.bookmark.offsets == {stream: line - 1}, broken
                table = reader.read(WAIT_S)
            assert table is not None, broken
            assert table.column("value").to_pylist() == [b"%d" % line], broken
            if not broken:
                break
    assert line > 20


@pytest.mark.conforms("P3")
def test_history_is_paged_and_in_order(feed: Feed, conn: Connection, stream: int) -> None:
    for start in range(0, 3000, 300):
        put(conn, stream, *(b"%d" % n + b"." * 2000 for n in range(start, start + 300)))
    assert list(feed.history("#", "latest")) == []
    reader = feed.history("#", 1000)
    tables = list(reader)
    assert len(tables) > 3
    assert [int(value.split(b".")[0]) for value in values(tables)] == list(range(1000, 3000))
    assert [at for table in tables for at in table.column("offset").to_pylist()] == list(range(1000, 3000))
    assert {table.schema for table in tables} == {DELIVERED_SCHEMA}
    assert (reader.is_finished, reader.bookmark.offsets) == (True, {stream: 3000})
    assert list(feed.history("#", reader.bookmark)) == []
    first = feed.history("#")
    page = first.read()
    assert page is not None
    rest = feed.history("#", str(first.bookmark))
    assert values([page, *rest]) == values(list(feed.history("#")))


@pytest.mark.conforms("P3")
def test_what_retention_has_taken_is_said(database: str) -> None:
    with with_a_short_lived_space(database) as conn, serving(database) as server, Feed(server.address) as feed:
        stream = stream_of(conn, "eu")
        put(conn, stream, b"1", b"2", topic="eu/1")
        reader = feed.follow("eu/#", Bookmark.of({stream: 1}))
        assert read_values(reader, 1) == [b"2"]
        held = feed.history("eu/#", "latest").bookmark
        put(conn, stream, b"3", topic="eu/1")
        rollover(conn, "eu")
        put(conn, stream_of(conn, "eu"), b"4", topic="eu/1")
        conn.execute("update generation set closed_at = closed_at - interval '1 day' where state = 'closed'")
        apply_retention(conn)
        later = feed.history("eu/#", held)
        with pytest.raises(PositionGone, match=f"stream {stream}: offset 2 is gone"):
            later.read()
        assert values(list(later)) == [b"4"]
        reported: list[PositionGone] = []
        assert values(list(feed.history("eu/#", held, on_data_loss=reported.append))) == [b"4"]
        assert [(gone.stream_id, gone.offset, gone.oldest) for gone in reported] == [(stream, 2, None)]

        async def report_later(gone: PositionGone) -> None:
            """Say nothing, unless somebody awaits it."""

        nobody_awaits: Any = report_later

        with pytest.raises(UsageError, match="on_data_loss returned a coroutine"):
            list(feed.history("eu/#", held, on_data_loss=nobody_awaits))
        assert values(list(feed.history("eu/#"))) == [b"4"]
        for begin in (feed.history, feed.follow):
            with pytest.raises(PositionGone):
                begin("eu/#", held).read()
            assert read_values(begin("eu/#", str(feed.bookmark)), 1) == [b"4"], "reported again"
        reader.close()


@pytest.mark.conforms("P3")
def test_a_loss_behind_the_beginning_is_said(feed: Feed, conn: Connection) -> None:
    """What a reader of all would have read next is gone, though the stream's beginning is not."""
    create_space(conn, "eu", "eu/#", shards=1)
    stream = stream_of(conn, "eu")
    put(conn, stream, b"1", topic="eu/1")
    with feed.follow("eu/#", "earliest") as reader:
        assert read_values(reader, 1) == [b"1"]
        with conn.transaction():
            put(conn, stream, b"2", topic="eu/1")
            rollover(conn, "eu")
            conn.execute("update generation set state = 'gone' where state = 'closed'")
        put(conn, stream_of(conn, "eu"), b"3", topic="eu/1")
        with pytest.raises(PositionGone, match=f"stream {stream}: offset 1 is gone"):
            read_values(reader, 1)


@pytest.mark.conforms("P9")
def test_history_begins_at_a_time(feed: Feed, conn: Connection, stream: int) -> None:
    put(conn, stream, b"1")
    row = conn.execute("select clock_timestamp()").fetchone()
    assert row is not None
    put(conn, stream, b"2", b"3")
    when: datetime = row[0]
    for start in (when, when.isoformat()):
        assert values(list(feed.history("#", start))) == [b"2", b"3"]
    with pytest.raises(UsageError, match="time zone"):
        feed.history("#", when.replace(tzinfo=None))


def test_only_what_matches_is_sent(feed: Feed, conn: Connection, stream: int) -> None:
    with feed.follow("a/+", "earliest") as reader:
        for number in range(40):
            put(conn, stream, b"%d" % number, topic="a/b" if number % 10 == 0 else "c")
        assert read_values(reader, 4) == [b"0", b"10", b"20", b"30"]
        assert reader.read(0.3) is None
        assert reader.bookmark.offsets == {stream: 40}


def test_a_large_block_comes_in_several_pages(feed: Feed, conn: Connection, stream: int) -> None:
    put(conn, stream, *(bytes([n]) * 1_000_000 for n in range(11)))
    tables = list(feed.history())
    assert len(tables) > 2
    assert values(tables) == [bytes([n]) * 1_000_000 for n in range(11)]


def test_what_cannot_be_read_is_refused(feed: Feed, stream: int) -> None:
    with pytest.raises(PositionBeyondHead, match=f"stream {stream}: offset 5"):
        feed.history("#", Bookmark.of({stream: 5}))
    with feed.follow("#", "earliest") as reader:
        timeline = reader.bookmark.timeline
    with pytest.raises(
        PositionBeyondHead, match=f"timeline elsewhere of the .* this is {timeline}: .*at its offset still"
    ):
        feed.history("#", Bookmark(stream, {stream: 0}, "elsewhere"))
    with pytest.raises(InvalidFilter):
        feed.history("a/#/b")
    with pytest.raises(UsageError, match="soon"):
        feed.follow("#", "soon")


@pytest.mark.conforms("E39", "W4")
@pytest.mark.parametrize("kind", ["history", "follow"])
def test_no_page_that_cannot_be_read_is_passed_over(
    feed: Feed, conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for value in (b"1", b"bad"):
        put(conn, stream, value * 100_000)  # a page each

    def encode_or_not(page: pa.Table) -> bytes:
        return b"?" if page["value"][0].as_py().startswith(b"bad") else encode(page)

    monkeypatch.setattr(history_and_follow, "READ_BYTES", 1)
    monkeypatch.setattr("sublet_leader.feed.history_and_follow.encode", encode_or_not)
    with getattr(feed, kind)("#", "earliest") as reader:
        assert len(read_values(reader, 1)) == 1
        for _ in range(3):
            with pytest.raises(UsageError, match="a page whose Arrow cannot be read"):
                reader.read(WAIT_S)
        assert reader.bookmark.offsets[stream] == 1
        monkeypatch.undo()
        assert [value[:1] for value in read_values(reader, 1)] == [b"b"]


def test_a_loss_in_a_new_space_is_reported_by_a_node(feed: Feed, conn: Connection) -> None:
    """To a reader that comes back when the rows of what was lost are deleted."""
    put(conn, stream_of(conn, "default"), b"0")
    feed.history("#", "latest")
    position = feed.bookmark
    create_space(conn, "b", "b/#", shards=1, retention_s=1)
    lost = stream_of(conn, "b")
    put(conn, lost, b"lost", topic="b/x")
    rollover(conn, "b")
    put(conn, stream_of(conn, "b"), b"1", topic="b/x")
    conn.execute("update generation set closed_at = closed_at - interval '1 hour'")
    collapse = EmptyGenerationCleaner(rest_s=0)
    while conn.execute("select from stream where stream_id = %s", (lost,)).rowcount:
        apply_retention(conn)
        collapse(conn)
    reported: list[PositionGone] = []
    with feed.follow("#", position, reported.append) as reader:
        assert read_values(reader, 1) == [b"1"]
    assert [gone.stream_id for gone in reported] == [lost]


# --- follow -----------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P1", "W3")
def test_children_come_after_their_parents(feed: Feed, database: str, conn: Connection) -> None:
    create_space(conn, "still", "still/#", shards=1)
    with feed.follow("#") as reader, Publisher(database) as publisher:
        for number in range(400):
            publisher.publish(f"{'eu' if number % 2 else 'us'}/x", b"%d" % number, key=b"%d" % (number % 6))
            if number in (80, 160, 240):
                reshard(conn, "default", number // 40)
            if number == 320:
                create_space(conn, "eu", "eu/#", shards=2)
        publisher.flush()
        found = list(map(int, read_values(reader, 400, 20)))
        ends = dict(conn.execute("select stream_id, head from stream where state = 'open'").fetchall())
        eventually(lambda: reader.read(0.05) is None and ends.items() <= reader.bookmark.offsets.items(), 30)
        assert values(list(feed.history("#", reader.bookmark))) == []
    assert sorted(found) == list(range(400))
    for key in range(6):
        order = [number for number in found if number % 6 == key]
        assert order == sorted(order)


def test_a_read_that_sees_a_rollover_finds_children(conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    eu = stream_of(conn, "eu")
    reading = MultiStreamReader(conn, TopicFilter("#"), "earliest")
    put(conn, eu, b"1", topic="eu/1")
    reading.update_heads(read_heads(conn, reading.open_streams))
    rollover(conn, "eu")
    conn.execute("update stream set parents = array[parents] where cardinality(parents) > 0")  # as an operator may
    for place in reading.readable_cursors():
        reading.read(conn, place)
    assert reading.is_stale
    reading.refresh_streams(conn)
    assert stream_of(conn, "eu") in reading.open_streams


@pytest.mark.conforms("P6")
def test_waiters_go_on_when_their_nodes_are_killed(database: str, fleet: Fleet) -> None:
    addresses = [address_of(fleet.nodes["n1"]), *(address_of(fleet.node(name)) for name in ("n2", "n3"))]
    killed = {100: "n1", 200: "n2"}
    with Feed(addresses) as feed, Publisher(database) as publisher, feed.follow("#") as reader:
        found: list[bytes] = []
        for number in range(300):
            publisher.publish("t", b"%d" % number, key=b"k")
            if number in killed:
                publisher.flush()
                found += read_values(reader, number + 1 - len(found), 30)
                fleet.nodes[killed[number]].kill()
        publisher.flush()
        found += read_values(reader, 300 - len(found), 30)
        assert reader.read(0.3) is None
    assert found == numbers(0, 300)


@pytest.mark.conforms("P6")
@pytest.mark.long
def test_a_frozen_node_is_left_for_another(fleet: Fleet, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_reader, "RECEIVE_TIMEOUT_S", 3.0)
    addresses = [address_of(fleet.nodes["n1"]), address_of(fleet.node("n2"))]
    with Feed(addresses) as feed, feed.follow("#") as reader:
        stream = stream_of(conn, "default")
        put(conn, stream, b"0")
        assert read_values(reader, 1) == [b"0"]
        fleet.nodes["n1"].signal(signal.SIGSTOP)
        put(conn, stream, b"1")
        assert read_values(reader, 1, 60) == [b"1"]


def test_a_node_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_reader, "RECEIVE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            Feed(address, node_timeout_s=1.5) as feed,
            pytest.raises(Unavailable, match=f"{address}.*Given up after 1.5 s"),
        ):
            feed.follow("#")


def test_a_database_that_is_away_is_waited_for(feed: Feed, database: str, conn: Connection, stream: int) -> None:
    with feed.follow("#") as reader:
        put(conn, stream, b"0")
        assert read_values(reader, 1) == [b"0"]
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'sublet feed%'"
        )
        put(conn, stream, b"1")
        assert read_values(reader, 1) == [b"1"]


@pytest.mark.conforms("P2")
def test_every_page_bears_its_call_and_place(server: Serving, conn: Connection, stream: int) -> None:
    put(conn, stream, b"0", b"1")
    with stub(server.address) as service:
        pages = service.Follow(follow_request(starting_position="earliest", subscription="mine"), timeout=90)
        first, second = next(pages), next(pages)
        put(conn, stream, b"2")
        third = next(page for page in pages if page.stream_id)
        rollover(conn, "default")
        child = stream_of(conn, "default")
        put(conn, child, b"0")
        named: set[int] = set()
        while (later := next(pages)).stream_id != child:
            named |= {each.stream_id for each in later.bookmark.positions}
        pages.cancel()
    assert child in named, "a reader begins anew where it gets a page of a stream that it does not know"
    assert {page.subscription_id for page in (first, second, third)} == {"mine"}
    assert [(each.stream_id, each.offset) for each in first.bookmark.positions] == [(stream, 0)]
    assert [(page.stream_id, page.start, page.position) for page in (second, third)] == [(stream, 0, 2), (stream, 2, 3)]


# --- many, and slow ---------------------------------------------------------------------------------------------------


def last_query(conn: Connection, application: str) -> Any:
    return conn.execute(
        "select max(query_start) from pg_stat_activity where application_name = %s", (application,)
    ).fetchone()


def test_many_waiters_share_one_look(server: Serving, conn: Connection, stream: int) -> None:
    with Feed(server.address) as feed, ExitStack() as stack:
        readers = [stack.enter_context(feed.follow("#")) for _ in range(20)]
        put(conn, stream, b"0")
        assert [read_values(reader, 1) for reader in readers] == [[b"0"]] * 20
        before, looks = last_query(conn, "sublet feed reading"), server.feed.head_poller.poll_count
        eventually(lambda: server.feed.head_poller.poll_count > looks + 5, 30)
        assert last_query(conn, "sublet feed reading") == before
        put(conn, stream, b"1")
        assert [read_values(reader, 1) for reader in readers] == [[b"1"]] * 20


def test_heads_from_elsewhere_wake_waiters(
    database: str, conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BACKOFF_INITIAL_S", 3600.0)
    with serving(database) as server, Feed(server.address) as feed, feed.follow("#") as reader:
        eventually(lambda: server.feed.head_poller.poll_count)
        end = put(conn, stream, b"0")
        assert reader.read(0.3) is None
        server.feed.update_heads({stream: end, 999: 5})
        assert read_values(reader, 1) == [b"0"]
        feed.publish("t", "1")
        assert read_values(reader, 1) == [b"1"]


@pytest.mark.conforms("X4")
def test_a_client_that_takes_no_pages_costs_few(server: Serving, database: str, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    for _ in range(100):
        put(conn, stream, b"x" * 500_000)
    with stub(server.address) as service, serving(database) as other, Feed(other.address) as feed:
        stuck = service.Follow(follow_request(starting_position="earliest"))
        assert next(stuck).HasField("bookmark")
        eventually(lambda: server.feed.pages_written > 2)
        for _ in range(3):
            assert len(values(list(feed.history()))) == 100
        assert other.feed.pages_written > 120
        assert server.feed.pages_written < 30
        assert next(page.position for page in stuck if page.position >= 100) == 100
        stuck.cancel()
    eventually(lambda: server.feed.readers.inside == 0)


@pytest.mark.conforms("X4")
def test_who_takes_nothing_stays_a_reader(server: Serving, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC keeps a page of a call that has ended until its client takes it, or goes."""
    monkeypatch.setattr(history_and_follow, "WRITE_TIMEOUT_S", 0.0)
    put(conn, stream_of(conn, "default"), *[b"x" * 500_000] * 8)
    channel = grpc.insecure_channel(server.address, NO_READ_AHEAD)
    stuck = sublet_pb2_grpc.FeedStub(channel).History(follow_request(starting_position="earliest"))
    assert next(stuck).HasField("bookmark")
    eventually(lambda: server.feed.pages.bytes_held > 2_000_000)
    eventually(lambda: 0 < server.feed.pages.bytes_held < 1_200_000, WAIT_S, "what was read beside a page is kept")
    assert server.feed.readers.inside == 1
    channel.close()
    eventually(lambda: (server.feed.readers.inside, server.feed.pages.bytes_held) == (0, 0))


@pytest.mark.conforms("X4")
def test_pages_that_nobody_takes_are_bounded(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who take theirs have their turn."""
    monkeypatch.setattr(history_and_follow, "CONTENDED_WRITE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(history_and_follow, "EXPANDED_BYTES", 8_000_000)
    put(conn, stream_of(conn, "default"), *[b"x" * 500_000] * 8)
    limits = FeedLimits(max_page_bytes=25_000_000)
    with serving(database, limits) as server, Feed(server.address) as feed, ExitStack() as stack:
        service = sublet_pb2_grpc.FeedStub(stack.enter_context(grpc.insecure_channel(server.address, NO_READ_AHEAD)))
        stuck = [service.History(follow_request(starting_position="earliest")) for _ in range(12)]
        assert all(next(call).HasField("bookmark") for call in stuck)
        assert len(values(list(feed.history()))) == 8
        eventually(lambda: server.feed.readers.inside == 12)
        eventually(lambda: server.feed.pages.bytes_held <= limits.max_page_bytes)


@pytest.mark.conforms("X4")
def test_readers_are_bounded(database: str, conn: Connection) -> None:
    limits = FeedLimits(max_readers=1, reader_retry_after_ms=30)
    with serving(database, limits) as server, Feed(server.address) as feed, stub(server.address) as service:
        inside = feed.follow("#")
        with refused(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_ms="30"):
            next(service.Follow(follow_request(), timeout=20))
        put(conn, stream_of(conn, "default"), b"0")
        assert read_values(inside, 1) == [b"0"]
        inside.close()
        assert values(list(feed.history())) == [b"0"]


@pytest.mark.conforms("X4")
def test_principals_work_in_rotation(database: str) -> None:
    threads, begun, done = DatabaseThreads(database, 1, "rotating"), threading.Event(), list[str]()

    def wait(conn: Connection) -> None:
        assert begun.wait(WAIT_S)

    first = threads.submit(wait, "a")
    works = [threads.submit(lambda _, name=name: done.append(name), name[0]) for name in ("a1", "a2", "b1", "a3", "c1")]  # type: ignore[misc]
    begun.set()
    for work in (first, *works):
        work.result(WAIT_S)
    assert done == ["a1", "b1", "c1", "a2", "a3"]
    threads.close()


@pytest.mark.conforms("X4")
def test_one_principal_leaves_others_a_thread(database: str) -> None:
    """However many requests it has under way, and however long they take."""
    over, threads = threading.Event(), DatabaseThreads(database, 4, "reading")
    busy = [threads.submit(lambda _: over.wait(), "a") for _ in range(5)]
    try:
        assert threads.submit(lambda _: "stored", "b").result(WAIT_S) == "stored"
        assert sum(work.running() for work in busy) <= 3
    finally:
        over.set()
    assert all(work.result(WAIT_S) for work in busy), "what had to wait was done then"
    threads.close()


@pytest.mark.conforms("X4")
def test_streams_of_readers_are_bounded(database: str, conn: Connection) -> None:
    """Together, as are bookmarks: of each stream that matches a reader has a position in the node's memory."""
    reshard(conn, "default", 100)
    limits = FeedLimits(max_reader_bytes=400 * 250)
    with serving(database, limits) as server, Feed(server.address) as feed, stub(server.address) as service:
        readers = [service.Follow(follow_request(starting_position="earliest"), timeout=60) for _ in range(2)]
        eventually(lambda: server.feed.readers.bytes_inside == 2 * 400 * 100, WAIT_S)
        with pytest.raises(grpc.RpcError, match=r"3 readers are under way.* 120000 bytes") as beyond:
            list(service.Follow(follow_request(starting_position="earliest"), timeout=60))
        assert beyond.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for reader in readers:
            reader.cancel()
        eventually(lambda: server.feed.readers.bytes_inside == 0, WAIT_S)
        assert values(list(feed.history())) == []


@pytest.mark.conforms("X4")
def test_bookmarks_of_readers_are_bounded(database: str) -> None:
    """Together, as each is in memory for as long as its call lasts."""
    streams = MAX_BOOKMARK_STREAMS // 2 + 1
    large = pb.FeedBookmark(positions=[pb.FeedPosition(stream_id=2**62 + n) for n in range(streams)])
    limits = FeedLimits(max_reader_bytes=160 * MAX_BOOKMARK_STREAMS)
    with serving(database, limits) as server, Feed(server.address) as feed, stub(server.address) as service:
        inside = service.Follow(follow_request(bookmark=large), timeout=60)
        eventually(lambda: server.feed.readers.bytes_inside > 0)
        with pytest.raises(grpc.RpcError, match=f"1 readers are .* {320 * streams} bytes") as beyond:
            next(service.Follow(follow_request(bookmark=large), timeout=20))
        assert beyond.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert values(list(feed.history())) == []
        inside.cancel()
        eventually(lambda: server.feed.readers.bytes_inside == 0)


@pytest.mark.conforms("X4")
def test_malformed_requests_are_refused_with_reason(server: Serving, conn: Connection) -> None:
    named: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "filter": "#",
        "subscription_id": "s",
        "starting_position": "latest",
    }
    many = pb.FeedBookmark(positions=[pb.FeedPosition(stream_id=n) for n in range(100_001)])
    negative = pb.FeedBookmark(positions=[pb.FeedPosition(stream_id=1, offset=-1)])
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"filter": ""}, "empty", "InvalidFilter"),
        ({"filter": "x" * 70_000}, "4096", "InvalidFilter"),
        ({"starting_position": "soon"}, "soon", "UsageError"),
        ({"starting_position": ""}, "latest", "UsageError"),
        ({"subscription_id": ""}, "subscription", "UsageError"),
        ({"bookmark": many}, "100001", "UsageError"),
        ({"bookmark": negative}, "whole numbers", "UsageError"),
        ({"protocol_version": 0}, "protocol version 0", "ProtocolMismatch"),
    ]
    with stub(server.address) as service, Feed(server.address) as feed, feed.follow("#") as reader:
        for given, story, error in cases:
            fields = {**named, **given}
            if "bookmark" in given:
                del fields["starting_position"]
            for method, kind in ((service.Follow, pb.FollowRequest), (service.History, pb.HistoryRequest)):
                with refused(story, error=error):
                    next(method(kind(**fields), timeout=20))
        put(conn, stream_of(conn, "default"), b"0")
        assert read_values(reader, 1) == [b"0"]
