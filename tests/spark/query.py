"""A streaming query: `python -m tests.spark.query URL PLACE [OPTIONS [DIE [SINK]]]`.

Consumes $share/spark/# from `format("sublet")` into a SINK: `files`, one for each batch, which a batch that is done
again does not write again, or `table`, public.sunk, which has no key, under a guard. PLACE has the checkpoint and the
files. OPTIONS is a JSON object. DIE is WHAT:WHERE:BATCH: which process gets kill -9 (driver, jvm, source,
worker) where in that batch (before or behind the sink). It ends at SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from sublet.spark import Guard
from tests.spark.session import spark_session

Rows = list[tuple[int, int, int]]
"""(stream, offset, value)"""


class Sink:
    """Writes each batch once, and dies where the test says so. With a URL it writes to a table there, which would have
    a row twice that is written twice."""

    def __init__(self, place: Path, die: str, url: str) -> None:
        self._guard, self._query = Guard(place / "checkpoint", url) if url else None, place.name
        self._place = place / "sink"
        self._what, self._where, self._batch = die.split(":") if die else ("", "", "-1")
        self._place.mkdir(parents=True, exist_ok=True)

    def __call__(self, frame: Any, batch: int) -> None:
        rows = [(row.stream, row.offset, int(row.value)) for row in frame.select("stream", "offset", "value").collect()]
        self._die("before", batch)
        (self._place / f"{batch:06d}.run-{os.getpid()}").write_text(json.dumps(sorted(rows)))
        self._write(batch, rows)
        say(f"batch {batch} has {len(rows)}")
        self._die("behind", batch)

    def _write(self, batch: int, rows: Rows) -> None:
        written = self._place / f"{batch:06d}.json"
        if self._guard is not None:
            with self._guard(batch) as connection:
                values = [(self._query, batch, *row) for row in rows]
                connection.cursor().executemany("insert into public.sunk values (%s, %s, %s, %s, %s)", values)
        elif not written.exists():
            begun = written.with_suffix(".begun")
            begun.write_text(json.dumps(sorted(rows)))
            begun.rename(written)

    def _die(self, where: str, batch: int) -> None:
        if (where, batch) == (self._where, int(self._batch)):
            say(f"{self._what} dies {where} the sink of batch {batch}")
            for pid in victims(self._what):
                os.kill(pid, signal.SIGKILL)


def victims(what: str) -> list[int]:
    """The processes of that kind that belong to this application."""
    if what == "driver":
        return [os.getpid()]
    children = psutil.Process().children(recursive=True)
    if what == "jvm":
        return [child.pid for child in children if child.name() == "java"]
    runner = "python_streaming_source_runner" if what == "source" else "pyspark.daemon"
    found = {child.pid: child.ppid() for child in children if runner in " ".join(child.cmdline())}
    # The daemon is a child of the JVM, and its workers are forked from it.
    return [pid for pid, parent in found.items() if what == "source" or parent in found]


def main(url: str, place: str, options: str = "{}", die: str = "", sink: str = "files") -> None:
    """Say `running` when the query is, and `ended` at the end."""
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    spark = spark_session("local[2,4]")
    reader = spark.readStream.format("sublet").option("url", url).option("subscription", "$share/spark/#")
    for name, value in {"sessionName": "query", "startingPosition": "earliest", **json.loads(options)}.items():
        reader = reader.option(name, value)
    query = (
        reader.load()
        .writeStream.foreachBatch(Sink(Path(place), die, url if sink == "table" else ""))
        .option("checkpointLocation", str(Path(place) / "checkpoint"))
        .start()
    )
    say("running")
    stay(spark, query, leave)


def stay(spark: Any, query: Any, leave: threading.Event) -> None:
    """Until the query has failed or is to be left; then end it, and Spark with it."""
    while query.isActive and not leave.wait(0.1):
        pass
    if query.exception() is not None:
        say(f"failed: {query.exception()}")
    query.stop()
    say("ended")
    spark.stop()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
