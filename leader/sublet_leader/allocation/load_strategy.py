"""`load`: balances load per weight with few moves, and never moves a stream back.

**Cost of a stream**, in thousandths of an average stream: its bytes per second, plus up to one more average stream
while it is behind, plus a tenth for its presence. Streams without a known load count as the mean of the others; if no
load is known, all cost the same, and the number of streams is balanced. A member's **level** is the cost of its streams
per weight; the **mean** is that of all streams over all weights.

**Grants**: the heaviest free stream first, to the member that will then have the lowest level; to its last holder while
that leaves it at two thirds of the mean or below. No member is left without a stream while there are enough streams for
all: the last ones are reserved for idle members. No member is granted more than twice its even share of the streams and
one.

**Revokes**: all within one budget of a tenth of the streams held, at least one, in which streams already being revoked
are counted. First by level, the heaviest streams first, where a member is more than a quarter above the mean (it gives
until it is at the mean) or more than a quarter below (members above the mean give to it). By level, a stream moves only
if its new holder, with it, stays a fifth below the level that the giver had with it; and a giver is left alone if the
streams that could go make up less than a tenth of its load. Then, the lightest first, for members without a stream
while another holds two, and from those above the bound by count. The last stream of a member stays.

**Termination**: a move by level replaces two levels by two that are lower than the higher one. So the levels, sorted
from the top, decrease lexicographically with each move, and no assignment recurs; measurements that are a tenth too
high or too low do not change that, because the gap is a fifth. For the same reason a stream being revoked is not given
back to its last holder, unless that is now far below all others. This holds for the moves as they are planned; streams
that become free one by one may be placed otherwise, by the same rule. That this terminates as well is not proven but
tested (`tests/property/test_load_laws.py`).

Near-linear in streams plus borrowers. Costs are integers, so that the order of the arguments never matters.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping

from sublet_leader.allocation.least_loaded_member import MemberLoads
from sublet_leader.allocation.quotas import compute_quotas
from sublet_leader.allocation.strategy import AllocationInput, AllocationPlan, StreamLoad

UNEVEN = 0.25
"""How far above or below the mean a level must be before streams move because of it."""
GAP = 0.8
"""Maximum level of the new holder, with the stream, as a fraction of the old holder's."""
WORTH = 0.1
"""Minimum fraction of a member's load that must be able to move."""
HOME = 2 / 3
"""Fraction of the mean up to which the last holder gets its streams back."""
BUDGET = 10
"""At most one in this many streams may be in the process of moving."""

_AVERAGE = 1000
_PRESENCE = 100
_FAR_BEHIND = 10_000
"""Messages: a stream this far behind counts for half an average stream more."""
_MAX_BYTES_PER_S = 1e15
"""More than any consumer can consume: a higher figure is capped."""


