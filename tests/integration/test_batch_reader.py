"""History as Spark reads it, without Spark: which messages a batch query is given, and that it leaves no trace.

What Spark itself makes of it is in `tests/spark/test_batch.py`, pushed filters are in `test_batch_filters.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from pyspark.sql.datasource import InputPartition

from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.source.batch_options import BatchQueryOptions
from sublet_borrower.spark.source.batch_reader import SubletBatchReader
from sublet_borrower.spark.source.range_reader import RangePartition
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    InvalidEpoch,
    PositionBeyondHead,
    PositionGone,
    SchemaMismatch,
    UnknownSpace,
)
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.db.connect import connect
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.fetch import PAGE_BLOCKS
from sublet_storage.producer import Publisher
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.small_block_compaction import compact_stream
from sublet_storage.spaces.space_changes import create_space, drop_space, reshard
from tests.integration.log_kit import Connection, block, put, stream_of
from tests.integration.replay_kit import Plan, values


def publish(url: str, count: int, first: int = 0, topic: str = "t/{}") -> list[bytes]:
    """Numbered messages, in three topics where the topic says so, in small blocks."""
    sent = [b"%06d" % number for number in range(first, first + count)]
    with Publisher(url, block_messages=5) as publisher:
        for number, value in enumerate(sent):
            publisher.publish(topic.format(number % 3), value, key=value)
    return sent


def now(conn: Connection) -> str:
    """The database's, as an option says it."""
    row = conn.execute("select clock_timestamp()").fetchone()
    assert row is not None
    return str(row[0].isoformat())


def rows_in_all_tables(conn: Connection) -> dict[str, object]:
    tables = conn.execute("select tablename from pg_tables where schemaname = 'sublet'").fetchall()
    count = sql.SQL("select count(*), coalesce(max(xmin::text::bigint), 0) from {}")
    return {name: conn.execute(count.format(sql.Identifier(name))).fetchone() for (name,) in tables}


@pytest.fixture(scope="module")
def sixty(shared_database: str) -> tuple[str, list[bytes]]:
    """Return a database that is only read, and its messages, in two streams."""
    with connect(shared_database) as conn:
        reshard(conn, "default", 2)
    return shared_database, publish(shared_database, 60)


def test_all_is_read_and_no_trace_is_left(sixty: tuple[str, list[bytes]]) -> None:
    url, sent = sixty
    with connect(url) as conn:
        before = rows_in_all_tables(conn)
        assert values(url) == sent == values(url)
        assert rows_in_all_tables(conn) == before


def test_a_filter_chooses_messages(sixty: tuple[str, list[bytes]]) -> None:
    url, sent = sixty
    assert [values(url, filter=each) for each in ("t/1", "t/#", "u/#")] == [sent[1::3], sent, []]


def test_a_task_has_the_drivers_schema(sixty: tuple[str, list[bytes]]) -> None:
    """Also the default: its worker may have had a job with another."""
    url, _ = sixty
    assert {task.schema_name for task in Plan(url).tasks if isinstance(task, RangePartition)} == {"sublet"}


def test_between_offsets_of_each_stream(sixty: tuple[str, list[bytes]]) -> None:
    url, _ = sixty
    rows = Plan(url, startingPosition="offset:3", endingPosition="offset:9").rows()
    assert sorted(row["offset"] for row in rows) == sorted(2 * [*range(3, 9)])
    assert Plan(url, startingPosition="offset:1000").tasks == []
    assert len(values(url, endingPosition="offset:1000")) == 60


def test_a_query_has_as_many_tasks_as_are_asked_for(sixty: tuple[str, list[bytes]]) -> None:
    url, sent = sixty
    plain, most, one = Plan(url), Plan(url, minPartitions=9), Plan(url, maxPartitions=1)
    assert len(most.tasks) >= 9
    assert len(plain.tasks) > len(one.tasks) == 1
    assert one.ranges == plain.ranges
    assert most.values() == one.values() == sent
    assert len(Plan(url, minPartitions=1000).tasks) == 60


