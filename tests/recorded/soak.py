"""`python -m tests.recorded.soak --minutes 60`: a run under all faults, in which nothing may leak.

A node, a consumer and a publisher run through it: they are frozen and cut off, while all other processes are killed.
Their memory, descriptors and threads, the database's connections, and all tables but those that grow with the messages
must not grow; then the records are checked as after every run. Exit code 1 if a check fails. `README.md` says how
growth is measured, and why so: by the lesser of two median slopes (Theil and Sen).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.connect import connect
from tests.kit import server_directory
from tests.recorded.__main__ import faults, report, say
from tests.recorded.history import read
from tests.recorded.plan import PROXIED, Plan, draw
from tests.recorded.stage import Stage

SAMPLE_INTERVAL_S = 3.0
WARM_UP = 1 / 3
"""Share of a run before the window that is checked."""

MIN_SAMPLES = 5
"""Fewest samples in each half."""

PAIRS_OF = 200
"""Largest number of samples for slopes; if there are more, as many are taken at equal distances."""

Sample = tuple[float, float]
"""(seconds of the run, value)."""
OF_MESSAGES = "block"
OF_LIVES = ("session_epoch", "producer")
"""Tables with a row for each name of a session or publisher, kept for days: checked by the number of started
processes."""
UNJUDGED = ("lending_history",)
"""Tables with a row for each move of a stream, kept for days."""
_TABLES = """
select c.relname, pg_total_relation_size(c.oid) / 1048576.0 from pg_class c
 where c.relkind = 'r' and c.relnamespace = 'sublet'::regnamespace
   and not exists (select from pg_inherits where inhrelid = c.oid)"""
_LOG = """
select (select coalesce(sum(pg_total_relation_size(inhrelid)), 0) from pg_inherits
         where inhparent = 'sublet.block'::regclass)::float8, (select sum(head) from sublet.stream)::float8"""
HEADING = f"{'':<22} {'':<19} {'median':>10} {'peak':>10} {'growth':>9} {'at most':>9}"
DEED_EVERY_S, ORDER_EVERY_S, SPEED = 4.0, 10.0, 2.0
NEW_STREAMS = ("rollover", "empty-generations", "reshard", "spaces")
"""Orders that are left out: they add streams, which stay as long as their messages."""
PROGRESS_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a measure may grow in the window: `floor`, or that share of its median, whichever is more."""

    unit: str
    floor: float
    share: float = 0.0


