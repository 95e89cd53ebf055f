"""What faults of Postgres and of consumers cost, beside a queue in a table: survived or not, and what bystanders see.

`python -m bench faults --rounds 3`. The faults are those of public comparisons of queues on Postgres: the server
restarted, its processes ended, its connections used up, consumers killed again and again, a transaction that holds
back vacuum, readers beside it. Each system has a server of its own in each, a publisher and two consumers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from bench import _postgres as postgres
from bench import _report as report
from bench._report import quantile, significant
from bench._worker import read_received
from bench.peers.load import Head, Kind
from bench.peers.processes import Running, module
from bench.peers.shared import JOBS, SHARED_SYSTEMS
from tests.kit import eventually

CONSUMERS = 2
START_S = 60.0
CATCH_UP_S = 60.0
"""How long after the last message was published all of them must have been received: else it has not survived."""
KILL_INTERVAL_S, BACKENDS_INTERVAL_S = 2.0, 1.0
REFUSED_S = 0.1
READERS = 4
READER_PAUSE_S = 0.1
BYSTANDER_ROWS, BYSTANDER_INTERVAL_S = 1000, 0.02
LEAD_S = 2.0
"""How long the load goes on before a fault begins, and after it ends."""

_END_OTHERS = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""

PROSE = """{rate:,} messages a second of 100 bytes, published for {seconds:g} s under each fault ({long:g} s while a
transaction is open, for vacuum to matter), to two consumers that share them. *SKIP LOCKED* is what most queues on
Postgres do: a table whose rows workers lock, {jobs} at a time, and delete when they are done; it has no order and no
groups. *Survived*: all messages had come {catch_up:g} s after the last was published, with no hand of anybody's.
*Lost* never came, *again* came more than once. The latency is from `publish()` to a consumer's hands, of all messages
that were published while the fault went on: an outage is in it. *Bystander* is the latency of an UPDATE of one row in
another table of the same database, {bystander:g} a second; what failed while Postgres was away is not counted. *Dead
rows* are those of all tables but the bystander's at the end of the fault. Faults: *restart*, the server is shut down
at once, and started again by its watchdog; *ended-processes*, all of the database's, each second; *no-connections*,
until the server refuses more; *killed-consumers*, one each {kill:g} s by SIGKILL, and another started at once;
*open-transaction*, one with a snapshot; *readers*, {readers} that count the rows of the system's largest table again
and again. Medians of {rounds} rounds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one system under one fault, in one round; times in milliseconds."""

    lost: int
    again: int
    p50_ms: float
    p99_ms: float
    bystander_p50_ms: float
    bystander_p99_ms: float
    dead_rows: int


class Scene:
    """A system at work in a database, and its consumers, which can be killed."""

    def __init__(self, name: str, url: str, directory: Path, ends: contextlib.ExitStack) -> None:
        self.system, self._name, self._url = SHARED_SYSTEMS[name], name, url
        self._directory, self._ends = directory, ends
        self._started = 0
        self._consumers: list[Running] = []
        ends.enter_context(self.system.serve(url, directory))
        for _ in range(CONSUMERS):
            self.start_consumer()

    def start_consumer(self) -> None:
        """Start another consumer."""
        arguments = ("consume", self._name, self._url, str(self._file(self._started)))
        log = self._directory / f"consumer-{self._started}.log"
        self._consumers.append(self._ends.enter_context(module("bench._worker", *arguments, log=log)))
        self._started += 1

    def kill_consumer(self) -> None:
        """Kill the consumer that runs longest."""
        os.kill(self._consumers.pop(0).pid, signal.SIGKILL)

    def publisher(self, rate: int, seconds: float) -> contextlib.AbstractContextManager[Running]:
        """Return a publisher under this load."""
        arguments = ("publish", self._name, self._url, str(rate), str(seconds))
        return module("bench._worker", *arguments, log=self._directory / "publisher.log")

    def received(self) -> list[tuple[int, Head]]:
        """Return what all consumers, also dead ones, have received."""
        return [each for number in range(self._started) for each in read_received(self._file(number))]

    def connect(self) -> psycopg.Connection[Any]:
        """Return a connection to its database."""
        return psycopg.connect(self._url, autocommit=True)

    def count_dead_rows(self) -> int:
        """Return the dead rows of all tables but the bystander's."""
        with self.connect() as connection:
            connection.execute("select pg_stat_force_next_flush()")
            ((dead,),) = connection.execute(
                "select sum(n_dead_tup)::bigint from pg_stat_user_tables where relname <> 'bystander'"
            ).fetchall()
        return int(dead)

    def _file(self, number: int) -> Path:
        return self._directory / f"received-{number}"


