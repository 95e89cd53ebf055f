"""Runs a plan: starts a Postgres and all processes, applies the faults, and collects the results."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import psycopg

from sublet_protocol.domain.errors import SubletError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.groups.status.overview_model import GroupOverview
from sublet_storage.log import fetch as message_log
from sublet_storage.spaces.space_changes import create_space, reshard
from tests.kit import eventually
from tests.kit_nodes import Process
from tests.postgres_proxy import PostgresProxy
from tests.recorded.consuming import INDEX, TABLE, Role
from tests.recorded.history import Group, Record
from tests.recorded.plan import (
    ENDS,
    LEADER,
    MOVED,
    NETWORK,
    NODES,
    OPERATOR,
    OWN,
    PROXIED,
    PUBLISHERS,
    WORKERS,
    Deed,
    Plan,
)

PLAIN, EXACT, QUEUE = "$share/plain/#", "$share/exact/#", "$queue/jobs/a/#"
NEWEST, LATER = "$share/newest/#", "$share/later/#"

ROLES = {
    "worker-1": (Role(PLAIN), Role(EXACT, exact=True), Role(QUEUE), Role(MOVED)),
    "worker-2": (Role(PLAIN, named=True), Role(PLAIN, nodes=NODES), Role(EXACT, exact=True, named=True), Role(MOVED)),
    "worker-3": (
        Role(PLAIN, in_asyncio=True),
        Role(EXACT, exact=True, in_parts=True, fails=0.1),
        Role(QUEUE, named=True),
    ),
}

KINDS = {"publisher-1": ("plain", "sql"), "publisher-2": ("named", "batch")}

LED = "select node from leadership where leadership_id <> 0 and expires_at > clock_timestamp() limit 1"
STREAMS = 3
LATER_AT, SINCE_AT = 0.4, 0.2
"""Shares of the run: when the late groups are created, and the time at which one of them starts."""

WAIT_S = 60.0
REST_S = 240.0
POLL_INTERVAL_S = 1.0
SETTLED = 3
"""Number of consecutive checks without anything left to consume."""


class Stage:
    """One run in a directory. `records` has the files of the processes; `say` is called with each fault."""

    def __init__(self, directory: Path, plan: Plan, speed: float, say: Callable[[str], None]) -> None:
        self.plan, self.records = plan, directory / "records"
        self.befell: Counter[str] = Counter()
        self._say, self._speed, self._logs = say, speed, directory / "logs"
        for made in (self.records, self._logs):
            made.mkdir()
        self._server = EmbeddedPostgres(directory / "data")
        self._record = Record(self.records / "stage.jsonl")
        self._processes: dict[str, Process] = {}
        self._lives: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._turns = itertools.count()
        self._began = 0.0
        self._roles = dict(ROLES)
        self._plays = dict(ROLES)
        self._frozen: dict[int, tuple[str, float]] = {}
        self._groups: list[str] = []
        self._since = 0.0
        self._addresses = dict(zip(NODES, _free_addresses(len(NODES)), strict=True))
        self.url = ""
        self._network: PostgresProxy | None = None

    def processes(self) -> dict[str, int]:
        """Return {life: process id} of those started last; from any thread."""
        return {self._life(name): process.pid for name, process in list(self._processes.items())}

    def lives(self) -> int:
        return sum(self._lives.values())

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all of it. Raise AssertionError if the groups do not come to rest afterwards."""
        try:
            self._begin()
            self.play()
            self._calm()
            self._rest()
        finally:
            with contextlib.suppress(SubletError, psycopg.Error):
                self._collect()
            self._end()

    def _begin(self) -> None:
        self.url = self._server.start()
        migrate(self.url)
        self._network = PostgresProxy(self.url).__enter__()
        with connect(self.url) as connection:
            reshard(connection, "default", STREAMS)
            create_space(connection, OWN, f"{OWN}/#", shards=2)
            connection.execute(TABLE)
            connection.execute(INDEX)
        self._command("groups", "create", QUEUE)
        for group in (Group(PLAIN), Group(EXACT, exact=True), Group(QUEUE, ("a",)), Group(MOVED)):
            self._group(group)
        orders = [[order.at_s, order.command] for order in sorted(self.plan.orders, key=lambda order: order.at_s)]
        (self.records / "orders.json").write_text(json.dumps(orders))
        for node in NODES:
            self._start(node)
        for node in NODES:
            self._processes[node].await_serving()
        self._began = time.monotonic()
        for name in (*WORKERS, *PUBLISHERS, OPERATOR):
            self._start(name)

    def play(self) -> None:
        """Carry out the plan."""
        for deed in self.plan.deeds:
            self._at(deed.at_s, partial(self._do, deed))
        self._at(self.plan.seconds * SINCE_AT, self._mark)
        self._at(self.plan.seconds * LATER_AT, self._come_later)
        end = self._began + self.plan.seconds
        while time.monotonic() < end:
            while self._agenda and self._agenda[0][0] <= time.monotonic():
                heapq.heappop(self._agenda)[2]()
            following = self._agenda[0][0] if self._agenda else end
            time.sleep(max(min(following, end) - time.monotonic(), 0.0))

    def _calm(self) -> None:
        """End all faults: frozen processes continue, dead ones are started, publishers stop."""
        self._agenda = []
        self._mend()
        for pid in list(self._frozen):
            self._thaw(pid)
        self._kill_orders()
        for name in PUBLISHERS:
            if self._processes[name].alive:
                self._processes[name].stop(WAIT_S * 2)
        for name in (*NODES, *WORKERS):
            process = self._processes[name]
            if process.alive and name in WORKERS and self._plays[name] != self._roles[name]:
                process.stop(WAIT_S)
            if not process.alive:
                self._start(name)
        for node in NODES:
            self._command("nodes", "drain", node, "--undo", "--wait", "0", check=False)
        self._command("groups", "resume", MOVED, check=False)

    def _rest(self) -> None:
        rested = 0
        left: dict[str, str] = {}

        def look() -> bool:
            nonlocal rested
            left.clear()
            left.update(self._left())
            rested = 0 if left else rested + 1
            return rested >= SETTLED

        try:
            eventually(look, REST_S, lambda: f"these groups have not consumed all: {left}", POLL_INTERVAL_S)
        except AssertionError:
            for group in left:
                self._say(self._command("groups", "why", group, check=False))
            raise
        for name in WORKERS:
            self._processes[name].stop(WAIT_S)

    def _left(self) -> dict[str, str]:
        found = {}
        try:
            with connect(self.url) as connection:
                (waiting,) = connection.execute("select count(*) from outbox").fetchall()
                if waiting[0]:
                    found[PLAIN] = f"{waiting[0]} messages in the outbox"
                for group in self._groups:
                    overview = describe_group(connection, Subscription.parse(group))
                    if lagging := [(one.stream_id, one.status, one.lag) for one in overview.streams if one.lag != 0]:
                        found[group] = f"{_lag(overview)} messages, {lagging[:5]}"
        except (psycopg.Error, SubletError) as error:
            found[PLAIN] = str(error)
        return found

    # --- deeds ------------------------------------------------------------------------------------------------------

    def _do(self, deed: Deed) -> None:
        """Apply a deed if its process exists."""
        if deed.whom == LEADER:
            deed = replace(deed, whom=self._leader())
        if deed.whom.startswith("backend"):
            done = self._to_backend(deed)
        elif deed.whom == "postmaster":
            done = self._signal(self._postmaster(), signal.SIGKILL if deed.what == "kill" else signal.SIGINT)
        elif deed.whom == NETWORK:
            done = self._to_network(deed)
        else:
            is_spared = deed.what in ENDS and deed.whom in self.plan.spared
            done = not is_spared and self._is_at_work(deed.whom) and self._to_process(deed)
        if done:
            self._say(str(deed))
            self.befell[f"{deed.what} {deed.whom.split()[0].rstrip('-123')}"] += 1
            self._record.write("deed", deed=str(deed))

    def _is_at_work(self, name: str) -> bool:
        process = self._processes.get(name)
        return process is not None and process.alive and process.pid not in self._frozen

    def _leader(self) -> str:
        """Return the node that leads a group; empty if none is known. The database is not queried while one of its
        backends is frozen: the thread that would wait for it is the one that thaws it."""
        if "" in (life for life, _ in self._frozen.values()):
            return ""
        with contextlib.suppress(psycopg.Error, SubletError), connect(self.url) as connection:
            if row := connection.execute(LED).fetchone():
                return str(row[0])
        return ""

    def _to_network(self, deed: Deed) -> bool:
        assert self._network is not None
        (self._network.go_away if deed.what == "cut" else self._network.hold)()
        self._in(deed.lasts_s, self._mend)
        return True

    def _mend(self) -> None:
        if self._network is not None:
            self._network.resume()

    def _to_process(self, deed: Deed) -> bool:
        process = self._processes[deed.whom]
        match deed.what:
            case "kill":
                if deed.whom == OPERATOR:
                    self._kill_orders()
                process.kill()
            case "stop":
                process.signal(signal.SIGTERM)
                self._in(deed.lasts_s, partial(self._see_out, deed.whom, process, time.monotonic()))
                return True
            case "freeze":
                self._freeze(process.pid, self._life(deed.whom), deed.lasts_s)
                return True
            case "replace":
                self._freeze(process.pid, self._life(deed.whom), deed.lasts_s)
                self._start(deed.whom)
                self._in(deed.lasts_s + 1.0, process.kill)
                return True
        self._in(deed.lasts_s, partial(self._start_again, deed.whom, process))
        return True

    def _to_backend(self, deed: Deed) -> bool:
        postmaster = self._postmaster()
        children = psutil.Process(postmaster).children() if postmaster else []
        backends = [child.pid for child in children if _is_backend(child) and child.pid not in self._frozen]
        if not backends:
            return False
        pid = sorted(backends)[int(float(deed.whom.split()[1]) * len(backends))]
        if deed.what == "freeze":
            self._freeze(pid, "", deed.lasts_s)
            return True
        return self._signal(pid, signal.SIGKILL if deed.what == "kill" else signal.SIGTERM)

    def _freeze(self, pid: int, life: str, lasts_s: float) -> None:
        if self._signal(pid, signal.SIGSTOP):
            self._frozen[pid] = life, time.time()
            self._in(lasts_s, partial(self._thaw, pid))

    def _thaw(self, pid: int) -> None:
        life, since = self._frozen.pop(pid, ("", 0.0))
        self._signal(pid, signal.SIGCONT)
        if life:
            self._record.write("frozen", process=life, **{"from": since, "to": time.time()})

    def _see_out(self, name: str, process: Process, since: float) -> None:
        """Start it again when it has ended; kill it if it does not."""
        if process.alive and time.monotonic() < since + WAIT_S:
            self._in(0.5, partial(self._see_out, name, process, since))
            return
        if process.alive:
            self._say(f"{name} did not end on SIGTERM: {process.output()[-500:]}")
            process.kill()
        self._start_again(name, process)

    def _start_again(self, name: str, process: Process) -> None:
        if self._processes[name] is process:
            self._start(name)

    def _kill_orders(self) -> None:
        operator = self._processes[OPERATOR]
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(operator.pid).children() if operator.alive else []:
                self._signal(child.pid, signal.SIGKILL)
        operator.kill()

    def _postmaster(self) -> int:
        """Return the postmaster's process id; 0 if there is none."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int((self._server.data_dir / "pg" / "postmaster.pid").read_text().split()[0])
            return pid if psutil.pid_exists(pid) else 0
        return 0

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
                return True
        return False

    # --- groups that come later -------------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._since = time.time()

    def _come_later(self) -> None:
        """Create a group that starts with what is published from now on, and one that starts at a past time."""
        try:
            asked_at = time.time()
            self._command("groups", "create", NEWEST)
            self._group(Group(NEWEST, since=(asked_at, time.time())))
        except AssertionError:
            self._in(1.0, self._come_later)
            return
        self._group(Group(LATER, since=(self._since, self._since)))
        start = datetime.fromtimestamp(self._since, UTC).isoformat()
        for name, role in (("worker-2", Role(NEWEST)), ("worker-3", Role(LATER, start))):
            self._roles[name] = (*self._roles[name], role)
            if self._processes[name].alive and self._processes[name].pid not in self._frozen:
                process = self._processes[name]
                process.signal(signal.SIGTERM)
                self._see_out(name, process, time.monotonic())

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        life = self._life(name)
        record = str(self.records / f"{life}.jsonl")
        url = self._network.url if self._network is not None and name in PROXIED else self.url
        if name in NODES:
            module, arguments = (
                "sublet.cli",
                ["leader", "--name", name, "--listen", self._addresses[name], "--notify", self.plan.notify],
            )
        elif name in WORKERS:
            self._plays[name] = self._roles[name]
            roles = [self._habits(role).text() for role in self._roles[name]]
            module, arguments = "tests.recorded.consuming", [url, record, life, *roles]
        elif name in PUBLISHERS:
            kinds = KINDS[name]
            module = "tests.recorded.publishing"
            arguments = [url, record, name, str(self._lives[name]), *kinds]
        else:
            module = "tests.recorded.operating"
            arguments = [url, record, str(self.records / "orders.json"), str(self._began)]
        extra = {"SUBLET_DATABASE_URL": url}
        self._processes[name] = Process(
            module, *arguments, log=self._logs / f"{name}.log", speed=self._speed, extra=extra
        )

    def _habits(self, role: Role) -> Role:
        without = self.plan.without
        return replace(
            role,
            nodes=tuple(self._addresses.values()) if role.nodes else (),
            fails=0.0 if "work-fails" in without else role.fails,
            breaks=0.0 if "loop-breaks" in without else role.breaks,
        )

    def _life(self, name: str) -> str:
        return f"{name}.{self._lives[name]}"

    def _command(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sublet.cli", *words],
            env={**os.environ, "SUBLET_DATABASE_URL": self.url},
            capture_output=True,
            text=True,
            check=False,
            timeout=5 * WAIT_S,  # it took one where each core had thirty processes
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout + done.stderr

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._began + at_s, next(self._turns), what))

    def _in(self, wait_s: float, what: Callable[[], None]) -> None:
        self._at(time.monotonic() - self._began + wait_s, what)

    def _end(self) -> None:
        for pid in list(self._frozen):
            self._thaw(pid)
        for process in self._processes.values():
            process.kill()
        if self._network is not None:
            self._network.__exit__(None, None, None)
        self._server.stop()

    # --- results ----------------------------------------------------------------------------------------------------

    def _group(self, group: Group) -> None:
        self._groups.append(group.name)
        self._record.write("group", **asdict(group))

    def _collect(self) -> None:
        """Collect the log, the user's table and the histories of lendings from the tables."""
        record = Record(self.records / "collected.jsonl")
        with connect(self.url) as connection:
            for stream, messages in _stored(connection):
                record.write("stored", stream=stream, messages=messages)
            columns = "number, consumers, call, stream, at, message, lane, before"
            for row in connection.execute(f"select {columns} from public.effect order by number").fetchall():
                record.write("effect", row=row)
            groups = connection.execute("select group_id, kind, name, filter from consumer_group").fetchall()
        store = PostgresGroupStore(self.url)
        try:
            for group_id, kind, name, topics in groups:
                for line in store.history(group_id):
                    record.write("lending", group=f"${kind}/{name}/{topics}", line=asdict(line))
        finally:
            store.close()


def _stored(connection: psycopg.Connection[Any]) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    """Yield pages of all streams: (stream, [(offset, message id)])."""
    heads = connection.execute("select stream_id, head from stream order by stream_id").fetchall()
    for stream, head in heads:
        position = 0
        while position < head:
            page = message_log.fetch(connection, stream, position)
            for batch in page.batches:
                columns = (batch.column(name).to_pylist() for name in ("offset", "value"))
                yield stream, [(offset, value.decode()) for offset, value in zip(*columns, strict=True)]
            position = page.position


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _is_backend(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "[local]" in " ".join(process.cmdline())
    return False


def _lag(overview: GroupOverview) -> int:
    return sum(one.lag or 0 for one in overview.streams)
