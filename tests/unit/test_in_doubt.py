"""What was planned last of a stream, whatever order the reports come in."""

from __future__ import annotations

from itertools import permutations

import pytest

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
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
