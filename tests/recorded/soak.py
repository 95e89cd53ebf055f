"""`python -m tests.recorded.soak --minutes 60`: a run under all faults, in which nothing may leak.

A node, a consumer and a publisher run through it: they are frozen and cut off, while all other processes are killed.
Their memory, descriptors and threads, the database's connections, and all tables but those that grow with the messages
must not grow (see `resources`); then the records are checked as after every run. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.kit import server_directory
from tests.recorded.__main__ import faults, report, say
from tests.recorded.history import read
from tests.recorded.plan import PROXIED, draw
from tests.recorded.resources import HEADING, Figure, Resources
from tests.recorded.stage import Stage

DEED_EVERY_S, ORDER_EVERY_S, SPEED = 4.0, 10.0, 2.0
NEW_STREAMS = ("rollover", "empty-generations", "reshard", "spaces")
"""Orders that are left out: they add streams, which stay as long as their messages."""

PROGRESS_INTERVAL_S = 30.0


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


def soak(directory: Path, seed: int, seconds: float, say: Callable[[str], None]) -> bool:
    """Return whether nothing leaked, the groups came to rest, and no guarantee was broken."""
    say(f"again: python -m tests.recorded.soak --minutes {seconds / 60:g} --seed {seed}")
    plan = draw(seed, seconds, DEED_EVERY_S, ORDER_EVERY_S, without=NEW_STREAMS, spared=PROXIED)
    resources: list[Resources] = []
    over = threading.Event()

    def began(stage: Stage) -> None:
        resources.append(Resources(stage.url, stage.processes, stage.lives))
        resources[0].start()
        threading.Thread(target=_print_progress, args=(stage, resources[0], seconds, over, say), daemon=True).start()

    def ended() -> None:
        over.set()
        resources[0].stop()

    stage = Stage(directory, plan, SPEED, lambda _: None, began, ended)
    failed: list[str] = []
    try:
        stage.run()
    except AssertionError as error:
        failed.append(f"the groups did not come to rest: {error}")
    finally:
        over.set()
    if not resources:
        return False
    figures = resources[0].figures(seconds)
    judged = [each for each in figures if each.growth is not None]
    say(f"--- {seconds / 60:g} minutes of seed {seed}: {faults(stage)}\n{HEADING}")
    say("\n".join(str(each) for each in judged if each.peak))
    failed += [f"{each.whose}: {each.measure} grew by {each.growth:.1f}" for each in judged if not each.is_flat]
    failed += [f"{name} was not judged" for name in _not_judged(judged)]
    if report(read(stage.records)):
        failed.append("a promise was broken, or messages are lost")
    say("sound" if not failed else "\n".join(["NOT SOUND", *failed]))
    return not failed


def _not_judged(judged: list[Figure]) -> list[str]:
    names = {each.whose.partition(".")[0] for each in judged}
    return [name for name in (*PROXIED, "database", "block", "lending") if name not in names]


def _print_progress(
    stage: Stage, resources: Resources, seconds: float, over: threading.Event, say: Callable[[str], None]
) -> None:
    while not over.wait(PROGRESS_INTERVAL_S):
        latest = {
            whose.partition(".")[0]: samples[-1][1]
            for (whose, measure), samples in list(resources.samples.items())
            if measure == "memory"
        }
        memory = ", ".join(f"{name} {latest.get(name, 0):.0f} MiB" for name in PROXIED)
        say(
            f"{resources.seconds / 60:5.1f} of {seconds / 60:g} min: {resources.messages:.0f} messages stored, "
            f"{sum(stage.befell.values())} faults; {memory}"
        )


if __name__ == "__main__":
    sys.exit(main())
