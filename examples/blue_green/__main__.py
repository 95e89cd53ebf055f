"""`python -m examples.blue_green [DAYS]`: replace a streaming query while flights come in, and measure the pause."""

from __future__ import annotations

import sys

from examples._stage import STREAMS, Stage, a_stage, arguments, flights_of, publishing, table, verdict, wrong
from examples.blue_green.query import SUBSCRIPTION, TABLES

PUBLISH_S = 180.0
"""For all flights, if nothing hurries it: longer than the hand-over can take."""
PHASE_S = 4.0

# A pause belongs to the phase in which it ends, and so does a flight that has waited.
PHASES = """
with phase as (select name, at as since, lead(at, 1, 'infinity') over (order by at) as until from phase_begun),
pause as (select at, extract(epoch from at - lag(at) over (order by at)) as seconds from batch)
select name, coalesce(string_agg(distinct version, ', '), ''), count(flight),
       (select percentile_cont(0.5) within group (order by seconds) from pause where at >= since and at < until),
       (select max(seconds)::float8 from pause where at >= since and at < until),
       max(extract(epoch from at - published_at))::float8
  from phase left join stored on at >= since and at < until group by name, since, until order by since"""


class Phases:
    """What is going on, noted in the database, whose clock the commits have."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        stage.connection.execute("create table phase_begun (name text, at timestamptz default clock_timestamp())")

    def begin(self, name: str) -> None:
        """From now on it is this."""
        self._stage.connection.execute("insert into phase_begun (name) values (%s)", (name,))
        self._stage.say(f"{name}: {self._stage.holders(SUBSCRIPTION)}")

    def last(self) -> None:
        """Let it go on for a while."""
        self._stage.pause(PHASE_S, lambda: stored(self._stage))


def stored(stage: Stage) -> str:
    """How far it is, and by whom."""
    found = stage.connection.execute("select version, count(*) from stored group by 1 order by 1").fetchall()
    return ", ".join(f"{version} has stored {flights:,}" for version, flights in found)


def deploy(stage: Stage, version: str, share: int) -> None:
    """Start a version, and wait until it has its share of the streams."""
    checkpoint = str(stage.home / f"{version}-checkpoint")
    stage.application(version, "examples.blue_green.query", checkpoint, version)
    stage.wait_for(
        f"{version} to have {share} streams",
        lambda: stage.holders(SUBSCRIPTION).get(version) == share,
        lambda: stored(stage),
    )


def hand_over(stage: Stage, phases: Phases) -> None:
    """From blue to green: blue is stopped when green has shown that it works."""
    stage.wait_for("blue to store something", lambda: "blue" in stored(stage))
    phases.begin("blue alone")
    phases.last()
    phases.begin("green starts")
    deploy(stage, "green", STREAMS // 2)
    stage.wait_for("green to store something", lambda: "green" in stored(stage), lambda: stored(stage))
    phases.begin("both")
    phases.last()
    phases.begin("blue stops")
    stage.stop("blue")
    stage.wait_for("green to have everything", lambda: stage.holders(SUBSCRIPTION) == {"green": STREAMS})
    phases.last()
    phases.begin("green alone")
    phases.last()


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    source = flights_of(arguments("blue_green", __doc__, 14).parse_args().days)
    with a_stage() as stage:
        stage.connection.execute(TABLES)
        phases = Phases(stage)
        deploy(stage, "blue", STREAMS)
        with publishing(stage.url, source, PUBLISH_S) as published:
            hand_over(stage, phases)
            phases.begin("the rest at once")
            published.publish_faster()
        stage.wait_for("everything to be stored", lambda: stage.look(SUBSCRIPTION).lag == 0, lambda: stored(stage))
        stage.stop("green")
        stage.say("the end")
        header = "phase", "stored by", "flights", "usual pause s", "longest pause s", "longest wait s"
        table(header, stage.connection.execute(PHASES).fetchall())
        return verdict("flights", wrong(source, stage.flights("stored")))


if __name__ == "__main__":
    sys.exit(main())
