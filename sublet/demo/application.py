"""The Spark application of the demo: `python -m sublet.demo.application DIRECTORY TASKS SECONDS_PER_MESSAGE`.

Its tasks share one group, on the database of SUBLET_DATABASE_URL. It drains them and ends when its standard input is
closed.
"""

from __future__ import annotations

import functools
import sys

import sublet.spark
from sublet.demo.flights import SUBSCRIPTION
from sublet.demo.local_spark import open_local_session
from sublet.demo.task_work import record_and_work

BATCH_BYTES = 30_000


def main(directory: str, tasks: str, seconds_per_message: str) -> None:
    """Consume until standard input ends."""
    spark = open_local_session("sublet demo", int(tasks))
    work = functools.partial(record_and_work, directory, float(seconds_per_message))
    with sublet.spark.consume(
        spark, SUBSCRIPTION, work, tasks=int(tasks), starting_position="earliest", max_batch_bytes=BATCH_BYTES
    ):
        sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
