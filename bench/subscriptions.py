"""Memory of a node for subscriptions and idle agents, beside a held call per subscription.

`python -m bench subscriptions --sizes 1000 10000 100000`. A server and its agents, two processes; measured is the
server's resident memory, as Linux reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import _report as report
from bench._holding import TIDY
from bench._report import read_lines, significant
from bench.peers.processes import Running, module
from tests.kit import eventually

SIZES = (1_000, 10_000, 100_000)
EACH = 100
"""Subscriptions per agent."""
FIRST = 10
"""Subscriptions of the agent that is connected before the first measurement: what a server allocates once is allocated
then."""
WAIT_S = 600.0
ASK_S = 0.1
SIDES = ("session", "call")
PROSE = """Resident memory of a server process, from /proc, for subscriptions to the STREAM channel by agents that have
{each} each and wait; medians of {rounds} rounds, with fresh processes. *Session* is the node's own server: every agent
holds one poll, whatever it has subscribed to. *Held calls* is a server on the same gRPC (grpc.aio) whose
every subscription is a call that waits for what is new, and that lets calls wait until it takes them up. Every agent
has a connection of its own in both; all agents of a round share a process, which is not weighed. *Idle agent* is what
the server grew by for an agent with one subscription, over a server that has served one agent already; *one more* is
what it grew by for each subscription that followed; *per subscription* is all of it over all subscriptions. At
{smallest:,} subscriptions the figures are near what the allocator rounds to. Held calls were measured up to
{largest_calls:,}."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a server: without agents, with agents of one subscription each, with all subscriptions."""

    empty: int
    begun: int
    full: int


