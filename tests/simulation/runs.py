"""Runs many seeds in a few processes, and sums up their figures."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from unittest import mock

from sublet_borrower.machine.transitions import ACTIONS as BORROWER
from sublet_leader import election
from sublet_leader.election.transitions import TRANSITIONS as ELECTION
from sublet_leader.group.grant_transitions import TRANSITIONS as ASSIGNMENT
from tests.simulation.simulation import Simulation

Pair = tuple[str, Enum, Enum]
"""(the machine's name, status, kind of event)."""

TABLES: dict[str, Mapping[Any, Mapping[Any, Any]]] = {
    "borrower": BORROWER,
    "election": ELECTION,
    "assignment": ASSIGNMENT,
}
_READ_BY = {
    "borrower": "sublet_borrower.machine.borrower.ACTIONS",
    "election": "sublet_leader.election.machine.TRANSITIONS",
    "assignment": "sublet_leader.group.assignment_manager.TRANSITIONS",
}
"""Name of each machine's table where the machine reads it."""
EXCEPTIONS: frozenset[Pair] = frozenset(
    {
        # A node that gives up a claim under way forgets its group, and opens it again only behind that claim's answer.
        # The runs of `tests/property/test_election_safety.py`, which want and unwant at will, have it.
        ("election", election.ElectionStatus.ABANDONING, election.ElectionEventKind.CAMPAIGN)
    }
)
"""The pairs that no run brings about; all others occur within a thousand seeds, or `test_seeds` fails. Every pair of
every table has a unit test: `test_group_leader_table.py`, `test_election.py`."""
CHUNK = 20
SEEDS_A_DAY = 1_000_000
ENOUGH_FAILURES = 20
"""Number of failures after which the remaining seeds are not run."""


class _Row(dict[Any, Any]):
    """A row that reports its look-ups."""

    def __init__(self, row: Mapping[Any, Any], note: Callable[[Any], None]) -> None:
        super().__init__(row)
        self._note = note

    def __getitem__(self, kind: Any) -> Any:
        self._note(kind)
        return super().__getitem__(kind)


@contextmanager
def counting() -> Iterator[Counter[Pair]]:
    seen: Counter[Pair] = Counter()
    with ExitStack() as stack:
        for machine, place in _READ_BY.items():
            stack.enter_context(mock.patch(place, _watched(machine, seen)))
        yield seen


def _watched(machine: str, seen: Counter[Pair]) -> dict[Any, _Row]:
    def noting(status: Enum) -> Callable[[Enum], None]:
        def note(kind: Enum) -> None:
            seen[machine, status, kind] += 1

        return note

    return {status: _Row(row, noting(status)) for status, row in TABLES[machine].items()}


@dataclass(slots=True)
class Figures:
    """Figures of some seeds. `counts`: events by name; `still`: seeds in which no stream moved; `failures`: (seed,
    error)."""

    seeds: int = 0
    virtual_s: float = 0.0
    took_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    still: list[int] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Return the sum, without the time taken, as they may have run in parallel."""
        self.seeds += other.seeds
        self.virtual_s += other.virtual_s
        self.counts.update(other.counts)
        self.pairs.update(other.pairs)
        self.still += other.still
        self.failures += other.failures

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        return (
            f"{self.seeds} seeds in {self.took_s:.0f} s: {self.virtual_s / 3600:.1f} virtual hours, {counted}, "
            f"{len(self.pairs)} of {len(all_pairs())} pairs of the tables; {len(self.failures)} failures"
        )


def all_pairs() -> set[Pair]:
    return {(name, status, kind) for name, table in TABLES.items() for status, row in table.items() for kind in row}


def first_seed_of_today() -> int:
    """Return the first seed of today's long runs: a million above yesterday's, and never one of the fixed seeds."""
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
    gc.disable()  # a run creates almost no garbage in cycles
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
    checkers = simulation.checkers
    figures.seeds += 1
    figures.virtual_s += simulation.world.now
    if not checkers.authority.moves:
        figures.still.append(seed)
    counts = {
        "moves": checkers.authority.moves,
        "claims by a free lock": checkers.authority.claims_by_lock,
        "of them from a leader that lived": checkers.authority.claims_from_living,
        "seeds with a crash": simulation.crashes > 0,
        "repeats, all in windows of forced moves": checkers.deliveries.repeats,
        "calls begun unaware of a loss": checkers.deliveries.unaware,
        "groups deleted": len(simulation.groups.retired),
        "sessions fenced": checkers.names.fenced,
        "streams returned": checkers.names.returned,
        "atomic groups": checkers.epochs.groups,
        "messages of epochs given": checkers.epochs.given,
        "epochs announced": checkers.epochs.announcements.count,
        "messages in queries' sinks": checkers.deliveries.stored,
        "messages written in transactions": checkers.transactions.stored,
        "commits not answered": simulation.users.unknown,
        "resets": simulation.operators.resets,
        "heads lowered": simulation.lowered_heads.happened,
        "blocks merged": simulation.maintenance.merged,
        "generations taken by age": simulation.maintenance.taken,
        "generations whose rows were deleted": simulation.maintenance.deleted,
    }
    figures.counts.update(counts)
