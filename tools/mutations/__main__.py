"""`python -m tools.mutations`: plant every fault, one at a time, and see which tests notice.

Exit code 0: every mutant was killed; 1: some were not; 2: the lists or the tests cannot be used as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tools.mutations.entries import InvalidList, Mutant, check, load, select
from tools.mutations.trial import Copy, Trial, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _options(arguments)
    try:
        mutants = select(load(options.root), options.only)
        if options.list:
            _show_list(mutants)
            return 0
        check(mutants, options.root)
        return _run(mutants, options.root, options.jobs)
    except InvalidList as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="a requirement id or a mutant's name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the tree to work in at once")
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree (default: the current directory)")
    return parser.parse_args(arguments)


def _show_list(mutants: Sequence[Mutant]) -> None:
    for mutant in mutants:
        print(f"{','.join(mutant.ids):12}  {mutant.name}  [{mutant.file}]")
    print(f"{len(mutants)} mutants")


def _run(mutants: Sequence[Mutant], root: Path, jobs: int) -> int:
    """Baselines, then mutants, each on whichever copy is free."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    made = [Copy(root) for _ in range(max(1, jobs))]
    try:
        if foreign := made[0].foreign_packages():
            raise InvalidList(
                f"{', '.join(foreign)} would not be imported from the copy: faults there would be unseen."
            )
        for copy in made:
            copies.put(copy)
        with ThreadPoolExecutor(len(made)) as pool:
            _baseline(mutants, pool, copies)
            return _report(mutants, _try_all(mutants, pool, copies))
    finally:
        for copy in made:
            copy.close()


def _baseline(mutants: Sequence[Mutant], pool: ThreadPoolExecutor, copies: SimpleQueue[Copy]) -> None:
    """Every selector must pass without a fault, or its turning red would mean nothing."""
    selectors = sorted({selector for mutant in mutants for selector in mutant.tests})
    trials = pool.map(lambda selector: _on_a_copy(copies, lambda copy: copy.try_tests([selector])), selectors)
    for selector, trial in zip(selectors, trials, strict=True):
        if trial.verdict is not Verdict.SURVIVED:
            raise InvalidList(f"{selector} is not green as it is: {trial.detail}")
    print(f"{len(selectors)} selectors are green as they are", flush=True)


def _try_all(mutants: Sequence[Mutant], pool: ThreadPoolExecutor, copies: SimpleQueue[Copy]) -> dict[str, Trial]:
    def attempt(mutant: Mutant) -> tuple[Trial, float]:
        started = time.monotonic()
        return _on_a_copy(copies, lambda copy: copy.try_mutant(mutant)), time.monotonic() - started

    futures = {pool.submit(attempt, mutant): mutant for mutant in mutants}
    trials: dict[str, Trial] = {}
    for done, future in enumerate(as_completed(futures), start=1):
        mutant, (trial, took_s) = futures[future], future.result()
        trials[mutant.name] = trial
        print(f"[{done}/{len(futures)}] {trial.verdict.value:8} {took_s:5.1f} s  {mutant.name}", flush=True)
    return trials


def _on_a_copy(copies: SimpleQueue[Copy], work: Callable[[Copy], Trial]) -> Trial:
    copy = copies.get()
    try:
        return work(copy)
    finally:
        copies.put(copy)


def _report(mutants: Sequence[Mutant], trials: dict[str, Trial]) -> int:
    """The table, and the exit code."""
    width = max((len(mutant.name) for mutant in mutants), default=0)
    print(f"\n{'verdict':8}  {'ids':12}  {'mutant':{width}}  noticed by")
    for mutant in mutants:
        trial = trials[mutant.name]
        print(f"{trial.verdict.value:8}  {','.join(mutant.ids):12}  {mutant.name:{width}}  {trial.detail}")
    alive = sum(trial.verdict is not Verdict.KILLED for trial in trials.values())
    print(f"{len(mutants) - alive} of {len(mutants)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
