"""All that there is for Spark, through Spark Connect: `python -m tests.spark.connected URL PLACE COUNT`.

Prints what `everything` returns, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sublet.spark import Guard, consume
from sublet_borrower.settings import BorrowerSettings
from tests.kit import eventually
from tests.spark.session import spark_session, streamed, to_its_end
from tests.spark.stage import SPEED, WAIT_S
from tests.spark.work import Recorder, attempts


def everything(spark: Any, url: str, place: Path, wanted: int, appending_url: str = "") -> dict[str, Any]:
    """Consume so many numbers in each of three ways, two of which write to `place` and to public.stored; read and write
    them as tables; return what came of it. `appending_url`: of who writes them."""
    rows = streamed(spark, "parquet", "t/#", url=url).selectExpr("cast(value as string) as value")
    to_its_end(rows.writeStream.format("parquet").option("path", str(place / "rows")), place / "parquet")
    (place / "guarded").mkdir()
    guard = Guard(place / "guarded", url)

    def store(frame: Any, batch: int) -> None:
        values = [(int(row.value),) for row in frame.collect()]
        with guard(batch) as connection:
            connection.cursor().executemany("insert into public.stored values (%s)", values)

    to_its_end(streamed(spark, "guarded", "t/#", url=url).writeStream.foreachBatch(store), place / "guarded")
    history = spark.read.format("sublet").option("url", url).option("filter", "t/#").load()
    copied = history.selectExpr("value", "key", "'copy' as topic").write.format("sublet")
    copied.option("url", appending_url or url).mode("append").save()
    return {
        "session": type(spark).__module__,
        "source": sorted(int(row.value) for row in spark.read.parquet(str(place / "rows")).collect()),
        "batch": history.count(),
        "copied": spark.read.format("sublet").option("url", url).option("filter", "copy").load().count(),
        "resident": resident(spark, url, place / "records", wanted),
    }


def resident(spark: Any, url: str, records: Path, wanted: int) -> dict[str, Any]:
    """By executor-resident consumers, as their handle reports; then stopped by it."""
    records.mkdir()
    recorder, settings = Recorder(str(records)), BorrowerSettings().scaled(SPEED)
    given: dict[str, Any] = {"url": url, "starting_position": "earliest", "settings": settings}
    with consume(spark, "$share/resident/t/#", recorder, tasks=2, on_attempt=recorder.begin, **given) as running:
        eventually(lambda: running.status().message_count == wanted, WAIT_S, lambda: str(running.status()))
        status = running.status()
    done = sum(len(line["offsets"]) for attempt in attempts(records) for line in attempt.lines)
    return {"messages": done, "alive": status.alive_count, "lag": status.lag, "tasks": len(running.result())}


def main(url: str, place: str, count: str) -> None:
    spark = spark_session("local[3,1000]", remote=True)
    found = everything(spark, url, Path(place), int(count))
    spark.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