def test_a_row_has_all_that_was_published(database: str, conn: Connection) -> None:
    when = datetime(2026, 11, 22, 10, 30, tzinfo=UTC)
    with Publisher(database, space="default") as publisher:
        delivery = publisher.publish("a/b", b"one", key=b"k", headers=[("h", b"1")], timestamp=when)
        publisher.in_epoch(7).publish("a/c", b"two")
    rows = {row["value"]: row for row in Plan(database).rows()}
    position = delivery.result()
    assert rows[b"one"] == {
        "key": b"k", "value": b"one", "topic": "a/b", "timestamp": when, "headers": [{"key": "h", "value": b"1"}],
        "space": "default", "stream": position.stream, "offset": position.offset, "epoch": None,
    }  # fmt: skip
    assert rows[b"two"]["epoch"] == [7]


def test_of_an_empty_database_there_is_nothing(database: str) -> None:
    options: list[dict[str, Any]] = [{}, {"minPartitions": 5}, {"filter": "a/+"}, {"startingEpoch": 1}]
    assert [Plan(database, **each).tasks for each in options] == [[], [], [], []]
    reader = SubletBatchReader(BatchQueryOptions(), all_columns())
    assert list(reader.read(InputPartition(None))) == []


def test_all_generations_are_read_up_to_the_plan(database: str, conn: Connection) -> None:
    sent = publish(database, 20)
    reshard(conn, "default", 3)
    sent += publish(database, 20, 20)
    reshard(conn, "default", 1)
    sent += publish(database, 20, 40)
    plan = Plan(database)
    reshard(conn, "default", 3)
    later = publish(database, 20, 60)
    assert plan.values() == sent
    assert len({stream for stream, _, _ in plan.ranges}) == 6
    assert values(database) == sent + later


def test_a_dropped_space_is_read_by_its_name(database: str, conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=2)
    theirs, others = publish(database, 12, topic="eu/{}"), publish(database, 12, 12)
    assert values(database, space="eu") == theirs
    assert values(database, space="default") == others
    drop_space(conn, "eu")
    assert values(database, space="eu") == theirs
    assert values(database, filter="eu/1") == theirs[1::3]
    with pytest.raises(UnknownSpace, match=r"option space is 'us': there is no such space. There are: default, eu"):
        Plan(database, space="us")


def test_between_times_of_storing(database: str, conn: Connection) -> None:
    first = publish(database, 20)
    then = now(conn)
    second = publish(database, 20, 20)
    later = now(conn)
    third = publish(database, 20, 40)
    assert values(database, startingPosition=then) == second + third
    assert values(database, endingPosition=then) == first
    elsewhere = datetime.fromisoformat(then).astimezone(timezone(timedelta(hours=9))).isoformat()
    assert values(database, endingPosition=elsewhere) == first
    assert values(database, startingPosition=then, endingPosition=later) == second
    reshard(conn, "default", 4)
    assert values(database, startingPosition=then, endingPosition=later) == second
    assert values(database, startingPosition=now(conn)) == []
    assert values(database, startingPosition=then, endingPosition="offset:1000") == second + third


