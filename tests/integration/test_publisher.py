"""The publisher against a real Postgres, killed for real; and a process forked from one that publishes."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    MalformedRow,
    ProducerFenced,
    PublisherClosed,
    SchemaMismatch,
    SubletError,
    UnknownOutcome,
    UsageError,
)
from sublet_storage.db.connect import connect
from sublet_storage.log.append import AppendOutcome, AppendResult, BlockAppend, SingleAppender, append
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.producer import (
    AppendedSpan,
    AsyncPublisher,
    BatchDelivery,
    Delivery,
    Publisher,
    delivery,
    epoch_lease,
)
from sublet_storage.producer.batches.pending_block import PendingBlock
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.send_buffer import SendBuffer
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, rollover
from tests.integration.log_kit import Connection, by_key, everything, swap_filters
from tests.integration.notify_kit import listening
from tests.interrupted_calls import run_interrupted
from tests.kit import WAIT_S, Background, eventually
from tests.postgres_proxy import PostgresProxy
from tests.readme import ROOT
from tests.support.streams import open_streams

pytestmark = pytest.mark.shards(3)


def stored(conn: Connection) -> list[dict[str, Any]]:
    return [message for messages in everything(conn).values() for message in messages]


def values(conn: Connection) -> list[bytes]:
    return sorted(message["value"] for message in stored(conn))


def blocks(conn: Connection) -> list[int]:
    """Return the number of messages of each block."""
    return [count for (count,) in conn.execute("select count from block order by end_offset")]


def places(spans: Sequence[AppendedSpan], count: int) -> list[tuple[int, int | None]]:
    """Return (stream, offset) of each row of a batch."""
    of_rows = ((row, span) for row in range(count) for span in spans if span.offset_of(row) is not None)
    return [(span.stream, span.offset_of(row)) for row, span in of_rows]


# --- what is published is what is read --------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was_given(database: str, conn: Connection) -> None:
    at = datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    with Publisher(database) as publisher:
        delivery = publisher.publish("a/b", "värde", key="k", headers={"h": b"1", "n": None}, timestamp=at)
        position = delivery.result(10)
        assert delivery.is_done
        publisher.publish("a/b", None)
    full, bare = sorted(stored(conn), key=lambda message: message["value"] is None)
    assert full == {
        "topic": "a/b",
        "key": b"k",
        "value": "värde".encode(),
        "headers": [{"key": "h", "value": b"1"}, {"key": "n", "value": None}],
        "timestamp": at,
        "epoch": None,
        "stream": position.stream,
        "offset": position.offset,
    }
    assert (bare["key"], bare["value"], bare["headers"]) == (None, None, None)
    assert abs(bare["timestamp"].timestamp() - time.time()) < 60


@pytest.mark.parametrize("form", ["table", "batch", "mapping"])
def test_a_batch_arrives_by_columns(database: str, conn: Connection, form: str) -> None:
    count = 300
    columns: dict[str, Any] = {
        "topic": [f"t/{index % 4}" for index in range(count)],
        "value": [b"%d" % index for index in range(count)],
        "key": [None if index % 3 else b"%d" % (index % 10) for index in range(count)],
        "headers": [{"n": b"%d" % index} if index % 2 else None for index in range(count)],
        "timestamp": [datetime(2026, 1, 1, 0, 0, index % 60, tzinfo=UTC) for index in range(count)],
    }
    headers = [None if each is None else list(each.items()) for each in columns["headers"]]
    kinds = {"headers": pa.map_(pa.string(), pa.binary())}
    table = pa.table({name: pa.array(each, kinds.get(name)) for name, each in (columns | {"headers": headers}).items()})
    given = {"table": table, "batch": table.combine_chunks().to_batches()[0], "mapping": columns}[form]
    with Publisher(database, block_messages=50) as publisher:
        assert publisher.publish_batch({"topic": [], "value": []}).result(5) == ()
        spans = publisher.publish_batch(given).result(10)
        with pytest.raises(UsageError, match="colour"):
            publisher.publish_batch({"topic": "a", "value": [b""], "colour": ["red"]})
    found = {(message["stream"], message["offset"]): message for message in stored(conn)}
    assert len(found) == len(places(spans, count)) == count
    for row, place in enumerate(places(spans, count)):
        named = None if headers[row] is None else [{"key": "n", "value": b"%d" % row}]
        expected = {name: columns[name][row] for name in ("topic", "value", "key", "timestamp")} | {"headers": named}
        assert {name: found[place][name] for name in expected} == expected


def test_what_waits_for_an_append_is_the_next_block(database: str, conn: Connection) -> None:
    reshard(conn, "default", 1)
    with Publisher(database) as publisher:
        with conn.transaction():
            conn.execute("select from stream where state = 'open' for update")
            for index in range(500):
                publisher.publish("t", b"%d" % index)
        publisher.flush(10)
    assert len(blocks(conn)) <= 3
    assert values(conn) == sorted(b"%d" % index for index in range(500))


@pytest.mark.conforms("W2")
@pytest.mark.usefixtures("without_notifications")
def test_blocks_committed_together_have_their_places(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are reported also where the first answer was lost."""
    answered: list[list[AppendResult]] = []

    def listening(own: Connection, appends: Sequence[BlockAppend]) -> list[AppendResult]:
        answered.append(append(own, appends))
        return answered[-1]

    monkeypatch.setattr("sublet_storage.producer.sender.append", listening)
    reshard(conn, "default", 1)
    with PostgresProxy(database) as cutter, Publisher(cutter.url, block_messages=4, blocks_per_commit=3) as publisher:
        publisher.publish_batch({"topic": "t", "value": [b"first"] * 8}).result(20)  # prepares what is cut off then
        cutter.cut()
        delivery = publisher.publish_batch({"topic": "t", "value": [b"%d" % row for row in range(30)]})
        assert cutter.was_cut.wait(20)
        try:
            eventually(lambda: _heads(conn) == 20, 20)
            assert not delivery.is_done, "three blocks are committed, and nobody knows"
        finally:
            cutter.resume()
        offsets = [offset for _, offset in places(delivery.result(20), 30)]
    retried = [AppendResult(AppendOutcome.DUPLICATE, None)] * 2 + [AppendResult(AppendOutcome.DUPLICATE, 20)]
    assert retried in answered, "the log remembers the end of the last block only"
    assert offsets == list(range(8, 38))
    assert [row["value"] for row in stored(conn)[8:]] == [b"%d" % row for row in range(30)]


