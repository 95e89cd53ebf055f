"""What an epoch is, and the example of Strymon's page."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.epoch_frontiers import (
    ConsumedFrontier,
    Epoch,
    LowerFrontier,
    UpperFrontier,
    check_count,
    check_epoch,
    is_at_or_before,
)
from sublet_protocol.domain.errors import InvalidEpoch
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_EPOCH
from sublet_storage.groups.model.progress_rules import merge_consumed_frontier


@pytest.mark.parametrize(
    ("value", "epoch"),
    [
        (5, (5,)),
        (-1, (-1,)),
        ((1, 2), (1, 2)),
        ([3, 4], (3, 4)),
        (2**63 - 2, (2**63 - 2,)),
        (-(2**63), (-(2**63),)),
        ((0,) * 8, (0,) * 8),
    ],
)
def test_an_epoch_is_an_integer_or_a_tuple_of_them(value: object, epoch: tuple[int, ...]) -> None:
    assert check_epoch(value) == epoch


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("5", "an integer"),
        ("x" * 10_000, "an integer"),
        (5.0, "an integer"),
        (True, "an integer"),
        (None, "an integer"),
        ((1, "2"), "an integer"),
        ((), "1 to 8 numbers"),
        ((0,) * 9, "1 to 8 numbers"),
        (2**63, "64-bit"),
        ((0, -(2**63) - 1), "64-bit"),
    ],
    ids=lambda part: repr(part)[:20],
)
def test_anything_else_is_refused_with_the_rule(value: object, says: str) -> None:
    """And with the value, of which a long one is shown in part."""
    with pytest.raises(InvalidEpoch, match=says) as refused:
        check_epoch(value)
    assert str(refused.value).startswith(f"epoch {value!r}"[:80])
    assert len(str(refused.value)) < 200


def test_all_epochs_of_a_space_are_of_one_kind() -> None:
    assert check_epoch((1, 2), numbers=2) == (1, 2)
    with pytest.raises(InvalidEpoch, match="this space have 2 numbers, and this one has 1"):
        check_epoch(7, numbers=2)
    with pytest.raises(InvalidEpoch, match="this space have 1 number, and this one has 2"):
        check_epoch((7, 8), numbers=1)


def test_an_epoch_that_has_not_begun_is_hidden_too() -> None:
    """Strymon's example: completed 0, 1, 2; active 3 and 5; 4 would leave a hole."""
    upper, lower = UpperFrontier.from_epochs([(3,), (5,)]), LowerFrontier.from_epochs([(3,)])
    assert [n for n in range(9) if not upper.covers((n,))] == [6, 7, 8]
    assert upper.remove_completed(lower) == upper
    assert upper.remove_completed(LowerFrontier.from_epochs([(5,)])) == upper, "5 itself may still come"
    assert upper.remove_completed(LowerFrontier.from_epochs([(6,)])) == UpperFrontier()
    assert upper.remove_completed(LowerFrontier()) == UpperFrontier(), "all is completed"
    assert not LowerFrontier().admits((0,))


def test_two_numbers_are_before_others_only_in_both() -> None:
    assert is_at_or_before((0, 5), (1, 5))
    assert not is_at_or_before((0, 9), (1, 5))
    assert not is_at_or_before((1, 5), (0, 9))
    upper, lower = UpperFrontier.from_epochs([(1, 5)]), LowerFrontier.from_epochs([(0, 9), (1, 0)])
    assert upper.remove_completed(lower) == upper, "(0, 9) has left (0, 5) behind; (1, 0) has not"


def test_of_three_numbers_any_earlier_one_counts() -> None:
    """Not only the last before it in their order."""
    least = (0, 0, 5), (1, 1, 0)
    assert LowerFrontier.from_epochs([*least, (2, 0, 5)]) == LowerFrontier(least)
    assert LowerFrontier.from_epochs([]) == LowerFrontier()


def test_the_greatest_of_many_pairs_are_exact() -> None:
    many = [(number, 0) for number in range(20_001)]
    assert UpperFrontier.from_epochs([*many, (0, 1)]).greatest == ((0, 1), (20_000, 0))


def test_after_the_last_epoch_nothing_is_left() -> None:
    completed = LowerFrontier(((0,),)).after_completing(UpperFrontier(((MAX_EPOCH,),)))
    assert completed == LowerFrontier(((MAX_EPOCH + 1,),))
    assert not completed.admits((MAX_EPOCH,))


def test_the_later_of_two_consumed_frontiers() -> None:
    """Of the offsets, or where they are the same of the epochs; where one has no epochs those of the other stay."""
    early, later = LowerFrontier(((1,),)), LowerFrontier(((2,),))
    for one, other, expected in (
        (ConsumedFrontier(7, early), ConsumedFrontier(5, later), ConsumedFrontier(7, early)),
        (ConsumedFrontier(7, early), ConsumedFrontier(7, later), ConsumedFrontier(7, later)),
        (ConsumedFrontier(7), ConsumedFrontier(5, later), ConsumedFrontier(7, later)),
        (ConsumedFrontier(7, early), ConsumedFrontier(8), ConsumedFrontier(8, early)),
    ):
        assert one.max_of(other) == expected == other.max_of(one)
    alien = LowerFrontier(((3, 0),))
    assert ConsumedFrontier(7, early).max_of(ConsumedFrontier(8, alien)) == ConsumedFrontier(7, early)
    assert ConsumedFrontier(7, early).max_of(None) == ConsumedFrontier(7, early)
    assert ConsumedFrontier(7, early).advanced_to(8, None) == ConsumedFrontier(8, early)
    assert ConsumedFrontier(7).advanced_to(8, later) == ConsumedFrontier(8, later)


