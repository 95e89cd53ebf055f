"""`python -m tests.simulation --seeds 20000 [--start k]`: long runs. Exit code 1 if a seed fails, which is named."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.exceptions import EXCEPTIONS
from tests.simulation.runs import Figures, all_pairs, run_seeds


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    shown = 0

    def show(figures: Figures) -> None:
        nonlocal shown
        for seed, wrong in figures.failures[shown:]:
            _say(f"\nSEED={seed}: {wrong}\n")
        shown = len(figures.failures)
        _say(f"\r{figures.seeds} seeds, {shown} failures")

    figures = run_seeds(range(options.start, options.start + options.seeds), options.processes, show)
    _say(f"\n{figures}\n")
    for machine, status, kind in sorted(all_pairs() - EXCEPTIONS - set(figures.pairs), key=str):
        _say(f"never seen: {machine}: {status.name.lower()}, {kind.name.lower()}\n")
    return 1 if figures.failures else 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