class Bystander:
    """Updates rows of a table of its own during the `with` block. `took_ms`: how long each update took."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._over = scene, threading.Event()
        self.took_ms: list[float] = []
        self._thread = threading.Thread(target=self._update)
        with scene.connect() as connection:
            connection.execute("create table bystander (number integer primary key, changes integer not null)")
            connection.execute("insert into bystander select n, 0 from generate_series(1, %s) n", (BYSTANDER_ROWS,))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _update(self) -> None:
        while not self._over.wait(BYSTANDER_INTERVAL_S):
            with contextlib.suppress(psycopg.OperationalError), self._scene.connect() as connection:
                while not self._over.wait(BYSTANDER_INTERVAL_S):
                    number, started = random.randint(1, BYSTANDER_ROWS), time.perf_counter()
                    connection.execute("update bystander set changes = changes + 1 where number = %s", (number,))
                    self.took_ms.append(1000 * (time.perf_counter() - started))


# --- faults ---------------------------------------------------------------------------------------------------------


def none(scene: Scene, over: threading.Event) -> None:
    """Do nothing."""
    over.wait()


def restart(scene: Scene, over: threading.Event) -> None:
    """Shut the server down; its watchdog starts it again."""
    with scene.connect() as connection:
        ((file,),) = connection.execute("select pg_read_file('postmaster.pid')").fetchall()
    os.kill(int(file.split()[0]), signal.SIGINT)
    over.wait()


def end_backends(scene: Scene, over: threading.Event) -> None:
    """End all server processes of the database, again and again."""
    with scene.connect() as connection:
        while not over.wait(BACKENDS_INTERVAL_S):
            connection.execute(_END_OTHERS)


def use_up_connections(scene: Scene, over: threading.Event) -> None:
    """Hold as many connections as there are, also those that others give up."""
    with contextlib.ExitStack() as held:
        while not over.is_set():
            try:
                held.enter_context(scene.connect())
            except psycopg.OperationalError:
                over.wait(REFUSED_S)


def kill_consumers(scene: Scene, over: threading.Event) -> None:
    """Kill a consumer and start another, again and again."""
    while not over.wait(KILL_INTERVAL_S):
        scene.kill_consumer()
        scene.start_consumer()


def hold_transaction(scene: Scene, over: threading.Event) -> None:
    """Hold a snapshot, and with it back what vacuum may take."""
    with scene.connect() as connection, connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select pg_current_xact_id()")
        over.wait()


def read(scene: Scene, over: threading.Event) -> None:
    """Count the rows of the system's table, several at once."""

    def count_rows() -> None:
        statement = sql.SQL("select count(*) from {}").format(sql.Identifier(*scene.system.table))
        with scene.connect() as connection:
            while not over.wait(READER_PAUSE_S):
                connection.execute(statement)

    readers = [threading.Thread(target=count_rows) for _ in range(READERS)]
    for each in readers:
        each.start()
    for each in readers:
        each.join()


FAULTS: dict[str, Callable[[Scene, threading.Event], None]] = {
    "none": none,
    "restart": restart,
    "ended-processes": end_backends,
    "no-connections": use_up_connections,
    "killed-consumers": kill_consumers,
    "open-transaction": hold_transaction,
    "readers": read,
}
LONG = "open-transaction"
MEDIANS = ("p50_ms", "p99_ms", "bystander_p50_ms", "bystander_p99_ms", "dead_rows")


