"""Publishing through nodes: real Postgres, real gRPC, nodes killed for real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest

from sublet_borrower.node_client import node_publish_sender
from sublet_borrower.node_client.feed_client import Feed
from sublet_leader.feed.publish import FeedPublishWriter
from sublet_leader.feed.service import FeedLimits
from sublet_protocol.domain.errors import (
    BatchNumberConflict,
    InvalidSetting,
    InvalidTopic,
    MalformedRow,
    ProducerFenced,
    PublisherClosed,
    Unavailable,
    ValueTooLarge,
)
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.feed_messages import (
    ERROR_METADATA,
    MAX_BATCH_BYTES,
    MAX_MESSAGE_BYTES,
    FeedPublishRequest,
)
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.db.connect import connect
from sublet_storage.log.append import ProducerStamp, append
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, reshard, rollover
from tests.integration.feed_kit import Serving, address_of, batch, places, publish, refused, serving, stub
from tests.integration.log_kit import Connection, by_key, everything, stamped, stream_of, swap_filters
from tests.kit import eventually
from tests.kit_nodes import Fleet
from tests.postgres_proxy import PostgresProxy


@pytest.fixture
def server(database: str, conn: Connection) -> Iterator[Serving]:
    with serving(database) as server:
        yield server


def stored(conn: Connection) -> Counter[bytes]:
    return Counter(message["value"] for messages in everything(conn).values() for message in messages)


def rows(count: int, topic: str = "t") -> list[dict[str, Any]]:
    return [{"topic": f"{topic}/{n}", "value": b"%d" % n} for n in range(count)]


# --- what is published is what is read --------------------------------------------------------------------------------


def test_each_delivery_has_the_position_of_its_message(server: Serving, conn: Connection) -> None:
    with Feed(server.address) as feed:
        one = feed.publish("a/b", "värde", key="k", headers={"h": b"1", "n": None}, timestamp=5)
        many = [feed.publish(f"t/{n % 7}", b"%d" % n) for n in range(300)]
        columns = {"topic": [f"u/{n % 5}" for n in range(5000)], "value": [b"u%d" % n for n in range(5000)]}
        spans = feed.publish_batch(columns).result(30)
        found = {(at.stream, at.offset): b"%d" % n for n, at in enumerate(each.result(30) for each in many)}
        at = one.result(30)
    for span in spans:
        numbers = span.rows if isinstance(span.rows, range) else span.rows.to_pylist()
        found |= {(span.stream, span.first_offset + index): b"u%d" % row for index, row in enumerate(numbers)}
    lying = {(each["stream"], each["offset"]): each for messages in everything(conn).values() for each in messages}
    full = lying.pop((at.stream, at.offset))
    assert (full["topic"], full["key"], full["value"]) == ("a/b", b"k", "värde".encode())
    assert full["headers"] == [{"key": "h", "value": b"1"}, {"key": "n", "value": None}]
    assert (full["timestamp"].timestamp(), full["epoch"]) == (5e-6, None)
    assert {place: each["value"] for place, each in lying.items()} == found
    with Feed(server.address) as feed:
        alone = [feed.publish_batch({"topic": [f"v/{n}"], "value": [b"v"]}) for n in range(100)]
        assert [len(span.rows) for each in alone for span in each.result(30)] == [1] * 100


def test_large_messages_travel_in_several_batches(server: Serving, conn: Connection) -> None:
    large = [bytes([n]) * (MAX_MESSAGE_BYTES - 100) for n in range(9)]
    with Feed(server.address) as feed:
        feed.publish_batch({"topic": "t", "value": [*large, *(b"%d" % n for n in range(20_000))]})
    assert stored(conn) == Counter([*large, *(b"%d" % n for n in range(20_000))])


# --- stored once ------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("W2")
def test_a_repeated_batch_is_stored_once(server: Serving, database: str, conn: Connection) -> None:
    """Beside batches of another producer, of an incarnation before, and with another number."""
    messages = [*rows(30), *rows(30, "eu")]
    create_space(conn, "eu", "eu/#", shards=2)
    for name in "abc":
        create_space(conn, name, f"{name}/#", shards=1)
    publish(server.address, 2, *rows(1, "a"), producer="q", incarnation=2)
    publish(server.address, 2, *rows(1, "b"))
    publish(server.address, 1, *rows(1, "c"), incarnation=2)
    first = publish(server.address, 2, *messages, incarnation=2)
    assert (first.is_duplicate, len(places(first))) == (False, 60)
    again = publish(server.address, 2, *messages, incarnation=2)
    assert (again.is_duplicate, places(again)) == (True, places(first))
    reshard(conn, "default", 5)
    create_space(conn, "one", "eu/1", shards=1)
    with serving(database) as restarted:
        again = publish(restarted.address, 2, *messages, incarnation=2)
        assert (again.is_duplicate, places(again)) == (True, places(first))
        after = publish(restarted.address, 3, {"topic": "t", "value": b"after"}, incarnation=2)
        assert not after.is_duplicate
        conn.execute("analyze producer")  # of a known small table Postgres reads all rows, in any order
        assert publish(restarted.address, 3, {"topic": "t", "value": b"after"}, incarnation=2).is_duplicate
    assert stored(conn) == Counter([b"%d" % n for n in range(30)] * 2 + [b"0"] * 3 + [b"after"])


@pytest.mark.conforms("P10")
def test_routes_of_another_timeline_are_read_anew(database: str) -> None:
    """There a space that was made last may be missing, and another have its number and its streams'."""
    publisher, anybody = FeedPublishWriter(), AccessGate().get_caller()
    with connect(database) as before, connect(database) as after:
        create_space(before, "eu", "eu/#", shards=1)
        create_space(before, "us", "us/#", shards=1)
        after.timeline = "another"
        for number, (conn, space) in enumerate([(before, "eu"), (after, "us")], start=1):
            request = FeedPublishRequest("p", 1, number, batch({"topic": "eu/1", "value": b"x"}))
            result, _ = publisher.store(conn, request, anybody)
            assert result.heads == {stream_of(conn, space): 1}
            swap_filters(conn)


