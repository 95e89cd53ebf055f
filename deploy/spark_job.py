"""A Spark application that consumes: `python spark_job.py SUBSCRIPTION [TASKS]`. SIGTERM drains it: nothing repeats.

What it does with a batch is to print how many messages it has. Where Spark runs, and whatever else, is said by Spark's
own settings (`spark-submit --master ...`); alone it runs in this process, with as many tasks as it is given.
"""

from __future__ import annotations

import signal
import sys
import threading

from pyspark.sql import SparkSession

import sublet
import sublet.spark


def work(batch: sublet.Batch) -> None:
    """Counts as done when it returns."""
    sys.stdout.write(f"stream {batch.stream_id}: {batch.table.num_rows} messages\n")
    sys.stdout.flush()


def main(subscription: str, tasks: str = "2") -> int:
    """Consume until SIGTERM or Ctrl-C; the exit code."""
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    spark = SparkSession.builder.appName("sublet").master(f"local[{tasks},1000]").getOrCreate()
    signal.signal(signal.SIGINT, lambda *_: leave.set())  # a new Spark context has set its own
    running = sublet.spark.consume(spark, subscription, work, tasks=int(tasks), starting_position="earliest")
    while running.is_running and not leave.wait(0.5):
        pass
    done = running.drain() if leave.is_set() else running.result()
    sys.stdout.write(f"{sum(task.summary.messages for task in done)} messages consumed\n")
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