# --- large ones -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("X4")
def test_intersecting_large_frontiers_is_bounded() -> None:
    """What an honest consumer has is exact; of what nobody has, an answer that may be one of both."""
    count = 300
    one = LowerFrontier.from_epochs((number, -number, 0) for number in range(count))
    later = LowerFrontier.from_epochs((number, 1 - number, 0) for number in range(count))
    alien = LowerFrontier.from_epochs((2 * number, 1 - 2 * number, 0) for number in range(count))
    assert one.intersect(later) == later == later.intersect(one)
    assert one.intersect(alien) in (one, alien)
    assert one.meet_within_limits([later]) == one


def descending(start: int, stop: int) -> tuple[Epoch, ...]:
    """Return epochs of which none is at or before another."""
    return tuple((number, -number) for number in range(start, stop))


def test_so_many_pairs_are_intersected_exactly() -> None:
    one, other = LowerFrontier(descending(0, 10)), LowerFrontier(((5, -9), *descending(10, 109)))
    assert len(one.least) * len(other.least) == MAX_ANTICHAIN
    assert one.intersect(other) == other.intersect(one) == LowerFrontier(descending(5, 10))


def test_so_much_is_completed_exactly() -> None:
    """As many epochs as a frontier has are left, and as many comparisons are made as are allowed."""
    left = LowerFrontier(descending(0, MAX_ANTICHAIN)).after_completing(UpperFrontier(((0, 0),)))
    assert left == LowerFrontier(((0, 1), *descending(1, MAX_ANTICHAIN)))
    left = LowerFrontier(descending(0, 975)).after_completing(UpperFrontier(((624, 0),)))
    assert left == LowerFrontier(((0, 1), *descending(625, 975))), "1250 epochs with 1600"


def test_beyond_a_bound_more_is_completed() -> None:
    """After one comparison or epoch more all of one epoch and the greatest numbers is completed, and no epoch less."""
    left = LowerFrontier(descending(0, 976)).after_completing(UpperFrontier(((624, 0),)))
    assert left == LowerFrontier(((0, 1), (625, 0)))
    full = LowerFrontier(tuple((number, -number, 0) for number in range(MAX_ANTICHAIN)))
    left = full.after_completing(UpperFrontier(((0, 0, 0),)))
    assert left == LowerFrontier(((0, 0, 1), (0, 1, 0), (1, 0, 0)))


def test_a_frontier_has_so_many_epochs() -> None:
    check_count(descending(0, MAX_ANTICHAIN))
    with pytest.raises(InvalidEpoch, match=f"the limit is {MAX_ANTICHAIN}"):
        check_count(descending(0, MAX_ANTICHAIN + 1))


@pytest.mark.conforms("X4")
def test_so_many_epochs_are_merged() -> None:
    """Of one or two numbers any, of more so many, and as many may be left as a frontier has."""
    antichain = [LowerFrontier(((number, -number, 1),)) for number in range(MAX_ANTICHAIN + 1)]
    assert antichain[0].meet_within_limits(antichain[:-1]) == LowerFrontier.from_epochs(
        each.least[0] for each in antichain[:-1]
    )
    assert antichain[0].meet_within_limits(antichain) is None
    needless = [LowerFrontier(((number, -number, 2),)) for number in range(24)]
    assert antichain[0].meet_within_limits([*antichain, *needless]) is None, "two parts have as many as a frontier has"
    for numbers, is_found in ((2, True), (3, False)):
        first, *rest = (LowerFrontier(((number,) * numbers,)) for number in range(20_001))
        assert first.meet_within_limits(rest[1:]) == first
        assert first.meet_within_limits(rest) == (first if is_found else None)


def test_too_many_begun_epochs_have_one_bound() -> None:
    begun = [(number, -number) for number in range(MAX_ANTICHAIN + 1)]
    assert UpperFrontier.from_epochs(begun) == UpperFrontier(((MAX_ANTICHAIN, 0),))
    assert UpperFrontier.from_epochs(begun[1:]) == UpperFrontier(tuple(begun[1:]))


@pytest.mark.conforms("X4")
def test_a_group_waits_for_too_many_epochs() -> None:
    lower = LowerFrontier(((0,) * 3,))
    held_back = [
        LowerFrontier.from_epochs((number, stream, -number) for number in range(100)) for stream in range(-50, 0)
    ]
    assert merge_consumed_frontier(lower, lower, held_back) == lower
    beside = [LowerFrontier(((number, -number, 1),)) for number in range(MAX_ANTICHAIN)]
    assert merge_consumed_frontier(None, LowerFrontier(((0, 0, 0),)), beside[1:]) is not None
    assert merge_consumed_frontier(None, LowerFrontier(((0, 0, 0),)), [*beside, LowerFrontier(((-1, 1, 1),))]) is None
    assert merge_consumed_frontier(None, LowerFrontier(((5,),)), [LowerFrontier(((n,),)) for n in range(9_000)]) == (
        LowerFrontier(((0,),))
    )
