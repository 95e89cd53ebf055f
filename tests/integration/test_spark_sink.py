"""The sink without Spark: its calls in Spark's order, a real Postgres, and a crash before and behind each of them.

What Spark itself makes of it is in `tests/spark/test_sink.py`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo
from pyspark import cloudpickle
from pyspark.sql.types import ArrayType

from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.job import cluster_checks
from sublet_borrower.spark.job.consumption import consume
from sublet_borrower.spark.sink.sink_connection import SinkDatabaseAddress
from sublet_borrower.spark.sink.writer import batch_writer, stage_rows, stream_writer
from sublet_borrower.spark.source.batch_options import batch_options
from sublet_borrower.spark.source.batch_reader import SubletBatchReader
from sublet_borrower.spark.source.micro_batch_transaction import Guard
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    InvalidSetting,
    SchemaMismatch,
    SinkBatchOutOfOrder,
    StagedBlocksLost,
    SubletError,
)
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.db.database_url import parse_url
from sublet_storage.producer import Publisher
from sublet_storage.producer.sink_staging import RETENTION_S, delete_abandoned_blocks
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import create_space, reshard, rollover
from tests.integration.log_kit import Connection, everything
from tests.integration.notify_kit import listening
from tests.integration.sink_kit import SCHEMA, Query, columns, left_staged, numbered, one_write, stored
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy


@pytest.fixture
def query(database: str) -> Query:
    return Query(database)


def state(conn: Connection) -> tuple[list[int], int]:
    """Return the numbers that are published, and how many blocks are staged."""
    return stored(conn), left_staged(conn)


def all_stored(count: int) -> tuple[list[int], int]:
    return list(range(count)), 0


class Died(Exception):
    """The driver is gone."""


POINTS = ("staged some", "staged", "committed")


def batch(query: Query, number: int, die: str = "") -> None:
    """A micro-batch of two tasks and 3000 rows, up to where its driver dies."""
    first = number * 3000
    tasks = [[numbered(first, 1000), numbered(first + 1000, 500)], [numbered(first + 1500, 1500)]]
    if die == "staged some":
        query.task(number, 0, tasks[0])
        raise Died
    done = query.write(number, *tasks)
    if die == "staged":
        raise Died
    query.commit(done, number)
    if die == "committed":
        raise Died


def test_a_batch_is_published_by_its_commit(query: Query, conn: Connection) -> None:

    done = query.write(0, [numbered(0, 2500)], [numbered(2500, 10)], [])
    assert [each.staged.messages for each in done] == [2500, 10, 0]
    assert stored(conn) == []
    query.commit(done, 0)
    assert state(conn) == all_stored(2510)


@pytest.mark.conforms("W2")
@pytest.mark.parametrize("point", POINTS)
def test_a_query_that_dies_stores_each_batch_once(database: str, conn: Connection, point: str) -> None:

    for number in range(3):
        for _ in range(2):
            with pytest.raises(Died):
                batch(Query(database), number, die=point)
        batch(Query(database), number)
    assert state(conn) == all_stored(9000)
    assert conn.execute("select batch from sink_batch").fetchall() == [(2,)]


def test_the_attempt_that_the_commit_names_counts(query: Query, conn: Connection) -> None:
    """The others at that task are removed."""
    attempts = [query.task(0, 0, [numbered(0, 1200)]) for _ in range(3)]
    other = query.task(0, 1, [numbered(1200, 300)])
    query.commit([attempts[1], other], 0)
    assert state(conn) == all_stored(1500)
    late = query.task(0, 0, [numbered(0, 1200)])
    assert late.staged.blocks == left_staged(conn) > 0
    query.commit(query.write(1, [numbered(1500, 10)]), 1)
    assert state(conn) == all_stored(1510)


def test_the_order_of_a_key_is_that_of_the_tasks(query: Query, conn: Connection) -> None:
    second = query.task(0, 1, [numbered(5000, 5000)])
    first = query.task(0, 0, [numbered(count * 500, 500) for count in range(10)])
    query.commit([second, first], 0)
    assert stored(conn) == list(range(10000))


@pytest.mark.conforms("W2", "W3")
@pytest.mark.parametrize(
    "shards", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(5, marks=pytest.mark.long)]
)
def test_what_was_staged_goes_to_the_children(query: Query, conn: Connection, shards: int) -> None:
    """That is so where its streams were closed meanwhile."""
    query.commit(query.write(0, [numbered(0, 3000)]), 0)
    early = query.write(1, [numbered(3000, 70_000)], [numbered(73_000, 2000)])
    rollover(conn, "default")
    reshard(conn, "default", shards)
    late = query.task(1, 2, [numbered(75_000, 2000)])
    for _ in range(2):
        query.commit([*early, late], 1)
        assert state(conn) == all_stored(77_000)


@pytest.mark.conforms("W2", "W3")
def test_what_was_staged_passes_deleted_streams(query: Query, conn: Connection) -> None:
    """One task's streams are no more, the other's are open."""
    reshard(conn, "default", 1)
    early = query.task(0, 0, [numbered(0, 2000)])
    reshard(conn, "default", 2)
    delete_past = EmptyGenerationCleaner(rest_s=0)
    while conn.execute("select from stream where state = 'closed'").rowcount:
        delete_past(conn)
        apply_retention(conn)
    late = query.task(0, 1, [numbered(2000, 1000)])
    for _ in range(2):
        query.commit([early, late], 0)
        assert state(conn) == all_stored(3000)


def test_what_was_staged_goes_where_its_topic_belongs(database: str, conn: Connection) -> None:
    """It goes by the spaces at the time of the commit."""
    query = Query(database, space="default")
    done = query.write(0, [numbered(0, 2000)])
    create_space(conn, "own", "t", shards=3)
    query.commit(done, 0)
    assert stored(conn) == list(range(2000))
    heads = conn.execute("select name, sum(head) from stream join space using (space_id) group by name").fetchall()
    assert dict(heads) == {"default": 0, "own": 2000}


@pytest.mark.conforms("W2")
@pytest.mark.parametrize("when", ["reply to COMMIT", "away for a while"])
def test_a_commit_without_a_connection_is_made_once(database: str, conn: Connection, when: str) -> None:
    with PostgresProxy(database) as proxy:
        query = Query(proxy.url)
        done = query.write(0, [numbered(0, 4000)])
        back = threading.Timer(0.5, proxy.resume)
        if when == "reply to COMMIT":
            proxy.cut_commit(resume=True)
        else:
            proxy.go_away()
            back.start()
        query.commit(done, 0)
    assert state(conn) == all_stored(4000)


def test_of_two_commits_of_a_batch_one_stores_it(database: str, conn: Connection) -> None:
    for number in range(5):
        first = number * 3000
        drivers = [Query(database), Query(database)]
        done = [each.write(number, [numbered(first, 3000)]) for each in drivers]
        with ThreadPoolExecutor(2) as pool:
            commits = [pool.submit(each.commit, mine, number) for each, mine in zip(drivers, done, strict=True)]
            for each in commits:
                each.result(30)
    assert state(conn) == all_stored(15_000)


def test_a_driver_that_is_behind_is_refused_by_name(database: str, conn: Connection) -> None:
    """One with a new checkpoint is not: it begins anew."""
    zombie, anew = Query(database), Query(database, "query 2")
    old = zombie.write(0, [numbered(0, 100)])
    batch(Query(database), 0)
    batch(Query(database), 1)
    with pytest.raises(SinkBatchOutOfOrder, match="query 1: batch 0 is not stored now, as batch 1 is stored already"):
        zombie.commit(old, 0)
    assert stored(conn) == list(range(6000))
    anew.commit(anew.write(0, [numbered(6000, 10)]), 0)
    assert stored(conn) == list(range(6010))


def test_a_batch_with_other_rows_is_reported(query: Query, conn: Connection, caplog: pytest.LogCaptureFixture) -> None:

    batch(query, 0)
    batch(query, 0)
    assert not caplog.text
    query.commit(query.write(0, [numbered(3000, 10)]), 0)
    assert "batch_id=0 stored_count=3000 ignored_count=10" in caplog.text
    assert stored(conn) == list(range(3000))


def test_an_empty_batch_counts(query: Query, conn: Connection) -> None:
    query.commit([], 0)
    query.commit(query.write(1, [], [numbered(0, 0)]), 1)
    assert conn.execute("select batch from sink_batch").fetchall() == [(1,)]
    assert stored(conn) == []


def test_abort_removes_what_was_staged(query: Query, conn: Connection) -> None:
    done = query.task(0, 0, [numbered(0, 3000)])
    query.abort([done, None], 0)
    assert left_staged(conn) == 0
    query.abort([None], 0)
    with pytest.raises(
        StagedBlocksLost, match="of the 3000 messages of batch 0 that its tasks have staged, 0 are there"
    ):
        query.commit([done], 0)
    assert conn.execute("select from sink_batch").fetchone() is None, "the batch may be written again"
    batch(query, 0)
    assert stored(conn) == list(range(3000))


def test_a_commit_misses_what_a_crash_has_taken(query: Query, conn: Connection) -> None:
    done = query.write(0, [numbered(0, 5000)])
    conn.execute("delete from staged_block where ordinal = 1")
    with pytest.raises(StagedBlocksLost, match="Nothing of the batch is stored: write it again"):
        query.commit(done, 0)
    assert stored(conn) == []


def test_what_nobody_publishes_is_forgotten(database: str, query: Query, conn: Connection) -> None:

    query.write(0, [numbered(0, 100)])
    one_write(database, iter([numbered(0, 100)]), topic="t")
    one_write(database, iter([numbered(100, 100)]), topic="t", sinkName="daily", batchId="7")
    assert delete_abandoned_blocks(conn) == 0
    conn.execute("update sink_batch set at = at - make_interval(secs => %s)", (RETENTION_S,))
    conn.execute("update staged_block set staged_at = staged_at - make_interval(secs => %s)", (RETENTION_S,))
    query.write(0, [numbered(0, 100)])
    there = left_staged(conn)
    assert delete_abandoned_blocks(conn) == there // 2
    assert left_staged(conn) == there // 2
    assert conn.execute("select sink, batch from sink_batch").fetchall() == [("sink daily", 7)]


def test_a_numbered_write_is_stored_once(database: str, conn: Connection) -> None:
    for first, number in ((0, 0), (0, 0), (10, 4)):
        one_write(database, iter([numbered(first, 10)]), topic="t", sinkName="daily", batchId=str(number))
    assert stored(conn) == list(range(20))
    with pytest.raises(SinkBatchOutOfOrder, match="sink daily: batch 3 is not stored now, as batch 4 is"):
        one_write(database, iter([numbered(30, 10)]), topic="t", sinkName="daily", batchId="3")
    one_write(database, iter([numbered(20, 10)]), topic="t")
    assert stored(conn) == list(range(30))


def test_whoever_listens_is_notified(database: str, conn: Connection) -> None:
    with listening(database) as received:
        query = Query(database)
        query.commit(query.write(0, [numbered(0, 100)]), 0)
        heads = dict(conn.execute("select stream_id, head from stream where head > 0").fetchall())
        eventually(lambda: all(received.of("stream", str(stream)) for stream in heads), 10.0)


def test_a_commit_waits_for_a_lock(
    database: str, query: Query, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet_borrower.spark.sink.sink_connection.LOCK_TIMEOUT_S", 0.1)
    done = query.write(0, [numbered(0, 100)])
    with connect(database) as other, ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.execute("select from stream for update")
            commit = pool.submit(query.commit, done, 0)
            eventually(lambda: _waits(conn), 10.0)
        commit.result(30)
    assert stored(conn) == list(range(100))


def _waits(conn: Connection) -> bool:
    waiting = conn.execute("select from pg_stat_activity where application_name = 'sublet spark sink'").fetchone()
    return waiting is not None


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
WHEN = datetime(2026, 11, 22, 10, 30, tzinfo=UTC)


def test_a_message_is_what_the_row_was(database: str, conn: Connection) -> None:
    headers = [("h", b"1"), ("h", None)]
    rows = pa.record_batch(
        {
            "Topic": pa.array(["a/b", None], pa.string()),
            "key": pa.array(["k", None], pa.string()),
            "value": pa.array([b"one", None], pa.binary()),
            "headers": pa.array([headers, None], HEADERS),
            "timestamp": pa.array([WHEN, None], pa.timestamp("us", tz="Europe/Zurich")),
        }
    )
    schema = columns("Topic string", "key string", "value binary", "timestamp timestamp")
    schema.add("headers", ArrayType(columns("key string", "value binary")))
    one_write(database, iter([rows]), schema, topic="else")
    found = {row["topic"]: row for held in everything(conn).values() for row in held}
    one, two = found["a/b"], found["else"]
    assert (one["key"], one["value"], one["timestamp"]) == (b"k", b"one", WHEN)
    assert [(header["key"], header["value"]) for header in one["headers"]] == headers
    assert (two["key"], two["value"], two["headers"], two["epoch"]) == (None, None, None, None)
    assert abs((two["timestamp"] - datetime.now(UTC)).total_seconds()) < 60


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("$sys", "what begins with \\$ is reserved"),
        ("a/+", "wildcard"),
        ("", "empty"),
        ("eu/1", "topic 'eu/1' belongs to space 'eu', and this publisher is for space 'default'"),
        (None, "a topic in the batch is null"),
    ],
)
def test_a_row_that_cannot_be_a_message_fails_its_task(
    database: str, conn: Connection, topic: str | None, said: str
) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    rows = pa.record_batch({"topic": pa.array(["t", topic], pa.string()), "value": pa.array([b"1", b"2"])})
    with pytest.raises(SubletError, match=said):
        one_write(database, iter([rows]), columns("topic string", "value binary"), space="default")
    assert not any(everything(conn).values())
    assert left_staged(conn) == 0


def test_what_cannot_be_written_to_is_named(database: str, empty_database: str) -> None:
    too_large = pa.record_batch({"key": pa.nulls(2, pa.binary()), "value": pa.array([b"1", bytes(2 * 1024 * 1024)])})
    with pytest.raises(SubletError, match="message 1 of the batch takes 2097185 bytes and the limit is 1048576"):
        one_write(database, iter([too_large]), topic="t")
    with pytest.raises(SubletError, match="space 'nowhere': there is no such space"):
        one_write(database, iter([numbered(0, 1)]), topic="t", space="nowhere")
    with pytest.raises(SchemaMismatch, match="Run `sublet migrate`"):
        one_write(empty_database, iter([numbered(0, 1)]), topic="t")
    with pytest.raises(DatabaseUnreachable):
        one_write("postgresql://nobody@127.0.0.1:1/none", iter([numbered(0, 1)]), topic="t")


def test_an_embedded_server_is_written_to_where_it_is(server_home: Path) -> None:
    directory = server_home / "data"
    with EmbeddedPostgres(directory) as server:
        migrate(server.url)
        writer = batch_writer({"dataDir": str(directory), "topic": "t"}, SCHEMA, False)
        done = stage_rows(writer.target, writer.options, writer.batch, 0, iter([numbered(0, 10)]))
        writer.commit([done])
        with writer.target.open_connection() as (_, conn):
            assert sum(map(len, everything(conn).values())) == 10
        elsewhere = SinkDatabaseAddress(None, directory, "sublet", "another-machine")
        with pytest.raises(InvalidSetting, match="was given a database that only another-machine can reach"):
            stage_rows(elsewhere, writer.options, writer.batch, 0, iter([numbered(0, 10)]))


PASSWORD = "pl4nted-p@ss"


@pytest.fixture
def secret(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The database, in the environment, with secrets."""
    url = make_conninfo(database, password=PASSWORD, sslpassword=PASSWORD, options=f"-c a.b={PASSWORD}")
    monkeypatch.setenv("SUBLET_DATABASE_URL", url)
    return url


