"""Frontiers are what their definitions say, in one dimension and in two; and a filter made of them is whole or not."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier, is_at_or_before

ONE = [(n,) for n in range(-1, 6)]
TWO = list(product(range(-1, 4), repeat=2))


def sets(universe: list[Epoch]) -> st.SearchStrategy[frozenset[Epoch]]:
    return st.frozensets(st.sampled_from(universe), max_size=6)


EITHER = [pytest.param(ONE, id="total"), pytest.param(TWO, id="product")]
both = pytest.mark.parametrize("universe", EITHER)


def may_come(epochs: Iterable[Epoch], epoch: Epoch) -> bool:
    return any(is_at_or_before(each, epoch) for each in epochs)


def has_begun(epochs: Iterable[Epoch], epoch: Epoch) -> bool:
    return any(is_at_or_before(epoch, each) for each in epochs)


@both
def test_the_order_is_one(universe: list[Epoch]) -> None:
    for a, b, c in product(universe, repeat=3):
        assert is_at_or_before(a, a)
        assert a == b or not (is_at_or_before(a, b) and is_at_or_before(b, a))
        assert is_at_or_before(a, c) or not (is_at_or_before(a, b) and is_at_or_before(b, c))


@both
@given(data=st.data())
def test_frontiers_are_antichains_of_what_made_them(universe: list[Epoch], data: st.DataObject) -> None:
    epochs = data.draw(sets(universe))
    lower, upper = LowerFrontier.from_epochs(epochs), UpperFrontier.from_epochs(epochs)
    for antichain in (lower.least, upper.greatest):
        assert set(antichain) <= epochs
        assert list(antichain) == sorted(set(antichain))
        assert not any(a != b and is_at_or_before(a, b) for a, b in product(antichain, repeat=2))
    for epoch in universe:
        assert lower.admits(epoch) == may_come(epochs, epoch)
        assert upper.covers(epoch) == has_begun(epochs, epoch)


@both
@given(data=st.data())
def test_of_several_it_is_that_of_all_together(universe: list[Epoch], data: st.DataObject) -> None:
    parts = data.draw(st.lists(sets(universe), min_size=1, max_size=4))
    union = frozenset[Epoch]().union(*parts)
    lowers, uppers = [LowerFrontier.from_epochs(p) for p in parts], [UpperFrontier.from_epochs(p) for p in parts]
    assert lowers[0].meet(*lowers[1:]) == LowerFrontier.from_epochs(union)
    assert uppers[0].join(*uppers[1:]) == UpperFrontier.from_epochs(union)


@both
@given(data=st.data())
def test_a_frontier_moves_on_to_where_less_may_come(universe: list[Epoch], data: st.DataObject) -> None:
    one, other = (LowerFrontier.from_epochs(data.draw(sets(universe))) for _ in range(2))
    shrinks = all(one.admits(epoch) for epoch in universe if other.admits(epoch))
    assert one.is_at_or_before(other) == shrinks
    assert one.is_at_or_before(LowerFrontier())


@both
@given(data=st.data())
def test_a_filter_loses_nothing_that_may_come(universe: list[Epoch], data: st.DataObject) -> None:
    upper, lower = (
        UpperFrontier.from_epochs(data.draw(sets(universe))),
        LowerFrontier.from_epochs(data.draw(sets(universe))),
    )
    left = upper.remove_completed(lower)
    for epoch in universe:
        if lower.admits(epoch):
            assert left.covers(epoch) == upper.covers(epoch)
    assert all(any(is_at_or_before(least, epoch) for least in lower.least) for epoch in left.greatest)


@both
@given(data=st.data())
def test_beyond_what_has_begun_lies_what_may_come(universe: list[Epoch], data: st.DataObject) -> None:
    lower, upper = (
        LowerFrontier.from_epochs(data.draw(sets(universe))),
        UpperFrontier.from_epochs(data.draw(sets(universe))),
    )
    beyond = lower.after_completing(upper)
    assert lower.is_at_or_before(beyond)
    for epoch in universe:
        assert beyond.admits(epoch) == (lower.admits(epoch) and not upper.covers(epoch))
