"""Sink, batch, streaming query and consuming tasks of a real Spark, with users who are members of one role each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublet.spark import Guard
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job.consumption import consume
from sublet_storage.db.connect import connect
from sublet_storage.db.roles import DatabaseRole
from tests.kit import eventually
from tests.kit_nodes import Fleet
from tests.role_kit import a_role_world
from tests.spark.stage import ALL, SPEED, WAIT_S
from tests.spark.test_sink import numbers, write
from tests.spark.work import Recorder, attempts

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.conforms("X6")]


def messages(records: Path) -> int:
    return sum(len(line["offsets"]) for each in attempts(records) for line in each.lines)


def test_spark_does_with_the_least_role(spark: Any, tmp_path: Path) -> None:
    with a_role_world() as world:
        fleet, append, url = (
            Fleet(world.of(DatabaseRole.NODE), tmp_path, SPEED),
            world.of(DatabaseRole.APPEND),
            world.of(DatabaseRole.CONSUME),
        )
        world.execute(
            f"create schema sunk authorization user_of_{DatabaseRole.CONSUME}; create table sunk.rows (value bigint)"
        )
        world.execute(f"grant all on sunk.rows to user_of_{DatabaseRole.CONSUME}")
        try:
            fleet.serve("n1")
            write(numbers(spark, 0, 300), append, topic="t/eu")
            assert spark.read.format("sublet").option("url", url).load().count() == 300

            guard = Guard(tmp_path / "checkpoint", url)

            def sink(frame: Any, batch: int) -> None:
                rows = [(int(row.value),) for row in frame.collect()]
                with guard(batch) as connection:
                    connection.cursor().executemany("insert into sunk.rows values (%s)", rows)

            options = {"url": url, "subscription": ALL, "sessionName": "here", "startingPosition": "earliest"}
            query = (
                spark.readStream.format("sublet")
                .options(**options)
                .load()
                .writeStream.foreachBatch(sink)
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(int(2 * WAIT_S))
            with connect(url) as conn:
                found = "select count(*), count(distinct value) from sunk.rows"
                assert conn.execute(found).fetchone() == (300, 300)

            records = tmp_path / "records"
            records.mkdir()
            recorder = Recorder(str(records))
            settings = BorrowerSettings().scaled(SPEED)
            given: dict[str, Any] = {"url": url, "starting_position": "earliest", "settings": settings}
            consumption = consume(spark, "$share/tasks/#", recorder, tasks=2, on_attempt=recorder.begin, **given)
            try:
                eventually(lambda: messages(records) >= 300, WAIT_S)
            finally:
                consumption.stop(10.0)
            assert "permission denied" not in fleet.nodes["n1"].output()
        finally:
            fleet.close()
