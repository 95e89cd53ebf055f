"""What the examples have in common: the world around them (a Postgres of their own, leader nodes, flights that are
published at a pace) and the count at the end. What one copies is in the examples themselves."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from sublet import Publisher, connect, errors
from sublet.demo import flights
from sublet.demo.child_processes import ChildProcesses, remove_settings
from sublet.demo.local_spark import open_local_session
from sublet.spark import Consumption
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect as connect_to
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.groups.status.overview_model import GroupOverview
from sublet_storage.spaces.space_changes import reshard

Connection = psycopg.Connection[Any]

STREAMS = 8
"""Fewer than by default: each is a task of every micro-batch, and they may have to share two cores."""
LIMIT_S = 150.0
PUBLISH_EVERY_S = 0.1


def arguments(name: str, purpose: str | None, days: int) -> argparse.ArgumentParser:
    """The command line that all examples have."""
    parser = argparse.ArgumentParser(prog=f"examples.{name}", description=purpose)
    text = "how many days of flights (default: %(default)s)"
    parser.add_argument("days", type=int, nargs="?", default=days, choices=range(1, 365), metavar="DAYS", help=text)
    return parser


def flights_of(days: int) -> pa.Table:
    """The flights of the first days, see `sublet.demo.flights.load`, by the hour."""
    source = flights.load()
    return source.filter(pc.less(source["hour"], pc.add(pc.min(source["hour"]), 24 * days))).sort_by("hour")


class Stage:
    """A database, nodes, and whatever else an example starts; all of it ends with `a_stage`.

    `connection` is for the example's own tables, `own_connection` sees sublet's.
    """

    def __init__(
        self, url: str, home: Path, processes: ChildProcesses, connection: Connection, own_connection: Connection
    ) -> None:
        self.url, self.home, self.processes = url, home, processes
        self.connection, self._own_connection = connection, own_connection
        reshard(own_connection, "default", STREAMS)
        self._began = time.monotonic()
        self._nodes: list[str] = []
        self._started = 0
        self._watched: set[str] = set()
        for _ in range(2):
            self._start_node()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def count(self, table: str) -> int:
        """How many rows the table has."""
        (count,) = self.connection.execute(f"select count(*) from {table}").fetchone() or (0,)
        return int(count)

    def flights(self, table: str) -> list[int]:
        """The rows in the data of the flights in it, each as often as it is there."""
        return [flight for (flight,) in self.connection.execute(f"select flight from {table}")]

    def say(self, what: str) -> None:
        """A line of what one sees."""
        print(f"{self.seconds:5.1f} s  {what}", flush=True)

    def look(self, subscription: str) -> GroupOverview:
        """The group now. Raises `NotFound` before anybody has named it."""
        return describe_group(self._own_connection, Subscription.parse(subscription))

    def holders(self, subscription: str) -> dict[str, int]:
        """{session: how many streams it holds}."""
        try:
            members = self.look(subscription).members
        except errors.NotFound:  # nobody has named the group yet
            return {}
        return {
            member.session or "": len(member.streams) for member in sorted(members, key=lambda one: one.session or "")
        }

    def command(self, *words: str) -> None:
        """Run `sublet WORDS`, to its end."""
        if self.processes.start("command", "sublet.cli", *words).wait():
            raise SystemExit(self.processes.tail_log("command"))

    def application(self, name: str, module: str, *words: str) -> None:
        """Start an application that is to live until `stop` or `kill`."""
        self.processes.start(name, module, *words)
        self._watched.add(name)
        self.say(f"{name} starts, a Spark application")

    def stop(self, name: str) -> None:
        """Let an application end as it likes to, and wait for it."""
        self._watched.discard(name)
        self.processes[name].communicate(timeout=LIMIT_S)

    def kill(self, name: str) -> None:
        """kill -9 an application, with all that it has started."""
        self._watched.discard(name)
        self.processes.kill(name)

    def kill_leader(self, subscription: str) -> str:
        """kill -9 the node that leads the group (any, if the one that did is dead), and start another; its name."""
        leader = self.look(subscription).leader
        victim = leader.node if leader and leader.node in self._nodes else self._nodes[0]
        self.processes[victim].kill()
        self._nodes.remove(victim)
        self._start_node()
        return victim

    def wait_for(self, what: str, fact: Callable[[], bool], progress: Callable[[], str] | None = None) -> None:
        """As `watch`. SystemExit if time is over."""
        if not self.watch(fact, progress):
            raise SystemExit(f"waited {LIMIT_S:g} s for {what}")

    def watch(self, fact: Callable[[], bool], progress: Callable[[], str] | None = None) -> bool:
        """Until it is so, with a line of progress each second in which there is some; False if it does not become so.
        SystemExit if an application ends by itself."""
        said, said_at, deadline = "", time.monotonic(), time.monotonic() + LIMIT_S
        while not fact():
            for name in self._watched:
                if self.processes[name].poll() is not None:
                    raise SystemExit(f"{name} has ended by itself:\n{self.processes.tail_log(name)}")
            if time.monotonic() > deadline:
                return False
            if progress is not None and time.monotonic() > said_at + 1.0:
                before, said, said_at = said, progress(), time.monotonic()
                if said and said != before:
                    self.say(said)
            time.sleep(0.05)
        return True

    def pause(self, seconds: float, progress: Callable[[], str] | None = None) -> None:
        """Let it run for a while."""
        until = self.seconds + seconds
        self.wait_for("the end of a pause", lambda: self.seconds >= until, progress)

    def _start_node(self) -> None:
        self._started += 1
        name = f"node-{self._started}"
        self.processes.start(name, "sublet.cli", "leader", "--name", name, "--listen", "127.0.0.1:0")
        self._nodes.append(name)


@contextmanager
def a_stage(speed: float = 2.5) -> Iterator[Stage]:
    """In a directory that is gone afterwards. So many times sooner than by default a dead process is noticed."""
    remove_settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing that it has started outlives it
    times = {**asdict(LeaderSettings().scaled(speed)), **asdict(BorrowerSettings().scaled(speed))}
    settings = {f"SUBLET_{name.upper()}": str(value) for name, value in times.items()}
    with tempfile.TemporaryDirectory(prefix="sublet-example-") as directory:
        home = Path(directory)
        home.chmod(0o755)  # Postgres runs as somebody else if we are root
        with (
            connect(data_dir=home / "postgres") as database,
            psycopg.connect(database.url.reveal(), autocommit=True) as connection,
            connect_to(database.url) as own_connection,
            ChildProcesses(home, {**os.environ, **settings, "SUBLET_DATABASE_URL": database.url.reveal()}) as processes,
        ):
            yield Stage(database.url, home, processes, connection, own_connection)


class Publishing:
    """Flights on their way, in a thread of its own."""

    def __init__(self, running: Future[None], publish_faster: threading.Event) -> None:
        self._running, self._publish_faster = running, publish_faster

    @property
    def over(self) -> bool:
        """Whether all is published. Raises what went wrong."""
        return self._running.done() and self._running.result() is None

    def publish_faster(self) -> None:
        """Publish the rest at once, and wait for it."""
        self._publish_faster.set()
        self._running.result(LIMIT_S)


@contextmanager
def publishing(url: str, source: pa.Table, seconds: float) -> Iterator[Publishing]:
    """Publish these flights in their order, over so many seconds."""
    publish_faster, abandon = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_publish, url, source, seconds, publish_faster, abandon)
        try:
            yield Publishing(running, publish_faster)
        finally:
            abandon.set()
            publish_faster.set()


def _publish(
    url: str, source: pa.Table, seconds: float, publish_faster: threading.Event, abandon: threading.Event
) -> None:
    columns = [name for name in ("topic", "key", "value", "timestamp") if name in source.column_names]
    rows = source.select(columns)
    step = max(1, round(rows.num_rows * PUBLISH_EVERY_S / seconds))
    with Publisher(url) as publisher:
        while rows.num_rows and not abandon.is_set():
            part = rows.num_rows if publish_faster.is_set() else step
            publisher.publish_batch(rows.slice(0, part))
            publisher.flush()
            rows = rows.slice(part)
            publish_faster.wait(PUBLISH_EVERY_S)


def run_query(name: str, start: Callable[[Any], Any]) -> None:
    """A Spark application that has this streaming query, until `Stage.stop`."""
    spark = open_local_session(name, 2)
    query = start(spark)
    _stop_on_signal(query.stop)
    query.awaitTermination()
    spark.stop()


def run_tasks(name: str, tasks: int, start: Callable[[Any], Consumption]) -> None:
    """A Spark application that consumes in so many tasks, until `Stage.stop`."""
    spark = open_local_session(name, tasks)
    with start(spark) as consumption:
        _stop_on_signal(consumption.drain)
        consumption.wait()
    spark.stop()


def _stop_on_signal(stop: Callable[[], Any]) -> None:
    def listen() -> None:
        sys.stdin.read()
        stop()

    threading.Thread(target=listen, daemon=True).start()


def wrong(source: pa.Table, rows: Iterable[int]) -> dict[str, list[int]]:
    """What must not be, and the flights (their rows in the data) of which it is true; `rows`: those that came out."""
    wanted, times = set(source["row"].to_pylist()), Counter(rows)
    return {
        "lost": sorted(wanted - times.keys()),
        "doubled": sorted(row for row in times if times[row] > 1),
        "not in the data": sorted(times.keys() - wanted),
    }


def verdict(what: str, bad: Mapping[str, Sequence[object]]) -> int:
    """Print how many are wrong, and some of them; the exit code."""
    for how, found in bad.items():
        print(f"{len(found):4,} {what} {how}{': ' if found else ''}{', '.join(map(str, found[:5]))}")
    return int(any(bad.values()))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print it, numbers to the right."""
    shown = [[_shown(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    numbers = [any(isinstance(row[n], int | float) for row in rows) for n in range(len(header))]
    print()
    for line in shown:
        cells = zip(line, widths, numbers, strict=True)
        print("  ".join(text.rjust(width) if number else text.ljust(width) for text, width, number in cells).rstrip())
    print()


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)
