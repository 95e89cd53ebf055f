"""Publishes each flight to the topic of its route: `python -m examples.publish_from_query.query CHECKPOINT`.

Start it again with the same checkpoint, however it ended: it goes on, and nothing is published twice.
"""

from __future__ import annotations

import sys
from typing import Any

from examples._stage import run_query

SUBSCRIPTION = "$share/routes/flights/#"
OUTPUT = "routes/#"


def start(spark: Any, checkpoint: str) -> Any:
    """The query, under way."""
    flights = (
        spark.readStream.format("sublet")
        .options(subscription=SUBSCRIPTION, sessionName="routes-1", startingPosition="earliest")
        .option("maxOffsetsPerTrigger", 1000)
        .schema("value binary")
        .load()
        .selectExpr("split(cast(value as string), ',') as flight")
    )
    routes = flights.selectExpr(
        "concat('routes/', flight[4], '/', flight[5]) as topic",
        "flight[1] as key",
        "concat_ws(',', flight[0], flight[6] * 1.609344) as value",  # the distance in kilometres
    )
    return routes.writeStream.format("sublet").option("checkpointLocation", checkpoint).start()


if __name__ == "__main__":
    run_query("routes", lambda spark: start(spark, *sys.argv[1:]))
