"""One suite, two readers: what a session is given of a stream is the same, from Postgres and by way of nodes."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import InsufficientPrivilege

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.fetch.node_reader import NodeMessageReader
from sublet_borrower.fetch.stream_fetcher import GrantedStreamReader
from sublet_borrower.streams.granted_stream import MAX_AWAITED, GrantedStream
from sublet_leader.feed import member_fetch
from sublet_leader.feed.history_and_follow import encode
from sublet_protocol.domain.errors import (
    PageUnreadable,
    PositionBeyondHead,
    PositionGone,
    TimelineChanged,
    ValueTooLarge,
)
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.groups.consumer_progress import next_session_epoch
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA
from sublet_storage.log.fetch import MATCH_ALL, LogPage
from sublet_storage.log.partition_reads import format_partition_name
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import create_space, rollover
from tests.integration.feed_kit import Serving
from tests.integration.log_kit import (
    generation_of,
    go_over_to_another_timeline,
    put,
    stream_of,
    with_a_short_lived_space,
)
from tests.kit import GRANT_KEY, WAIT_S, eventually
from tests.postgres_proxy import PostgresProxy

pytestmark = pytest.mark.shards(1)

Connection = psycopg.Connection[Any]

BATCH_BYTES = 4 << 20
TIMEOUT_S = 3.0
MB = 1_000_000


class World:
    """A reader, and its way to the log, which can be in trouble. `proxy`: before Postgres."""

    def __init__(self, database: str, proxy: PostgresProxy) -> None:
        self.database, self.proxy = database, proxy

    def reader(self, max_batch_bytes: int = BATCH_BYTES, timeout_s: float = TIMEOUT_S) -> GrantedStreamReader:
        """Another reader."""
        return DatabaseMessageReader(self.proxy.url, max_batch_bytes, timeout_s)

    def go_away(self) -> None:
        """Make all nodes stop answering."""
        self.proxy.go_away()

    def come_back(self) -> None:
        """Make a node answer again."""
        self.proxy.resume()

    def close(self) -> None:
        """Stop what serves."""


T = TypeVar("T", bound=World)


class NodeWorld(World):
    """The reader asks a node, and that the database."""

    def __init__(self, database: str, proxy: PostgresProxy) -> None:
        super().__init__(database, proxy)
        self._server = Serving(proxy.url)
        self._server.start()
        self.address = self._server.address

    def reader(self, max_batch_bytes: int = BATCH_BYTES, timeout_s: float = TIMEOUT_S) -> GrantedStreamReader:
        return NodeMessageReader([self.address], max_batch_bytes, timeout_s)

    def go_away(self) -> None:
        self._server.stop()

    def come_back(self) -> None:
        self._server = Serving(self.proxy.url, port=int(self.address.rpartition(":")[2]))
        self._server.start()

    def close(self) -> None:
        self._server.stop()


@contextlib.contextmanager
def opened(kind: type[T], database: str) -> Iterator[T]:
    with PostgresProxy(database) as proxy:
        world = kind(database, proxy)
        yield world
        proxy.resume()
        world.close()


@pytest.fixture(params=[World, NodeWorld], ids=["postgres", "node"])
def world(request: pytest.FixtureRequest, database: str) -> Iterator[World]:
    with opened(request.param, database) as world:
        yield world


@pytest.fixture
def reader(world: World) -> Iterator[GrantedStreamReader]:
    reader = world.reader()
    yield reader
    reader.close()


def granted_of(conn: Connection, stream_id: int, position: int = 0, filter: str = "#") -> GrantedStream:
    generation = generation_of(conn, stream_id)
    return GrantedStream(stream_id, 1, generation, TopicFilter(filter), position, grant_key=GRANT_KEY)


def stream_with(conn: Connection, *values: bytes) -> int:
    """Return the stream of the default space, which has these values, in a block."""
    stream = stream_of(conn, "default")
    put(conn, stream, *values)
    return stream


def read_up_to(reader: GrantedStreamReader, conn: Connection) -> GrantedStream:
    """Return a stream of which a first block was read, and of a second nothing is known."""
    granted = granted_of(conn, stream_with(conn, b"1"))
    pages(reader, granted)
    put(conn, granted.stream_id, b"2")
    granted.head = None
    return granted


def always(_: GrantedStream) -> bool:
    return True


def pages(reader: GrantedStreamReader, granted: GrantedStream) -> list[LogPage]:
    """Return all pages up to the head."""
    found: list[LogPage] = []
    while granted.may_have_more:
        page = reader.fetch(granted, always)
        assert page is not None
        found.append(page)
    return found


def rows(found: list[LogPage]) -> list[dict[str, Any]]:
    return [row for page in found for batch in page.batches for row in batch.to_pylist()]


def values(found: list[LogPage]) -> list[bytes]:
    return [row["value"] for row in rows(found)]


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P2", "P3")
def test_pages_follow_one_another_to_the_head(world: World, reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    for first in range(0, 30, 3):
        put(conn, stream, *(b"%d" % number for number in range(first, first + 3)))
    small = world.reader(max_batch_bytes=1)
    for each in (reader, small):
        each.warm_up()
        granted = granted_of(conn, stream, 4)
        found = pages(each, granted)
        assert values(found) == [b"%d" % number for number in range(4, 30)]
        assert [(row["stream"], row["offset"]) for row in rows(found)] == [(stream, number) for number in range(4, 30)]
        assert {batch.schema for page in found for batch in page.batches} == {DELIVERED_SCHEMA}
        assert [page.start for page in found] == [4, *(page.position for page in found[:-1])]
        assert (granted.next_read_offset, granted.head) == (30, 30)
        assert each.fetch(granted, always) == LogPage((), 30, 30, 30, False), "there is nothing more"
    assert len(found) == 9, "the limit was one block"
    small.close()


@pytest.mark.conforms("P2", "P3")
@pytest.mark.parametrize("filter", ["#", "t/2"])
def test_what_was_waited_for_is_read(world: World, reader: GrantedStreamReader, conn: Connection, filter: str) -> None:
    stream = stream_of(conn, "default")
    put(conn, stream, b"0", topic="t/0")
    granted = granted_of(conn, stream, filter=filter)
    pages(reader, granted)
    with contextlib.closing(world.reader(max_batch_bytes=1)) as small:
        for count in (1, 2, 5, 20, 100):
            start, matching = granted.next_read_offset, [b"%d" % n for n in range(count) if filter == "#" or n % 3 == 2]
            for number in range(count):
                head = put(conn, stream, b"%d" % number, topic=f"t/{number % 3}")
            one_by_one = replace(granted, outstanding={})
            one_by_one.head_hint = granted.head_hint = head
            found = pages(reader, granted)
            assert values(found) == matching
            assert (found[0].start, found[-1].position, found[-1].head) == (start, head, head)
            assert values(pages(small, one_by_one)) == matching
            if filter == "#" and isinstance(small, DatabaseMessageReader):
                page = small.fetch(replace(granted, next_read_offset=start, outstanding={}), always)
                assert page is not None
                assert page.position == start + 1


def last_statement(conn: Connection) -> str:
    """Return the last statement of this database's reader, which waits for the next."""
    ((last, state),) = conn.execute(
        "select query, state from pg_stat_activity"
        " where application_name = 'sublet reader' and datname = current_database()"
    ).fetchall()
    assert state == "idle"
    return str(last)


