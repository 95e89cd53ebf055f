"""Time of a stream between two live owners, beside one RPC and one commit.

`python -m bench handover --moves 200`. A node, two consumers and a visitor, each a process. The visitor joins, waits
for a message of every stream that it is granted, and leaves, again and again. Measured are the moves caused by its
joining: from the record `revoke` in the group's history, by the database's clock, until `poll` returns the first
message to the visitor, by the clock of the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Beside, quantile
from sublet_storage.db.connect import connect
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.sharing_kit import ALL, Scene
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet, environment

MIN_HOLD_S = 0.1
RESIDENTS = 2
PAUSE_S = 0.02
"""Pause between two batches of a resident, during which it handles revokes."""
BLOCK = 20
MIN_BLOCKS, MORE_BLOCKS = 60, 100
"""Blocks of a stream that wait to be consumed, so that every new holder has something to deliver."""
FLOORS = 10
"""RPCs and commits timed before each visit."""
PROSE = """{moves} moves of streams that were revoked for balance from a consumer which was alive and at that moment in
no batch (else the time to the end of that batch comes on top), {each:.1f} at once in the median, with default settings
but min_grant_duration_s = {hold}, so that a stream may move as soon as it has come. From *revoke* in the group's
history to the first message at the new owner lie: the line of history, committed; the holder's final progress and the
grant, committed together; the reading of a block over the connection that the new owner opened as it joined.
Beside: a round trip to the same node (grpc.health.v1 Check) and then a commit of one updated row; and a connection like
the new owner's; {floors} times before each join, one by one, while nothing moved. The first visit, in which the
visitor's process imports what it reads with, is not counted."""


