"""`spark.read.format("sublet")` in a real Spark: its rows, its one snapshot, and filters that Spark pushes down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import alter_space, reshard
from sublet_storage.spaces.tiering import tier_space
from tests.spark.session import streamed, to_its_end
from tests.spark.stage import Stage

pytestmark = pytest.mark.spark

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
START = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)


@pytest.fixture
def pushdown(spark: Any) -> Iterator[None]:
    """Spark passes its filters to Python sources."""
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.unset(PUSHDOWN)


def history(spark: Any, stage: Stage, **options: str) -> Any:
    return spark.read.format("sublet").options(url=stage.url, **options).load()


def numbers(frame: Any) -> list[int]:
    return sorted(int(row.value) for row in frame.select("value").collect())


def publish_by_minute(stage: Stage, count: int) -> None:
    with Publisher(stage.url, block_messages=5) as publisher:
        for number in range(count):
            when = START + number * timedelta(minutes=1)
            publisher.publish(f"t/{number // 20}", b"%d" % number, key=b"k", timestamp=when)
            publisher.flush()


@pytest.mark.long
def test_frame_is_one_snapshot(spark: Any, stage: Stage) -> None:
    """A frame reads all generations, and nothing that comes after it was made."""
    stage.publish(100)
    reshard(stage.connection, "default", 2)
    stage.publish(100, 100)
    frame = history(spark, stage, minPartitions="3")
    assert numbers(frame) == list(range(200))
    stage.publish(50, 200)
    assert frame.count() == 200
    assert numbers(frame.where("topic = 't/1'")) == list(range(1, 200, 5))
    assert history(spark, stage).count() == 250
    assert history(spark, stage, filter="t/1", endingPosition="offset:0", startingPosition="earliest").count() == 0
    assert history(spark, stage, filter="nobody/#").collect() == []


@pytest.mark.long
@pytest.mark.parametrize("condition", ["topic = 't/1'", "topic in ('t/1', 't/2') and offset >= 25", "topic like 't/%'"])
def test_push_down_changes_no_rows(spark: Any, stage: Stage, pushdown: None, condition: str) -> None:
    publish_by_minute(stage, 60)
    ours = history(spark, stage, pushDownPredicate="true").where(condition)
    assert ours.collect() == history(spark, stage).where(condition).collect() != []
    assert ") Filter " not in ours._jdf.queryExecution().executedPlan().toString()


def test_time_is_pushed_down_to_blocks(spark: Any, stage: Stage, pushdown: None) -> None:
    """Blocks that Spark's filter excludes are not fetched: these could not be."""
    publish_by_minute(stage, 60)
    late = "timestamp > timestamp'2026-11-22 10:32:00Z' and timestamp <= timestamp'2026-11-22 10:47:00Z'"
    before = stage.connection.execute(
        "update block set payload = null, uri = 'elsewhere', uri_bytes = 1"
        " where last_timestamp < '2026-11-22 10:30Z' or first_timestamp > '2026-11-22 10:50Z'"
    )
    assert before.rowcount >= 35
    assert numbers(history(spark, stage, pushDownPredicate="true").where(late)) == list(range(33, 48))


def test_push_down_must_be_asked_for(spark: Any, stage: Stage, pushdown: None) -> None:
    """Spark 4.3 takes the ranges of one plan for those of another: with filters pushed both halves would be one."""
    publish_by_minute(stage, 60)
    frame = history(spark, stage)
    both = frame.where("topic = 't/0'").union(frame.where("topic = 't/2'"))
    assert numbers(both) == [*range(20), *range(40, 60)]
    assert frame.count() == 60


def test_push_down_needs_sparks_setting(spark: Any, stage: Stage) -> None:
    with pytest.raises(Exception, match=PUSHDOWN):  # Spark wraps it in errors of its own
        history(spark, stage, pushDownPredicate="true").collect()


@pytest.mark.long
def test_push_down_is_not_for_streams(spark: Any, stage: Stage, pushdown: None, tmp_path: Path) -> None:
    """A stream is not asked for `pushDownPredicate`, which history needs."""
    stage.serve("n1")
    stage.publish(20)
    frame = streamed(spark, "g", "#", url=stage.url).where("topic = 't/1'")
    rows: list[Any] = []
    to_its_end(frame.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect())), tmp_path / "checkpoint")
    assert len(rows) == 4


def test_history_outside_of_postgres(spark: Any, stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "payloads").mkdir()
    space = alter_space(stage.connection, "default", payload_location=f"file://{tmp_path}/payloads")
    with Publisher(stage.url, block_messages=10) as publisher:
        for number in range(200):
            publisher.publish("t", b"%d" % number, key=b"%d" % (number % 9), headers=[("padding", os.urandom(1000))])
    reshard(stage.connection, "default", 2)
    assert tier_space(stage.connection, space).blocks > 0
    assert numbers(history(spark, stage, minPartitions="3")) == list(range(200))
