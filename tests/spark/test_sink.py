"""`write` and `writeStream` to `format("sublet")` in a real Spark: rows that come back, and queries that are killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_storage.db.connect import connect
from tests.integration.sink_kit import left_staged, stored
from tests.kit import eventually
from tests.kit_nodes import Process
from tests.spark.stage import SPEED, WAIT_S

pytestmark = pytest.mark.spark

Connection = psycopg.Connection[Any]

KILLS = ("jvm:1", "driver:-", "jvm:3", "jvm:-", "driver:5", "jvm:7")
"""Which process gets kill -9: when the sink has stored that batch, or while a task has staged what is not stored."""
MAX_KILLS = int(os.environ.get("QUERY_KILLS", "2"))


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as connection:
        yield connection


def write(frame: Any, url: str, mode: str = "append", **options: object) -> None:
    frame.write.format("sublet").option("url", url).options(**options).mode(mode).save()


def numbers(spark: Any, first: int, count: int) -> Any:
    rows = spark.range(first, first + count, 1, 3)
    return rows.selectExpr("cast(concat('k', id % 7) as binary) as key", "cast(id as string) as value")


def test_a_batch_write_is_stored_once_and_in_order(spark: Any, database: str, conn: Connection) -> None:
    write(numbers(spark, 0, 50_000), database, topic="t")
    assert stored(conn) == list(range(50_000))
    assert left_staged(conn) == 0
    write(numbers(spark, 0, 0), database, topic="t")
    assert stored(conn) == list(range(50_000))


def test_failed_commit_publishes_nothing(spark: Any, database: str, conn: Connection) -> None:
    """A batch that comes too late is refused, and nothing stays staged."""
    write(numbers(spark, 0, 100), database, topic="t", sinkName="daily", batchId=5)
    with pytest.raises(Exception, match="sink daily: batch 4 is not stored now, as batch 5 is stored already"):
        write(numbers(spark, 100, 40_000), database, topic="t", sinkName="daily", batchId=4)
    assert stored(conn) == list(range(100))
    assert left_staged(conn) == 0


def test_nothing_is_overwritten(spark: Any, database: str, tmp_path: Path) -> None:
    """What is refused is said by its name."""
    with pytest.raises(Exception, match='mode "overwrite": messages that are published stay, and none is replaced'):
        write(numbers(spark, 0, 10), database, "overwrite", topic="t")
    counts = spark.readStream.format("rate").load().groupBy("value").count().selectExpr("cast(value as string) value")
    writer = counts.writeStream.format("sublet").option("url", database).option("topic", "t").outputMode("complete")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(Exception, match='the output mode "complete": messages that are published stay'):
        query.awaitTermination(int(WAIT_S))


def start(url: str, place: Path, name: str, die: str = "") -> Process:
    return Process("tests.spark.writing", url, str(place), die, log=place / f"{name}.log", speed=SPEED)


def wait_until_dead(driver: Process) -> None:
    """Until its JVM is, which its driver may outlive."""
    eventually(lambda: not driver.alive or "failed" in driver.output(), 2 * WAIT_S, driver.output)
    driver.kill()


def newest(conn: Connection) -> int:
    """The last batch that the sink has stored; -1 if there is none."""
    row = conn.execute("select coalesce(max(batch), -1) from sink_batch").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.long
@pytest.mark.conforms("W2")
@pytest.mark.timeout(200 * (2 + MAX_KILLS))
def test_killed_query_stores_each_batch_once(database: str, conn: Connection, tmp_path: Path) -> None:
    in_doubt = 0
    for number, die in enumerate(KILLS[:MAX_KILLS]):
        driver = start(database, tmp_path, f"driver-{number}", die)
        wait_until_dead(driver)
        noted = [int(file.name) for file in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")]
        in_doubt += newest(conn) > max(noted, default=-1)
    driver = start(database, tmp_path, "last")
    before = newest(conn)
    eventually(lambda: newest(conn) > before + 1, 2 * WAIT_S, driver.output)
    assert driver.stop() == 0
    found = stored(conn)
    assert found == list(range(len(found)))
    assert in_doubt, "at least one died behind the commit, and before Spark had noted it"
    assert conn.execute("select count(*) from sink_batch").fetchone() == (1,), "one query, one name"
