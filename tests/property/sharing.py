"""Random groups for the laws of the sharing, and a world in which a strategy's plans are carried out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sublet_leader.allocation import (
    AllocationInput,
    AllocationPlan,
    AllocationStrategy,
    EvenStrategy,
    StreamLoad,
    validate_plan,
)

Holdings = dict[int, str]
Weights = dict[str, float]
Loads = dict[int, StreamLoad]

NAMES = [f"b{i}" for i in range(8)]
WEIGHTS = st.sampled_from([1.0, 1.0, 1.0, 2.0, 0.1, 0.3, 7.5])
ROUNDS = 200
"""More than any group of these takes until nothing moves."""

_RATES = [0.0, 1.0, 100.0, 100.0, 110.0, 120.0, 1000.0, 5000.0]
_LAGS = [-1, 0, 0, 500, 50_000]


def allocate(
    held: Mapping[int, str],
    free: Collection[int],
    weights: Mapping[str, float],
    movable: Collection[int] | None = None,
    moving: Collection[int] = (),
) -> AllocationPlan:
    """Return the plan of `even` without last holders and loads."""
    return EvenStrategy().plan(AllocationInput(held, free, weights, movable, moving))


@st.composite
def groups(draw: st.DrawFn, streams: int = 40) -> tuple[Holdings, frozenset[int], Weights]:
    """Some streams held, by members and by strangers, some free, and the members' weights."""
    members = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=8))
    weights = {name: draw(WEIGHTS) for name in members}
    owners = draw(st.lists(st.sampled_from([*NAMES, None]), max_size=streams))
    held = {i: owner for i, owner in enumerate(owners) if owner is not None}
    return held, frozenset(i for i, owner in enumerate(owners) if owner is None), weights


@st.composite
def allocation_inputs(draw: st.DrawFn) -> AllocationInput:
    """Draw any input of a strategy: some streams may not move, some are moving, some loads are known."""
    held, free, weights = draw(groups())
    every = [*held, *free]
    subset = st.sets(st.sampled_from(every)) if every else st.just(set[int]())
    loads = {s: StreamLoad(draw(st.sampled_from(_RATES)), draw(st.sampled_from(_LAGS))) for s in draw(subset)}
    last = {s: draw(st.sampled_from(NAMES)) for s in draw(subset) if s in free}
    moving = draw(subset) - free
    return AllocationInput(held, free, weights, draw(st.one_of(st.none(), subset)), moving, last, loads)


@dataclass
class World:
    """Carries plans out: what is granted is held at once; what is revoked is, `delay` rounds later, with whom the last
    plan moves it to, as where a leader writes both in one transaction, or free."""

    strategy: AllocationStrategy
    held: Holdings
    free: set[int]
    weights: Weights
    load: Loads = field(default_factory=dict)
    last: Holdings = field(default_factory=dict)
    moving: dict[int, int] = field(default_factory=dict)
    follows_moves: bool = True
    """Whether no plan is forgotten before what it moves is released."""
    past: dict[int, list[str]] = field(default_factory=dict)
    """The holders of each stream, in their order."""

    def __post_init__(self) -> None:
        for stream_id, borrower in self.held.items():
            self.past[stream_id] = [borrower]

    def allocation_input(self, load: Loads | None = None) -> AllocationInput:
        """Return the present input."""
        moving, load = set(self.moving), self.load if load is None else load
        return AllocationInput(dict(self.held), set(self.free), self.weights, None, moving, dict(self.last), load)

    def round(self, load: Loads | None = None, delay: int = 0) -> AllocationPlan:
        """Carry out one plan."""
        allocation_input = self.allocation_input(load)
        plan = validate_plan(self.strategy.plan(allocation_input), allocation_input)
        for stream_id, borrower in plan.grants:
            self._grant(stream_id, borrower)
        moves = dict(plan.moves) if self.follows_moves else {}
        self.moving |= dict.fromkeys(plan.revokes, delay)
        for stream_id, rounds in list(self.moving.items()):
            if rounds:
                self.moving[stream_id] -= 1
                continue
            self.set_free(stream_id)
            if (borrower := moves.get(stream_id, self.last[stream_id])) != self.last[stream_id]:
                self._grant(stream_id, borrower)
        return plan

    def _grant(self, stream_id: int, borrower: str) -> None:
        self.held[stream_id] = borrower
        self.free.discard(stream_id)
        self.past.setdefault(stream_id, []).append(borrower)

    def set_free(self, stream_id: int) -> None:
        """Free the stream after its holder has released it."""
        self.moving.pop(stream_id, None)
        self.last[stream_id] = self.held.pop(stream_id)
        self.free.add(stream_id)

    def settle(self) -> int:
        """Rounds until a plan has nothing to do; fails if there are too many."""
        for rounds in range(ROUNDS):
            if not self.round() and not self.moving and not (self.free and self.weights):
                return rounds
        raise AssertionError(f"after {ROUNDS} rounds streams still move")

    def moves(self) -> dict[int, int]:
        """Return how often each stream has changed hands."""
        return {stream_id: len(holders) - 1 for stream_id, holders in self.past.items()}


def jittered(load: Loads, rng: random.Random) -> Loads:
    """Return the loads as measured: each up to a tenth too high or too low."""
    return {s: StreamLoad(each.bytes_per_s * rng.uniform(0.9, 1.1), each.lag) for s, each in load.items()}


def counts(held: Mapping[int, str], weights: Collection[str]) -> dict[str, int]:
    """Return how many streams each member holds."""
    held_by = Counter(held.values())
    return {name: held_by[name] for name in weights}
