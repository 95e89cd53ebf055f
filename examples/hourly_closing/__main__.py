"""`python -m examples.hourly_closing [DAYS]`: publish so many days, kill consumers and leaders meanwhile, and check."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from borrower.settings import BorrowerSettings
from examples.hourly_closing.consumer import SUBSCRIPTION, TABLES
from leader.settings import LeaderSettings
from protocol.words import Subscription
from storage.connect import connect as connect_to
from storage.groups.overview import describe
from sublet import Publisher, connect
from sublet.demo import flights
from sublet.demo.processes import Children

AIRPORTS = ("EWR", "JFK", "LGA")
HOUR_S = 0.06
"""What a publisher takes for an hour, on average."""
SPEED = 4.0
"""So many times sooner than by default a dead process is noticed: there is time for more of them."""
KILL_EVERY_S = 1.0, 4.0
LIMIT_S = 100.0

BY_DAY = """
select to_timestamp(hour * 3600)::date as day, count(*), sum(flights), sum(miles), string_agg(distinct closed_by, ', ')
  from closed_hour group by day order by day"""
EARLY = "select distinct hour from closed_hour join hour_part using (hour) where added_at > closed_at"


def publish(url: str, source: pa.Table, airport: str, all_here: threading.Barrier, over: threading.Event) -> None:
    """One airport's flights, hour by hour, at a pace of its own."""
    ours = source.filter(pc.equal(source["origin"], airport))
    with Publisher(url, space="default") as publisher:
        publisher.advance(pc.min(source["hour"]).as_py())
        all_here.wait(LIMIT_S)  # whoever comes later cannot publish in what the others have completed
        for hour in range(pc.min(source["hour"]).as_py(), pc.max(source["hour"]).as_py() + 1):
            rows = ours.filter(pc.equal(ours["hour"], hour))
            publisher.at(hour).publish_batch(rows.select(["topic", "key", "value"]))
            if over.wait(random.uniform(0, 2 * HOUR_S)):
                return
            publisher.advance(hour + 1)


class Cast:
    """Two nodes and four consumers, processes all. Whoever is killed is replaced."""

    def __init__(self, url: str, processes: Children) -> None:
        self._url, self._processes, self._started = url, processes, Counter[str]()
        self.killed: list[str] = []
        self._nodes, self._consumers = (
            [self._start(role) for _ in range(n)] for role, n in (("node", 2), ("consumer", 4))
        )

    def kill_one(self) -> str:
        """kill -9 of a consumer or, each fourth time, of the node that leads; its name."""
        role, living = ("node", self._nodes) if len(self.killed) % 4 == 1 else ("consumer", self._consumers)
        victim = self._leader() if role == "node" else random.choice(living)
        self._processes[victim].kill()
        living[living.index(victim)] = self._start(role)
        self.killed.append(victim)
        return victim

    def _start(self, role: str) -> str:
        self._started[role] += 1
        name = f"{role}-{self._started[role]}"
        node = ("sublet.cli", "leader", "--name", name, "--listen", "127.0.0.1:0")
        self._processes.start(
            name, *(node if role == "node" else ("examples.hourly_closing.consumer", self._url, name))
        )
        return name

    def _leader(self) -> str:
        """Who leads the group; any node, if the last one that did is dead."""
        with connect_to(self._url) as connection:
            leader = describe(connection, Subscription.parse(SUBSCRIPTION)).leader
        return leader.node if leader and leader.node in self._nodes else random.choice(self._nodes)


def play(url: str, cast: Cast, source: pa.Table, connection: psycopg.Connection[Any]) -> None:
    """Until all is published and all hours are closed, or the time is over."""
    began, hours, over = time.monotonic(), pc.count_distinct(source["hour"]).as_py(), threading.Event()

    def closed() -> int:
        return len(connection.execute("select from closed_hour").fetchall())

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  closed {closed():3} of {hours} hours; {what}", flush=True)

    with ThreadPoolExecutor() as pool:
        all_here = threading.Barrier(len(AIRPORTS))
        publishers = [pool.submit(publish, url, source, airport, all_here, over) for airport in AIRPORTS]
        try:
            while len(cast.killed) < 2 or not all(each.done() for each in publishers):
                for each in wait(publishers, random.uniform(*KILL_EVERY_S), FIRST_EXCEPTION).done:
                    each.result()
                say(f"killed {cast.kill_one()}")
        finally:
            over.set()
    say("all is published")
    while closed() < hours and time.monotonic() < began + LIMIT_S:
        time.sleep(0.1)
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


def report(connection: psycopg.Connection[Any], bad: dict[str, list[int]], killed: list[str]) -> int:
    """Print what was closed and what is wrong; the exit code."""
    print(f"\n{'day':10}  {'hours':>5}  {'flights':>7}  {'miles':>9}  closed by")
    for row in connection.execute(BY_DAY):
        print("{}  {:5}  {:7,}  {:9,}  {}".format(*row))
    print(f"\n{len(killed)} processes killed: {', '.join(killed)}")
    for what, hours in bad.items():
        print(f"{len(hours):4} hours {what}{': ' if hours else ''}{', '.join(map(str, hours[:5]))}")
    return int(any(bad.values()))


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    parser = argparse.ArgumentParser(prog="examples.hourly_closing", description=__doc__)
    parser.add_argument("days", type=int, nargs="?", default=14, choices=range(1, 366), metavar="DAYS")
    days = parser.parse_args().days
    source = flights.load()
    source = source.filter(pc.less(source["hour"], pc.add(pc.min(source["hour"]), 24 * days)))
    times = {**asdict(LeaderSettings().scaled(SPEED)), **asdict(BorrowerSettings().scaled(SPEED))}
    settings = {f"SUBLET_{name.upper()}": str(value) for name, value in times.items()}
    with tempfile.TemporaryDirectory(prefix="sublet-closing-") as directory:
        home = Path(directory)
        home.chmod(0o755)  # Postgres runs as somebody else if we are root
        with (
            connect(data_dir=home / "postgres") as database,
            psycopg.connect(database.url, autocommit=True) as connection,
            Children(home, {**os.environ, **settings, "SUBLET_DATABASE_URL": database.url}) as processes,
        ):
            connection.execute(TABLES)
            processes.start("create", "sublet.cli", "groups", "create", SUBSCRIPTION, "--atomic").wait()
            cast = Cast(database.url, processes)
            play(database.url, cast, source, connection)
            return report(connection, wrong(connection, source), cast.killed)


if __name__ == "__main__":
    sys.exit(main())
