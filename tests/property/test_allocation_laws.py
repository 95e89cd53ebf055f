"""The laws of `even`, over random groups: balance, minimality, stickiness, idempotence.

What is true of every strategy is in `test_strategy_laws.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sublet_leader.allocation import AllocationInput, AllocationPlan, EvenStrategy
from tests.property.sharing import NAMES, Holdings, Weights, allocate, counts, groups


def apply(held: Mapping[int, str], plan: AllocationPlan) -> Holdings:
    """Return the holdings once every grant is accepted and every revoke has ended."""
    stays = {stream: who for stream, who in held.items() if stream not in plan.revokes}
    return stays | dict(plan.grants)


def settle(held: Mapping[int, str], free: frozenset[int], weights: Weights) -> Holdings:
    """Apply plans until there is nothing left to do: two suffice, one to revoke and one to grant what came free.

    Whoever lost a stream would be the best place for it, and does not get it back for that.
    """
    first = allocate(held, free, weights)
    after = apply(held, first)
    last = {stream: held[stream] for stream in first.revokes}
    second = EvenStrategy().plan(AllocationInput(after, first.revokes, weights, last_holders=last))
    assert not second.revokes
    return apply(after, second)


def quotas(total: int, weights: Weights) -> dict[str, Fraction]:
    """Return the exact shares, in fractions of a stream."""
    entire = sum(Fraction(w) for w in weights.values())
    return {name: total * Fraction(w) / entire for name, w in weights.items()}


@pytest.mark.conforms("E18")
@given(groups())
def test_stickiness_only_surplus_is_revoked(group: tuple[Holdings, frozenset[int], Weights]) -> None:
    held, free, weights = group
    plan = allocate(held, free, weights)
    before, end = counts(held, weights), counts(settle(held, free, weights), weights)
    lost = counts({stream: held[stream] for stream in plan.revokes}, weights)
    assert sum(lost.values()) == len(plan.revokes), "a stranger's stream was revoked"
    for name in weights:
        assert lost[name] == max(0, before[name] - end[name])


@pytest.mark.conforms("E18")
@given(groups(streams=14).filter(lambda group: group[2]))
@example(({0: "b1", 1: "b1", 2: "b0"}, frozenset(), {"b0": 1.0, "b1": 1.0}))
def test_minimality_no_other_rounding_moves_less(group: tuple[Holdings, frozenset[int], Weights]) -> None:
    held, free, weights = group
    before = counts(held, weights)
    quota = quotas(sum(before.values()) + len(free), weights)
    spare = sum(before.values()) + len(free) - sum(math.floor(q) for q in quota.values())
    best = min(
        sum(max(0, before[name] - math.floor(quota[name]) - (name in favoured)) for name in weights)
        for favoured in map(set, itertools.combinations(weights, spare))
        if _largest(quota, favoured)
    )
    assert len(allocate(held, free, weights).revokes) == best


def _largest(quota: dict[str, Fraction], favoured: set[str]) -> bool:
    """Return whether no member without an extra stream has a larger remainder than one with it."""
    chosen = [quota[name] % 1 for name in favoured]
    others = [quota[name] % 1 for name in quota if name not in favoured]
    return not chosen or not others or min(chosen) >= max(others)


@pytest.mark.conforms("E18", "E19")
@given(groups(), st.sets(st.integers(0, 39)))
def test_what_may_not_move_stays_and_moves_later(
    group: tuple[Holdings, frozenset[int], Weights], movable: set[int]
) -> None:
    held, free, weights = group
    plan = allocate(held, free, weights, movable=movable)
    assert movable.issuperset(plan.revokes)
    assert plan.grants == allocate(held, free, weights).grants
    later = allocate(apply(held, plan), plan.revokes, weights)
    end = settle(apply(apply(held, plan), later), frozenset(later.revokes), weights)
    assert counts(end, weights) == counts(settle(held, free, weights), weights)


HOMES = st.dictionaries(st.integers(0, 39), st.sampled_from(NAMES)) | st.sampled_from(NAMES).map(
    lambda name: dict.fromkeys(range(40), name)
)


@pytest.mark.conforms("E18")
@given(groups(), HOMES | st.just({}))
def test_balance_wherever_home_is(group: tuple[Holdings, frozenset[int], Weights], last: Holdings) -> None:
    """Going home costs no fairness and no move; a settled group is left alone, and so is one on its way there."""
    held, free, weights = group
    plain = allocate(held, free, weights)
    homing = EvenStrategy().plan(AllocationInput(held, free, weights, last_holders=last))
    assert len(homing.revokes) == len(plain.revokes)
    home = [sum(last.get(stream) == who for stream, who in plan.grants) for plan in (plain, homing)]
    assert home[1] >= home[0]
    later = AllocationInput(apply(held, homing), (), weights, moving_streams=homing.revokes)
    assert not EvenStrategy().plan(later), "somebody got more than its share, or revokes are revoked again"
    end = settle(apply(held, homing), frozenset(homing.revokes), weights)
    assert not allocate(end, (), weights)
    quota = quotas(sum(counts(end, weights).values()), weights)
    for name, count in counts(end, weights).items():
        assert math.floor(quota[name]) <= count <= math.ceil(quota[name])
