"""Many seeds over a few processes, and what they amounted to."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum

from tests.simulation.simulation import Simulation
from tests.simulation.tally import TABLES, Pair, counting

CHUNK = 20
SEEDS_A_DAY = 1_000_000
ENOUGH_FAILURES = 20
"""So many wrong runs say that the world is broken; the rest would say nothing new."""


@dataclass(slots=True)
class Figures:
    """What some seeds amounted to. `failures`: (seed, what went wrong)."""

    seeds: int = 0
    moves: int = 0
    resets: int = 0
    written: int = 0
    unknown: int = 0
    merged: int = 0
    taken: int = 0
    still: list[int] = field(default_factory=list)
    with_crash: int = 0
    repeats: int = 0
    unaware: int = 0
    atomic: int = 0
    given_in_epochs: int = 0
    announced: int = 0
    deleted: int = 0
    fenced: int = 0
    returned: int = 0
    stored: int = 0
    virtual_s: float = 0.0
    took_s: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)
    pairs: Counter[Pair] = field(default_factory=Counter)

    def add(self, other: Figures) -> None:
        """Both together; the time taken is not added, for they may have run side by side."""
        self.seeds += other.seeds
        self.moves += other.moves
        self.resets += other.resets
        self.written += other.written
        self.unknown += other.unknown
        self.merged += other.merged
        self.taken += other.taken
        self.still += other.still
        self.with_crash += other.with_crash
        self.repeats += other.repeats
        self.unaware += other.unaware
        self.atomic += other.atomic
        self.given_in_epochs += other.given_in_epochs
        self.announced += other.announced
        self.deleted += other.deleted
        self.fenced += other.fenced
        self.returned += other.returned
        self.stored += other.stored
        self.virtual_s += other.virtual_s
        self.failures += other.failures
        self.pairs += other.pairs

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds in {self.took_s:.0f} s: {self.virtual_s / 3600:.1f} virtual hours, "
            f"{self.moves / max(self.seeds, 1):.1f} moves a seed, {self.with_crash / max(self.seeds, 1):.0%} of the "
            f"seeds with a crash, {self.repeats} repeated deliveries, all explained by reported forced moves, "
            f"{self.deleted} groups deleted, {self.fenced} sessions fenced, {self.returned} streams returned, "
            f"{self.unaware} calls begun unaware of a loss, {self.atomic} atomic groups, given {self.given_in_epochs} "
            f"messages of epochs and {self.announced} announcements, {self.stored} messages in queries' sinks, "
            f"{self.resets} resets, {self.written} messages written in users' transactions, {self.unknown} commits not "
            f"answered, {self.merged} blocks merged, {self.taken} generations taken by their age, "
            f"{len(self.pairs)} of {len(all_pairs())} pairs of the tables; {len(self.failures)} failures"
        )


def all_pairs() -> set[Pair]:
    """Every (machine, status, kind) there is."""
    return {(name, status, kind) for name, table in TABLES.items() for status, row in table.items() for kind in row}


def first_seed_of_today() -> int:
    """Return where the long runs of today begin: a million seeds further than yesterday's, and never among those that
    are the same each time."""
    return datetime.now(UTC).date().toordinal() * SEEDS_A_DAY


def run_seeds(
    seeds: Sequence[int],
    processes: int = 2,
    shown: Callable[[Figures], None] | None = None,
    enough: int = ENOUGH_FAILURES,
) -> Figures:
    """Run them all, or until enough have failed; `shown` is called now and then with the figures so far."""
    started, figures = time.monotonic(), Figures()
    chunks = [tuple(seeds[i : i + CHUNK]) for i in range(0, len(seeds), CHUNK)]
    for some in _results(chunks, processes):
        figures.add(some)
        figures.took_s = time.monotonic() - started
        if shown is not None:
            shown(figures)
        if len(figures.failures) >= enough:
            break
    return figures


def _results(chunks: Sequence[tuple[int, ...]], processes: int) -> Iterator[Figures]:
    if processes == 1:
        yield from map(_run_some, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_run_some, chunks)


def _run_some(seeds: Sequence[int]) -> Figures:
    figures = Figures()
    gc.disable()  # a run makes no garbage in cycles worth looking for
    with counting() as pairs:
        for seed in seeds:
            _run_one(seed, figures)
    gc.collect()
    figures.pairs = Counter({pair: count for pair, count in pairs.items() if isinstance(pair[2], Enum)})
    return figures


def _run_one(seed: int, figures: Figures) -> None:
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as wrong:  # noqa: BLE001 whatever it is, the other seeds run on, and this one is named
        figures.failures.append((seed, f"{type(wrong).__name__}: {wrong}"))
    figures.seeds += 1
    moves = simulation.checkers.authority.moves
    figures.moves += moves
    figures.resets += simulation.operators.resets
    figures.written += simulation.checkers.transactions.stored
    figures.unknown += simulation.users.unknown
    figures.merged += simulation.housekeeping.merged
    figures.taken += simulation.housekeeping.taken
    if not moves:
        figures.still.append(seed)
    figures.with_crash += simulation.crashes > 0
    figures.repeats += simulation.checkers.deliveries.repeats
    figures.unaware += simulation.checkers.deliveries.unaware
    figures.atomic += simulation.checkers.epochs.groups
    figures.given_in_epochs += simulation.checkers.epochs.given
    figures.announced += simulation.checkers.epochs.announcements.count
    figures.deleted += len(simulation.groups.retired)
    figures.fenced += simulation.checkers.names.fenced
    figures.returned += simulation.checkers.names.returned
    figures.stored += simulation.checkers.deliveries.stored
    figures.virtual_s += simulation.world.now
