"""`python -m examples.windowed_miles [DAYS]`: publish so many days, and compare the files with the data."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from examples._stage import STREAMS, a_stage, arguments, flights_of, publishing, table, verdict
from examples.windowed_miles.query import SUBSCRIPTION

PUBLISH_S = 15.0

Window = tuple[int, str]
"""An hour (since 1970) and an airport."""
Totals = list[tuple[Window, tuple[int, int]]]
"""Of each window: flights and miles."""


def wanted(source: pa.Table) -> Totals:
    """What should come out, from the data itself."""
    sums = source.group_by(["hour", "origin"]).aggregate([("row", "count"), ("distance", "sum")]).to_pylist()
    return [((each["hour"], each["origin"]), (each["row_count"], each["distance_sum"])) for each in sums]


def written(path: Path) -> Totals:
    """What the files say. Those count that the sink's log has: others are of batches that were begun and not done."""
    lines = [line for log in (path / "_spark_metadata").glob("[0-9]*") for line in log.read_text().splitlines()[1:]]
    files = {urlparse(json.loads(line)["path"]).path for line in lines}
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [((hour_of(row["hour"]), row["origin"]), (row["flights"], row["miles"])) for row in rows]


def hour_of(begins: datetime) -> int:
    """Since 1970. Spark writes times of UTC."""
    return int(begins.replace(tzinfo=UTC).timestamp()) // 3600


def wrong(totals: Totals, found: Totals) -> dict[str, list[Window]]:
    """What must not be, and the windows of which it is true."""
    right, times = dict(totals), Counter(window for window, _ in found)
    return {
        "not written": [window for window in right if not times[window]],
        "written more than once": [window for window in times if times[window] > 1],
        "with another total than in the data": [window for window, sums in found if sums != right.get(window)],
    }


def by_day(found: Totals) -> list[tuple[str | int, ...]]:
    """Windows, flights and miles."""
    days: dict[str, list[tuple[int, int]]] = {}
    for (hour, _), sums in found:
        days.setdefault(f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%d}", []).append(sums)
    return [
        (day, len(sums), *(sum(column) for column in zip(*sums, strict=True))) for day, sums in sorted(days.items())
    ]


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    days = arguments("windowed_miles", __doc__, 14).parse_args().days
    source = flights_of(days + 1)  # the last day's hours are closed by those of the next
    planned = pc.cast(pc.multiply(source["hour"], 3_600_000_000), pa.timestamp("us", "UTC"))
    last = pc.add(pc.min(source["hour"]), 24 * days)
    totals = wanted(source.filter(pc.less(source["hour"], last)))
    with a_stage() as stage:
        path = stage.home / "miles"

        def found() -> Totals:
            return [(window, sums) for window, sums in written(path) if window[0] < last.as_py()]

        def progress() -> str:
            return f"{len(found()):,} of {len(totals):,} windows are closed"

        checkpoint = str(stage.home / "checkpoint")
        stage.application("query", "examples.windowed_miles.query", checkpoint, str(path))
        stage.wait_for("the query to hold all streams", lambda: sum(stage.holders(SUBSCRIPTION).values()) == STREAMS)
        with publishing(stage.url, source.append_column("timestamp", planned), PUBLISH_S) as published:
            stage.wait_for("all flights to be published", lambda: published.over, progress)
        stage.say(f"all {source.num_rows:,} flights are published")
        stage.watch(lambda: len(found()) >= len(totals), progress)
        stage.stop("query")
        stage.say(f"the end: {progress()}")
        table(("day", "windows", "flights", "miles"), by_day(found()))
        return verdict("windows", wrong(totals, found()))


if __name__ == "__main__":
    sys.exit(main())
