"""Who gets what, by example; the laws are in tests/property/test_allocation_laws.py."""

from __future__ import annotations

import math

import pytest

from sublet_leader.allocation import AllocationInput, AllocationPlan, EvenStrategy, compute_quotas
from sublet_protocol.domain.errors import UsageError
from tests.property.sharing import allocate

EVEN = {"a": 1.0, "b": 1.0}


def test_free_streams_are_dealt_in_turn() -> None:
    assert allocate({}, range(4), EVEN).grants == ((0, "a"), (1, "b"), (2, "a"), (3, "b"))


@pytest.mark.conforms("E18")
def test_free_streams_go_to_the_most_under_full() -> None:
    plan = allocate({1: "a", 2: "a", 3: "b"}, [4, 5, 6], {"a": 1.0, "b": 1.0, "c": 1.0})
    assert plan == AllocationPlan(grants=((4, "c"), (5, "b"), (6, "c")))
    plan = allocate({1: "b"}, [2, 3, 4], {"a": 1.0, "b": 2.0})
    assert plan.grants == ((2, "a"), (3, "b"), (4, "b")), "who has its share is not under-full"


def test_largest_remainders_get_the_spare_streams() -> None:
    assert compute_quotas(4, {"a": 1.0, "b": 2.0}) == {"a": 1, "b": 3}
    assert compute_quotas(10, {"a": 0.1, "b": 0.1, "c": 0.1}) == {"a": 4, "b": 3, "c": 3}
    assert compute_quotas(10, {}) == {}, "nobody is there"


@pytest.mark.conforms("E18")
def test_ties_are_exact_where_floating_point_is_not() -> None:
    """0.1 + 0.2 differs from 0.3 in the last bit; equal weights must tie whatever their value."""
    held = dict(enumerate("gfedcbagfe"))
    assert not allocate(held, [], dict.fromkeys("abcdefg", 0.1))


@pytest.mark.conforms("E18", "E19")
def test_what_was_just_granted_is_not_revoked() -> None:
    held = dict.fromkeys(range(4), "a")
    assert allocate(held, [], EVEN, movable=[0, 3]).revokes == (0, 3)
    assert allocate(held, [], EVEN, movable=[1]).revokes == (1,)
    assert not allocate(held, [], EVEN, movable=[])


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
@pytest.mark.parametrize(
    ("last", "grants"),
    [
        ({}, ((2, "b"), (3, "a"), (4, "b"))),
        ({2: "a", 3: "b"}, ((2, "a"), (3, "b"), (4, "b"))),
        ({2: "a", 3: "a", 4: "gone"}, ((2, "a"), (3, "b"), (4, "b"))),
    ],
    ids=["no home", "homes", "no room at home"],
)
def test_a_free_stream_goes_home_if_there_is_room(last: dict[int, str], grants: tuple[tuple[int, str], ...]) -> None:
    plan = EvenStrategy().plan(AllocationInput({1: "a"}, [2, 3, 4], EVEN, last_holders=last))
    assert plan.grants == grants


def test_where_shares_tie_the_spare_stream_goes_home() -> None:
    assert compute_quotas(1, EVEN, homing={"b": 1}) == {"a": 0, "b": 1}
    assert compute_quotas(1, EVEN, {"a": 1}, {"b": 1}) == {"a": 1, "b": 0}, "who holds one already keeps it"
