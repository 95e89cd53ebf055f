"""A streaming query that stores flights: `python -m examples.blue_green.query CHECKPOINT VERSION`.

Each version has a session name and a checkpoint of its own, and all of them the same group. So a new one is just
started beside the old one, shares its work, and has all of it when the old one stops.
"""

from __future__ import annotations

import sys
from typing import Any

from examples._stage import run_query
from sublet.spark import Guard

SUBSCRIPTION = "$share/board/flights/#"
TABLES = """
create table stored (flight bigint, version text, published_at timestamptz, at timestamptz default clock_timestamp());
create table batch (version text, flights bigint, at timestamptz default clock_timestamp())"""
INSERT = "insert into stored (flight, version, published_at) values (%s, %s, %s)"


def warm_up(spark: Any) -> None:
    """Read a little history, as long as nobody waits: the first batch of a young Spark takes seconds."""
    spark.read.format("sublet").option("endingPosition", "offset:1").load().collect()


def start(spark: Any, checkpoint: str, version: str) -> Any:
    """The query, under way; its streams go to the others when it is stopped."""
    warm_up(spark)
    flights = (
        spark.readStream.format("sublet")
        .options(subscription=SUBSCRIPTION, sessionName=version, startingPosition="earliest")
        .option("inDoubtTimeout", 0)  # with a guard nobody can write what another has written
        .schema("value binary, timestamp timestamp")
        .load()
        .selectExpr("cast(split_part(cast(value as string), ',', 1) as bigint) as flight", "timestamp")
    )
    guard = Guard(checkpoint)

    def store(frame: Any, batch_id: int) -> None:
        rows = [(row.flight, version, row.timestamp.astimezone()) for row in frame.collect()]
        with guard(batch_id) as connection:  # what is written, and that the batch is done, are one commit
            if rows:
                connection.cursor().executemany(INSERT, rows)
                connection.execute("insert into batch (version, flights) values (%s, %s)", (version, len(rows)))

    return flights.writeStream.foreachBatch(store).option("checkpointLocation", checkpoint).start()


if __name__ == "__main__":
    run_query(sys.argv[2], lambda spark: start(spark, *sys.argv[1:]))
