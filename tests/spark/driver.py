"""A Spark application: `python -m tests.spark.driver URL SUBSCRIPTION RECORDS TASKS PAUSE_S [MASTER [CONF]]`.

Consumes until SIGTERM, then drains. CONF is a JSON object of Spark settings. Times come from the environment.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from sublet_borrower.spark.job.consumption import consume
from tests.spark.query import say
from tests.spark.session import spark_session
from tests.spark.work import Recorder


def main(
    url: str, subscription: str, records: str, tasks: str, pause_s: str, master: str = "local[2,1000]", conf: str = "{}"
) -> None:
    """Say `consuming` when the job is under way, and `drained` at the end."""
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    spark = spark_session(master, json.loads(conf))
    recorder = Recorder(records, float(pause_s))
    running = consume(
        spark,
        subscription,
        recorder,
        tasks=int(tasks),
        url=url,
        starting_position="earliest",
        on_attempt=recorder.begin,
    )
    say("consuming")
    while running.is_running and not leave.wait(0.1):
        pass
    say(f"drained {sum(task.summary.messages for task in running.drain())}")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
