"""What was planned last of a stream, whatever order the reports come in."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import MalformedRow
from sublet_protocol.domain.in_doubt_range import InDoubtRange, choose_latest_in_doubt

FORMER, PRESENT = 7, 9


def plan(start: int, end: int, grant_id: int = PRESENT, epoch: int | None = None) -> InDoubtRange:
    """A plan, in an atomic group with what is consumed before that epoch."""
    consumed = None if epoch is None else ConsumedFrontier(end, LowerFrontier(((epoch,),)))
    return InDoubtRange(grant_id, start, end, 0.0 if start == end else 1.0, consumed)


LEFT = plan(0, 5, FORMER)
LIVES = {
    "nothing left, then a plan of the same start": [plan(0, 0), plan(0, 5), plan(5, 9)],
    "a former plan that was not begun": [LEFT, plan(0, 0), plan(0, 3)],
    "a former plan that was done again": [LEFT, plan(5, 6), plan(6, 9)],
    "steps of epochs that leave the offset where it is": [plan(3, 3), plan(3, 3, epoch=4), plan(3, 3, epoch=5)],
}


@pytest.mark.conforms("E27")
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_the_last_plan_stays_whatever_the_order(life: list[InDoubtRange]) -> None:
    for order in permutations(life):
        known: InDoubtRange | None = None
        for reported in (*order, None, *order):
            known = choose_latest_in_doubt(reported, known, PRESENT)
        assert known == life[-1], order


@pytest.mark.parametrize(
    ("position", "epoch", "is_pending"), [(4, 4, True), (5, 3, True), (5, 4, False), (5, None, False), (6, 5, False)]
)
def test_a_plan_is_pending_until_progress_passes_it(position: int, epoch: int | None, is_pending: bool) -> None:
    """Of a step of epochs, what is consumed counts too, where that is known."""
    consumed = None if epoch is None else ConsumedFrontier(position, LowerFrontier(((epoch,),)))
    assert plan(0, 5, epoch=4).is_pending(position, consumed) is is_pending
    assert plan(0, 5).is_pending(position, consumed) is (position < 5)


def test_what_a_former_grant_left_may_be_cut() -> None:
    cut = plan(0, 0, FORMER)
    assert choose_latest_in_doubt(cut, LEFT, PRESENT) == cut


NO_EPOCHS: list[Any] = [1, {}, [1], [[]], [["a"]], [[1], {}], [[1], [1, 2]], [[1.5]], [[2**63]], [[10**300]], [[0] * 9]]
NO_FRONTIERS: list[Any] = [
    *(None, [], 1, "a", {}),
    *({"upto": "1", "least": None}, {"upto": -1, "least": None}, {"upto": 2**63, "least": None}, {"upto": 1}),
    *({"upto": 1, "least": each} for each in NO_EPOCHS),
]
NO_NUMBERS: list[Any] = ["1", None, -1, 10**300, []]


@pytest.mark.parametrize("stored", NO_FRONTIERS)
def test_a_malformed_frontier_is_named(stored: Any) -> None:
    with pytest.raises(MalformedRow, match="is stored as a "):
        ConsumedFrontier.from_json(stored)
    if stored is not None:
        with pytest.raises(MalformedRow, match="is stored as a "):
            InDoubtRange.from_json({**plan(0, 1).to_json(), "consumed": stored})


@pytest.mark.parametrize(
    "changed",
    [
        *({key: each} for key in ("grant_id", "start", "end", "hold_s") for each in NO_NUMBERS),
        *({"hold_s": each} for each in (86_401.0, math.nan, math.inf)),
    ],
)
def test_a_malformed_range_in_doubt_is_named(changed: dict[str, Any]) -> None:
    stored = plan(0, 1, epoch=5).to_json()
    assert InDoubtRange.from_json(stored) == plan(0, 1, epoch=5)
    with pytest.raises(MalformedRow, match="is stored as a range in doubt"):
        InDoubtRange.from_json({**stored, **changed})