def test_little_that_was_waited_for_is_asked_for_alone(database: str, conn: Connection) -> None:
    stream = stream_with(conn, b"0")
    with contextlib.closing(DatabaseMessageReader(database, BATCH_BYTES, TIMEOUT_S)) as reader:
        granted = granted_of(conn, stream)
        assert values(pages(reader, granted)) == [b"0"]
        assert "from stream" in last_statement(conn)
        granted.head_hint = put(conn, stream, b"1")
        assert values(pages(reader, granted)) == [b"1"]
        assert "from stream" not in last_statement(conn)
        granted.head_hint = put(conn, stream, *(b"2" for _ in range(MAX_AWAITED + 1)))
        assert len(values(pages(reader, granted))) == MAX_AWAITED + 1
        assert "from stream" in last_statement(conn)


def test_a_reader_has_read_before_its_first_grant(database: str, conn: Connection) -> None:
    """The server keeps a plan for reads of the newest partition with that filter."""
    stream = stream_with(conn, b"never read")
    with contextlib.closing(DatabaseMessageReader(database, BATCH_BYTES, TIMEOUT_S)) as reader:
        for filter, plan_count in ((MATCH_ALL, 1), (TopicFilter("a/+"), 2)):
            reader.warm_up(filter)
            statement = "select statement from pg_prepared_statements where generic_plans > 0"
            plans = reader.query(partial(psycopg.Connection.execute, query=statement))
            assert plans is not None
            partition = format_partition_name(generation_of(conn, stream))
            assert [f"from {partition}\n" in plan for (plan,) in plans.fetchall()] == [True] * plan_count


