"""`python -m examples.exactly_once [DAYS] [--kills N]`: publish so many days, kill workers and leaders, and count."""

from __future__ import annotations

import os
import random
import signal
import sys

from examples._stage import Stage, a_stage, arguments, flights_of, publishing, table, verdict, wrong
from examples.exactly_once.application import SUBSCRIPTION, TABLE, TASKS
from sublet.demo.holding_intervals import parse_process

KILL_EVERY_S = 1.5, 4.0


class Killer:
    """Kills one after the other, at random: Python workers, and each third time the node that leads."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.killed: list[str] = []

    def kill_one(self) -> None:
        """kill -9."""
        if len(self.killed) % 3 == 1:
            self.killed.append(self._stage.kill_leader(SUBSCRIPTION))
        else:
            self._stage.wait_for("a worker that holds streams, and lives", self._kill_worker)
        self._stage.say(f"killed {self.killed[-1]}; {stored(self._stage)}")

    def _kill_worker(self) -> bool:
        """Whether there was one."""
        agents = [member.agent or "" for member in self._stage.look(SUBSCRIPTION).members]
        worker = parse_process(random.choice(agents or [""]))
        if worker is None:
            return False
        try:
            os.kill(worker, signal.SIGKILL)
        except ProcessLookupError:  # it is dead already, and not evicted yet
            return False
        self.killed.append(f"worker {worker}")
        return True


def stored(stage: Stage) -> str:
    """How far it is."""
    return f"{stage.count('ledger'):,} flights are stored"


def report(stage: Stage, bad: dict[str, list[int]], killed: list[str]) -> int:
    """Print who has stored what, and what is wrong; the exit code."""
    found = stage.connection.execute("select worker, count(*), sum(miles)::bigint from ledger group by 1 order by 1")
    dead = set(killed)
    rows = [
        (f"worker {pid}", flights, miles, "killed" if f"worker {pid}" in dead else "") for pid, flights, miles in found
    ]
    table(("stored by", "flights", "miles", ""), rows)
    print(f"{len(killed)} processes killed: {', '.join(killed)}")
    return verdict("flights", bad)


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    parser = arguments("exactly_once", __doc__, 14)
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="how many processes get kill -9")
    asked = parser.parse_args()
    source = flights_of(asked.days)
    with a_stage() as stage:
        stage.connection.execute(TABLE)
        stage.application("application", "examples.exactly_once.application")
        killer = Killer(stage)
        stage.wait_for("the tasks to share the streams", lambda: len(stage.holders(SUBSCRIPTION)) == TASKS)
        with publishing(stage.url, source, 4.0 * (asked.kills + 1)) as published:
            for _ in range(asked.kills):
                stage.pause(random.uniform(*KILL_EVERY_S), lambda: stored(stage))
                killer.kill_one()
            published.publish_faster()
        stage.say(f"all {source.num_rows:,} flights are published")
        stage.wait_for(
            "all flights to be stored",
            lambda: stage.look(SUBSCRIPTION).lag == 0,
            lambda: stored(stage),
        )
        stage.stop("application")
        stage.say("the end")
        return report(stage, wrong(source, stage.flights("ledger")), killer.killed)


if __name__ == "__main__":
    sys.exit(main())
