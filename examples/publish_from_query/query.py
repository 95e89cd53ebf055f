"""Reads flights, publishes each to the topic of its route: `python -m examples.publish_from_query.query URL CHECKPOINT`.

Start it again with the same checkpoint, however it ended: it goes on, and nothing is published twice.
"""

from __future__ import annotations

import sys
from typing import Any

from borrower.spark.local import local_session
from examples._stage import stop_when_told

SUBSCRIPTION = "$share/routes/flights/#"
OUTPUT = "routes/#"


def start(spark: Any, url: str, checkpoint: str) -> Any:
    """The query, under way."""
    flights = (
        spark.readStream.format("sublet")
        .option("url", url)
        .option("subscription", SUBSCRIPTION)
        .option("sessionName", "routes-1")
        .option("startingPosition", "earliest")
        .option("maxMessagesPerTrigger", "200")
        .schema("value binary")
        .load()
        .selectExpr("split(cast(value as string), ',') as flight")
    )
    routes = flights.selectExpr(
        "concat('routes/', flight[4], '/', flight[5]) as topic",
        "flight[1] as key",
        "concat_ws(',', flight[0], flight[6] * 1.609344) as value",  # the distance in kilometres
    )
    return routes.writeStream.format("sublet").option("url", url).option("checkpointLocation", checkpoint).start()


def main(url: str, checkpoint: str) -> None:
    """Until it is told to stop."""
    spark = local_session("routes", 2)
    query = start(spark, url, checkpoint)
    stop_when_told(query.stop)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