class LoadStrategy:
    """Strategy `load`: balances the observed load per weight, damped."""

    def plan(self, allocation_input: AllocationInput) -> AllocationPlan:
        """Return what to grant and what to revoke now."""
        if not allocation_input.weights:
            return AllocationPlan()
        holdings, free, moving = (
            allocation_input.streams_by_member(),
            set(allocation_input.free_streams),
            set(allocation_input.moving_streams),
        )
        streams = [*free, *moving, *(stream_id for member_streams in holdings.values() for stream_id in member_streams)]
        costs = _compute_costs(streams, allocation_input.loads)
        bounds = {b: 2 * share + 1 for b, share in compute_quotas(len(streams), allocation_input.weights).items()}
        assigner = _StreamAssigner(
            allocation_input, MemberLoads(allocation_input.weights, bounds, holdings, costs), costs
        )
        # Streams being revoked have no holder yet, but will: so their places are taken, and only not granted.
        holders = assigner.assign(free | moving)
        selector = _RevokeSelector(assigner, holdings, max(1, (len(streams) - len(free)) // BUDGET) - len(moving))
        revoked = selector.select_revokes(allocation_input)
        moves = {**{s: holders[s] for s in moving}, **revoked}
        return AllocationPlan(
            tuple((s, holders[s]) for s in sorted(free)), tuple(sorted(revoked)), tuple(sorted(moves.items()))
        )


class _StreamAssigner:
    """Assigns free and moving streams to members, and tracks the resulting levels."""

    def __init__(self, allocation_input: AllocationInput, levels: MemberLoads, costs: Mapping[int, int]) -> None:
        self.levels, self.costs = levels, costs
        self._input = allocation_input

    def assign(self, streams: Collection[int]) -> dict[int, str]:
        """Return a member for each stream, the heaviest stream first; the levels rise accordingly."""
        levels, homes = self.levels, self._find_homes(streams)
        holders = {}
        waiting = len(streams)
        for stream_id in sort_by_cost(streams, self.costs):
            cost, home = self.costs[stream_id], homes.get(stream_id)
            if waiting <= levels.idle_count:
                borrower = self._add(self._choose_idle_member(home), cost)
            elif home:
                borrower = self._add(self._choose_member(home, cost), cost)
            else:
                borrower = self._require_member(levels.add_to_least_loaded(cost))
            holders[stream_id] = borrower
            waiting -= 1
        return holders

    def _find_homes(self, streams: Collection[int]) -> dict[int, str]:
        """Return {stream: the member that had it last, or is losing it now}."""
        homes = {**self._input.holders, **self._input.last_holders}
        return {s: homes[s] for s in streams if homes.get(s) in self._input.weights}

    def _add(self, borrower: str, cost: int) -> str:
        self.levels.add(borrower, cost)
        return borrower

    def _require_member(self, borrower: str | None) -> str:
        assert borrower is not None, "the bounds add up to more than there are streams"
        return borrower

    def _choose_idle_member(self, home: str | None) -> str:
        return home if home and not self.levels.count[home] else self._require_member(self.levels.find_idle_member())

    def _choose_member(self, home: str, cost: int) -> str:
        """Return `home` while it is well below the mean, or far below all others; else the member that would have the
        lowest level."""
        levels = self.levels
        if levels.count_surplus(home) < 0 and levels.load_of(home, cost) <= HOME * levels.mean:
            return home
        best = self._require_member(levels.find_least_loaded(cost))
        alternative = levels.find_least_loaded(cost, avoid=home) if best == home else None
        if alternative is not None and levels.load_of(home, cost) > GAP * levels.load_of(alternative, cost):
            return alternative
        return best


class _RevokeSelector:
    """Selects the streams to revoke."""

    def __init__(self, assigner: _StreamAssigner, holdings: Mapping[str, list[int]], budget: int) -> None:
        self._levels, self._costs = assigner.levels, assigner.costs
        self._holdings, self._budget = holdings, budget
        self._revoked: dict[int, str] = {}

    def select_revokes(self, allocation_input: AllocationInput) -> dict[int, str]:
        """Return {stream to revoke: its next holder}: as many as the budget allows, the most urgent chosen first."""
        if self._budget > 0:
            revocable = allocation_input.revocable_streams()
            movable = {b: [s for s in streams if s in revocable] for b, streams in self._holdings.items()}
            self._level_loads(movable)
            self._fill_idle_members(movable)
            self._shed_surplus(movable)
        return self._revoked

    def _move(self, stream_id: int, giver: str, taker: str) -> None:
        cost = self._costs[stream_id]
        self._levels.remove(giver, cost)
        self._levels.add(taker, cost)
        self._revoked[stream_id] = taker
        self._budget -= 1

    def _sort_unrevoked(self, streams: list[int]) -> list[int]:
        return sort_by_cost([s for s in streams if s not in self._revoked], self._costs)

    def _level_loads(self, movable: Mapping[str, list[int]]) -> None:
        """Move streams from members with a high level to those with a low one, as long as that is a clear gain."""
        levels = self._levels
        low = {b for b in movable if levels.load_of(b) < (1 - UNEVEN) * levels.mean}
        brink = (1 if low else 1 + UNEVEN) * levels.mean
        # Members that are only a little above the mean give to those in `low` only, not to members slightly below them.
        full = {b for b in movable if levels.load_of(b) > (1 + UNEVEN) * levels.mean}
        candidates = [
            (-self._costs[s], -s, giver)
            for giver, streams in movable.items()
            if levels.load_of(giver) > brink and self._is_worth_moving(giver)
            for s in streams
        ]
        for minus_cost, minus_id, giver in sorted(candidates):
            if self._budget <= 0:
                return
            level = levels.load_of(giver)
            if levels.count[giver] > 1 and level > levels.mean:
                taker = levels.find_least_loaded(-minus_cost, avoid=giver)
                if (
                    taker is not None
                    and (giver in full or taker in low)
                    and levels.load_of(taker, -minus_cost) <= GAP * level
                ):
                    self._move(-minus_id, giver, taker)

    def _is_worth_moving(self, giver: str) -> bool:
        """Return whether the streams that could move, now or later, are a fair part of the giver's load."""
        levels = self._levels
        taker = levels.find_least_loaded(1, avoid=giver)
        if taker is None or levels.count[giver] < 2:
            return False
        limit = GAP * levels.load_of(giver)
        could_go = sum(
            cost for cost in map(self._costs.__getitem__, self._holdings[giver]) if levels.load_of(taker, cost) <= limit
        )
        return could_go >= WORTH * levels.load[giver]

    def _fill_idle_members(self, movable: Mapping[str, list[int]]) -> None:
        """Move a stream to each member without one while another has two: the lightest of the most loaded."""
        levels = self._levels
        if not levels.idle_count or sum(levels.count.values()) < len(levels.count):
            return
        givers = [(-levels.load_of(borrower), borrower) for borrower, count in levels.count.items() if count > 1]
        heapq.heapify(givers)
        remaining: dict[str, list[int]] = {}
        while givers and self._budget > 0 and (taker := levels.find_idle_member()):
            _, giver = heapq.heappop(givers)
            if giver not in remaining:
                remaining[giver] = self._sort_unrevoked(movable[giver])
            if remaining[giver]:
                self._move(remaining[giver].pop(), giver, taker)
            if remaining[giver] and levels.count[giver] > 1:
                heapq.heappush(givers, (-levels.load_of(giver), giver))

    def _shed_surplus(self, movable: Mapping[str, list[int]]) -> None:
        """Move streams from members far above their share by count: the lightest, to where they fit best."""
        for giver in sorted(movable):
            if self._levels.count_surplus(giver) > 0:
                remaining = self._sort_unrevoked(movable[giver])
                while remaining and self._budget > 0 and self._levels.count_surplus(giver) > 0:
                    taker = self._levels.find_least_loaded(self._costs[remaining[-1]], avoid=giver)
                    if taker is None:
                        return
                    self._move(remaining.pop(), giver, taker)


def sort_by_cost(streams: Collection[int], costs: Mapping[int, int]) -> list[int]:
    """Return the streams by descending cost; those of equal cost by id."""
    ordered = sorted(streams)
    ordered.sort(key=costs.__getitem__, reverse=True)
    return ordered


def _compute_costs(streams: Collection[int], load: Mapping[int, StreamLoad]) -> dict[int, int]:
    """Return the cost of each stream in thousandths of an average stream; each at least that of its presence."""
    rates = {
        s: min(each.bytes_per_s, _MAX_BYTES_PER_S)
        for s in streams
        if (each := load.get(s)) and 0 <= each.bytes_per_s < math.inf
    }
    if not rates:
        return dict.fromkeys(streams, _AVERAGE)
    scale = _AVERAGE / ((math.fsum(rates.values()) / len(rates)) or 1.0)
    costs = {
        s: round(rate * scale + _PRESENCE + (_AVERAGE * lag / (lag + _FAR_BEHIND) if (lag := load[s].lag) > 0 else 0))
        for s, rate in rates.items()
    }
    unknown = round(sum(costs.values()) / len(costs))
    return costs if len(costs) == len(streams) else {s: costs.get(s, unknown) for s in streams}
