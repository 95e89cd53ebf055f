"""Miles by hour and airport, to Parquet: `python -m examples.windowed_miles.query CHECKPOINT PATH`."""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from examples._stage import run_query

SUBSCRIPTION = "$share/miles/flights/#"
LATE = "3 hours"
"""An hour is closed when a flight has come that left so much later."""


def start(spark: Any, checkpoint: str, path: str) -> Any:
    """The query, under way."""
    spark.conf.set("spark.sql.shuffle.partitions", 2)
    flights = (
        spark.readStream.format("sublet")
        .options(subscription=SUBSCRIPTION, sessionName="miles-1", startingPosition="earliest")
        .schema("value binary, timestamp timestamp")
        .load()
        .selectExpr("timestamp as planned", "split(cast(value as string), ',') as flight")
    )
    miles = (
        flights.withWatermark("planned", LATE)
        .groupBy(F.window("planned", "1 hour"), F.col("flight")[4].alias("origin"))
        .agg(F.count("*").alias("flights"), F.sum(F.col("flight")[6].cast("bigint")).alias("miles"))
        .selectExpr("window.start as hour", "origin", "flights", "miles")
    )
    files = miles.writeStream.format("parquet").outputMode("append").option("path", path)
    return files.option("checkpointLocation", checkpoint).start()


if __name__ == "__main__":
    run_query("miles", lambda spark: start(spark, *sys.argv[1:]))
