"""A Spark application whose database has secrets: `python -m tests.spark.planted PLACE`.

It uses whatever there is, prints plans and errors, and leaves checkpoints, Spark's event log and the pages of its UI
below PLACE. The database is SUBLET_DATABASE_URL's.
"""

from __future__ import annotations

import logging
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from sublet import Session
from sublet_borrower.spark.job.consumption import consume
from sublet_borrower.spark.source.micro_batch_transaction import Guard
from tests.spark.query import say
from tests.spark.session import spark_session, streamed, to_its_end

COUNT = 40
UI = ("jobs", "stages", "storage", "environment", "executors", "SQL", "StreamingQuery")
OF_UI = ("environment", "jobs", "stages?details=true", "allexecutors", "sql?details=true&length=1000")
"""What Spark answers to programs, below its application."""
log = logging.getLogger("users.program")


def main(place: str) -> None:
    """Say `done` at the end."""
    here, counted = Path(place), 0
    (here / "events").mkdir()
    (here / "local").mkdir()
    logs = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": (here / "events").as_uri()}
    logs |= {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    spark = spark_session("local[3,100]", {**logs, "spark.local.dir": str(here / "local"), "spark.log.level": "INFO"})
    with Session("$share/own/t", starting_position="earliest") as session:
        say(repr(session))
        for batch in session:
            say(repr(batch))
            if (counted := counted + batch.table.num_rows) >= COUNT:
                break
    history = spark.read.format("sublet").option("filter", "t").load()
    history.explain(True)
    say(f"history {history.count()}")
    history.selectExpr("value", "'copy' as topic").write.format("sublet").mode("append").save()
    guard = Guard(here / "guarded")

    def store(frame: Any, batch_id: int) -> None:
        with guard(batch_id):
            say(f"guarded {frame.count()}")

    to_its_end(streamed(spark, "guarded", "t").writeStream.foreachBatch(store), here / "guarded")
    copies = streamed(spark, "copies", "t").selectExpr("value", "'copy' as topic").writeStream.format("sublet")
    query = to_its_end(copies, here / "copies")
    query.explain(True)
    running = consume(spark, "$share/resident/t", work, tasks=1, starting_position="earliest")
    while running.status().message_count < COUNT and not running.wait(0.2):
        pass
    say(f"resident {sum(task.summary.messages for task in running.drain())}")
    failing = consume(spark, "$share/failing/t", fail, tasks=1, starting_position="earliest")
    try:
        failing.result()
    except Exception as error:  # noqa: BLE001 whatever comes of it
        say(f"failed: {error}")
    for option, value in (("url", os.environ["SUBLET_DATABASE_URL"]), ("password", os.environ["PGPASSWORD"])):
        try:
            spark.read.format("sublet").option(option, value).load().count()
        except Exception as error:  # noqa: BLE001 whatever Spark makes of it
            say(f"refused: {error}")
    store_ui(spark.sparkContext, here / "ui")
    spark.stop()
    say("done")


def store_ui(context: Any, place: Path) -> None:
    """Store what Spark's UI shows, one file a page."""
    place.mkdir()
    paths = [f"/{page}/" for page in UI] + [f"/api/v1/applications/{context.applicationId}/{page}" for page in OF_UI]
    for number, path in enumerate(paths):
        with urllib.request.urlopen(context.uiWebUrl + path, timeout=60) as answer:
            (place / str(number)).write_bytes(answer.read())


def work(batch: Any) -> None:
    """Logs the database's URL, and an exception that has it in its text, in the worker."""
    say(repr(batch))
    url = os.environ["SUBLET_DATABASE_URL"]
    log.warning("logged in a worker: %s", url)
    try:
        raise ValueError(f"raised in a worker: {url}")
    except ValueError:
        log.exception("caught")


def fail(batch: Any) -> None:
    """Ends its task with an exception that has the database's URL in its text."""
    raise ValueError(f"ended a task: {os.environ['SUBLET_DATABASE_URL']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
