"""Whoever joins, whenever: every epoch is given whole or not at all."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.domain.epoch_frontiers import LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import InvalidEpoch
from sublet_storage.log.complete_epoch_filter import CompleteEpochFilter, EpochStartingPosition, ExcludedEpochs
from tests.property.epoch_world import STEPS, Reader, World

BEGINS = [
    EpochStartingPosition.LATEST,
    EpochStartingPosition.LATEST,
    EpochStartingPosition.ACTIVE,
    EpochStartingPosition.EARLIEST,
]
JOINERS = int(os.environ.get("JOINERS", "6000"))
"""Of each order: so many points of random histories are joined. 52000 make a hundred thousand, in a minute."""
PER_WORLD = 12

both = pytest.mark.parametrize("dimensions", [pytest.param(1, id="total"), pytest.param(2, id="product")])


@pytest.mark.conforms("S3", "S4", "S5", "S7")
@both
def test_every_epoch_is_entire_or_absent(dimensions: int) -> None:
    dice = random.Random(dimensions)
    entire = absent = 0
    for number in range(JOINERS // PER_WORLD):
        world = World(lambda n: int(dice.random() * n), dimensions)
        for joiner in range(PER_WORLD):
            reader = Reader(world, dice.randrange(STEPS), BEGINS[joiner % len(BEGINS)])
            given_, not_given = _reported(number, reader)
            entire, absent = entire + given_, absent + not_given
    assert min(entire, absent) > JOINERS, (entire, absent)


def _reported(number: int, reader: Reader) -> tuple[int, int]:
    try:
        return reader.read_all().check()
    except AssertionError as error:
        story = f"history {number}, joined after step {reader.joined} at {reader.begin}: {reader.world.logs}"
        raise AssertionError(f"{error} ({story})") from None


@pytest.mark.conforms("S3")
@both
@settings(max_examples=150)
@given(data=st.data())
def test_the_smallest_history_of_a_torn_epoch_is_found(dimensions: int, data: st.DataObject) -> None:
    world = World(lambda n: data.draw(st.integers(0, n - 1)), dimensions)
    joined, begin = data.draw(st.integers(0, STEPS)), data.draw(st.sampled_from(EpochStartingPosition))
    Reader(world, joined, begin).read_all().check()


# --- the rules, one by one ------------------------------------------------------------------------------------------


def lower(*epochs: int) -> LowerFrontier:
    return LowerFrontier.from_epochs((epoch,) for epoch in epochs)


def upper(*epochs: int) -> UpperFrontier:
    return UpperFrontier.from_epochs((epoch,) for epoch in epochs)


def out(selection: CompleteEpochFilter, space: int = 1) -> list[int]:
    excluded = selection.excluded_in(space)
    return [] if excluded is None else [n for n in range(10) if excluded.contains((n,))]


def live(lowers: dict[int, LowerFrontier | None], *begun: UpperFrontier) -> CompleteEpochFilter:
    """Return the filter of who starts with what is new."""
    return CompleteEpochFilter.starting_at(EpochStartingPosition.LATEST, lowers, begun)


@pytest.mark.conforms("S2", "S5")
def test_the_frontier_is_of_all_spaces_and_streams() -> None:
    selection = live({1: lower(4), 2: lower(3), 3: None}, upper(3), upper(5), upper())
    assert selection.announced == lower(3)
    assert out(selection) == out(selection, 2) == [0, 1, 2, 3, 4, 5]


@pytest.mark.conforms("S3", "S6")
def test_a_filter_stays_until_the_frontier_is_past() -> None:
    selection = live({1: lower(3)}, upper(5))
    assert out(selection.advanced_to({1: lower(5)})) == [0, 1, 2, 3, 4, 5]
    assert selection.advanced_to({1: lower(6)}).excluded_in(1) is None


def test_completed_epochs_need_no_filter() -> None:
    assert live({1: lower(6)}, upper(5)).excluded_in(1) is None


@pytest.mark.conforms("S7")
def test_completed_epochs_of_history_are_left_out() -> None:
    selection = CompleteEpochFilter.starting_at(EpochStartingPosition.ACTIVE, {1: lower(3)}, [upper(5)])
    assert out(selection) == [0, 1, 2]
    assert selection.advanced_to({1: lower(3)}).excluded_in(1) is None


@pytest.mark.parametrize("begin", [EpochStartingPosition.ACTIVE, EpochStartingPosition.EARLIEST])
def test_what_retention_has_taken_in_part_is_left_out(begin: EpochStartingPosition) -> None:
    selection = CompleteEpochFilter.starting_at(begin, {1: lower(3)}, [upper(4), upper(6)], [upper(4)])
    assert out(selection) == [0, 1, 2, 3, 4]
    assert [n for n in range(8) if selection.may_need(1, upper(n))] == [5, 6, 7]
    assert selection.advanced_to({1: lower(5)}).excluded_in(1) is None


@pytest.mark.conforms("S7")
def test_a_lost_stream_may_have_had_more_epochs() -> None:
    unfinished = ExcludedEpochs(upper(), None, upper(7), lower(7))
    selection = CompleteEpochFilter.starting_at(EpochStartingPosition.EARLIEST, {}, [], [], {1: unfinished})
    assert (out(selection), selection.may_need(1, upper(7))) == ([7], True)


@pytest.mark.conforms("S4")
def test_a_late_space_completes_nothing_twice() -> None:
    selection = live({1: lower(6), 2: None}, upper(5))
    assert (out(selection), out(selection, 2)) == ([], [0, 1, 2, 3, 4, 5])
    selection = selection.advanced_to({1: lower(7), 2: lower(4)})
    assert selection.announced == lower(6)
    assert (out(selection), out(selection, 2)) == ([], [0, 1, 2, 3, 4, 5])
    selection = selection.advanced_to({1: lower(8), 2: lower(7)})
    assert (selection.announced, out(selection, 2)) == (lower(7), [])


@pytest.mark.conforms("S3", "S4")
def test_frontiers_of_many_epochs_never_go_back() -> None:
    """They are too large to be combined exactly, and a space that begins late may still publish in (10, 85)."""
    held = [(n, 100 - n) for n in range(40)]
    first, later = LowerFrontier.from_epochs(held), LowerFrontier.from_epochs([*held[:-1], (45, 61)])
    selection = live({1: first, 2: None}, upper())
    moved = selection.advanced_to({1: later, 2: LowerFrontier(((10, 85),))})
    assert selection.announced is not None
    assert moved.announced is not None
    assert selection.announced.is_at_or_before(moved.announced)
    excluded = moved.excluded_in(2)
    assert excluded is not None
    assert excluded.contains((10, 85))
    assert not excluded.contains((10, 95))


def test_where_nothing_is_in_epochs_none_is_reported() -> None:
    selection = live({1: None}, upper())
    assert (selection.announced, selection.excluded_in(1)) == (None, None)
    assert selection.advanced_to({1: None}) == selection
    assert selection.advanced_to({}) == selection


def test_epochs_of_two_kinds_are_refused() -> None:
    with pytest.raises(InvalidEpoch, match=r"epochs of 1 and of 2 numbers .* Read each space by a filter of its own"):
        live({1: lower(3), 2: LowerFrontier(((1, 2),))})
    with pytest.raises(InvalidEpoch):
        live({1: lower(3)}, upper(5)).advanced_to({2: LowerFrontier(((1, 2),))})
