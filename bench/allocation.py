"""Duration of one allocation plan, beside merely building a dict of its pairs.

`python -m bench.allocation --streams 100000 --borrowers 10000`. Each strategy distributes the streams from scratch, and
plans one join into the resulting group, at a tenth of the size and at the full one. Rounds take turns; figures are
medians over rounds, and growth is a ratio within the round.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import _report as report
from sublet_leader.allocation import AllocationInput, AllocationStrategy, StreamLoad, load_strategy

STRATEGIES = ("even", "load")
LIMIT = "a dict of the pairs"
TARGET_S = 1.0
TARGET_GROWTH = 20.0
"""Bound at ten times the size: linear is 10, and n log n, outside the processor's caches, some 15."""
PROSE = """Processor time of one plan, by strategy, for streams x borrowers: all shared out from scratch, and one
join into the group that has settled; with the making of the input, which checks it. *Growth* is the ratio of the
two sizes, *times the dict* the ratio to merely building {limit}. Medians over {rounds} rounds."""

Seconds = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    parser = argparse.ArgumentParser(prog="bench.allocation", description=__doc__)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--borrowers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    sizes = [(options.streams // 10, options.borrowers // 10), (options.streams, options.borrowers)]
    contenders = [_contenders(*size) for size in sizes]
    # Otherwise the collector would scan the data of all contenders each time, and the running one would pay for it.
    gc.collect()
    gc.freeze()
    seconds: list[Seconds] = [{name: [] for name in each} for each in contenders]
    for _ in range(options.rounds):
        for each, measured in zip(contenders, seconds, strict=True):
            for name, contender in each.items():
                measured[name].append(_time(contender))
    settings = {"streams": options.streams, "borrowers": options.borrowers, "rounds": options.rounds}
    plans = [_judged(name, *seconds) for name in contenders[0]]
    report.save("allocation", settings, {"plans": plans}, options.json)
    section = _table(plans, sizes)
    report.page(options.page, "allocation", PROSE.format(limit=LIMIT, rounds=options.rounds), section)
    print(section)


def _contenders(streams: int, borrowers: int) -> dict[str, Callable[[], object]]:
    """Return {name: what is timed} for this size."""
    rng = random.Random(1)
    load = {stream_id: StreamLoad(rng.paretovariate(1.2) * 1000, rng.randrange(2000)) for stream_id in range(streams)}
    weights = {f"agent-{number % 100}/{number}": 1.0 for number in range(borrowers)}
    pairs = [(stream_id, f"agent-{stream_id % 100}/{stream_id % borrowers}") for stream_id in range(streams)]
    found: dict[str, Callable[[], object]] = {LIMIT: lambda: dict(pairs)}
    for name in STRATEGIES:
        strategy = load_strategy(name)
        scratch = AllocationInput({}, range(streams), weights, loads=load)
        held = _settled(strategy, scratch)
        join = AllocationInput(held, (), {**weights, "newcomer": 1.0}, list(held), loads=load)
        found[f"{name} from scratch"] = _plan(strategy, scratch)
        found[f"{name}, one join"] = _plan(strategy, join)
    return found


def _plan(strategy: AllocationStrategy, allocation_input: AllocationInput) -> Callable[[], object]:
    """Return a function that builds the input, which validates it, and plans."""

    def run() -> object:
        s = allocation_input
        return strategy.plan(
            AllocationInput(
                s.holders, s.free_streams, s.weights, s.movable_streams, s.moving_streams, s.last_holders, s.loads
            )
        )

    return run


def _settled(strategy: AllocationStrategy, allocation_input: AllocationInput) -> dict[int, str]:
    """Return {stream: member} once the plan is stable."""
    held, free = dict(allocation_input.holders), set(allocation_input.free_streams)
    while plan := strategy.plan(AllocationInput(held, free, allocation_input.weights, loads=allocation_input.loads)):
        held |= dict(plan.grants)
        free = set(plan.revokes)
        for stream_id in free:
            del held[stream_id]
    return held


def _time(contender: Callable[[], object]) -> float:
    """Return seconds of processor time, so that other load on the machine does not count."""
    gc.collect()
    started = time.process_time()
    contender()
    return time.process_time() - started


def _judged(name: str, small: Seconds, large: Seconds) -> dict[str, Any]:
    """Return the medians as JSON, and whether they meet the bound."""
    growth = statistics.median(b / a for a, b in zip(small[name], large[name], strict=True))
    beside = statistics.median(b / a for a, b in zip(large[LIMIT], large[name], strict=True))
    median = statistics.median(large[name])
    return {
        "what": name,
        "small_s": round(statistics.median(small[name]), 6),
        "large_s": round(median, 6),
        "large_s_lowest": round(min(large[name]), 6),
        "large_s_highest": round(max(large[name]), 6),
        "growth": round(growth, 1),
        "times_the_dict": round(beside, 1),
        "holds": None if name == LIMIT else median < TARGET_S and growth <= TARGET_GROWTH,
    }


def _table(plans: list[dict[str, Any]], sizes: list[tuple[int, int]]) -> str:
    small, large = (f"{streams:,} x {borrowers:,}" for streams, borrowers in sizes)
    lines = [
        f"| plan | {small} | {large} | lowest - highest | growth | times the dict | < {TARGET_S:g} s, growth <= "
        f"{TARGET_GROWTH:g} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for plan in plans:
        verdict = {None: "", True: "holds", False: "**missed**"}[plan["holds"]]
        spread = f"{plan['large_s_lowest'] * 1000:.1f} - {plan['large_s_highest'] * 1000:.1f} ms"
        lines.append(
            f"| {plan['what']} | {plan['small_s'] * 1000:.1f} ms | {plan['large_s'] * 1000:.1f} ms | {spread} "
            f"| {plan['growth']} | {plan['times_the_dict']} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
