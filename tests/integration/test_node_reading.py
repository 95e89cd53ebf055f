"""Members of a group without access to the database: real nodes, some killed, and a real Postgres behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.feed import member_fetch
from sublet_leader.feed.service import FeedLimits
from sublet_protocol.domain.access.rights import AccessRule, AccessRules, AccessSnapshot, Right
from sublet_protocol.domain.errors import PermissionDenied, Unavailable, UsageError
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.access_cache import AccessCache
from sublet_protocol.gate.audit import RefusalLog
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.gate.gate import Caller
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.member_reads import FetchRequest, encode_fetch_request, encode_heads_request
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.db.connect import connect
from tests.integration.feed_kit import address_of, refused, serving, stub
from tests.integration.log_kit import Connection, put, stream_of
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED
from tests.postgres_proxy import PostgresProxy

SETTINGS = BorrowerSettings().scaled(SPEED)
HASTY = replace(SETTINGS, read_timeout_s=1.5)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Whoever looks for a database finds none, and whoever starts one does it there."""
    monkeypatch.setenv("SUBLET_DATABASE_URL", "postgresql://nowhere.invalid/db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def addresses(stage: Stage) -> list[str]:
    return [address_of(node) for node in stage.fleet.nodes.values()]


def member(nodes: list[str], **settings: Any) -> Session:
    wanted = {"starting_position": "earliest", "settings": SETTINGS, **settings}
    return Session(ALL, nodes=nodes, transport="nodes", **wanted)


class Member:
    """A member of a group on a thread of its own; `seen`: (stream, offset) of all that it was given."""

    def __init__(self, nodes: list[str]) -> None:
        self.session = member(nodes)
        self.seen: list[tuple[int, int]] = []
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> None:
        """Hand over, and end."""
        self.session.drain()
        self._thread.join(WAIT_S)
        self.session.close()
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            for batch in self.session:
                self.seen += [(batch.stream_id, offset) for offset in batch.table.column("offset").to_pylist()]
        except BaseException as error:  # noqa: BLE001 raised by `stop`
            self.failure = error


# --- a group ----------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E16", "E29", "P6")
def test_two_members_survive_the_node_they_read_from(stage: Stage, nowhere: Path) -> None:
    stage.serve("n1", "n2")
    nodes = addresses(stage)
    members = [Member(nodes) for _ in range(2)]
    try:
        eventually(lambda: stage.scene.shares() == [8, 8], WAIT_S, stage.said)
        with stage.scene.load(every_s=0.05):
            eventually(lambda: all(len(one.seen) > 100 for one in members), WAIT_S, stage.said)
            stage.fleet.nodes["n1"].kill()
            before = [len(one.seen) for one in members]
            eventually(
                lambda: all(len(one.seen) > had + 200 for one, had in zip(members, before, strict=True)),
                WAIT_S,
                stage.said,
            )
        eventually(stage.scene.consumed, WAIT_S, stage.said)
    finally:
        for one in members:
            one.stop()
    heads = stage.scene.heads()
    times = Counter(place for one in members for place in one.seen)
    assert set(times) == {(stream, offset) for stream, head in heads.items() for offset in range(head)}, "lost"
    assert set(times.values()) == {1}
    assert stage.scene.shares() == []
    assert not (nowhere / ".sublet").exists()


def test_an_async_session_goes_through_nodes_too(stage: Stage, nowhere: Path) -> None:
    stage.serve("n1")
    stage.scene.publish(10)
    wanted: dict[str, Any] = {"nodes": addresses(stage), "transport": "nodes", "starting_position": "earliest"}

    async def work() -> list[bytes]:
        found: list[bytes] = []
        async with AsyncSession(ALL, settings=SETTINGS, **wanted) as session:
            async for batch in session:
                found += batch.table.column("value").to_pylist()
                if len(found) == 10:
                    with pytest.raises(UsageError, match="transport='database'"):
                        await session.run_in_transaction(lambda connection: None, batch)
                    return found
        return found

    assert sorted(map(int, asyncio.run(work()))) == list(range(10))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_transaction_takes_the_database(stage: Stage, nowhere: Path) -> None:
    stage.serve("n1")
    stage.scene.publish(1)
    with member(addresses(stage)) as session:
        batch = session.poll(WAIT_S)
        assert batch is not None
        for transaction in (batch.transaction(), session.transaction(batch)):
            with pytest.raises(UsageError, match=r"transport='database'.*batch\.grant_id"), transaction:
                pytest.fail("there is no connection")
        assert session.poll(0.1) is None, "asking has acknowledged the batch"
        eventually(stage.scene.consumed, WAIT_S, stage.said)


@contextlib.contextmanager
def a_port(greeting: bytes | None) -> Iterator[str]:
    """Yield a port that listens without being a node's. Without a greeting nothing is accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.sendall(greeting or b"")

        if greeting is not None:
            threading.Thread(target=greet, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_without_a_node_it_is_said_who_was_asked(greeting: bytes | None, nowhere: Path) -> None:
    with a_port(greeting) as wrong, pytest.raises(Unavailable, match=f"no node answers at {wrong}, 127.0.0.1:1"):
        member([wrong, "127.0.0.1:1"], settings=HASTY)
    assert not (nowhere / ".sublet").exists()


def test_a_session_passes_over_what_is_no_node(database: str) -> None:
    """And draws the epoch of its name at the one that is."""
    with a_port(None) as silent, serving(database) as feed, connect(database) as conn:
        member([silent, "127.0.0.1:1", feed.address], settings=HASTY, name="etl").close()
        assert conn.execute("select subscription, session from session_epoch").fetchall() == [(ALL, "etl")]


@pytest.mark.conforms("X4")
def test_malformed_requests_are_refused_by_name(database: str) -> None:
    good: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "stream_id": 1,
        "filter": "#",
        "generation_id": 1,
        "limit_bytes": 1,
        "grant_id": 1,
    }
    cases: list[tuple[str, Any, str, str]] = [
        ("Read", pb.FetchRequest(**good | {"stream_id": -1}), "stream_id -1", "UsageError"),
        ("Read", pb.FetchRequest(**good | {"filter": "a/#/b"}), "filter 'a/#/b'", "InvalidFilter"),
        ("Read", pb.FetchRequest(**good | {"position": 5, "stream_id": 10**9}), "no such stream", "NotFound"),
        ("Read", pb.FetchRequest(**good | {"position": 5}), "beyond the head", "PositionBeyondHead"),
        ("Heads", pb.HeadsRequest(protocol_version=9, stream_ids=[1]), "protocol version 9", "ProtocolMismatch"),
        ("SessionEpoch", pb.SessionEpochRequest(), "protocol version 0", "ProtocolMismatch"),
    ]
    with serving(database) as server, stub(server.address) as service:
        for method, request, story, name in cases:
            with refused(story, error=name):
                getattr(service, method)(request, timeout=20)
        assert len(service.Heads(encode_heads_request(range(1, 17)), timeout=20).heads) == 16


@pytest.mark.conforms("X4")
def test_a_draw_of_a_locked_name_is_to_be_repeated(database: str) -> None:
    request = pb.SessionEpochRequest(protocol_version=PROTOCOL_VERSION, subscription=ALL, session="etl")
    with serving(database) as server, stub(server.address) as service, connect(database) as user:
        first = service.SessionEpoch(request, timeout=20).epoch
        with user.transaction():
            user.execute("select next_session_epoch(%s, 'etl')", (ALL,))
            with refused("an open transaction keeps the name locked", grpc.StatusCode.UNAVAILABLE):
                service.SessionEpoch(request, timeout=20)
        assert service.SessionEpoch(request, timeout=20).epoch > first


@pytest.mark.conforms("X4")
def test_reads_are_bounded(database: str) -> None:
    with connect(database) as conn:
        stream = stream_of(conn, "default")
    request = encode_fetch_request(FetchRequest(stream, 0, TopicFilter("#"), 1, 1, 1))
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(PostgresProxy(database))
        server = stack.enter_context(serving(proxy.url, FeedLimits(max_reads=2)))
        service = stack.enter_context(stub(server.address))
        assert service.Read(request, timeout=20).head == 0
        proxy.hold()
        under_way = [service.Read.future(request, timeout=20) for _ in range(2)]
        eventually(lambda: server.feed.reads.inside == 2)
        under_way[0].cancel()  # it counts until its work is over
        for method, asked in [("Read", request), ("Heads", encode_heads_request([stream]))] * 20:
            with pytest.raises(grpc.RpcError) as refused:
                getattr(service, method)(asked, timeout=2)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(refused.value.trailing_metadata())[RETRY_AFTER_METADATA]) > 0
        proxy.resume()
        assert under_way[1].result().head == 0
        eventually(lambda: server.feed.reads.inside == 0)


@pytest.mark.conforms("X4")
def test_an_answer_counts_until_it_is_taken(database: str) -> None:
    """Else whoever takes none could have any number of them, as large as they are."""
    with connect(database) as conn:
        stream = stream_of(conn, "default")
        put(conn, stream, bytes(3 << 20))
    large, small = (encode_fetch_request(FetchRequest(stream, at, TopicFilter("#"), 1, 1, 1)) for at in (0, 1))
    with contextlib.ExitStack() as stack:
        before_postgres = stack.enter_context(PostgresProxy(database))
        limits = FeedLimits(max_reads=9, reading_connections=1)
        server = stack.enter_context(serving(before_postgres.url, limits))
        before_node = stack.enter_context(PostgresProxy(f"tcp://{server.address}"))
        client, other = (stack.enter_context(stub(at)) for at in (f"127.0.0.1:{before_node.port}", server.address))
        assert client.Read(small, timeout=20).head == 1
        before_postgres.hold()
        under_way = [client.Read.future(large) for _ in range(6)]
        eventually(lambda: server.feed.reads.inside == 6)
        before_node.hold()
        before_postgres.resume()
        assert other.Read(small, timeout=20).head == 1, "which was executed after the six"
        assert server.feed.reads.inside > 3, "the network has taken one or two"
        before_node.resume()
        assert [each.result().head for each in under_way] == [1] * 6
        eventually(lambda: server.feed.reads.inside == 0)


@pytest.mark.conforms("X4")
def test_answers_that_nobody_takes_fill_a_bound(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further reads wait for memory before they are executed; calls that need little do not."""
    monkeypatch.setattr("sublet_leader.feed.service.EXPANDED_BYTES", 3 << 20)
    with connect(database) as conn:
        stream = stream_of(conn, "default")
        put(conn, stream, bytes(3 << 20))
    request = encode_fetch_request(FetchRequest(stream, 0, TopicFilter("#"), 1, 1, 1))
    with contextlib.ExitStack() as stack:
        before_postgres = stack.enter_context(PostgresProxy(database))
        limits = FeedLimits(max_page_bytes=7 << 20, reading_connections=1)
        server = stack.enter_context(serving(before_postgres.url, limits))
        before_node = stack.enter_context(PostgresProxy(f"tcp://{server.address}"))
        client, other = (stack.enter_context(stub(at)) for at in (f"127.0.0.1:{before_node.port}", server.address))
        assert client.Read(request, timeout=20).head == 1
        before_postgres.hold()
        under_way = [client.Read.future(request) for _ in range(9)]
        eventually(lambda: server.feed.reads.inside == 9)
        under_way.pop().cancel()
        eventually(lambda: server.feed.reads.inside == 8)
        before_node.hold()
        before_postgres.resume()
        for _ in range(8):
            assert other.Heads(encode_heads_request([stream]), timeout=20).heads
        assert server.feed.reads.inside > 4, "the network has taken some"
        assert server.feed.pages.is_short
        assert 3 << 20 < server.feed.pages.bytes_held <= 7 << 20
        before_node.resume()
        assert [each.result().head for each in under_way] == [1] * 8
        eventually(lambda: (server.feed.reads.inside, server.feed.pages.bytes_held) == (0, 0))


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("X4")
def test_a_call_for_heads_reads_each_group_once(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a row for each stream of each group, and once in a while; and none at all, and no statement, for who may join
    no group."""
    conn.execute(
        "insert into consumer_group (kind, name, filter)"
        " select 'share', 'g' || i, 'orders/' || i % 2 || '/#' from generate_series(1, 20) i"
    )
    conn.execute(
        "insert into lending (group_id, stream_id, position)"
        " select group_id, s, 0 from consumer_group, generate_series(1001, 1050) s"
        " where filter <> 'orders/1/#' or s > 1010"
    )
    rows: list[list[Any]] = []
    parsed: list[str] = []
    fetch = psycopg.Cursor.fetchall

    def fetchall(cursor: psycopg.Cursor[Any]) -> list[Any]:
        rows.append(fetch(cursor))
        return rows[-1]

    def parse(text: str) -> TopicFilter:
        parsed.append(text)
        return TopicFilter(text)

    monkeypatch.setattr(psycopg.Cursor, "fetchall", fetchall)
    monkeypatch.setattr("sublet_storage.groups.admin.access_snapshot.TopicFilter", parse)
    rule = AccessRule("user:member", Right.JOIN, TopicFilter("orders/1/#"))
    cache = AccessCache(AccessSnapshot("1", AccessRules([rule]), {}), time.monotonic)
    streams = range(1001, 1101)
    member, stranger = (Caller(name, "", "Heads", cache, RefusalLog()) for name in ("user:member", "user:stranger"))
    read, rights = list(range(1011, 1051)), member_fetch.StreamRights()
    assert sorted(rights.filter(conn, member, streams)) == read
    assert sum(map(len, rows)) <= 20 + 40
    assert sorted(parsed) == ["orders/0/#", "orders/1/#"]
    rows.clear()
    assert not rights.filter(conn, stranger, streams)
    with pytest.raises(PermissionDenied):
        rights.check(conn, stranger, FetchRequest(1011, 0, rule.filter, 1, 1, 1))
    assert sorted(rights.filter(conn, member, read)) == read
    rights.check(conn, member, FetchRequest(1011, 0, rule.filter, 1, 1, 1))
    assert not rows
    with pytest.raises(PermissionDenied):
        rights.check(conn, member, FetchRequest(1011, 0, TopicFilter("orders/#"), 1, 1, 1))
    cache.replace(AccessSnapshot("2", AccessRules([]), {}))
    assert not rights.filter(conn, member, read), "a rule that is gone counts no more"
    cache.replace(AccessSnapshot("3", AccessRules([rule]), {}))
    monkeypatch.setattr(member_fetch, "VALID_S", 0.0)
    past = member_fetch.StreamRights()
    assert sorted(past.filter(conn, member, read)) == read
    conn.execute("update consumer_group set deleted_at = now()")
    assert not past.filter(conn, member, read), "what was found is looked up again"
    for filter, error in ((rule.filter, Unavailable), (TopicFilter("orders/#"), PermissionDenied)):
        with pytest.raises(error):
            past.check(conn, member, FetchRequest(1011, 0, filter, 1, 1, 1))
    conn.execute("update consumer_group set deleted_at = now() - interval '1 hour'")
    with pytest.raises(PermissionDenied):
        past.check(conn, member, FetchRequest(1011, 0, rule.filter, 1, 1, 1))
