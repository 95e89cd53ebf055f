"""Miles by hour and airport, to Parquet: `python -m examples.windowed_miles.query URL CHECKPOINT PATH`."""

from __future__ import annotations

import sys
from typing import Any

from borrower.spark.local import local_session
from examples._stage import stop_when_told

SUBSCRIPTION = "$share/miles/flights/#"
LATE = "3 hours"
"""An hour is closed when a flight has come that left so much later."""


def start(spark: Any, url: str, checkpoint: str, path: str) -> Any:
    """The query, under way."""
    from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

    flights = (
        spark.readStream.format("sublet")
        .option("url", url)
        .option("subscription", SUBSCRIPTION)
        .option("sessionName", "miles-1")
        .option("startingPosition", "earliest")
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


def main(url: str, checkpoint: str, path: str) -> None:
    """Until it is told to stop."""
    spark = local_session("miles", 2)
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    query = start(spark, url, checkpoint, path)
    stop_when_told(query.stop)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
