"""Stores flights in a Postgres table, each exactly once, though the table has no key that would refuse a second one."""

from __future__ import annotations

import os
import time
from typing import Any

import sublet.spark
from examples._stage import run_tasks
from sublet import Batch

SUBSCRIPTION = "$share/ledger/flights/#"
TABLE = "create table ledger (flight bigint, miles bigint, worker int)"
INSERT = "insert into ledger values (%s, %s, %s)"
TASKS = 3
BATCH_BYTES = 2_000
WORK_S = 0.05
"""What a batch takes, inside its transaction: so a kill finds some that are open."""


def store(batch: Batch) -> None:
    """The rows and the group's progress are one commit; whoever dies before it leaves neither."""
    rows = []
    for value in batch.table["value"].to_pylist():
        flight, *_, miles = value.decode().split(",")
        rows.append((int(flight), int(miles), os.getpid()))
    with batch.transaction() as connection:
        connection.cursor().executemany(INSERT, rows)
        time.sleep(WORK_S)


def start(spark: Any) -> sublet.spark.Consumption:
    """As many consumers as tasks. A task whose worker dies is started again by Spark, and is a new consumer."""
    return sublet.spark.consume(
        spark, SUBSCRIPTION, store, tasks=TASKS, starting_position="earliest", max_batch_bytes=BATCH_BYTES
    )


if __name__ == "__main__":
    run_tasks("exactly once", TASKS, start)
