"""All that there is for Spark, through Spark Connect: `python -m tests.spark.connected URL PLACE COUNT`.

Consumes COUNT messages in each of three ways, reads and writes them as tables, and prints what came of it as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sublet.spark import Guard, consume
from sublet_borrower.settings import BorrowerSettings
from tests.kit import eventually
from tests.spark.session import spark_session
from tests.spark.stage import SPEED, WAIT_S
from tests.spark.work import Recorder, attempts


def main(url: str, place: str, count: str) -> None:
    here, wanted = Path(place), int(count)
    spark = spark_session("local[3,1000]", remote=True)
    found: dict[str, Any] = {"session": type(spark).__module__}
    rows = streamed(spark, url, "parquet", here).writeStream.format("parquet").option("path", str(here / "rows"))
    to_its_end(rows, here / "parquet")
    found["source"] = sorted(int(row.value) for row in spark.read.parquet(str(here / "rows")).collect())
    guard = Guard(here / "guarded", url)

    def store(frame: Any, batch: int) -> None:
        values = [(int(row.value),) for row in frame.collect()]
        with guard(batch) as connection:
            connection.cursor().executemany("insert into public.stored values (%s)", values)

    to_its_end(streamed(spark, url, "guarded", here).writeStream.foreachBatch(store), here / "guarded")
    history = spark.read.format("sublet").option("url", url).option("filter", "t/#").load()
    found["batch"] = history.count()
    history.selectExpr("value", "key", "'copy' as topic").write.format("sublet").option("url", url).mode(
        "append"
    ).save()
    found["copied"] = spark.read.format("sublet").option("url", url).option("filter", "copy").load().count()
    found["resident"] = resident(spark, url, here, wanted)
    spark.stop()
    sys.stdout.write(json.dumps(found) + "\n")


def streamed(spark: Any, url: str, name: str, place: Path) -> Any:
    """A group of its own, from the beginning."""
    (place / name).mkdir()
    reader = spark.readStream.format("sublet").option("url", url).option("subscription", f"$share/{name}/t/#")
    reader = reader.option("sessionName", name).option("startingPosition", "earliest")
    return reader.load().selectExpr("cast(value as string) as value")


def to_its_end(writer: Any, checkpoint: Path) -> None:
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    if not query.awaitTermination(int(2 * WAIT_S)):
        raise TimeoutError(f"the query has not ended: {query.status}")


def resident(spark: Any, url: str, place: Path, wanted: int) -> dict[str, Any]:
    """By executor-resident consumers, as their handle reports; then stopped by it."""
    recorder = Recorder(str(place / "records"))
    (place / "records").mkdir()
    settings = BorrowerSettings().scaled(SPEED)
    with consume(
        spark, "$share/resident/t/#", recorder, tasks=2, url=url, starting_position="earliest", settings=settings,
        on_attempt=recorder.begin,
    ) as running:  # fmt: skip
        eventually(lambda: running.status().message_count == wanted, WAIT_S, lambda: str(running.status()))
        status = running.status()
    done = sum(len(line["offsets"]) for attempt in attempts(place / "records") for line in attempt.lines)
    return {"messages": done, "alive": status.alive_count, "lag": status.lag, "tasks": len(running.result())}


if __name__ == "__main__":
    main(*sys.argv[1:])