# --- the run --------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for number in range(options.rounds):
        for fault in options.faults:
            for name in SHARED_SYSTEMS:
                seconds = options.long_seconds if fault == LONG else options.seconds
                outcomes.setdefault((fault, name), []).append(_run(name, fault, options.rate, seconds))
                print(f"round {number + 1} of {options.rounds}: {fault}, {name}", flush=True)
    figures = [_figures(fault, name, found) for (fault, name), found in outcomes.items()]
    settings = {
        "rounds": options.rounds,
        "rate": options.rate,
        "seconds": options.seconds,
        "long": options.long_seconds,
    }
    report.save("faults", settings, {"figures": figures}, options.json)
    prose = PROSE.format(
        rate=options.rate,
        seconds=options.seconds,
        long=options.long_seconds,
        jobs=JOBS,
        catch_up=CATCH_UP_S,
        bystander=1 / BYSTANDER_INTERVAL_S,
        kill=KILL_INTERVAL_S,
        readers=READERS,
        rounds=options.rounds,
    )
    section = table(figures)
    report.page(options.page, "faults", prose, section)
    print(section)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=int, default=1000, help="messages per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a fault")
    parser.add_argument("--long-seconds", type=float, default=120.0, help="of an open transaction")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _run(name: str, fault: str, rate: int, seconds: float) -> Outcome:
    """Run one system under one fault, on a server of its own."""
    with postgres.place() as (url, directory), contextlib.ExitStack() as ends:
        scene = Scene(name, url, directory, ends)
        publisher = ends.enter_context(scene.publisher(rate, 3 * LEAD_S + seconds))
        eventually(scene.received, START_S, publisher.said, 0.1)
        bystander, over = Bystander(scene), threading.Event()
        time.sleep(LEAD_S)
        end = threading.Timer(seconds, over.set)  # the fault is on this thread: with one that ends its processes do
        began_ns = time.monotonic_ns()
        end.start()
        with bystander:
            FAULTS[fault](scene, over)
        ended_ns, dead_rows = time.monotonic_ns(), scene.count_dead_rows()
        expected = _await_all(scene, publisher)
        received = [(at_ns, head) for at_ns, head in scene.received() if head.kind != Kind.LAST]
        numbers = {head.number for _, head in received}
        took = [at_ns - head.sent_ns for at_ns, head in received if began_ns <= head.sent_ns < ended_ns]
        return Outcome(
            expected - len(numbers),
            len(received) - len(numbers),
            quantile(took, 0.5) / 1e6,
            quantile(took, 0.99) / 1e6,
            quantile(bystander.took_ms, 0.5),
            quantile(bystander.took_ms, 0.99),
            dead_rows,
        )


def _await_all(scene: Scene, publisher: Running) -> int:
    """Wait until all messages have been received, or the time for it is over. Return how many were published."""
    deadline = time.monotonic() + 2 * LEAD_S + CATCH_UP_S
    while True:
        publisher.check()
        heads = [head for _, head in scene.received()]
        last = next((head.number for head in heads if head.kind == Kind.LAST), None)
        if last is not None and len({head.number for head in heads}) > last:
            return last
        if time.monotonic() >= deadline:
            return max(head.number for head in heads) + 1 if last is None else last
        time.sleep(0.2)


def _figures(fault: str, name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the medians of all rounds, and the worst of what must not be."""

    def median(field: str) -> float:
        return significant(statistics.median(getattr(each, field) for each in outcomes))

    return {
        "fault": fault,
        "system": name,
        "survived": sum(each.lost == 0 for each in outcomes),
        "rounds": len(outcomes),
        "lost": max(each.lost for each in outcomes),
        "again": max(each.again for each in outcomes),
        **{field: median(field) for field in MEDIANS},
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| fault | system | survived | lost | again | p50 ms | p99 ms | bystander p50 ms | p99 ms | dead rows |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in figures:
        survived = f"{each['survived']} of {each['rounds']}"
        medians = " | ".join(f"{each[field]:g}" for field in MEDIANS)
        lines.append(
            f"| {each['fault']} | {each['system']} | {survived} | {each['lost']} | {each['again']} | {medians} |"
        )
    return "\n".join(lines) + "\n"