def pickled(value: object) -> bytes:
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    assert b"pl4nted" not in data
    return data


@pytest.mark.conforms("X3")
def test_tasks_of_a_query_have_no_secret(secret: str) -> None:
    with Publisher() as publisher:
        publisher.publish("t", "1")
    reader = SubletBatchReader(batch_options({}), all_columns())
    (task,) = reader.partitions()
    pickled(reader)
    there: Any = cloudpickle.loads(pickled(task))
    assert parse_url(there.address)["dbname"] == parse_url(secret)["dbname"]
    assert sum(batch.num_rows for batch in reader.read(there)) == 1


@pytest.mark.conforms("X3")
def test_a_sink_and_a_guard_have_no_secret(secret: str) -> None:
    for made in (batch_writer, stream_writer):
        there: Any = cloudpickle.loads(pickled(made({"topic": "t"}, SCHEMA, False)))
        with there.target.open_connection() as (url, conn):
            assert parse_url(url)["password"] == PASSWORD
            assert conn.info.dbname == parse_url(secret)["dbname"]
    pickled(Guard("checkpoint"))


@pytest.mark.conforms("X3")
def test_a_jobs_closure_has_no_secret(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closures: list[bytes] = []

    def map_in_arrow(function: object, *_: object, **__: object) -> Any:
        closures.append(pickled(function))
        return SimpleNamespace(collect=list)

    spark = SimpleNamespace(addTag=print, range=lambda *_: SimpleNamespace(mapInArrow=map_in_arrow))
    monkeypatch.setattr(cluster_checks, "check_cluster", lambda *_: None)
    monkeypatch.setattr(cluster_checks, "read_setting", lambda *_: "local[2]")
    monkeypatch.setattr(cluster_checks, "spark_context", lambda spark: None)
    assert consume(spark, "$share/g/#", print, tasks=1).result(60.0) == []
    assert str(parse_url(secret)["dbname"]).encode() in closures[0]