class Member:
    """A consumer's process that takes commands; see `bench._member`."""

    def __init__(self, url: str, directory: Path, name: str, pause_s: float) -> None:
        self._record = directory / f"{name}.jsonl"
        self._record.touch()
        with (directory / f"{name}.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench._member", url, ALL, str(self._record), str(pause_s)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(1.0),
                text=True,
            )

    def say(self, command: str) -> None:
        """Send `join` or `leave`."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def first(self) -> dict[tuple[int, int], int]:
        """Return {(stream, grant id): microseconds since 1970} of the first message under each grant."""
        lines = [line for line in self._record.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {(said["stream"], said["grant"]): said["at_us"] for said in map(json.loads, lines)}

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Move:
    """One stream's move from one owner to the next; microseconds since 1970."""

    revoked: int
    granted: int
    delivered: int


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower limit of a hand-over; milliseconds."""

    call: float
    commit: float
    connect: float


class Group:
    """The group under measurement, its node, its members and its backlog."""

    def __init__(self, url: str, directory: Path, streams: int) -> None:
        self.scene = Scene(url)
        self.streams = streams
        reshard(self.scene.connection, "default", streams)
        self.scene.connection.execute("create table floor (id integer primary key, n bigint)")
        self.scene.connection.execute("insert into floor values (1, 0)")
        self._publisher = Publisher(url, block_messages=BLOCK)
        self.fleet = Fleet(url, directory, 1.0, {"SUBLET_MIN_GRANT_DURATION_S": str(MIN_HOLD_S)})
        self.residents = [Member(url, directory, f"resident-{n}", PAUSE_S) for n in range(RESIDENTS)]
        self.visitor = Member(url, directory, "visitor", 0.0)
        self.floors: list[Floor] = []

    def close(self) -> None:
        """End the processes."""
        for member in (*self.residents, self.visitor):
            member.kill()
        self.fleet.close()
        self._publisher.close()
        self.scene.close()

    def begin(self) -> None:
        """Start the node, and wait until the residents have all streams."""
        node = self.fleet.node("n1")
        eventually(lambda: "serves on" in node.output(), WAIT_S, node.output)
        self._stock()
        for resident in self.residents:
            resident.say("join")
        eventually(partial(self._is_shared, RESIDENTS), WAIT_S, self._shown, 0.05)

    def visit(self) -> int:
        """Let the visitor join and leave; return how many streams it was granted."""
        self._stock()
        self._time_floors()
        at_home = {agent for _, _, _, agent in self.scene.rows()}
        self.visitor.say("join")
        eventually(partial(self._is_shared, RESIDENTS + 1), WAIT_S, self._shown, 0.02)
        granted = {stream for stream, _, _, agent in self.scene.rows() if agent not in at_home}
        grants = {(stream, grant) for stream, grant in self.scene.grants().items() if stream in granted}
        eventually(lambda: grants <= self.visitor.first().keys(), WAIT_S, self._shown, 0.02)
        self.visitor.say("leave")
        eventually(partial(self._is_shared, RESIDENTS), WAIT_S, self._shown, 0.02)
        return len(grants)

    def first(self) -> dict[tuple[int, int], int]:
        """Return `Member.first` of all members."""
        return {key: at for member in (*self.residents, self.visitor) for key, at in member.first().items()}

    def _is_shared(self, among: int) -> bool:
        shares = self.scene.shares()
        return sum(shares) == self.streams and len(shares) == among and shares[-1] - shares[0] <= 1

    def _shown(self) -> str:
        return f"{self.scene.rows()}\n{self.fleet.nodes['n1'].output()[-1500:]}"

    def _stock(self) -> None:
        """Publish enough for all streams to last for a visit."""
        heads = self.scene.heads()
        left = [heads[stream] - position for stream, _, position, _ in self.scene.rows()] or [0]
        if min(left) < MIN_BLOCKS * BLOCK:
            count = MORE_BLOCKS * BLOCK * self.streams
            keys = [b"%d" % (number % (100 * self.streams)) for number in range(count)]
            self._publisher.publish_batch({"topic": "t", "value": [b"x" * 100] * count, "key": keys})
            self._publisher.flush()

    def _time_floors(self) -> None:
        """Time the RPCs, then the commits."""
        with grpc.insecure_channel(self.scene.claim().node.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def call() -> object:
                return stub.Check(health_pb2.HealthCheckRequest())

            def commit() -> object:
                return self.scene.connection.execute("update floor set n = n + 1 where id = 1", prepare=True)

            def open_connection() -> object:
                with connect(self.scene.url) as connection:
                    return connection

            call()
            self.floors += [Floor(_time(call), _time(commit), _time(open_connection)) for _ in range(FLOORS)]


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    parser = argparse.ArgumentParser(prog="bench handover", description=__doc__)
    parser.add_argument("--moves", type=int, default=200, help="at least so many")
    parser.add_argument("--streams", type=int, default=16, help="of the group")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    with postgres.place() as (url, directory), contextlib.closing(Group(url, directory, options.streams)) as group:
        group.begin()
        group.visit()
        begun_us = time.time_ns() // 1000
        granted: list[int] = []
        while sum(granted) < options.moves:
            granted.append(group.visit())
            print(f"{sum(granted)} of {options.moves} moves", flush=True)
        history = [line for line in group.scene.history() if line.at_us >= begun_us]
        moves = moves_of(history, group.first())
        floors = group.floors
    assert len(moves) >= options.moves * 0.9, f"{len(moves)} moves are whole of {sum(granted)}"
    figures = _figures(moves, floors)
    settings = {
        "moves": len(moves),
        "streams": options.streams,
        "residents": RESIDENTS,
        "min_grant_duration_s": MIN_HOLD_S,
    }
    each = quantile(granted, 0.5)
    body = {"moves_at_once": each, "figures": [figure.judged() for figure in figures]}
    report.save("handover", settings, body, options.json)
    prose = PROSE.format(moves=len(moves), each=each, hold=MIN_HOLD_S, floors=FLOORS)
    section = report.table(figures)
    report.page(options.page, "handover", prose, section)
    print(section)


def moves_of(history: Iterable[HistoryRecord], first: Mapping[tuple[int, int], int]) -> list[Move]:
    """Return the moves that began with a revoke and ended with a message; `first` has the times of messages."""
    begun: dict[int, list[int]] = {}
    moves: list[Move] = []
    for line in history:
        times = begun.get(line.stream_id, [])
        if line.event == "revoke":
            begun[line.stream_id] = [line.at_us]
        elif line.event == "release" and len(times) == 1:
            times.append(line.at_us)
        elif line.event == "grant":
            begun.pop(line.stream_id, None)
            delivered = first.get((line.stream_id, line.grant_id))
            if len(times) == 2 and delivered is not None:
                moves.append(Move(times[0], line.at_us, delivered))
    return moves


def _figures(moves: list[Move], floors: list[Floor]) -> list[Beside]:
    both = [floor.call + floor.commit for floor in floors]
    call, commit, opened = (quantile([getattr(f, part) for f in floors], 0.5) for part in ("call", "commit", "connect"))

    def took(begin: str, end: str, share: float = 0.5) -> float:
        return quantile([(getattr(move, end) - getattr(move, begin)) / 1000 for move in moves], share)

    def entire(name: str, share: float) -> Beside:
        value = took("revoked", "delivered", share)
        return Beside(f"hand-over, {name}", value, "ms", f"RPC + commit, {name}", quantile(both, share))

    return [
        entire("p50", 0.5),
        entire("p99", 0.99),
        Beside("of p50: revoke to grant", took("revoked", "granted"), "ms", "RPC + commit", call + commit),
        Beside("of p50: grant to first message", took("granted", "delivered"), "ms", "RPC + connection", call + opened),
    ]


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()
