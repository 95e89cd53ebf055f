"""Long runs of many seeds, and one run printed line by line.

Exit code 1 if a seed fails; it is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.simulation.checkers import Violation
from tests.simulation.runs import ENOUGH_FAILURES, EXCEPTIONS, Figures, all_pairs, first_seed_of_today, run_seeds
from tests.simulation.simulation import Simulation

SHOWN_LINES = 400


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument(
        "--start", type=int, help="the first (default: another one each day, behind those of the tests)"
    )
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    parser.add_argument("--seed", type=int, help="this one alone, with its trace")
    parser.add_argument("--about", default="", metavar="TEXT", help="with --seed: only lines that contain this")
    parser.add_argument("--lines", type=int, default=SHOWN_LINES, help="with --seed: so many, 0: all (default: 400)")
    options = parser.parse_args()
    if options.seed is not None:
        return print_run(options.seed, options.about, options.lines)
    return _run_many(options)


def print_run(seed: int, about: str = "", lines: int = SHOWN_LINES) -> int:
    simulation = Simulation(seed, trace=True)
    wrong = ""
    try:
        simulation.run()
    except Violation as violation:
        wrong = str(violation)
    except Exception:  # noqa: BLE001 what the product raised, shown with the trace that led to it
        wrong = traceback.format_exc()
    reported = [line for line in simulation.world.lines or () if about in line]
    _say("\n".join(reported[-lines:] if lines else reported))
    _say(f"\nSEED={seed}: {wrong or 'nothing is wrong'}\n")
    return 1 if wrong else 0


def _run_many(options: argparse.Namespace) -> int:
    shown, begun = 0, time.monotonic()

    def show(figures: Figures) -> None:
        nonlocal shown
        for seed, wrong in figures.failures[shown:]:
            _say(f"\nSEED={seed}: {wrong}\n  again, with its trace: python -m tests.simulation --seed {seed}\n")
        shown = len(figures.failures)
        took_s = time.monotonic() - begun
        left_s = took_s / figures.seeds * (options.seeds - figures.seeds)
        rate = figures.seeds / max(took_s, 0.001)
        _say(
            f"\r{figures.seeds} of {options.seeds} seeds, {shown} failures, {took_s:.0f} s, {rate:.1f} a second, "
            f"{left_s:.0f} s to go  "
        )

    start = first_seed_of_today() if options.start is None else options.start
    seeds = range(start, start + options.seeds)
    _say(f"seeds [{seeds.start}, {seeds.stop}), again with --start {start} --seeds {options.seeds}\n")
    figures = run_seeds(seeds, options.processes, show, 1 if options.first else ENOUGH_FAILURES)
    rate = figures.seeds / max(figures.took_s, 0.001)
    _say(f"\n{figures}\nseeds [{seeds.start}, {seeds.stop}): {figures.took_s:.0f} s, {rate:.1f} a second\n")
    if not figures.failures:
        for machine, status, kind in sorted(all_pairs() - EXCEPTIONS - set(figures.pairs), key=str):
            _say(f"never seen: {machine}: {status.name.lower()}, {kind.name.lower()}\n")
    return 1 if figures.failures else 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