BOUNDS = {
    "memory": Bound("MiB", 12.0),
    "descriptors": Bound("", 8.0),
    "threads": Bound("", 8.0),
    "connections": Bound("", 8.0, 0.5),
    "rows": Bound("", 30.0),
    "size": Bound("MiB", 1.0),
    "bytes per message": Bound("", 0.0, 0.25),
    "rows per life": Bound("", 2.0, 0.5),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure of one process or table over a run. `growth`: by the smaller slope; None: too few samples."""

    whose: str
    measure: str
    median: float
    peak: float
    growth: float | None
    bound: float

    @property
    def is_flat(self) -> bool:
        """Return whether it was checked, and grew no more than allowed."""
        return self.growth is not None and self.growth <= self.bound

    def __str__(self) -> str:
        unit = BOUNDS[self.measure].unit
        growth = "?" if self.growth is None else f"{self.growth:+.2f}"
        verdict = "flat" if self.is_flat else "GROWS" if self.growth is not None else "not judged"
        numbers = f"{self.median:10.1f} {self.peak:10.1f} {growth:>9} {self.bound:9.1f}"
        return f"{self.whose:<22} {f'{self.measure} {unit}':<19} {numbers}  {verdict}"


def judge(whose: str, measure: str, samples: Iterable[Sample], seconds: float) -> Figure:
    """Return the figure of the samples of a run of that many seconds."""
    late = [sample for sample in samples if sample[0] >= seconds * WARM_UP]
    values = [value for _, value in late] or [0.0]
    median = statistics.median(values)
    bound = BOUNDS[measure]
    grown, most = growth(late, seconds * (1 - WARM_UP)), max(bound.floor, bound.share * median)
    return Figure(whose, measure, median, max(values), grown, most)


def growth(late: list[Sample], window_s: float) -> float | None:
    """Return how much the samples grow in a window by the lesser slope of their halves; None if they span less than
    half of it, or are too few."""
    if not late or late[-1][0] - late[0][0] < window_s / 2:
        return None
    middle_s = (late[0][0] + late[-1][0]) / 2
    halves = [each for each in late if each[0] < middle_s], [each for each in late if each[0] >= middle_s]
    if min(map(len, halves)) < MIN_SAMPLES:
        return None
    return min(map(slope, halves)) * (late[-1][0] - late[0][0])


def slope(samples: list[Sample]) -> float:
    """Return the median of the slopes between all pairs of samples."""
    chosen = samples[:: -(-len(samples) // PAIRS_OF)]
    return statistics.median(
        (later - sooner) / (end - begin) for (begin, sooner), (end, later) in itertools.combinations(chosen, 2)
    )


@dataclass
class Resources:
    """Samples in a thread of its own, so that a slow database delays nothing else. `processes`: returns {name: process
    id}; `lives`: returns how many have been started."""

    url: str
    processes: Callable[[], Mapping[str, int]]
    lives: Callable[[], int]
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    messages: float = 0.0

    def __post_init__(self) -> None:
        self.over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def figures(self, seconds: float) -> list[Figure]:
        """Return the figures of a run of that many seconds, in the order in which they were first sampled."""
        return [judge(whose, measure, samples, seconds) for (whose, measure), samples in list(self.samples.items())]

    def _run(self) -> None:
        while not self.over.wait(SAMPLE_INTERVAL_S):
            for name, pid in self.processes().items():
                with contextlib.suppress(psutil.Error):
                    self._look_at_process(name, psutil.Process(pid))
            with contextlib.suppress(psycopg.Error, SubletError):
                self._look_at_tables()

    def _look_at_process(self, name: str, process: psutil.Process) -> None:
        self._add(name, "memory", process.memory_info().rss / 2**20)
        self._add(name, "descriptors", process.num_fds())
        self._add(name, "threads", process.num_threads())

    def _look_at_tables(self) -> None:
        with connect(self.url) as connection:
            clients = "select count(*) from pg_stat_activity where backend_type = 'client backend'"
            for (count,) in connection.execute(clients).fetchall():
                self._add("database", "connections", count)
            for table, size in connection.execute(_TABLES).fetchall():
                if table not in (OF_MESSAGES, *UNJUDGED):
                    counting = sql.SQL("select count(*) from sublet.{}").format(sql.Identifier(table))
                    for (rows,) in connection.execute(counting).fetchall():
                        self._look_at_rows(table, rows, float(size))
            for size, messages in connection.execute(_LOG).fetchall():
                self.messages = messages or 0.0
                if messages:
                    self._add(OF_MESSAGES, "bytes per message", size / messages)

    def _look_at_rows(self, table: str, rows: int, size: float) -> None:
        if table in OF_LIVES:
            self._add(table, "rows per life", rows / self.lives())
        else:
            self._add(table, "rows", rows)
            self._add(table, "size", size)

    def _add(self, whose: str, measure: str, value: float) -> None:
        self.samples.setdefault((whose, measure), []).append((self.seconds, float(value)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it lasts (default: 60)")
    parser.add_argument("--seed", type=int, help="of the plan (default: by the clock)")
    parser.add_argument("--keep", type=Path, help="where the records are kept; else only if it fails")
    options = parser.parse_args()
    directory = options.keep or server_directory()
    directory.mkdir(exist_ok=True)
    seed = int(time.time()) if options.seed is None else options.seed
    is_sound = soak(directory, seed, options.minutes * 60, say)
    if is_sound and options.keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        say(f"the records are in {directory}: python -m tests.recorded --check {directory}")
    return 0 if is_sound else 1


class WatchedStage(Stage):
    """A run whose resources are sampled while it is played; `progress` is given a line about them now and then."""

    def __init__(self, directory: Path, plan: Plan, progress: Callable[[str], None]) -> None:
        super().__init__(directory, plan, SPEED, lambda _: None)
        self.resources: Resources | None = None
        self._progress = progress

    def play(self) -> None:
        self.resources = resources = Resources(self.url, self.processes, self.lives)
        resources.start()
        threading.Thread(target=self._print_progress, args=(resources,), daemon=True).start()
        try:
            super().play()
        finally:
            resources.over.set()

    def _print_progress(self, resources: Resources) -> None:
        while not resources.over.wait(PROGRESS_INTERVAL_S):
            samples = list(resources.samples.items())
            latest = {w.partition(".")[0]: found[-1][1] for (w, measure), found in samples if measure == "memory"}
            memory = ", ".join(f"{name} {latest.get(name, 0):.0f} MiB" for name in PROXIED)
            self._progress(
                f"{resources.seconds / 60:5.1f} of {self.plan.seconds / 60:g} min: {resources.messages:.0f} messages "
                f"stored, {self.befell.total()} faults; {memory}"
            )


def soak(directory: Path, seed: int, seconds: float, say: Callable[[str], None]) -> bool:
    """Return whether nothing leaked, the groups came to rest, and no guarantee was broken."""
    say(f"again: python -m tests.recorded.soak --minutes {seconds / 60:g} --seed {seed}")
    plan = draw(seed, seconds, DEED_EVERY_S, ORDER_EVERY_S, without=NEW_STREAMS, spared=PROXIED)
    stage = WatchedStage(directory, plan, say)
    failed: list[str] = []
    try:
        stage.run()
    except AssertionError as error:
        failed.append(f"the groups did not come to rest: {error}")
    if stage.resources is None:
        return False
    judged = [each for each in stage.resources.figures(seconds) if each.growth is not None]
    say(f"--- {seconds / 60:g} minutes of seed {seed}: {faults(stage)}\n{HEADING}")
    say("\n".join(str(each) for each in judged if each.peak))
    failed += [f"{each.whose}: {each.measure} grew by {each.growth:.1f}" for each in judged if not each.is_flat]
    names = {each.whose.partition(".")[0] for each in judged}
    wanted = (*PROXIED, "database", "block", "lending")
    failed += [f"{name} was not judged" for name in wanted if name not in names]
    if report(read(stage.records)):
        failed.append("a promise was broken, or messages are lost")
    say("sound" if not failed else "\n".join(["NOT SOUND", *failed]))
    return not failed


if __name__ == "__main__":
    sys.exit(main())
