"""`python -m tests.recorded --minutes 10 --seed 7`: a run under kills, its check, and a report.

Exit code 1 if a guarantee was broken, or the groups did not come to rest. `--check DIRECTORY` checks the records of an
earlier run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from tests.kit import server_directory
from tests.recorded.anomaly_report import report_lines
from tests.recorded.checks import Anomaly, check
from tests.recorded.history import History, Outcome, read
from tests.recorded.plan import DEEDS, HABITS, ORDERS, draw
from tests.recorded.stage import Stage

MAX_SHOWN_CHARS = 5
"""Number of anomalies of a kind that are printed in detail."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things befall it (default: 10)")
    parser.add_argument("--seed", type=int, help="of the plan (default: by the clock)")
    parser.add_argument("--speed", type=float, default=2.0, help="by which all times are divided (default: 2)")
    parser.add_argument("--deed-every", type=float, default=4.0, help="seconds between two, about (default: 4)")
    parser.add_argument("--order-every", type=float, default=6.0, help="seconds between two, about (default: 6)")
    parser.add_argument("--without", nargs="*", default=[], choices=[*DEEDS, *ORDERS, *HABITS], help="leave these out")
    parser.add_argument("--keep", type=Path, help="where the records are kept; else only if it fails")
    parser.add_argument("--check", type=Path, metavar="DIRECTORY", help="only check the records of a run")
    options = parser.parse_args()
    if options.check:
        return report(read(options.check / "records"))
    seed = int(time.time()) if options.seed is None else options.seed
    plan = draw(seed, options.minutes * 60, options.deed_every, options.order_every, options.without)
    given = "" if options.seed is not None else f" --seed {seed}"
    say(f"again: python -m tests.recorded {' '.join(sys.argv[1:])}{given}\n{plan}\n--- it begins")
    directory = options.keep or server_directory()
    directory.mkdir(exist_ok=True)
    stage = Stage(directory, plan, options.speed, say)
    code, begun = 0, time.monotonic()
    try:
        stage.run()
    except AssertionError as error:
        say(f"--- the groups did not come to rest: {error}")
        code = 1
    say(f"--- {time.monotonic() - begun:.0f} s: {faults(stage)}")
    code = report(read(stage.records)) or code
    if code == 0 and options.keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        say(f"the records are in {directory}: python -m tests.recorded --check {directory}")
    return code


def report(history: History) -> int:
    """Print what was recorded and each broken guarantee; return 1 if there is one."""
    asked = Counter(message.outcome for message in history.messages.values())
    say(
        f"published {len(history.messages)}: {asked[Outcome.OK]} acknowledged, {asked[Outcome.FAILED]} rolled back, "
        f"{asked[Outcome.UNKNOWN]} unknown; {len(history.log)} in the log, in "
        f"{len({stream for stream, *_ in history.log})} streams"
    )
    for group in history.groups:
        calls = history.of_group(group)
        given = [place for call in calls for place in call.messages]
        moves = Counter(line.event for line in history.lendings.get(group.name, ()))
        reported = ", ".join(f"{event} {count}" for event, count in sorted(moves.items()))
        counted = f"{len(calls)} calls, {len(given)} messages given out, {len(set(given))} of them once"
        say(f"{group.name}: {counted}; {reported}")
    anomalies = check(history)
    by_kind: dict[tuple[str, str], list[Anomaly]] = {}
    for anomaly in anomalies:
        by_kind.setdefault((anomaly.group, anomaly.kind), []).append(anomaly)
    for found in by_kind.values():
        say(f"\n{found[0].kind}{f' in {found[0].group}' if found[0].group else ''}: {len(found)}")
        for anomaly in found[:MAX_SHOWN_CHARS]:
            say(f"  {anomaly.what}")
        say("\n".join(report_lines(history, found[0])))
    say("no promise was broken" if not anomalies else f"\n{len(anomalies)} anomalies")
    return 1 if anomalies else 0


def faults(stage: Stage) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(stage.befell.items()))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
