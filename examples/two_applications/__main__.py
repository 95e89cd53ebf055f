"""`python -m examples.two_applications [DAYS]`: two applications share so many days, one stops, and nothing is lost."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import UTC, datetime

from examples._stage import STREAMS, Stage, a_stage, arguments, flights_of, publishing, table, verdict, wrong
from examples.two_applications.application import SUBSCRIPTION, TABLE, TASKS

WEIGHTS = {"heavy": 3, "light": 1}
SHARES = {"heavy": 6, "light": 2}
PUBLISH_S = 20.0
TOGETHER_S = 6.0
"""For how long both work, and then the one that is left, before the rest is published at once."""

BY_APPLICATION = """
select application, count(*) filter (where at <= %(stopped_at)s), count(*) filter (where at > %(stopped_at)s)
  from stored group by application order by application"""


def sessions(stage: Stage) -> dict[str, int]:
    """{session: how many streams it holds}. Each task has one, whose name begins with its application's."""
    return stage.holders(SUBSCRIPTION)


def shares(stage: Stage) -> dict[str, int]:
    """{application: how many streams its tasks hold}."""
    held = Counter[str]()
    for session, streams in sessions(stage).items():
        held[session.partition("-")[0]] += streams
    return dict(held)


def show(stage: Stage) -> None:
    """Print who holds how many streams."""
    stage.say(f"the streams are held by {', '.join(f'{name}: {n}' for name, n in sorted(shares(stage).items()))}")
    held = [(name, WEIGHTS[name.partition("-")[0]], streams) for name, streams in sessions(stage).items()]
    table(("session", "weight", "streams"), held)


def stored(stage: Stage) -> str:
    """How far it is."""
    return f"{stage.count('stored'):,} flights are stored"


def main() -> int:
    """All of it, on a Postgres of its own; the exit code."""
    source = flights_of(arguments("two_applications", __doc__, 14).parse_args().days)
    with a_stage() as stage:
        stage.connection.execute(TABLE)
        for name, weight in WEIGHTS.items():
            stage.application(name, "examples.two_applications.application", name, str(weight))
        stage.wait_for("a share of 3 to 1", lambda: shares(stage) == SHARES and len(sessions(stage)) == 2 * TASKS)
        show(stage)
        with publishing(stage.url, source, PUBLISH_S) as published:
            stage.pause(TOGETHER_S, lambda: stored(stage))
            reported_at, reported = datetime.now(UTC), stage.seconds
            stage.stop("heavy")
            stage.say(f"heavy has stopped, {stage.seconds - reported:.1f} s after it was asked to")
            stage.wait_for("light to hold everything", lambda: shares(stage) == {"light": STREAMS})
            show(stage)
            stage.pause(TOGETHER_S, lambda: stored(stage))
            published.publish_faster()
        stage.say(f"all {source.num_rows:,} flights are published")
        stage.wait_for("everything to be stored", lambda: stage.look(SUBSCRIPTION).lag == 0, lambda: stored(stage))
        stage.stop("light")
        stage.say("the end")
        rows = stage.connection.execute(BY_APPLICATION, {"stopped_at": reported_at}).fetchall()
        table(("flights stored by", "before heavy was asked to stop", "afterwards"), rows)
        return verdict("flights", wrong(source, stage.flights("stored")))


if __name__ == "__main__":
    sys.exit(main())