@pytest.mark.conforms("W1")
def test_an_exception_in_a_call_loses_nothing_else(database: str, conn: Connection) -> None:
    """Wherever it breaks off the call, a flush ends, a batch is there whole or not at all, and later heads are
    announced."""
    sure: list[bytes] = []
    maybe: list[bytes] = []
    where = [Path(sys.modules[it.__module__].__file__ or "") for it in (Publisher, SingleAppender, shared_publisher)]
    where[0] = where[0].parent
    with listening(database) as received, Publisher(database) as publisher:

        def is_notified() -> bool:
            sure.append(b"notified %d" % len(sure))
            last = publisher.publish("t", sure[-1], key=b"notified").result(30)
            change = received.subscriber.get("stream", str(last.stream))
            return change is not None and change.version == 2 * (last.offset + 1)

        eventually(is_notified)

        def publish(value: bytes) -> None:
            publisher.publish("t", value, key=value)
            publisher.publish_batch({"topic": "t", "value": [value + b"+", value + b"-"], "key": [b"k", value]})
            publisher.flush(30)

        for place in itertools.count(1):
            value = b"%d" % place
            _, broken = run_interrupted(partial(publish, value), place, *where)
            publisher.publish("t", value + b"!", key=value).result(30)
            sure.append(value + b"!")
            (maybe if broken else sure).extend([value, value + b"+", value + b"-"])
            if not broken:
                break
        publisher.flush(30)
        eventually(is_notified)
    there = values(conn)
    assert len(set(there)) == len(there)
    assert set(sure) <= set(there) <= {*sure, *maybe}
    assert {value[:-1] for value in there if value.endswith(b"+")} == {
        value[:-1] for value in there if value.endswith(b"-")
    }, "a batch is there whole or not at all"
    assert place > 100


