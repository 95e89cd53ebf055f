"""The Spark application of the demo: `python -m sublet.demo.application URL DIRECTORY TASKS SECONDS_PER_MESSAGE`.

Four executor tasks in one group. It ends, after a drain, when its standard input is closed.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from borrower.spark.java import java_home
from sublet.demo.flights import SUBSCRIPTION
from sublet.demo.work import record_and_work


def main(url: str, directory: str, tasks: str, seconds_per_message: str) -> None:
    """Consume until standard input ends."""
    os.environ["JAVA_HOME"] = str(java_home(Path(".cache")))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from borrower.spark.local import local_session

    import sublet.spark

    spark = local_session("sublet demo", int(tasks))
    work = functools.partial(record_and_work, directory, float(seconds_per_message))
    with sublet.spark.consume(
        spark, SUBSCRIPTION, work, tasks=int(tasks), url=url, start="earliest", batch_bytes=30_000
    ):
        sys.stdout.write("consuming\n")
        sys.stdout.flush()
        sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
