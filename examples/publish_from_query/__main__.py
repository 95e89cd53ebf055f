"""`python -m examples.publish_from_query [DAYS]`: flights go through a query that is killed and comes back."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg

from examples._stage import STREAMS, Stage, a_stage, arguments, flights_of, publishing, table, verdict, wrong
from examples.publish_from_query.query import OUTPUT, SUBSCRIPTION
from sublet.demo.flights import find_rows
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.readers.tail import Tail

SPACE = "routes"
KILL_AT = 0.3
PUBLISH_S = 20.0


class Output:
    """What the query has published, read as it comes."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._tail = Tail(connection, TopicFilter(OUTPUT), "earliest")
        self.rows: list[int] = []
        self.origins = Counter[str]()

    def look(self) -> int:
        """How many messages there are, by now."""
        for page in self._tail.pages():
            self.rows += find_rows(page["value"])
            self.origins.update(topic.split("/")[1] for topic in page["topic"].to_pylist())
        return len(self.rows)

    def said(self) -> str:
        """The same in words."""
        return f"{self.look():,} messages on {OUTPUT}"


def batches(checkpoint: Path, log: str) -> set[int]:
    """The micro-batches in one of Spark's logs: `offsets`, what has begun, or `commits`, what is done."""
    return {int(entry.name) for entry in (checkpoint / log).glob("[0-9]*")}


def kill(stage: Stage, checkpoint: Path) -> None:
    """kill -9 of all there is of the query: the driver, its JVM, its Python workers."""
    stage.kill("query")
    begun = sorted(batches(checkpoint, "offsets") - batches(checkpoint, "commits"))
    where = f"in the middle of batch {begun[0]}" if begun else "between two batches"
    stage.say(f"killed the driver, {where}")


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    source = flights_of(arguments("publish_from_query", __doc__, 14).parse_args().days)
    with a_stage() as stage, connect(stage.url) as connection:
        checkpoint = stage.home / "checkpoint"
        query = "examples.publish_from_query.query", str(checkpoint)
        stage.command("spaces", "create", SPACE, OUTPUT, "--shards", "4")
        output = Output(connection)
        stage.application("query", *query)
        stage.wait_for("the query to hold all streams", lambda: sum(stage.holders(SUBSCRIPTION).values()) == STREAMS)
        with publishing(stage.url, source, PUBLISH_S) as published:
            stage.wait_for(
                "some of the output", lambda: output.look() > KILL_AT * source.num_rows, lambda: output.said()
            )
            kill(stage, checkpoint)
            published.publish_faster()
        stage.say(f"all {source.num_rows:,} flights are published, {output.said()}")
        stage.application("query", *query)
        stage.wait_for("all to be consumed", lambda: stage.look(SUBSCRIPTION).lag == 0, lambda: output.said())
        stage.stop("query")
        stage.say(f"the end: {output.said()}")
        wanted = Counter(source["origin"].to_pylist())
        table(("from", "flights", "messages"), [(name, wanted[name], output.origins[name]) for name in sorted(wanted)])
        return verdict("flights", wrong(source, output.rows))


if __name__ == "__main__":
    sys.exit(main())