def test_a_flush_does_not_wait_for_lingering(database: str, conn: Connection) -> None:
    reshard(conn, "default", 1)
    with Publisher(database, linger_ms=60_000, block_messages=10) as publisher:
        for _ in range(3):
            publisher.publish("t", b"x")
        publisher.flush(10)
        deliveries = [publisher.publish("t", b"x") for _ in range(10)]
        deliveries[0].result(10)
    assert blocks(conn) == [3, 10]


def test_blocks_are_bounded_in_messages_and_bytes(database: str, conn: Connection) -> None:
    reshard(conn, "default", 1)
    with Publisher(database, block_messages=8, block_bytes=10_000) as publisher:
        publisher.publish_batch({"topic": "t", "value": [b"x"] * 20})
        publisher.publish_batch({"topic": "t", "value": [b"x" * 3000] * 10})
        publisher.publish("t", b"x" * 50_000)
    rows = conn.execute("select count, octet_length(payload) from block order by end_offset").fetchall()
    assert sum(row[0] for row in rows) == 31
    assert max(row[0] for row in rows) <= 8
    assert all(size < 12_000 or count == 1 for count, size in rows)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_publisher_of_a_space_refuses_other_topics(database: str, conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    with Publisher(database, space="eu") as publisher:
        publisher.publish("eu/1", b"x").result(10)
        with pytest.raises(UsageError, match="'us' belongs to space 'default'"):
            publisher.publish("us", b"x")
        drop_space(conn, "eu")
        late = publisher.publish("eu/1", b"y")
        assert late.result(10).stream in {stream.stream_id for stream in open_streams(conn)}
        with pytest.raises(UsageError, match="'eu/1' belongs to space 'default'"):
            publisher.publish("eu/1", b"z")
        create_space(conn, "eu", "eu/#", shards=1)

        def is_taken() -> bool:
            with suppress(UsageError):
                return bool(publisher.publish("eu/1", b"z"))
            return False

        eventually(is_taken)


def test_what_can_never_be_published_reads_no_routes(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[object]()
    monkeypatch.setattr(SendBuffer, "request_routes", reads.append)
    with Publisher(database) as publisher:
        for publish in (
            lambda: publisher.publish("a/#", b"x"),
            lambda: publisher.publish("a", b"x", timestamp=-(2**63) - 1),
            lambda: publisher.publish_batch({"topic": "a/#", "value": [b"x"]}),
        ):
            with pytest.raises(UsageError):
                publish()
    assert reads == []


@pytest.mark.parametrize("form", ["single", "batch"])
def test_a_malformed_space_is_refused_until_mended(database: str, conn: Connection, form: str) -> None:
    """Others are not."""
    create_space(conn, "eu", "eu/#", shards=2)
    stream = PublisherRoutingTable.load(conn).find_stream("eu/1", None)
    with Publisher(database) as publisher:

        def publish(topic: str) -> Delivery | BatchDelivery:
            columns = {"topic": topic, "value": [b"x"]}
            return publisher.publish(topic, b"x") if form == "single" else publisher.publish_batch(columns)

        def is_taken() -> bool:
            with suppress(MalformedRow):
                return bool(publish("eu/1").result(WAIT_S))
            return False

        conn.execute("update stream set state = 'closed' where stream_id = %s", (stream,))
        with pytest.raises(MalformedRow, match=r"space 'eu': .* `sublet spaces rollover` opens others"):
            publish("eu/1").result(WAIT_S)
        assert publish("us/1").result(WAIT_S)
        assert not is_taken()
        rollover(conn, "eu")
        eventually(is_taken)
        with pytest.raises(MalformedRow):  # of the first
            publisher.flush()
    assert values(conn) == [b"x", b"x"]


def test_a_closed_publisher_raises(database: str) -> None:
    publisher = Publisher(database)
    publisher.close()
    publisher.close()
    with pytest.raises(PublisherClosed):
        publisher.publish("a", b"x")
    with pytest.raises(PublisherClosed):
        publisher.publish_batch({"topic": "a", "value": [b"x"]})
    with pytest.raises(PublisherClosed), publisher:
        pass


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_full_buffer_makes_the_caller_wait(database: str, conn: Connection) -> None:
    """Nothing is dropped."""
    reshard(conn, "default", 1)
    published = 0

    def publish() -> None:
        nonlocal published
        for index in range(200):
            publisher.publish("t", b"%03d" % index + b"x" * 1000)
            published += 1

    with Publisher(database, max_buffered_bytes=20_000) as publisher:
        with conn.transaction():
            conn.execute("select from stream where state = 'open' for update")
            caller = threading.Thread(target=publish)
            caller.start()
            eventually(lambda: published >= 19)
            caller.join(0.2)
            assert published < 25
            with pytest.raises(TimeoutError):
                publisher.flush(0.1)
        caller.join(20)
    assert [value[:3] for value in values(conn)] == [b"%03d" % index for index in range(200)]


@pytest.mark.conforms("W2")
def test_lost_connections_double_nothing(database: str, conn: Connection) -> None:
    """Each message is stored once, and in order."""
    sent: dict[bytes, list[bytes]] = {b"%d" % key: [] for key in range(5)}
    with Publisher(database, block_messages=20, max_buffered_bytes=10_000) as publisher:

        def publish() -> None:
            for key, mine in sent.items():
                mine.append(b"%d" % len(mine))
                publisher.publish("t", mine[-1], key=key)

        with Background(publish):
            for number in range(8):
                eventually(lambda: _cut(conn))
                before = _heads(conn)
                eventually(lambda least=before: _heads(conn) > least + 20, 20)  # type: ignore[misc]
                if number % 2:
                    rollover(conn, "default")
    assert by_key(conn) == sent


@pytest.mark.conforms("W2")
@pytest.mark.usefixtures("without_notifications")
@pytest.mark.parametrize("rolled_over", [False, True])
def test_an_append_without_a_reply_is_stored_once(database: str, conn: Connection, rolled_over: bool) -> None:
    """That holds also when its stream was closed meanwhile."""
    with PostgresProxy(database) as cutter, Publisher(cutter.url) as publisher:
        publisher.publish("t", b"first").result(20)
        (before,) = {stream_id for stream_id, found in everything(conn).items() if found}
        cutter.cut()
        lost = publisher.publish("t", b"lost")
        assert cutter.was_cut.wait(20)
        waiting = publisher.publish("t", b"waiting")
        assert values(conn) == [b"first", b"lost"], "it is committed, and the publisher does not know"
        if rolled_over:
            rollover(conn, "default")
        cutter.resume()
        assert (lost.result(20).stream, lost.result().offset) == (before, 1)
        assert (waiting.result(20).stream != before) is rolled_over
    assert values(conn) == [b"first", b"lost", b"waiting"]


@pytest.mark.long
@pytest.mark.conforms("W2")
@pytest.mark.usefixtures("without_notifications")
@pytest.mark.parametrize("timeout_s", [1, math.inf])
def test_a_doubt_outlives_later_attempts(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """What may be stored since the first is not to be published again without a look, also where there are no limits
    but that of what the server keeps of publishers."""
    if timeout_s == math.inf:
        monkeypatch.setattr(delivery, "MAX_DOUBT_S", 1.0)
    with PostgresProxy(database) as network:
        publisher = Publisher(network.url, delivery_timeout_s=timeout_s)
        publisher.publish("t", b"first").result(20)
        network.cut()
        lost = publisher.publish("t", b"lost")
        assert network.was_cut.wait(20)
        network.go_away()
        with pytest.raises(UnknownOutcome, match="It may be stored or not: look before you publish it again"):
            lost.result(60)
        with pytest.raises(UnknownOutcome):
            publisher.close()
    assert values(conn) == [b"first", b"lost"]


def test_a_database_that_stays_away_fails_deliveries(database: str, conn: Connection) -> None:
    publisher = Publisher(database, delivery_timeout_s=0.3)
    publisher.publish("t", b"x").result(20)
    name = conn.info.dbname
    with psycopg.connect(database.replace(name, "postgres"), autocommit=True) as admin:
        admin.execute(f"alter database {name} with allow_connections false")
        eventually(lambda: _cut(conn))
        delivery = publisher.publish("t", b"x")
        with pytest.raises((DatabaseUnreachable, SubletError)):
            delivery.result(20)
        with pytest.raises((DatabaseUnreachable, SubletError)):
            publisher.flush(20)
        admin.execute(f"alter database {name} with allow_connections true")
    publisher.publish("t", b"y").result(20)
    publisher.close()
    assert b"y" in values(conn)


def test_a_late_change_of_schema_moves_no_publisher(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where it connects later: it goes on in the schema that it was opened with, and others begin in theirs."""
    with Publisher(database, space="default") as publisher:
        monkeypatch.setenv("SUBLET_SCHEMA", "elsewhere")
        publisher.publish("t", b"1").result(10)
        conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^sublet pub'")
        publisher.in_epoch(1).publish("t", b"2").result(10)
        with pytest.raises(SchemaMismatch, match="'elsewhere'"):
            Publisher(database)
    assert values(conn) == [b"1", b"2"]


def test_a_newer_incarnation_fences_the_older(database: str, conn: Connection) -> None:
    older = Publisher(database, producer="meter")
    older.publish("t", b"1").result(10)
    with Publisher(database, producer="meter") as newer:
        newer.publish("t", b"2").result(10)
        with pytest.raises(ProducerFenced, match="'meter'"):
            older.publish("t", b"3").result(10)
        newer.publish("t", b"4").result(10)
    with pytest.raises(SubletError):
        older.publish("t", b"5")
    with pytest.raises(ProducerFenced):
        older.close()
    assert values(conn) == [b"1", b"2", b"4"]


def test_a_fault_in_the_sender_reaches_all_who_wait(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("our own fault")

    monkeypatch.setattr(PendingBlock, "pack", broken)
    publisher = Publisher(database)
    deliveries = [publisher.publish(f"t/{index}", b"x") for index in range(3)]
    with pytest.raises(ZeroDivisionError):
        deliveries[0].result(20)
    eventually(lambda: all(delivery.is_done for delivery in deliveries))
    with pytest.raises(PublisherClosed):
        publisher.publish("t", b"x")
    for each in deliveries:
        with pytest.raises((ZeroDivisionError, PublisherClosed)):
            each.result(20)
    with pytest.raises(ZeroDivisionError):
        publisher.close()


@pytest.mark.conforms("W2", "W3")
def test_what_waits_for_a_closed_stream_goes_on(database: str, conn: Connection) -> None:
    """It goes to the stream's children, in order."""
    keys = [b"%d" % index for index in range(20)]

    def reshard_twice() -> None:
        with connect(database) as other:
            reshard(other, "default", 4)
            reshard(other, "default", 2)

    with connect(database) as locker, Publisher(database, block_messages=5) as publisher:
        with locker.transaction():
            locker.execute("lock table stream in exclusive mode")
            singles = [publisher.publish("t", b"%d" % index, key=key) for index in range(10) for key in keys]
            batch = publisher.publish_batch({"topic": "t", "key": keys * 2, "value": [b"10"] * 20 + [b"11"] * 20})
            changer = threading.Thread(target=reshard_twice)
            changer.start()
        positions = [each.result(20) for each in singles]
        spans = batch.result(20)
        changer.join(20)
        after = [publisher.publish("t", b"12", key=key).result(20) for key in keys]
    assert by_key(conn) == {key: [b"%d" % index for index in range(13)] for key in keys}
    place = {(each["stream"], each["offset"]): (each["key"], each["value"]) for each in stored(conn)}
    named = [(key, b"%d" % index) for index in range(10) for key in keys]
    assert [place[at.stream, at.offset] for at in positions] == named
    assert {place[at.stream, at.offset] for at in after} == {(key, b"12") for key in keys}
    assert [place[at] for at in places(spans, 40)] == [(key, value) for value in (b"10", b"11") for key in keys]


def test_blocks_are_compressed_as_the_space_is_set(database: str, conn: Connection) -> None:
    alter_space(conn, "default", compression="zstd")
    with Publisher(database) as publisher:
        publisher.publish_batch({"topic": "t", "value": [b"the same again and again"] * 1000})
    ((codec, size),) = conn.execute("select codec & 3, octet_length(payload) from block").fetchall()
    assert (codec, size < 3000, len(stored(conn))) == (2, True, 1000)


# --- asyncio ----------------------------------------------------------------------------------------------------------


def test_the_async_twin_publishes_waits_and_reports(database: str, conn: Connection) -> None:
    async def main() -> None:
        async with AsyncPublisher(database, max_buffered_bytes=2000) as publisher:
            deliveries = [await publisher.publish("t", b"%d" % index, key=b"k") for index in range(300)]
            positions = [await delivery for delivery in deliveries]
            assert [at.offset for at in positions] == list(range(300))
            spans = await (await publisher.publish_batch({"topic": "t", "key": b"k", "value": [b"x"] * 5}))
            assert [(span.first_offset, len(span.rows)) for span in spans] == [(300, 5)]
            await publisher.flush(10)
        with pytest.raises(PublisherClosed):
            await publisher.publish("t", b"x")
        with pytest.raises(PublisherClosed):
            await publisher.open()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(values(conn)) == 305


def _heads(conn: Connection) -> int:
    ((total,),) = conn.execute("select sum(head)::bigint from stream").fetchall()
    return int(total)


def _cut(conn: Connection) -> int:
    """Terminate the publishers' connections; how many."""
    ours = "datname = current_database() and application_name = 'sublet publisher'"
    return conn.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {ours}").rowcount


def connect_elsewhere(*arguments: Any, **named: Any) -> Any:
    """Connect, as if the database were on another timeline."""
    connection = connect(*arguments, **named)
    connection.timeline = "another"
    return connection


@pytest.mark.conforms("P10")
def test_epochs_of_a_lost_space_are_not_taken(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be those of the space that has its number now."""
    create_space(conn, "eu", "eu/#", shards=1)
    create_space(conn, "us", "us/#", shards=1)
    monkeypatch.setattr(epoch_lease, "connect", connect_elsewhere)
    with Publisher(database, space="eu") as publisher:
        publisher.in_epoch(1)
    with Publisher(database, space="eu") as publisher:
        swap_filters(conn)
        with pytest.raises(ProducerFenced, match="another timeline"):
            publisher.in_epoch(2)


@pytest.mark.conforms("P10")
def test_epochs_after_a_lost_registration(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other timeline has an older one under that name."""
    monkeypatch.setattr(epoch_lease, "connect", connect_elsewhere)
    with Publisher(database, space="default", producer="meter") as publisher:
        conn.execute("update producer set incarnation = 1 where producer_id = 'meter'")
        publisher.in_epoch(1).publish("t", b"x").result(10)
    assert values(conn) == [b"x"]


# --- a forked process -------------------------------------------------------------------------------------------------


def act(story: str, place: str | Path) -> None:
    command = [sys.executable, "-m", "tests.processes.forking", story, str(place)]
    done = subprocess.run(command, check=False, cwd=ROOT, timeout=90, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.conforms("W1")
@pytest.mark.parametrize(
    "story",
    [
        pytest.param("every_use_in_a_child_is_refused", marks=pytest.mark.long),
        "a_child_that_drops_it_touches_nothing",
        "a_childs_copies_of_connections_lead_nowhere",
        pytest.param("the_async_twin_refuses_too", marks=pytest.mark.long),
    ],
)
def test_a_child_cannot_publish_by_its_parents(database: str, story: str) -> None:
    act(story, database)


def test_a_child_does_not_stop_its_parents_server(server_home: Path) -> None:
    act("a_child_does_not_stop_the_server", server_home / "data")
