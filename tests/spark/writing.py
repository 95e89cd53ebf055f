"""A streaming query that publishes: `python -m tests.spark.writing URL PLACE [DIE]`.

Writes consecutive numbers to `format("sublet")`. PLACE has the checkpoint. DIE is WHAT:BATCH: which process gets kill
-9, driver or jvm, when the sink has stored that batch, or WHAT:- when something is staged that is not stored. It ends
at SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from sublet_storage.db.connect import connect
from tests.kit import eventually
from tests.spark.query import say, stay, victims
from tests.spark.session import spark_session

WAIT_S = 100.0


def die(url: str, what: str, when: str) -> None:
    """Wait for the moment in the database, which knows it first; then kill."""
    asked = "select from staged_block" if when == "-" else f"select from sink_batch where batch >= {int(when)}"
    with connect(url) as conn:
        eventually(lambda: conn.execute(asked).fetchone() is not None, WAIT_S, every_s=0.0005)
    for pid in victims(what):
        os.kill(pid, signal.SIGKILL)


def main(url: str, place: str, dying: str = "") -> None:
    """Say `running` when the query is, and `ended` at the end."""
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    spark = spark_session("local[2,4]")
    query = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 500)
        .option("numPartitions", 2)
        .load()
        # Each of two tasks has every other number: a key's are all in one.
        .selectExpr("cast(concat('k', value % 8) as binary) as key", "cast(value as string) as value")
        .writeStream.format("sublet")
        .option("url", url)
        .option("topic", "numbers")
        .option("checkpointLocation", str(Path(place) / "checkpoint"))
        .start()
    )
    say("running")
    if dying:
        what, _, when = dying.partition(":")
        die(url, what, when)
    stay(spark, query, leave)


if __name__ == "__main__":
    main(*sys.argv[1:])