def test_a_space_that_is_mended_takes_messages(conn: Connection) -> None:
    writer, anybody = FeedPublishWriter(), AccessGate().get_caller()
    request = FeedPublishRequest("p", 1, 1, batch({"topic": "t", "value": b"x"}))
    conn.execute("update stream set hash_to = hash_to - 1 where hash_from = 0")
    with pytest.raises(MalformedRow, match="`sublet spaces rollover`"):
        writer.store(conn, request, anybody)
    rollover(conn, "default")

    def is_stored() -> bool:
        with suppress(MalformedRow):
            return writer.store(conn, request, anybody)[1] == 1
        return False

    eventually(is_stored)


@pytest.mark.conforms("W2")
def test_simultaneous_attempts_store_a_batch_once(server: Serving, database: str, conn: Connection) -> None:
    publish(server.address, 1, *rows(1))
    with serving(database) as other, ThreadPoolExecutor(8) as pool:
        for number in range(2, 8):
            message = {"topic": "t", "key": b"k", "value": b"n%d" % number}
            asked = [pool.submit(publish, node.address, number, message) for node in (server, other) for _ in "1234"]
            replies = [each.result(60) for each in asked]
            assert sum(not reply.is_duplicate for reply in replies) == 1
            assert len({frozenset(places(reply)) for reply in replies}) == 1
    assert stored(conn) == Counter([b"0", *(b"n%d" % number for number in range(2, 8))])


@pytest.mark.conforms("W2")
def test_a_commit_without_answer_is_stored_once(database: str, conn: Connection) -> None:
    with PostgresProxy(database) as proxy, serving(proxy.url) as server, Feed(server.address) as feed:
        feed.publish("t", "0").result(30)
        proxy.cut_commit(resume=True)
        feed.publish("t", "1").result(30)
        assert proxy.was_cut.is_set()
        feed.publish("t", "2").result(30)
    assert stored(conn) == Counter([b"0", b"1", b"2"])


@pytest.mark.conforms("W2", "W3")
def test_a_batch_for_a_closed_stream_goes_elsewhere(server: Serving, conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=2)
    with Feed(server.address) as feed:
        for number in range(6):
            columns = {
                "topic": [f"{place}/x" for place in ("us", "eu") for _ in range(40)],
                "key": [f"{place}{n % 7}" for place in ("us", "eu") for n in range(40)],
                "value": [b"%d.%d.%s" % (number, n, place) for place in (b"us", b"eu") for n in range(40)],
            }
            feed.publish_batch(columns).result(30)
            reshard(conn, "eu", 1 + number % 3)
    assert set(stored(conn).values()) == {1}
    assert len(stored(conn)) == 480
    for found in by_key(conn).values():
        order = [tuple(map(int, value.split(b".")[:2])) for value in found]
        assert order == sorted(order)


def test_an_older_incarnation_is_fenced(server: Serving) -> None:
    publish(server.address, 1, *rows(1), incarnation=5)
    publish(server.address, 1, *rows(1), incarnation=6)
    with refused("newer incarnation", error=ProducerFenced.__name__):
        publish(server.address, 2, *rows(1), incarnation=5)


