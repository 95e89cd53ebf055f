"""Samples of groups' lags: of which groups there are some, and that none are taken where none are kept."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sublet_leader.observe.lag_history import LagHistory

NO_POOL = cast(Any, None)


def test_a_group_that_comes_later_has_no_earlier_lag() -> None:
    history = LagHistory(NO_POOL, minutes=1, max_groups=2)
    history.add_sample(1.0, {1: 5})
    history.add_sample(2.0, {1: None, 2: 7, 3: 8})
    assert history.read((1, 2, 3)) == ([1.0, 2.0], {1: [5, None], 2: [None, 7], 3: [None, None]}), "two have lags"


def test_a_group_that_is_gone_leaves_its_place() -> None:
    history = LagHistory(NO_POOL, minutes=1, max_groups=2)
    history.add_sample(1.0, {1: 5, 2: 6})
    history.add_sample(2.0, {2: 7, 3: 8})
    history.add_sample(0.5, {3: 9, 4: 1})  # the clock was set back
    assert history.read((1, 2)) == ([1.0, 2.0, 0.5], {1: [None] * 3, 2: [None] * 3})
    assert history.read((3, 4)) == ([1.0, 2.0, 0.5], {3: [None, 8, 9], 4: [None, None, 1]})


@pytest.mark.parametrize(("minutes", "max_groups"), [(0, 5), (5, 0)])
def test_without_room_no_sample_is_taken(minutes: int, max_groups: int) -> None:
    LagHistory(NO_POOL, minutes, max_groups).run()
    history = LagHistory(NO_POOL, 1, 1)
    history.stop()
    history.run()  # nor once it is to end
