"""Stores flights: `python -m examples.two_applications.application NAME WEIGHT`.

Start it as often as you like, with whatever names: all of them share the work, by their weights.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import sublet.spark
from examples._stage import run_tasks
from sublet import Batch
from sublet.demo.flights import find_rows

SUBSCRIPTION = "$share/office/flights/#"
TABLE = "create table stored (flight bigint, application text, at timestamptz default clock_timestamp())"
INSERT = "insert into stored (flight, application) values (%s, %s)"
TASKS = 2
WORK_S = 0.01
"""What a batch takes."""


def store(application: str, batch: Batch) -> None:
    """The rows and the group's progress in one commit."""
    with batch.transaction() as connection:
        connection.cursor().executemany(INSERT, [(row, application) for row in find_rows(batch.table["value"])])
        time.sleep(WORK_S)


def start(spark: Any, name: str, weight: str) -> sublet.spark.Consumption:
    """Each task is a consumer of this weight: of 8 streams, tasks that weigh 3, 3, 1 and 1 hold 3, 3, 1 and 1."""
    work = functools.partial(store, name)
    return sublet.spark.consume(
        spark, SUBSCRIPTION, work, tasks=TASKS, name=name, weight=float(weight), starting_position="earliest"
    )


if __name__ == "__main__":
    run_tasks(sys.argv[1], TASKS, lambda spark: start(spark, *sys.argv[1:]))