@pytest.mark.conforms("W2")
def test_a_number_of_another_batch_is_refused(server: Serving, conn: Connection) -> None:
    """Two clients under one name, or one that counts from 1 again: nobody is answered that something is stored which is
    not."""
    publish(server.address, 1, {"topic": "t", "value": b"first"})
    publish(server.address, 100, {"topic": "t", "value": b"last"})
    other = {"topic": "t", "value": b"other"}
    for number, why in ((100, "had other messages"), (50, "nobody knows"), (1, "nobody knows")):
        with pytest.raises(
            grpc.RpcError, match=f"number {number} is not stored now, as number 100 is.*{why}"
        ) as refused:
            publish(server.address, number, other)
        assert dict(refused.value.trailing_metadata())[ERROR_METADATA] == BatchNumberConflict.__name__
    assert publish(server.address, 100, {"topic": "t", "value": b"last"}).is_duplicate
    assert not publish(server.address, 1, other, incarnation=2).is_duplicate
    assert stored(conn) == Counter([b"first", b"last", b"other"])


def test_node_and_database_clients_do_not_fence(server: Serving, database: str, conn: Connection) -> None:
    message = {"topic": "t", "value": b"through a node"}
    with Publisher(database, producer="p") as publisher:
        publisher.publish("t", b"1").result(30)
        publish(server.address, 1, message, producer="p", incarnation=2**32)
        publisher.publish("t", b"2").result(30)
    with Publisher(database, producer="p") as publisher:
        publisher.publish("t", b"3").result(30)
    publish(server.address, 2, message, producer="p", incarnation=2**32)
    assert stored(conn) == Counter([b"1", b"2", b"3", b"through a node", b"through a node"])


@pytest.mark.conforms("P6")
def test_killed_nodes_lose_and_repeat_nothing(conn: Connection, fleet: Fleet) -> None:
    with Feed([address_of(fleet.nodes["n1"]), address_of(fleet.node("n2"))]) as feed:
        deliveries = []
        for number in range(600):
            deliveries.append(feed.publish("t", b"%d" % number, key=b"%d" % (number % 5)))
            if number == 200:
                deliveries[100].result(30)
                fleet.nodes["n1"].kill()
            if number == 400:
                deliveries[300].result(30)
                address_of(fleet.node("n3"))
        places = {(at.stream, at.offset) for at in (each.result(60) for each in deliveries)}
    assert len(places) == 600
    assert stored(conn) == Counter(b"%d" % number for number in range(600))
    for found in by_key(conn).values():
        assert list(map(int, found)) == sorted(map(int, found))


# --- too much, and wrong ----------------------------------------------------------------------------------------------


@pytest.mark.conforms("X4")
def test_a_busy_node_answers_when_to_come_again(database: str, conn: Connection) -> None:
    """And one with too many bytes in its hands."""
    limits = FeedLimits(max_batches=2, max_batch_bytes=3000, retry_after_ms=20)
    with serving(database, limits) as server, ThreadPoolExecutor(2) as pool, connect(database) as other:
        publish(server.address, 1, *rows(1), producer="warm")
        with refused(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_ms="20"):
            publish(server.address, 2, {"topic": "t", "value": b"x" * 3000}, producer="warm")
        with other.transaction():
            other.execute("select from stream for update")
            held = [pool.submit(publish, server.address, 1, {"topic": "t", "value": b"h"}, producer=p) for p in "ab"]
            eventually(lambda: server.feed.batches.inside == 2)
            with refused(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_ms="20"):
                publish(server.address, 1, *rows(1), producer="c")
            feed = Feed(server.address)
            delivery = feed.publish("t", "patient")
            with pytest.raises(TimeoutError):
                delivery.result(0.3)
        delivery.result(30)
        feed.close()
        assert all(not each.result(30).is_duplicate for each in held)
        eventually(lambda: server.feed.batches.inside == server.feed.batches.bytes_inside == 0)
    assert stored(conn) == Counter({b"0": 1, b"h": 2, b"patient": 1})


