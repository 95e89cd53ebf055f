"""`python -m tools.mutations`: plants faults one at a time and reports which tests notice.

The faults are those of the lists, and some drawn at random. Exit code 0: every listed fault was killed, and of those
drawn nine in ten; 1: not so; 2: the lists or the tests cannot be used as they are.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tools.mutations.entries import InvalidList, Mutant, check, load, load_equivalent, select
from tools.mutations.sample import TOLERATED, Nearness, draw, try_fault
from tools.mutations.trial import Copy, Trial, Verdict

SAMPLE = 30
"""Number of faults drawn by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job and its children would ignore it
    options = _options(arguments)
    try:
        mutants = select(load(options.root), options.only)
        if options.list:
            _show_list(mutants)
            return 0
        check(mutants, options.root)
        load_equivalent(options.root)
        return _run([] if options.sample else mutants, options)
    except InvalidList as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    today = int(datetime.now(UTC).strftime("%Y%m%d"))
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="a requirement id or a mutant's name")
    parser.add_argument("--sample", type=int, metavar="N", help="draw so many, and leave the lists (default: both, 30)")
    parser.add_argument("--seed", type=int, default=today, help="which are drawn (default: the date)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the tree to work in at once")
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree (default: the current directory)")
    return parser.parse_args(arguments)


def _show_list(mutants: Sequence[Mutant]) -> None:
    for mutant in mutants:
        print(f"{','.join(mutant.ids):12}  {mutant.name}  [{mutant.file}]")
    print(f"{len(mutants)} mutants")


def _run(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    """Try the listed faults, then the drawn ones, each on a free copy; return the exit code."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(max(1, options.jobs)):
            copies.put(copy := stack.enter_context(Copy(options.root)))
        if foreign := copy.foreign_packages():
            raise InvalidList(
                f"{', '.join(foreign)} would not be imported from the copy: faults there would be unseen."
            )
        pool = stack.enter_context(ThreadPoolExecutor(max(1, options.jobs)))
        code = _listed(mutants, pool, copies) if mutants else 0
        return code if options.only else max(code, _sample(options, pool, copies))


def _listed(mutants: Sequence[Mutant], pool: ThreadPoolExecutor, copies: SimpleQueue[Copy]) -> int:
    _baseline(mutants, pool, copies)
    work = {mutant.name: partial(Copy.try_mutant, mutant=mutant) for mutant in mutants}
    return _report(mutants, _try_all(work, pool, copies))


def _sample(options: argparse.Namespace, pool: ThreadPoolExecutor, copies: SimpleQueue[Copy]) -> int:
    """Draw faults, try them, and print the survivors and the score."""
    faults = draw(options.root, SAMPLE if options.sample is None else options.sample, options.seed)
    nearness = Nearness(options.root)
    trials = _try_all(
        {
            fault.shown((options.root / fault.file).read_text(encoding="utf-8")): partial(
                try_fault, fault=fault, runs=nearness.runs(fault)
            )
            for fault in faults
        },
        pool,
        copies,
    )
    survivors = [shown for shown, trial in trials.items() if trial.verdict is Verdict.SURVIVED]
    killed = sum(trial.verdict is Verdict.KILLED for trial in trials.values())
    print("\n" + "".join(f"survived: {shown}\n" for shown in survivors), end="")
    broken = len(trials) - killed - len(survivors)
    print(f"{killed} of {killed + len(survivors)} drawn faults killed, by seed {options.seed}; {broken} more broken")
    return 1 if len(survivors) > TOLERATED * (killed + len(survivors)) else 0


def _baseline(mutants: Sequence[Mutant], pool: ThreadPoolExecutor, copies: SimpleQueue[Copy]) -> None:
    """Check that every selector passes without a fault: only then does a failure mean anything."""
    selectors = sorted({selector for mutant in mutants for selector in mutant.tests})
    trials = pool.map(lambda selector: _on_a_copy(copies, lambda copy: copy.try_tests([selector])), selectors)
    for selector, trial in zip(selectors, trials, strict=True):
        if trial.verdict is not Verdict.SURVIVED:
            raise InvalidList(f"{selector} is not green as it is: {trial.detail}")
    print(f"{len(selectors)} selectors are green as they are", flush=True)


def _try_all(
    faults: Mapping[str, Callable[[Copy], Trial]], pool: ThreadPoolExecutor, copies: SimpleQueue[Copy]
) -> dict[str, Trial]:
    def attempt(work: Callable[[Copy], Trial]) -> tuple[Trial, float]:
        started = time.monotonic()
        return _on_a_copy(copies, work), time.monotonic() - started

    futures = {pool.submit(attempt, work): name for name, work in faults.items()}
    trials: dict[str, Trial] = {}
    for done, future in enumerate(as_completed(futures), start=1):
        name, (trial, took_s) = futures[future], future.result()
        trials[name] = trial
        print(f"[{done}/{len(futures)}] {trial.verdict.value:8} {took_s:5.1f} s  {name} [{trial.detail}]", flush=True)
    return trials


def _on_a_copy(copies: SimpleQueue[Copy], work: Callable[[Copy], Trial]) -> Trial:
    copy = copies.get()
    try:
        return work(copy)
    finally:
        copies.put(copy)


def _report(mutants: Sequence[Mutant], trials: dict[str, Trial]) -> int:
    """Print the table; return the exit code."""
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