def test_who_may_read_nothing_learns_it_by_reading(database: str, conn: Connection) -> None:
    stream = stream_with(conn, b"1")
    conn.execute("create role unread login; grant usage on schema sublet to unread")
    try:
        stranger = make_conninfo(database, user="unread")
        with contextlib.closing(DatabaseMessageReader(stranger, BATCH_BYTES, WAIT_S)) as reader:
            reader.warm_up()
            with pytest.raises(InsufficientPrivilege):
                reader.fetch(granted_of(conn, stream), always)
    finally:
        conn.execute("drop owned by unread; drop role unread")


@pytest.mark.conforms("P3")
def test_what_does_not_match_is_passed_over(reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    for number in range(12):
        put(conn, stream, b"%d" % number, topic="a/b" if number % 4 == 0 else "c")
    assert values(pages(reader, granted_of(conn, stream, filter="a/+"))) == [b"0", b"4", b"8"]
    granted = granted_of(conn, stream, filter="none/#")
    assert reader.fetch(granted, always) == LogPage((), 0, 12, 12, False)
    assert granted.next_read_offset == 12


@pytest.mark.conforms("P2")
def test_a_large_block_comes_in_several_pages(reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_with(conn, *(bytes([number]) * MB for number in range(20)))
    found = pages(reader, granted_of(conn, stream, 1))
    assert values(found) == [bytes([number]) * MB for number in range(1, 20)]


def test_a_message_of_twenty_megabytes_is_read(world: World, conn: Connection) -> None:
    stream = stream_with(conn, b"before", b"x" * 20 * MB, b"after")
    with contextlib.closing(world.reader(timeout_s=WAIT_S)) as reader:
        found = values(pages(reader, granted_of(conn, stream)))
    assert [(len(value), value[:1]) for value in found] == [(6, b"b"), (20 * MB, b"x"), (5, b"a")]


@pytest.mark.conforms("E29", "P8")
def test_a_page_that_may_not_be_taken_is_discarded(reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_with(conn, b"1")
    granted = granted_of(conn, stream)
    assert reader.fetch(granted, lambda _: False) is None
    assert (granted.next_read_offset, granted.head) == (0, None)
    assert values(pages(reader, granted)) == [b"1"]
    granted.is_ended = True
    assert reader.fetch(granted, always) is None


# --- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P3", "W4")
def test_what_retention_has_taken_is_gone_by_name(database: str, reader: GrantedStreamReader) -> None:
    with with_a_short_lived_space(database) as conn:
        stream, other = stream_of(conn, "eu"), stream_of(conn, "default")
        put(conn, stream, b"1", b"2", topic="eu/1")
        rollover(conn, "eu")
        conn.execute("update generation set closed_at = closed_at - interval '1 day' where state = 'closed'")
        apply_retention(conn)
        granted = granted_of(conn, stream, 1)
        with pytest.raises(PositionGone) as gone:
            reader.fetch(granted, always)
        assert (gone.value.stream_id, gone.value.offset, gone.value.oldest) == (stream, 1, None)
        put(conn, other, b"1")
        put(conn, other, b"2")
        conn.execute("delete from block where stream_id = %s and end_offset = 1", (other,))
        with pytest.raises(PositionGone) as gone:
            reader.fetch(granted_of(conn, other), always)
        assert (gone.value.stream_id, gone.value.offset, gone.value.oldest) == (other, 0, 1)
        assert values(pages(reader, granted_of(conn, other, 1))) == [b"2"]


def test_a_position_beyond_the_head_is_an_error(reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_with(conn, b"1")
    with pytest.raises(PositionBeyondHead, match=f"stream {stream}: offset 5 is beyond the head 1"):
        reader.fetch(granted_of(conn, stream, 5), always)
    assert values(pages(reader, granted_of(conn, stream))) == [b"1"]


def test_heads_are_those_of_the_streams_that_exist(reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_with(conn, b"1", b"2")
    assert reader.fetch_heads([stream, 10**9]) == [(stream, 2)]
    assert reader.fetch_heads(iter(())) == []


# --- trouble ----------------------------------------------------------------------------------------------------------


def read_on(reader: GrantedStreamReader, granted: GrantedStream) -> list[bytes]:
    """Return what is read next, once something can be."""
    return values([eventually(lambda: reader.fetch(granted, always), WAIT_S)])


@pytest.mark.conforms("P6")
def test_after_trouble_it_goes_on_in_the_same_place(
    world: World, reader: GrantedStreamReader, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """While nobody answers there is no page, and one warning."""
    granted = read_up_to(reader, conn)
    with caplog.at_level(logging.INFO, "sublet_borrower"):
        world.go_away()
        for _ in range(5):
            assert reader.fetch(granted, always) is None
            assert reader.fetch_heads([granted.stream_id]) == []
        assert granted.next_read_offset == 1
        world.come_back()
        assert read_on(reader, granted) == [b"2"]
    away, again = [record for record in caplog.records if record.name.startswith("sublet_borrower.fetch.")]
    assert (away.levelname, again.levelname) == ("WARNING", "INFO")
    assert re.search("available.*, retrying: ", away.getMessage())
    assert re.search("available.*again|again.*available", again.getMessage())


@pytest.mark.conforms("P6")
def test_a_silent_database_is_waited_for_only_so_long(
    world: World, reader: GrantedStreamReader, conn: Connection
) -> None:
    granted = read_up_to(reader, conn)
    world.proxy.hold()
    assert reader.fetch(granted, always) is None, "and not never"
    world.proxy.resume()
    assert read_on(reader, granted) == [b"2"]


def test_a_closed_reader_opens_again_when_it_reads(reader: GrantedStreamReader, conn: Connection) -> None:
    stream = stream_with(conn, b"1")
    for _ in range(2):
        assert reader.fetch_heads([stream]) == [(stream, 1)]
        reader.close()
        reader.close()


# --- nodes alone ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(database: str) -> Iterator[NodeWorld]:
    with opened(NodeWorld, database) as world:
        yield world


@pytest.mark.conforms("X4")
def test_a_nodes_page_is_bounded(nodes: NodeWorld, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is larger is an error that says so."""
    monkeypatch.setattr("sublet_leader.feed.history_and_follow.MAX_PAGE_BYTES", 10 * MB)
    stream = stream_with(conn, *(bytes([number]) * MB for number in range(20)))
    put(conn, stream, b"x" * 11 * MB)
    reader, granted = nodes.reader(1 << 40, timeout_s=60.0), granted_of(conn, stream)
    sizes: list[int] = []
    while granted.next_read_offset < 20:
        page = reader.fetch(granted, always)
        assert page is not None
        sizes.append(pa.Table.from_batches(page.batches).nbytes)
    assert len(sizes) > 2
    assert max(sizes) <= member_fetch.PAGE_BYTES
    with pytest.raises(ValueTooLarge, match=f"stream {stream}, offset 20 has 110.* bytes, and a node sends 10000000"):
        reader.fetch(granted, always)
    assert granted.next_read_offset == 20
    reader.close()


@pytest.mark.conforms("P6")
@pytest.mark.parametrize("has_lost_node", [False, True])
def test_what_no_node_can_send_keeps_no_other_waiting(
    nodes: NodeWorld, conn: Connection, monkeypatch: pytest.MonkeyPatch, has_lost_node: bool
) -> None:
    """The session's other streams are read meanwhile, without a pause."""
    create_space(conn, "eu", "eu/#", shards=1)
    put(conn, stream_of(conn, "eu"), b"other", topic="eu/1")
    bad, good = granted_of(conn, stream_with(conn, b"bad")), granted_of(conn, stream_of(conn, "eu"))
    addresses = [nodes.address, "127.0.0.1:1"] if has_lost_node else [nodes.address]
    reader = NodeMessageReader(addresses, 1, TIMEOUT_S)

    def encode_or_not(page: pa.Table) -> bytes:
        return b"?" if page["value"][0].as_py() == b"bad" else encode(page)

    monkeypatch.setattr("sublet_leader.feed.member_fetch.encode", encode_or_not)
    for _ in range(3):
        with pytest.raises(PageUnreadable, match=f"stream {bad.stream_id}: node .* sends, from offset 0 on, a page"):
            reader.fetch(bad, always)
    assert values(pages(reader, good)) == [b"other"]
    monkeypatch.undo()
    assert values(pages(reader, bad)) == [b"bad"]
    reader.close()


@pytest.mark.conforms("P6")
def test_a_node_without_its_database_does_not_answer(nodes: NodeWorld, conn: Connection) -> None:
    stream = stream_with(conn, b"1")
    reader, granted = nodes.reader(), granted_of(conn, stream)
    nodes.proxy.go_away()
    assert reader.fetch(granted, always) is None
    nodes.proxy.resume()
    assert read_on(reader, granted) == [b"1"]
    reader.close()


@pytest.mark.conforms("P6")
def test_of_two_nodes_the_other_goes_on_at_once(
    nodes: NodeWorld, database: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    other = NodeWorld(database, nodes.proxy)
    reader = NodeMessageReader([nodes.address, other.address], 1, TIMEOUT_S)
    granted = read_up_to(reader, conn)
    with caplog.at_level(logging.WARNING, "sublet_borrower"):
        nodes.go_away()
        assert values(pages(reader, granted)) == [b"2"]
    assert caplog.records == [], "nobody has waited"
    nodes.come_back()
    reader.close()
    other.close()


@pytest.mark.conforms("E30")
def test_epochs_of_sessions_grow_whoever_draws_them(nodes: NodeWorld, database: str) -> None:
    reader = NodeMessageReader([nodes.address], 1, TIMEOUT_S)
    with connect(database) as connection:
        name = (Subscription.parse("$share/g/#"), "etl")
        drawn = [draw(*name) for draw in (reader.next_session_epoch, partial(next_session_epoch, connection)) * 2]
    assert drawn == sorted(set(drawn))
    reader.close()


@pytest.mark.conforms("P10")
def test_a_connection_of_a_past_timeline_is_replaced(world: World, conn: Connection) -> None:
    """One that was idle when the primary died, and looks as if it were open."""
    stream = stream_with(conn, b"a")
    with contextlib.closing(world.reader()) as reader:
        assert pages(reader, granted_of(conn, stream))
        go_over_to_another_timeline(conn)
        granted = granted_of(conn, stream)
        granted.grant_id = TIMELINE_US

        def is_read() -> bool:
            with contextlib.suppress(TimelineChanged):
                return bool(pages(reader, granted))
            return False

        eventually(is_read, 20.0)


@pytest.mark.conforms("P10")
def test_a_grant_of_another_timeline_reads_nothing(world: World, conn: Connection) -> None:
    stream = stream_with(conn, b"a")
    go_over_to_another_timeline(conn)
    granted = granted_of(conn, stream)
    with contextlib.closing(world.reader()) as reader:
        for granted.grant_id in (TIMELINE_US - 1, 2 * TIMELINE_US):
            with pytest.raises(TimelineChanged, match=f"stream {stream} was granted on another timeline"):
                reader.fetch(granted, always)
        granted.grant_id = TIMELINE_US
        assert pages(reader, granted)