@pytest.mark.conforms("X4")
def test_a_producers_numbers_grow_by_steps(server: Serving, conn: Connection) -> None:
    """From nothing, or from the last batch; the first of an incarnation counts from 0. A refused one stores nothing."""
    step, message = 2**32, {"topic": "t", "value": b"v"}
    good = [(step, step), (step, 2 * step), (2 * step, 1), (2 * step, step + 1)]
    bad = [(step + 1, 1), (1, step + 1)], [(2 * step + 1, 1)], [(step, 3 * step + 1)], [(3 * step + 1, 1)]
    publish(server.address, 1, message, producer="another")
    append(conn, [stamped(stream_of(conn, "default"), ProducerStamp("feed/p", 1, 1), b"v")])  # no batch of a node
    for (incarnation, number), beyond in zip(good, bad, strict=True):
        for too_far in beyond:
            with refused("grows by at most 4294967296 at a time", grpc.StatusCode.INVALID_ARGUMENT):
                publish(server.address, too_far[1], message, incarnation=too_far[0])
        assert not publish(server.address, number, message, incarnation=incarnation).is_duplicate
    assert len(list(stored(conn).elements())) == 2 + len(good)


@pytest.mark.conforms("X4")
def test_malformed_batches_are_refused_with_reason(server: Serving, conn: Connection) -> None:
    good = batch({"topic": "t", "value": b"v"})
    named: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "producer": "p", "incarnation": 1, "number": 1}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": b""}, f"1 to {MAX_BATCH_BYTES}"),
        ({"messages": b"x" * 100}, "Arrow"),
        ({"messages": good, "producer": ""}, "producer"),
        ({"messages": good, "producer": "p" * 256}, "limit is 255"),
        ({"messages": good, "number": 0}, "number 0"),
        ({"messages": good, "incarnation": -1}, "incarnation -1"),
        ({"messages": good, "protocol_version": 99}, "protocol version 99"),
        ({"messages": batch({"topic": "a/+", "value": b""})}, "wildcards"),
        ({"messages": batch({"topic": "t", "value": b"x" * MAX_MESSAGE_BYTES})}, "limit is 1048576"),
    ]
    with Feed(server.address) as feed, stub(server.address) as service:
        for number, (given, story) in enumerate(cases):
            with pytest.raises(grpc.RpcError) as refused:
                service.Publish(pb.PublishRequest(**{**named, **given}), timeout=20)
            assert story in refused.value.details()
            assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
            feed.publish("t", b"%d" % number).result(20)
    assert stored(conn) == Counter(b"%d" % number for number in range(len(cases)))


def test_bad_input_is_refused_where_it_is_given(server: Serving) -> None:
    with Feed(server.address) as feed:
        with pytest.raises(InvalidTopic, match=r"a/\+"):
            feed.publish("a/+", "v")
        with pytest.raises(InvalidTopic, match="wildcards"):
            feed.publish_batch({"topic": ["a", "b/#"], "value": ["1", "2"]})
        with pytest.raises(ValueTooLarge, match="1048576"):
            feed.publish("a", b"x" * MAX_MESSAGE_BYTES)
    with pytest.raises(PublisherClosed):
        feed.publish("a", "v")
    for nodes in ([], "nowhere", ["127.0.0.1:7411", "x:99999"]):
        with pytest.raises(InvalidSetting, match="node"):
            Feed(nodes)


def test_a_dead_node_is_named() -> None:
    feed = Feed("127.0.0.1:1", delivery_timeout_s=1)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1\b.*Given up after 1 s"):
        feed.publish("t", "v").result(30)
    with pytest.raises(Unavailable):
        feed.close()


def test_what_waits_behind_a_timeout_is_not_sent(
    server: Serving, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would be waited for as long again. The first is waited for beyond the time of all that wait; none fits
    into a batch with another."""
    monkeypatch.setattr(node_publish_sender, "MIN_ATTEMPT_S", 2.0)
    large = MAX_MESSAGE_BYTES // 2
    feed = Feed(server.address, delivery_timeout_s=0.1)
    feed.publish("t", b"first").result(30)
    with conn.transaction():
        conn.execute("select from stream for update")
        lost, *waiting = [feed.publish("t", letter * large) for letter in (b"l", b"w", b"w", b"w")]
        with pytest.raises(Unavailable, match=r"Given up after 0\.1 s\. It may be stored or not"):
            lost.result(60)
        for delivery in waiting:
            with pytest.raises(Unavailable, match=r"not sent within 0\.1 s, .* Publish it again"):
                delivery.result(60)
    feed.publish("t", b"next").result(30)
    with pytest.raises(Unavailable):
        feed.close()
    assert stored(conn).keys() - {b"l" * large} == {b"first", b"next"}


def test_closing_waits_no_longer_than_it_is_asked_to(server: Serving, conn: Connection) -> None:
    """The database does not answer before it has returned."""
    with conn.transaction():
        conn.execute("select from stream for update")
        feed = Feed(server.address)
        delivery = feed.publish("t", "v")
        with pytest.raises(Unavailable):
            feed.close(0.2)
        with pytest.raises(Unavailable):
            delivery.result(0)