@dataclass(frozen=True, slots=True)
class Point:
    """One size on one side: bytes, medians over the rounds."""

    subscriptions: int
    agents: int
    weights: tuple[Weights, ...]

    @property
    def idle_agent(self) -> float:
        """Return the bytes of an agent with its one subscription."""
        return statistics.median((one.begun - one.empty) / self.agents for one in self.weights)

    @property
    def one_more(self) -> float:
        """Return the bytes of a further subscription of an agent."""
        return statistics.median((one.full - one.begun) / (self.subscriptions - self.agents) for one in self.weights)

    @property
    def per_subscription(self) -> float:
        """Return the bytes per subscription, agents included."""
        return statistics.median((one.full - one.empty) / self.subscriptions for one in self.weights)

    def said(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        names = ("idle_agent", "one_more", "per_subscription")
        return {f"{name}_bytes": round(getattr(self, name)) for name in names}


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    parser = argparse.ArgumentParser(prog="bench subscriptions", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="subscriptions in all")
    parser.add_argument("--each", type=int, default=EACH, help="subscriptions of one agent")
    parser.add_argument("--largest-calls", type=int, default=max(SIZES), help="held calls are left out beyond")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    if options.each < 2 or any(size % options.each or size < 2 * options.each for size in options.sizes):
        parser.error(
            f"--each {options.each}: at least 2, of which every size is a multiple and at least twice as large."
        )
    curve = [_measured(size, options) for size in options.sizes]
    settings = {"sizes": options.sizes, "each": options.each, "rounds": options.rounds}
    report.save("subscriptions", settings, {"curve": [_said(points) for points in curve]}, options.json)
    section = table(curve)
    prose = PROSE.format(
        each=options.each,
        rounds=options.rounds,
        smallest=min(options.sizes),
        largest_calls=min(options.largest_calls, max(options.sizes)),
    )
    report.page(options.page, "subscriptions", prose, section)
    print(section)


def _measured(size: int, options: argparse.Namespace) -> dict[str, Point]:
    """Return {side: figures} of one size."""
    found: dict[str, list[Weights]] = {}
    agents = size // options.each
    for number in range(options.rounds):
        for side in SIDES:
            if side == "session" or size <= options.largest_calls:
                started = time.monotonic()
                found.setdefault(side, []).append(_weigh(side, agents, size))
                seconds = time.monotonic() - started
                print(f"{size:,} by {side}, round {number + 1}: {seconds:.0f} s", flush=True)
    return {side: Point(size, agents, tuple(weights)) for side, weights in found.items()}


def _weigh(side: str, agents: int, subscriptions: int) -> Weights:
    with contextlib.ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sublet-bench-")))
        server = opened.enter_context(_Server.begun(directory))
        opened.enter_context(server.agents(side, 1, FIRST)).write_line()
        empty = server.weight(side, 1, FIRST)
        others = opened.enter_context(server.agents(side, agents, subscriptions))
        begun = server.weight(side, 1 + agents, FIRST + agents)
        others.write_line()
        return Weights(empty, begun, server.weight(side, 1 + agents, FIRST + subscriptions))


class _Server:
    """The process whose memory is measured."""

    def __init__(self, directory: Path, process: Running) -> None:
        self._directory, self._process = directory, process
        self._file = directory / "server.jsonl"
        self._address: str = self._next(0)["address"]
        self._asked = 0

    @classmethod
    @contextlib.contextmanager
    def begun(cls, directory: Path) -> Iterator[_Server]:
        """Yield a server that runs until the end of the block."""
        arguments = ("serve", str(directory / "server.jsonl"))
        with module("bench._holding", *arguments, log=directory / "server.log") as process:
            yield cls(directory, process)

    @contextlib.contextmanager
    def agents(self, side: str, agents: int, subscriptions: int) -> Iterator[Running]:
        """Yield the process of the agents once each has one subscription."""
        file = self._directory / f"{agents}.jsonl"
        arguments = (side, str(file), self._address, str(agents), str(subscriptions))
        with module("bench._holding", *arguments, log=file.with_suffix(".log")) as process:

            def begun() -> bool:
                process.check()
                return bool(read_lines(file))

            eventually(begun, WAIT_S, process.said, 0.05)
            yield process

    def weight(self, side: str, agents: int, subscriptions: int) -> int:
        """Return the bytes once that many subscriptions exist and wait."""

        def waits() -> bool:
            held = self._ask()
            if side == "session":
                return (held["subscriptions"], held["polls"]) == (subscriptions, agents)
            return bool(held["calls"] == subscriptions)

        eventually(waits, WAIT_S, lambda: f"{self._ask()} of {subscriptions} by {agents}", ASK_S)
        self._ask(TIDY)
        return resident_bytes(self._process.pid)

    def _ask(self, line: str = "\n") -> dict[str, Any]:
        self._process.write_line(line)
        self._asked += 1
        return self._next(self._asked)

    def _next(self, number: int) -> dict[str, Any]:
        """Return the line of that number, once it is written."""

        def line() -> dict[str, Any] | None:
            self._process.check()
            found = read_lines(self._file)
            return found[number] if len(found) > number else None

        return eventually(line, WAIT_S, self._process.said)


def resident_bytes(pid: int) -> int:
    """Return VmRSS of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no VmRSS: this bench needs Linux, and a process that runs.")


# --- results --------------------------------------------------------------------------------------------------------


def _said(points: dict[str, Point]) -> dict[str, Any]:
    first = points["session"]
    sides = {side: point.said() for side, point in points.items()}
    return {"subscriptions": first.subscriptions, "agents": first.agents, **sides}


def table(curve: Sequence[dict[str, Point]]) -> str:
    """Return a table with session / held calls for each figure."""
    lines = [
        "| subscriptions | agents | | session | held calls | calls / session |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = {"idle_agent": "idle agent", "one_more": "one more", "per_subscription": "per subscription"}
    for points in curve:
        ours, calls = points["session"], points.get("call")
        for name, what in names.items():
            value = getattr(ours, name)
            beside = getattr(calls, name) if calls else None
            ratio = f"{significant(beside / value):g}" if beside is not None and value > 0 else ""
            lines.append(
                f"| {ours.subscriptions:,} | {ours.agents:,} | {what} | {value:,.0f} bytes "
                f"| {'' if beside is None else f'{beside:,.0f} bytes'} | {ratio} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
