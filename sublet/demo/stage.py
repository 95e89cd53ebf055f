"""Starts Postgres, nodes, the Spark application and the publisher; kills a worker and the leader; waits for the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from protocol.errors import Unavailable
from protocol.words import Subscription
from storage.connect import connect
from storage.database import open_database
from storage.groups.model import HistoryRecord, LendingStatus
from storage.groups.postgres import PostgresGroups
from storage.publish import Publisher
from sublet.demo import check, flights
from sublet.demo.show import Show

TASKS = 4
NODES = ("demo-1", "demo-2")
PUBLISH_S = 30.0
"""Over which the flights are published, so that consumption overlaps it."""
SECONDS_PER_MESSAGE = 0.0004
"""What the tasks pretend that a message takes: four of them need about 35 s for all."""
KILL_WORKER_AT, KILL_LEADER_AT = 0.33, 0.5
LIMIT_S = 170.0


def run(as_json: bool, keep: str | None) -> int:
    """The whole demo; its exit code."""
    show = Show()
    home = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="sublet-demo-"))
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o755)
    try:
        with open_database(None, home / "postgres") as database:
            show.say("Postgres is up, embedded")
            return _Stage(database.url, home, show).play(as_json)
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


@dataclass(slots=True)
class _Stage:
    """One performance."""

    url: str
    home: Path
    show: Show
    published: int = 0
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    failure: BaseException | None = None

    def play(self, as_json: bool) -> int:
        records = self.home / "records"
        records.mkdir()
        records.chmod(0o777)
        source = flights.load()
        self.show.say(f"{source.num_rows:,} flights loaded")
        with self._ending_processes(), PostgresStore(self.url) as store:
            for name in NODES:
                self._start(name, "sublet.cli", "leader", "--name", name, "--listen", "127.0.0.1:0")
            arguments = (self.url, str(records), str(TASKS), str(SECONDS_PER_MESSAGE))
            application = self._start("application", "sublet.demo.application", *arguments)
            self.show.say(f"leader nodes {' and '.join(NODES)} and a Spark application with {TASKS} tasks are starting")
            self._until(lambda: len(store.holders()) == TASKS, "the tasks to share the streams")
            self.show.say(f"{TASKS} tasks share {store.streams()} streams")
            threading.Thread(target=self._publish, args=(source,), name="publisher", daemon=True).start()
            with self.show.bars(source.num_rows):
                self._watch(store, source.num_rows)
            self.show.say("everything is consumed; draining the application")
            application.communicate(timeout=60)
            heads, history = store.heads(), store.history()
        findings = check.judge(source, heads, check.read_attempts(records), history)
        self._report(findings, history, as_json)
        return 0 if findings.sound else 1

    # --- the play ---------------------------------------------------------------------------------------------------

    def _publish(self, source: pa.Table) -> None:
        """All flights in the file's order, a tenth of a second's worth at a time."""
        published = source.select(["topic", "key", "value"])
        step = max(1, round(source.num_rows / PUBLISH_S / 10))
        try:
            with Publisher(self.url) as publisher:
                began = time.monotonic()
                for first in range(0, source.num_rows, step):
                    publisher.publish_batch(published.slice(first, step))
                    publisher.flush()
                    self.published = min(first + step, source.num_rows)
                    ahead = began + self.published / source.num_rows * PUBLISH_S - time.monotonic()
                    time.sleep(max(0.0, ahead))
        except BaseException as error:  # noqa: BLE001 it is raised where somebody sees it
            self.failure = error

    def _watch(self, store: PostgresStore, total: int) -> None:
        """Show how far it is, and kill at the right moments."""
        acts: list[tuple[float, Callable[[PostgresStore], bool]]] = [
            (KILL_WORKER_AT, self._kill_worker),
            (KILL_LEADER_AT, self._kill_leader),
        ]

        def done() -> bool:
            consumed = store.consumed()
            self.show.update(self.published, consumed)
            if acts and consumed >= acts[0][0] * total and acts[0][1](store):
                acts.pop(0)
            return consumed == total

        self._until(done, "everything to be consumed")
        if acts:
            raise Unavailable("the demo was over before it could kill anything: this machine is too fast for it.")

    def _kill_worker(self, store: PostgresStore) -> bool:
        """The Python worker whose streams have the most left."""
        agent, streams = store.busiest()
        found = re.search(r":(\d+):", agent)
        if found is None or not streams:
            return False
        os.kill(int(found[1]), signal.SIGKILL)
        self.show.say(f"[red]killed[/red] the worker of task {agent}, which held streams {_listed(streams)}")
        return True

    def _kill_leader(self, store: PostgresStore) -> bool:
        name = store.leader()
        self.processes[name].kill()
        self.show.say(f"[red]killed[/red] {name}, the node that led the group")
        return True

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[str]:
        log = (self.home / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SUBLET_DATABASE_URL": self.url},
        )
        return self.processes[name]

    @contextlib.contextmanager
    def _ending_processes(self) -> Iterator[None]:
        try:
            yield
        finally:
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()

    def _until(self, fact: Callable[[], bool], what: str) -> None:
        """Wait for a fact, unless the application dies, the publisher fails or the time is over."""
        while not fact():
            if self.failure is not None:
                raise self.failure
            if self.processes["application"].poll() is not None:
                raise Unavailable(f"the Spark application ended by itself:\n{self._tail('application')}")
            if self.show.seconds > LIMIT_S:
                raise Unavailable(f"waited too long for {what}:\n{self._tail('application')}")
            time.sleep(0.1)

    def _tail(self, name: str) -> str:
        return "\n".join((self.home / f"{name}.log").read_text(errors="replace").splitlines()[-30:])

    # --- the end ----------------------------------------------------------------------------------------------------

    def _report(self, findings: check.Findings, history: Sequence[HistoryRecord], as_json: bool) -> None:
        holdings = _holdings(history)
        moves = [one for one in holdings if one["moved_from"] is not None]
        if not as_json:
            self.show.end(findings, holdings, moves)
            return
        said: dict[str, Any] = {
            "published": findings.published,
            "consumed": findings.consumed,
            "lost": findings.lost,
            "duplicated": findings.duplicated,
            "explained_duplicates": findings.explained_duplicates,
            "moves": len(moves),
            "seconds": round(self.show.seconds),
            "totals_match": all(wanted == found for wanted, found, _ in findings.totals.values()),
            "move_list": moves,
            "duplicate_ranges": findings.duplicate_ranges,
        }
        sys.stdout.write(json.dumps(said) + "\n")


class PostgresStore:
    """What the demo asks of the database: the same rows that `sublet groups describe` shows."""

    def __init__(self, url: str) -> None:
        self._groups = PostgresGroups(url)
        self._connection = connect(url, application_name="sublet demo")

    def __enter__(self) -> PostgresStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._groups.close()
        self._connection.close()

    def heads(self) -> dict[int, int]:
        """{stream: head}."""
        return dict(self._connection.execute("select stream_id, head from stream").fetchall())

    def streams(self) -> int:
        """How many there are."""
        return len(self.heads())

    def holders(self) -> set[str]:
        """The agents that hold streams."""
        return {agent for agent, _, _ in self._held()}

    def consumed(self) -> int:
        """Messages that are durably consumed."""
        row = self._connection.execute("select coalesce(sum(position), 0)::bigint from lending").fetchone()
        return int(row[0]) if row else 0

    def busiest(self) -> tuple[str, list[int]]:
        """The agent with the most left to do, and its streams that have something left."""
        left: dict[str, int] = {}
        streams: dict[str, list[int]] = {}
        for agent, stream, behind in self._held():
            if behind > 0:
                left[agent] = left.get(agent, 0) + behind
                streams.setdefault(agent, []).append(stream)
        agent = max(left, key=lambda a: left[a], default="")
        return agent, streams.get(agent, [])

    def leader(self) -> str:
        """The name of the node that leads the group."""
        return self._groups.look([self._group()])[self._group()].node.name

    def history(self) -> list[HistoryRecord]:
        """What happened to the lendings."""
        return list(self._groups.history(self._group()))

    def _group(self) -> int:
        return self._groups.open_group(Subscription.parse(flights.SUBSCRIPTION)).group_id

    def _held(self) -> list[tuple[str, int, int]]:
        return self._connection.execute(
            "select l.agent, l.stream_id, s.head - l.position from lending l join stream s using (stream_id)"
            " where l.status = %s",
            (LendingStatus.HELD.value,),
        ).fetchall()


def _holdings(history: Sequence[HistoryRecord]) -> list[dict[str, Any]]:
    """A line per grant: who held which stream from when to when, what it consumed, and how it ended."""
    began = min((h.at_us for h in history), default=0)
    lines: list[dict[str, Any]] = []
    open_lines: dict[int, dict[str, Any]] = {}
    last_holder: dict[int, str] = {}
    for h in history:
        seconds = (h.at_us - began) / 1e6
        if h.event == "grant":
            holder = _short(h.agent)
            line = {
                "stream": h.stream_id, "holder": holder, "grant": h.grant_id, "from_s": round(seconds, 1),
                "until_s": None, "from_offset": h.position, "to_offset": h.position, "ended": "holds it still",
                "forced": False, "moved_from": last_holder.get(h.stream_id),
            }  # fmt: skip
            lines.append(line)
            open_lines[h.stream_id], last_holder[h.stream_id] = line, holder
        elif h.stream_id in open_lines and h.event != "reclaim":
            line = open_lines.pop(h.stream_id)
            line |= {"until_s": round(seconds, 1), "to_offset": h.position, "ended": h.reason, "forced": h.forced}
    return sorted(lines, key=lambda line: (line["stream"], line["from_s"]))


def _short(agent: str | None) -> str:
    """The part of an agent's id that tells tasks of one machine apart: its process."""
    found = re.search(r":(\d+):", agent or "")
    return f"worker {found[1]}" if found else str(agent)


def _listed(streams: Sequence[int]) -> str:
    return ", ".join(str(stream) for stream in sorted(streams))
