"""`python -m examples.hourly_closing [DAYS]`: publish so many days, kill consumers and leaders meanwhile, and check."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from examples._stage import Stage, a_stage, arguments, flights_of, table, verdict
from examples.hourly_closing.consumer import SUBSCRIPTION, TABLES
from sublet import Publisher

AIRPORTS = ("EWR", "JFK", "LGA")
HOUR_S = 0.06
"""What a publisher takes for an hour, on average."""
SPEED = 4.0
"""So many times sooner than by default a dead process is noticed: there is time for more of them."""
KILL_EVERY_S = 1.0, 4.0
READY_S = 100.0

BY_DAY = """
select to_timestamp(hour * 3600)::date as day, count(*), sum(flights)::bigint, sum(miles)::bigint,
       string_agg(distinct closed_by, ', ')
  from closed_hour group by day order by day"""
EARLY = "select distinct hour from closed_hour join hour_part using (hour) where added_at > closed_at"


def publish(url: str, source: pa.Table, airport: str, all_here: threading.Barrier, over: threading.Event) -> None:
    """One airport's flights, hour by hour, at a pace of its own."""
    ours = source.filter(pc.equal(source["origin"], airport))
    with Publisher(url, space="default") as publisher:
        publisher.advance(pc.min(source["hour"]).as_py())
        all_here.wait(READY_S)  # whoever comes later cannot publish in what the others have completed
        for hour in range(pc.min(source["hour"]).as_py(), pc.max(source["hour"]).as_py() + 1):
            rows = ours.filter(pc.equal(ours["hour"], hour))
            publisher.in_epoch(hour).publish_batch(rows.select(["topic", "key", "value"]))
            if over.wait(random.uniform(0, 2 * HOUR_S)):
                return
            publisher.advance(hour + 1)


class Cast:
    """Four consumers, processes all, beside the nodes. Whoever is killed is replaced."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._started = stage, 0
        self.killed: list[str] = []
        self._consumers = [self._start() for _ in range(4)]

    def kill_one(self) -> str:
        """kill -9 of a consumer or, each fourth time, of the node that leads; its name."""
        victim = self._stage.kill_leader(SUBSCRIPTION) if len(self.killed) % 4 == 1 else self._kill_consumer()
        self.killed.append(victim)
        return victim

    def _kill_consumer(self) -> str:
        victim = random.choice(self._consumers)
        self._stage.processes[victim].kill()
        self._consumers[self._consumers.index(victim)] = self._start()
        return victim

    def _start(self) -> str:
        self._started += 1
        name = f"consumer-{self._started}"
        self._stage.processes.start(name, "examples.hourly_closing.consumer", name)
        return name


def play(stage: Stage, cast: Cast, source: pa.Table) -> None:
    """Until all is published and all hours are closed, or the time is over."""
    hours, over = pc.count_distinct(source["hour"]).as_py(), threading.Event()

    def say(what: str) -> None:
        stage.say(f"closed {stage.count('closed_hour'):3} of {hours} hours; {what}")

    with ThreadPoolExecutor() as pool:
        all_here = threading.Barrier(len(AIRPORTS))
        publishers = [pool.submit(publish, stage.url, source, airport, all_here, over) for airport in AIRPORTS]
        try:
            while len(cast.killed) < 2 or not all(each.done() for each in publishers):
                for each in wait(publishers, random.uniform(*KILL_EVERY_S), FIRST_EXCEPTION).done:
                    each.result()
                say(f"killed {cast.kill_one()}")
        finally:
            over.set()
    say("all is published")
    stage.watch(lambda: stage.count("closed_hour") >= hours)
    say("the end")


def wrong(connection: psycopg.Connection[Any], source: pa.Table) -> dict[str, list[int]]:
    """What must not be, and the hours of which it is true."""
    sums = source.group_by("hour").aggregate([("row", "count"), ("distance", "sum")]).to_pylist()
    wanted = {each["hour"]: (each["row_count"], each["distance_sum"]) for each in sums}
    rows = connection.execute("select hour, flights, miles from closed_hour").fetchall()
    times = Counter(hour for hour, *_ in rows)
    return {
        "not closed": [hour for hour in wanted if not times[hour]],
        "closed more than once": [hour for hour in times if times[hour] > 1],
        "with another total than in the data": [hour for hour, *total in rows if tuple(total) != wanted.get(hour)],
        "closed before all of it was added up": [hour for (hour,) in connection.execute(EARLY)],
    }


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    source = flights_of(arguments("hourly_closing", __doc__, 14).parse_args().days)
    with a_stage(SPEED) as stage:
        stage.connection.execute(TABLES)
        stage.command("groups", "create", SUBSCRIPTION, "--atomic")
        cast = Cast(stage)
        play(stage, cast, source)
        rows = stage.connection.execute(BY_DAY).fetchall()
        table(("day", "hours", "flights", "miles", "closed by"), rows)
        print(f"{len(cast.killed)} processes killed: {', '.join(cast.killed)}")
        return verdict("hours", wrong(stage.connection, source))


if __name__ == "__main__":
    sys.exit(main())
