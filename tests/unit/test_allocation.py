"""Who gets what, by example; the laws are in tests/property/test_allocation_laws.py."""

from __future__ import annotations

import math

import pytest

from sublet_leader.allocation import AllocationInput, AllocationPlan, EvenStrategy, compute_quotas
from sublet_protocol.domain.errors import UsageError
from tests.property.sharing import allocate

EVEN = {"a": 1.0, "b": 1.0}


def test_the_first_borrower_gets_everything() -> None:
    assert allocate({}, [3, 1, 2], {"a": 1.0}) == AllocationPlan(grants=((1, "a"), (2, "a"), (3, "a")))


def test_nobody_to_lend_to_is_an_empty_plan() -> None:
    assert not allocate({1: "gone"}, [2], {})


def test_free_streams_are_dealt_in_turn() -> None:
    assert allocate({}, range(4), EVEN).grants == ((0, "a"), (1, "b"), (2, "a"), (3, "b"))


@pytest.mark.conforms("E18")
def test_free_streams_go_to_the_most_under_full() -> None:
    plan = allocate({1: "a", 2: "a", 3: "b"}, [4, 5, 6], {"a": 1.0, "b": 1.0, "c": 1.0})
    assert plan == AllocationPlan(grants=((4, "c"), (5, "b"), (6, "c")))


@pytest.mark.conforms("E18")
def test_a_join_revokes_only_the_surplus() -> None:
    plan = allocate(dict.fromkeys(range(6), "a") | dict.fromkeys(range(6, 12), "b"), [], {**EVEN, "c": 1.0})
    assert plan == AllocationPlan(revokes=(4, 5, 10, 11))


@pytest.mark.conforms("E18")
def test_a_leave_moves_nothing_of_those_who_stay() -> None:
    held = {1: "a", 2: "a", 3: "b"}
    plan = allocate(held, [4, 5], EVEN)
    assert plan == AllocationPlan(grants=((4, "b"), (5, "a")))


@pytest.mark.conforms("E18")
def test_weights_set_the_proportions() -> None:
    plan = allocate({}, range(12), {"a": 1.0, "b": 3.0, "c": 2.0})
    counts = {b: sum(1 for _, who in plan.grants if who == b) for b in "abc"}
    assert counts == {"a": 2, "b": 6, "c": 4}


def test_largest_remainders_get_the_spare_streams() -> None:
    assert compute_quotas(4, {"a": 1.0, "b": 2.0}) == {"a": 1, "b": 3}
    assert compute_quotas(10, {"a": 0.1, "b": 0.1, "c": 0.1}) == {"a": 4, "b": 3, "c": 3}


@pytest.mark.conforms("E18")
def test_a_tie_leaves_the_spare_stream_with_its_holder() -> None:
    assert not allocate({1: "z", 2: "z", 3: "a"}, [], {"a": 1.0, "z": 1.0})


def test_ties_are_exact_where_floating_point_is_not() -> None:
    # 0.1 + 0.2 differs from 0.3 in the last bit; equal weights must tie whatever their value.
    weights = dict.fromkeys("abcdefg", 0.1)
    held = dict(enumerate("gfedcbagfe"))
    assert not allocate(held, [], weights)


@pytest.mark.conforms("E20")
def test_more_borrowers_than_streams_leaves_the_surplus_on_standby() -> None:
    weights = {f"b{i}": 1.0 for i in range(5)}
    held = {1: "b3", 2: "b4"}
    assert not allocate(held, [], weights)
    assert compute_quotas(2, weights, {"b3": 1, "b4": 1}) == {"b0": 0, "b1": 0, "b2": 0, "b3": 1, "b4": 1}


@pytest.mark.conforms("E20")
def test_a_standby_takes_over_in_the_plan_after_an_owner_left() -> None:
    weights = {"b0": 1.0, "b4": 1.0}
    assert allocate({2: "b4"}, [1], weights) == AllocationPlan(grants=((1, "b0"),))


@pytest.mark.conforms("E18", "E19")
def test_what_was_just_granted_is_not_revoked() -> None:
    held = dict.fromkeys(range(4), "a")
    assert allocate(held, [], EVEN, movable=[0, 3]).revokes == (0, 3)
    assert allocate(held, [], EVEN, movable=[1]).revokes == (1,)
    assert not allocate(held, [], EVEN, movable=[])


@pytest.mark.conforms("E18")
def test_streams_on_their_way_are_not_revoked_twice() -> None:
    held = dict.fromkeys(range(4), "a")
    assert allocate(held, [], EVEN).revokes == (2, 3)
    assert not allocate(held, [], EVEN, moving=[2, 3])
    assert not allocate({0: "a", 1: "a"}, [], EVEN, moving=[2, 3])


def test_streams_of_strangers_are_left_out_of_account() -> None:
    held = {1: "a", 2: "a", 3: "b", 4: "b"} | dict.fromkeys(range(5, 50), "leaving")
    assert not allocate(held, [], EVEN)


def test_the_order_of_the_arguments_does_not_matter() -> None:
    held = {i: "abc"[i % 2] for i in range(20)}
    weights = {"a": 1.0, "b": 2.0, "c": 1.5}
    backwards = dict(reversed(held.items())), [25, 24, 23], dict(reversed(weights.items()))
    assert allocate(held, [23, 24, 25], weights) == allocate(*backwards)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused_by_name(weight: float) -> None:
    with pytest.raises(UsageError, match=r"'b' has weight .* above 0"):
        allocate({}, [1], {"a": 1.0, "b": weight})


def test_extreme_weights_are_only_weights() -> None:
    plan = allocate({}, range(10), {"a": 5e-324, "b": 1.7e308})
    assert {who for _, who in plan.grants} == {"b"}


def test_contradictions_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="stream 1 is both held by 'a' and free"):
        allocate({1: "a"}, [1], EVEN)
    with pytest.raises(UsageError, match="stream 2 is both free and being revoked"):
        allocate({}, [2], EVEN, moving=[2])


@pytest.mark.conforms("E18")
def test_a_free_stream_goes_home_if_there_is_room_below_the_share() -> None:
    def plan(last: dict[int, str]) -> AllocationPlan:
        return EvenStrategy().plan(AllocationInput({1: "a"}, [2, 3, 4], EVEN, last_holders=last))

    assert plan({}).grants == ((2, "b"), (3, "a"), (4, "b"))
    assert plan({2: "a", 3: "b"}).grants == ((2, "a"), (3, "b"), (4, "b"))
    assert plan({2: "a", 3: "a", 4: "gone"}).grants == ((2, "a"), (3, "b"), (4, "b"))


def test_where_shares_tie_the_spare_stream_goes_home() -> None:
    assert EvenStrategy().plan(AllocationInput({}, [1], EVEN, last_holders={1: "b"})).grants == ((1, "b"),)
    assert compute_quotas(1, EVEN, homing={"b": 1}) == {"a": 0, "b": 1}
    # Who holds one already keeps it all the same.
    assert compute_quotas(1, EVEN, {"a": 1}, {"b": 1}) == {"a": 1, "b": 0}