def test_blocks_that_were_merged_are_read_as_before(database: str, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    for number in range(50):
        put(conn, stream, b"%06d" % number)
    plan = Plan(database, startingPosition="offset:7", endingPosition="offset:43", minPartitions=5)
    before = plan.rows()
    assert compact_stream(conn, stream, older_than_s=0) > 40
    assert plan.rows() == before == Plan(database, startingPosition="offset:7", endingPosition="offset:43").rows()
    assert [row["offset"] for row in before] == list(range(7, 43))


@pytest.mark.timeout(30)
def test_a_stream_shorter_than_planned_is_an_error(database: str, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    for number in range(10):
        put(conn, stream, b"%d" % number)
    plan = Plan(database)
    conn.execute("delete from block where end_offset > 7")
    conn.execute("update stream set head = 7 where stream_id = %s", (stream,))
    with pytest.raises(PositionBeyondHead, match=r"offset 10 is beyond the head 7\. Was the database restored"):
        plan.rows()


def test_a_task_that_ends_early_disturbs_no_other(database: str, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    sent = [b"%06d" % number for number in range(3 * PAGE_BLOCKS)]
    for first in range(0, len(sent), 64):
        append(conn, [BlockAppend(stream, block(value)) for value in sent[first : first + 64]])
    plan = Plan(database)
    for _ in range(3):
        (task,) = [task for task, (_, start, end) in zip(plan.tasks, plan.ranges, strict=True) if end > start]
        reading = iter(plan.reader.read(task))
        assert next(reading).column("value")[0].as_py() == sent[0]
        reading.close()
        assert plan.values() == sent


@pytest.fixture
def aged(database: str, conn: Connection) -> list[bytes]:
    """Return the messages of the older generation of `eu`, past its retention."""
    create_space(conn, "eu", "eu/#", shards=1, retention_s=100)
    old = publish(database, 10, topic="eu/{}")
    reshard(conn, "eu", 2)
    conn.execute("update generation set closed_at = closed_at - interval '101 s' where state = 'closed'")
    return old


def test_what_retention_takes_before_a_plan_and_after(database: str, conn: Connection, aged: list[bytes]) -> None:
    """It is not missed in a plan that comes later; one that came before may do without it."""
    new = publish(database, 10, 10, topic="eu/{}")
    strict, lenient = Plan(database, filter="eu/#"), Plan(database, failOnDataLoss="false")
    assert strict.values() == aged + new
    apply_retention(conn)
    assert values(database, filter="eu/#") == new
    assert lenient.values() == new
    with pytest.raises(PositionGone):
        strict.rows()


def in_epochs(url: str, epochs: Iterable[Any], space: str = "default") -> None:
    """A message in each of these, called by it, some of them in one block; None: in no epoch."""
    with Publisher(url, space=space) as publisher:
        for number, epoch in enumerate(epochs):
            (publisher if epoch is None else publisher.in_epoch(epoch)).publish(f"{space}/e", repr(epoch).encode())
            if number % 3 == 2:
                publisher.flush()


def test_between_epochs_messages_in_none_are_left_out(database: str, conn: Connection) -> None:
    in_epochs(database, [None, 1, 2, None, 2, 4, 3, 7])
    assert values(database, startingEpoch=2, endingEpoch=4) == [b"2", b"2", b"3"]
    assert values(database, startingEpoch=3) == [b"3", b"4", b"7"]
    assert values(database, endingEpoch=2) == [b"1"]
    assert values(database, startingEpoch=-5, endingEpoch=100) == [b"1", b"2", b"2", b"3", b"4", b"7"]
    assert len(values(database)) == 8


def test_epochs_of_several_numbers_have_no_ends(database: str, conn: Connection) -> None:
    create_space(conn, "pairs", "pairs/#", shards=1)
    in_epochs(database, [1, 2])
    in_epochs(database, [(1, 2)], "pairs")
    with pytest.raises(InvalidEpoch, match="epochs of space 'pairs' have 2 numbers"):
        Plan(database, startingEpoch=1)
    assert values(database, startingEpoch=1, space="default") == [b"1", b"2"]
    assert values(database, filter="pairs/+") == [b"(1, 2)"]


def test_an_unusable_database_is_refused(empty_database: str) -> None:
    with pytest.raises(SchemaMismatch, match="sublet migrate"):
        Plan(empty_database)
    with pytest.raises(DatabaseUnreachable):
        Plan("postgresql://nobody@127.0.0.1:1/nothing")


def test_an_embedded_server_is_found_by_its_directory(server_home: Path) -> None:
    with open_database(data_dir=server_home / "data") as place:
        sent = publish(place.url, 10)
    plan = Plan(None, dataDir=server_home / "data")
    assert plan.values() == sent
