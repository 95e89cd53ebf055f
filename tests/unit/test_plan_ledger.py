"""A session that plans ahead: what is planned is begun when it is written, and what was begun is not lost sight of."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from sublet_borrower.machine.events import ProgressReported, RevokeStarted, SavedProgress, StreamGranted, StreamRemoved
from sublet_borrower.planner.micro_batch_planner import split_evenly
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import (
    PlannedRange,
    PlannedRangeStatus,
    PlannerStream,
    resolve_outcome,
)
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.groups.consumer_progress import LastPlannedRange
from sublet_storage.readers.epoch_steps import BlockRun, EpochStep
from tests.kit import GRANT_KEY

HOLD_S = 60.0


class Desk:
    """A planning whose reports are written down as soon as `write` is called."""

    def __init__(self, done: Iterable[PlannedRange] | None = (), begun: Iterable[PlannedRange] = ()) -> None:
        """What a former process had done and begun; None: that is not known yet."""
        self.said: list[ProgressReported] = []
        self.planning = MicroBatchPlanLedger(self.said.append, HOLD_S)
        if done is not None:
            self.planning.restore(done, begun)

    def grant(
        self, stream_id: int = 1, grant_id: int = 50, position: int = 10, left: InDoubtRange | None = None
    ) -> None:
        grant = Grant("a/1", 1, stream_id, grant_id, position, 1, 0, 99, "#", in_doubt=left, grant_key=GRANT_KEY)
        self.planning.apply_update(StreamGranted(grant))

    def heads(self, **heads: int) -> None:
        self.planning.update_heads((int(name[1:]), head) for name, head in heads.items())

    def idle(self) -> list[int]:
        return [granted.grant.stream_id for granted in self.planning.plannable_streams(lambda granted: True)]

    def write(self) -> None:
        for said in tuple(self.said):
            self.planning.apply_update(SavedProgress(said.stream_id, said.grant_id, said.position, said.in_doubt))

    def begun(self) -> list[PlannedRange]:
        return [begun.planned for begun in self.planning.take_saved_plans()]

    def plan(self, **ends: int) -> list[PlannedRange]:
        self.planning.plan({int(name[1:]): end for name, end in ends.items()})
        self.write()
        return self.begun()

    def done(self, planned: Iterable[PlannedRange]) -> None:
        self.planning.acknowledge(planned)
        self.planning.report_progress()

    def last(self) -> ProgressReported:
        return self.said[-1]

    def ended(self) -> tuple[int, int, bool]:
        """Of which stream progress was reported last, where, and whether it is final."""
        return self.last().stream_id, self.last().position, self.last().is_final


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.grant()
    desk.heads(s1=30)
    return desk


def test_nothing_is_begun_before_it_is_written(desk: Desk) -> None:
    assert desk.idle() == [1]
    desk.planning.plan({1: 20})
    assert desk.last() == ProgressReported(1, 50, 10, lag=20, in_doubt=InDoubtRange(50, 10, 20, HOLD_S))
    assert desk.planning.has_unsaved_plan()
    assert desk.begun() == []
    desk.write()
    assert not desk.planning.has_unsaved_plan()
    assert desk.begun() == [PlannedRange(1, 50, 10, 20)]
    assert desk.begun() == [PlannedRange(1, 50, 10, 20)], "until it is acknowledged"


def test_what_was_saved_of_another_plan_is_not_this(desk: Desk) -> None:
    desk.planning.plan({1: 20})
    desk.planning.apply_update(SavedProgress(1, 50, 10))
    desk.planning.apply_update(SavedProgress(1, 50, 10, InDoubtRange(50, 5, 10, HOLD_S)))
    desk.planning.apply_update(SavedProgress(1, 49, 10, InDoubtRange(50, 10, 20, HOLD_S)))
    assert desk.begun() == []


def test_what_was_done_before_is_planned_no_more(desk: Desk) -> None:
    desk.planning.plan({1: 20})
    desk.planning.apply_update(SavedProgress(1, 50, 15, desk.last().in_doubt))
    assert desk.begun() == []
    assert desk.plan(s1=20) == [PlannedRange(1, 50, 15, 20)]


def test_a_stream_has_one_plan_at_a_time(desk: Desk) -> None:
    (first,) = desk.plan(s1=20)
    assert (desk.idle(), desk.planning.is_caught_up({1: 10})) == ([], False)
    assert desk.plan(s1=30) == [first]
    desk.done([first])
    assert desk.last() == ProgressReported(1, 50, 20, lag=10)
    assert desk.idle() == [1]
    assert desk.plan(s1=30) == [PlannedRange(1, 50, 20, 30)]


@pytest.mark.parametrize(("target", "ends", "is_over"), [(None, [], True), (10, [], True), (14, [14], False)])
def test_a_finite_plan_ends_at_its_target(target: int | None, ends: list[int], is_over: bool) -> None:
    """Also of a stream that is granted, and first looked at, when more has come."""
    desk, targets = Desk(), {} if target is None else {1: target}
    desk.grant()
    assert desk.planning.is_caught_up(targets) == is_over, "also before it is looked at"
    desk.heads(s1=20)
    plannable = desk.planning.plannable_streams(lambda granted: True, targets)
    assert [granted.plannable_end for granted in plannable] == ends
    assert desk.planning.is_caught_up(targets) == is_over


def test_done_and_planned_next_are_one_report(desk: Desk) -> None:
    (first,) = desk.plan(s1=20)
    said = len(desk.said)
    desk.planning.acknowledge([first])
    desk.planning.plan({1: 30})
    desk.planning.report_progress()
    assert desk.said[said:] == [ProgressReported(1, 50, 20, lag=10, in_doubt=InDoubtRange(50, 20, 30, HOLD_S))]


def test_another_acknowledgement_changes_nothing(desk: Desk) -> None:
    (first,) = desk.plan(s1=20)
    for other in ((2, 50, 10, 20), (1, 49, 10, 20), (1, 50, 9, 20), (1, 50, 10, 21)):
        desk.done([PlannedRange(*other)])
    assert desk.begun() == [first]


def test_a_revoke_waits_for_what_is_planned(desk: Desk) -> None:
    desk.grant(2)
    (first,) = desk.plan(s1=20)
    said = len(desk.said)
    desk.planning.apply_update(RevokeStarted(1, 50))
    assert len(desk.said) == said
    desk.planning.apply_update(RevokeStarted(2, 50))
    assert desk.ended() == (2, 10, True), "an idle one goes"
    desk.done([first])
    assert desk.ended() == (1, 20, True)
    assert desk.idle() == []


def test_who_leaves_reports_its_position(desk: Desk) -> None:
    desk.grant(2)
    desk.heads(s2=30)
    desk.plan(s1=20, s2=20)
    desk.planning.apply_update(RevokeStarted(1, 50))
    desk.planning.abandon()
    assert desk.ended() == (1, 10, True)
    desk.planning.apply_update(RevokeStarted(2, 50))
    assert desk.ended() == (2, 10, True)


def test_a_head_is_polled_once_then_followed(desk: Desk) -> None:
    desk.grant(2)
    assert desk.planning.streams_to_poll() == [2]
    assert desk.planning.caught_up_streams() == {}
    desk.heads(s2=10)
    assert desk.planning.streams_to_poll() == []
    assert desk.planning.caught_up_streams() == {2: (50, 10)}
    desk.plan(s1=30)
    assert desk.planning.caught_up_streams() == {1: (50, 30), 2: (50, 10)}
    desk.heads(s1=5)
    assert desk.planning.lags() == {1: (10, 30), 2: (10, 10)}, "a head does not go back"
    desk.planning.apply_update(RevokeStarted(2, 50))
    assert desk.planning.caught_up_streams() == {1: (50, 30)}


def test_a_stream_that_ends_before_its_plan_is_ended(desk: Desk) -> None:
    """But for what came after its head was asked for: a plan, or another grant."""
    desk.plan(s1=30)
    before = desk.planning.known_ends([1, 2])
    assert before == {1: (50, 30)}
    desk.done(desk.plan(s1=30))
    desk.heads(s1=40)
    desk.done(desk.plan(s1=40))
    desk.planning.end_beyond_head([(1, 30)], before)
    desk.planning.hand_back()
    assert not desk.last().is_final
    desk.heads(s1=30)
    assert desk.planning.streams_to_poll() == [1], "it is looked at again"
    desk.planning.end_beyond_head([(1, 29)], before)
    desk.planning.hand_back()
    assert (desk.last().is_final, desk.last().is_beyond_head) == (True, True)


def test_what_is_planned_is_done_before_the_end(desk: Desk) -> None:
    """And the end is reported once."""
    planned = desk.plan(s1=30)
    ends = desk.planning.known_ends([1])
    assert [list(desk.planning.end_beyond_head([(1, 20)], ends)) for _ in range(2)] == [[1], []], "said once"
    desk.said.clear()
    desk.planning.hand_back()
    assert desk.said == []
    desk.done(planned)
    for _ in range(2):
        desk.planning.hand_back()
    assert [each.is_final for each in desk.said] == [False, True]


@pytest.mark.parametrize("atomic", [False, True])
def test_a_stream_granted_anew_is_looked_at_first(desk: Desk, atomic: bool) -> None:
    """What was to be planned under its former grant is not planned under this one."""
    assert desk.planning.plannable_streams(lambda granted: False) == []
    consumed = ConsumedFrontier(10) if atomic else None
    grant = Grant("a/1", 1, 1, 51, 10, 1, 0, 99, "#", consumed=consumed, grant_key=GRANT_KEY)
    desk.planning.apply_update(StreamGranted(grant))
    desk.planning.plan({1: 20})
    desk.planning.plan_steps({1: EpochStep((), ConsumedFrontier(10), 20, ConsumedFrontier(20))})
    assert (desk.said, desk.planning.has_unsaved_plan()) == ([], False)
    desk.heads(s1=30)
    assert (desk.idle(), len(desk.planning.plannable_atomic_streams(lambda granted: True))) == (
        ([], 1) if atomic else ([1], 0)
    )
    assert desk.planning.plannable_atomic_streams(lambda granted: False) == []


@pytest.mark.conforms("P5", "X4")
def test_hints_are_polled_and_not_planned(desk: Desk) -> None:
    desk.grant(position=10)
    desk.heads(s1=10)
    assert (desk.idle(), desk.planning.streams_to_poll()) == ([], [])
    desk.planning.hint_heads([(1, 2**40), (2, 7)])
    assert (desk.idle(), desk.planning.streams_to_poll()) == ([], [1])
    desk.heads(s1=12)
    assert (desk.idle(), desk.planning.streams_to_poll(), desk.planning.lags()) == ([1], [], {1: (10, 12)})
    desk.planning.hint_heads([(1, 12)])  # what is known
    assert desk.planning.streams_to_poll() == []


def test_the_stream_that_has_waited_longest_is_first() -> None:
    desk = Desk()
    for stream in (1, 2, 3):
        desk.grant(stream)
    desk.heads(s1=30, s2=30, s3=30)
    desk.done(desk.plan(s1=11))
    desk.done(desk.plan(s2=11))
    assert desk.idle() == [3, 1, 2]


# --- what is left of before -------------------------------------------------------------------------------------------

LEFT = InDoubtRange(40, 10, 20, HOLD_S)
BEGUN = PlannedRange(1, 40, 10, 20)


@pytest.mark.conforms("E27")
@pytest.mark.parametrize("first", ["the grant", "the checkpoint"])
def test_what_was_begun_is_done_again_first(first: str) -> None:
    desk = Desk(begun=[BEGUN]) if first == "the checkpoint" else Desk(None)
    desk.grant(left=LEFT)
    desk.heads(s1=30)
    if first == "the grant":
        assert desk.idle() == []
        assert desk.planning.restart(BEGUN) is None
        desk.planning.restore((), [BEGUN])
    again = desk.planning.restart(BEGUN)
    assert again is not None
    assert again.position == 10
    assert desk.idle() == []
    assert desk.begun() == [BEGUN]
    desk.done([BEGUN])
    assert desk.last() == ProgressReported(1, 50, 20, lag=10)
    assert desk.plan(s1=30) == [PlannedRange(1, 50, 20, 30)]


@pytest.mark.conforms("E27")
@pytest.mark.parametrize(
    ("done", "position"),
    [((BEGUN,), 20), ((), 10), ((PlannedRange(1, 40, 5, 10),), 10), ((PlannedRange(2, 40, 10, 20),), 10)],
    ids=["done", "never begun", "another range", "another stream"],
)
def test_only_what_was_done_is_not_planned_anew(done: Iterable[PlannedRange], position: int) -> None:
    """Another range of the stream that was begun is not begun again."""
    desk = Desk(done, begun=[replace(BEGUN, end=19)])
    desk.grant(left=LEFT)
    assert desk.last() == ProgressReported(1, 50, position, in_doubt=InDoubtRange(50, position, position, 0.0))
    desk.heads(s1=30)
    assert desk.plan(s1=25) == [PlannedRange(1, 50, position, 25)]


def test_late_is_no_progress_under_another_grant(desk: Desk) -> None:
    """Neither while nothing is planned under that, nor while something else is."""
    for grant_id, end in ((60, None), (70, 15)):
        (begun,) = desk.plan(s1=20)
        desk.planning.apply_update(StreamRemoved(1, grant_id - 10, GrantEndOutcome.LOST))
        desk.planning.apply_update(StreamRemoved(1, grant_id - 10, GrantEndOutcome.LOST))  # it is not held
        desk.grant(grant_id=grant_id)
        desk.heads(s1=30)
        desk.planning.plan({} if end is None else {1: end})
        desk.done([begun])
        assert desk.planning.lags() == {1: (10, 30)}
        assert desk.planning.has_unsaved_plan() == (end is not None)


def stepping(left: InDoubtRange | None = None, **begun: PlannedRange) -> tuple[Desk, PlannerStream]:
    """A stream of an atomic group that was looked at to its head."""
    desk = Desk(begun=begun.values())
    grant = Grant("a/1", 1, 1, 50, 10, 1, 0, 99, "#", consumed=ConsumedFrontier(10), in_doubt=left, grant_key=GRANT_KEY)
    desk.planning.apply_update(StreamGranted(grant))
    desk.heads(s1=30)
    assert desk.idle() == []
    held = (desk.planning.plannable_atomic_streams(lambda granted: True) or desk.planning.steps_to_restore())[0][0]
    held.space_id = 1
    return desk, held


def step(*runs: tuple[int, int], upto: int = 20) -> EpochStep:
    blocks = tuple(BlockRun(start, end, 100, True) for start, end in runs)
    return EpochStep(blocks, ConsumedFrontier(10), upto, ConsumedFrontier(upto))


def test_a_step_is_planned_once_an_empty_one_is_done() -> None:
    desk, _ = stepping()
    for end in (12, 14):
        desk.planning.plan_steps({1: step(upto=end)})
        assert desk.last() == ProgressReported(1, 50, end, lag=30 - end, consumed=ConsumedFrontier(end))
    desk.planning.plan_steps({1: step((14, 20))})
    assert desk.last().in_doubt == InDoubtRange(50, 14, 20, HOLD_S, ConsumedFrontier(20))
    assert desk.planning.plannable_atomic_streams(lambda granted: True) == []
    assert desk.planning.steps_to_restore() == [], "it is known"
    desk.write()
    assert desk.begun() == [PlannedRange(1, 50, 14, 20, ConsumedFrontier(20))]


def test_a_step_that_progress_passed_is_planned_anew() -> None:
    desk, _ = stepping()
    desk.planning.plan_steps({1: step((10, 20))})
    desk.planning.apply_update(SavedProgress(1, 50, 10, desk.last().in_doubt, ConsumedFrontier(15)))
    assert (desk.begun(), desk.planning.has_unsaved_plan()) == ([], False)


def test_what_is_gone_is_not_planned() -> None:
    desk, held = stepping()
    assert desk.planning.steps_to_restore() == []
    held.is_gone = True
    assert desk.planning.plannable_atomic_streams(lambda granted: True) == []


@pytest.mark.parametrize(("runs", "is_final"), [(((10, 20),), True), (((10, 15), (16, 20)), False)])
def test_a_step_that_reads_a_bad_block_is_the_end(runs: tuple[tuple[int, int], ...], is_final: bool) -> None:
    desk, held = stepping()
    held.poison = PoisonBlock(1, (15, 16), "is garbage.")
    desk.planning.plan_steps({1: step(*runs)})
    assert (desk.last().is_final, desk.last().poison) == (is_final, held.poison.run_end * is_final)
    assert desk.planning.has_unsaved_plan() != is_final


@pytest.mark.conforms("E27")
def test_the_step_of_an_earlier_plan_is_restored_first() -> None:
    """Before that nothing of it is begun."""
    left = InDoubtRange(40, 10, 20, HOLD_S, ConsumedFrontier(20))
    begun = PlannedRange.from_in_doubt(1, left)
    desk, held = stepping(left, begun=begun)
    assert [consumed for _, _, consumed in desk.planning.steps_to_restore()] == [left.consumed]
    assert desk.begun() == []
    held.is_gone = True
    assert desk.planning.steps_to_restore() == []
    held.is_gone, held.step = False, step((10, 20))
    assert desk.planning.steps_to_restore() == []
    assert desk.begun() == [begun]


@pytest.mark.parametrize("acknowledged", ["between", "after"])
def test_what_was_begun_goes_on_under_the_next_grant(desk: Desk, acknowledged: str) -> None:
    (begun,) = desk.plan(s1=20)
    left = desk.last().in_doubt
    desk.planning.apply_update(StreamRemoved(1, 50, GrantEndOutcome.LOST))
    assert desk.begun() == []
    if acknowledged == "between":
        desk.done([begun])
    desk.grant(grant_id=60, left=left)
    if acknowledged == "after":
        assert desk.begun() == [begun]
        desk.done([begun])
    assert (desk.last().grant_id, desk.last().position) == (60, 20)
    assert desk.begun() == []


@pytest.mark.conforms("E27")
def test_done_is_stored_until_progress_passes_it(desk: Desk) -> None:
    desk.grant(stream_id=2, position=0)
    desk.heads(s2=5)
    one, other = desk.plan(s1=20, s2=5)
    desk.done([one, other])
    assert desk.planning.unsaved_ranges() == (one, other)
    desk.planning.apply_update(SavedProgress(1, 50, 19))
    assert desk.planning.unsaved_ranges() == (one, other), "a part of it has been passed"
    desk.planning.apply_update(SavedProgress(1, 50, 20))
    assert desk.planning.unsaved_ranges() == (other,)
    desk.planning.apply_update(SavedProgress(2, 49, 5))
    assert desk.planning.unsaved_ranges() == (other,), "that was said under another grant"
    desk.planning.apply_update(StreamRemoved(2, 50, GrantEndOutcome.LOST))
    assert desk.planning.unsaved_ranges() == (other,), "no answer about it has come yet"
    desk.grant(stream_id=2, grant_id=60, position=5)
    assert desk.planning.unsaved_ranges() == (), "the grant begins behind it"


def test_done_of_an_earlier_process_remains() -> None:
    """Until that is written down."""
    desk = Desk([BEGUN])
    assert desk.planning.unsaved_ranges() == (BEGUN,)
    desk.grant(left=LEFT)
    assert desk.planning.unsaved_ranges() == (BEGUN,), "it is reported, and not written down yet"
    desk.write()
    assert desk.planning.unsaved_ranges() == ()


def test_a_range_is_passed_by_its_epochs() -> None:
    before, behind = ConsumedFrontier(10, LowerFrontier(((1,),))), ConsumedFrontier(10, LowerFrontier(((3,),)))
    planned = PlannedRange(1, 50, 10, 10, behind)
    assert not planned.is_passed(10, before)
    assert planned.is_passed(10, behind)


def test_a_repeated_acknowledgement_is_nothing_new(desk: Desk) -> None:
    (begun,) = desk.plan(s1=20)
    desk.done([begun])
    desk.write()
    desk.done([begun])
    assert desk.planning.unsaved_ranges() == ()


def test_only_the_range_that_is_dropped_is_forgotten() -> None:
    desk = Desk([BEGUN], [BEGUN])
    desk.planning.drop_done(PlannedRange(1, 40, 10, 19))
    assert desk.planning.unsaved_ranges() == (BEGUN,)
    desk.planning.drop_done(BEGUN)
    assert desk.planning.unsaved_ranges() == ()
    desk.planning.drop_started(BEGUN)
    desk.grant(left=LEFT)
    assert desk.begun() == []


def test_a_part_committed_elsewhere_is_left_out() -> None:
    desk = Desk(begun=[BEGUN])
    desk.grant(position=15, left=LEFT)
    again = desk.planning.restart(BEGUN)
    assert again is not None
    assert again.position == 15


def test_only_the_range_in_doubt_is_begun_or_put_off(desk: Desk) -> None:
    """Its stream is handed back once all is done that lies before the block."""
    (planned,) = desk.plan(s1=20)
    assert desk.planning.restart(replace(planned, end=19)) is None
    problem = PoisonBlock(1, (15, 16), "is garbage.")
    desk.planning.put_off({replace(planned, end=19): problem, replace(planned, stream_id=2): problem})
    assert desk.planning.restart(planned) is not None
    desk.planning.put_off({planned: problem})
    desk.planning.put_off({planned: problem})
    assert desk.planning.restart(planned) is None
    assert desk.last().in_doubt == planned.cut
    desk.write()
    desk.planning.hand_back()
    assert (desk.last().is_final, desk.last().poison) == (False, 0)
    assert desk.plan(s1=15) == [replace(planned, end=15)]
    desk.done([replace(planned, end=15)])
    desk.planning.hand_back()
    assert (desk.ended(), desk.last().poison) == ((1, 15, True), problem.run_end)


PUT_OFF, OTHER = InDoubtRange(40, 10, 10, 0.0), InDoubtRange(40, 20, 30, HOLD_S)


@pytest.mark.conforms("E27")
@pytest.mark.parametrize(
    ("last", "status"),
    [
        (None, "LOST"),
        (LastPlannedRange(PUT_OFF, is_pending=False, is_ours=True, grant_id=None), "PUT_OFF"),
        (LastPlannedRange(OTHER, is_pending=True, is_ours=True, grant_id=None), "LOST"),
        (LastPlannedRange(LEFT, is_pending=True, is_ours=True, grant_id=None), "OPEN"),
        (LastPlannedRange(LEFT, is_pending=True, is_ours=False, grant_id=None), "LOST"),
        (LastPlannedRange(LEFT, is_pending=False, is_ours=False, grant_id=None), "DONE"),
    ],
)
def test_what_became_of_a_begun_range(last: LastPlannedRange | None, status: str) -> None:
    assert resolve_outcome(BEGUN, last) is PlannedRangeStatus[status]


@pytest.mark.conforms("E27")
@pytest.mark.parametrize(
    ("start", "end", "is_pending", "consumed", "is_superseded"),
    [
        (20, 21, False, None, True),
        (20, 21, True, None, False),
        (19, 21, False, None, False),
        (20, 20, False, None, False),
        (20, 21, False, ConsumedFrontier(20), False),
    ],
    ids=["later", "not done", "overlaps", "empty", "epochs"],
)
def test_only_a_later_range_that_is_done_supersedes(
    start: int, end: int, is_pending: bool, consumed: ConsumedFrontier | None, is_superseded: bool
) -> None:
    last = LastPlannedRange(InDoubtRange(41, start, end, HOLD_S), is_pending=is_pending, is_ours=True, grant_id=None)
    assert replace(BEGUN, consumed_frontier=consumed).is_superseded_by(last) == is_superseded


@pytest.mark.parametrize(
    ("reached", "is_finished", "consumed", "was_done"),
    [
        (20, False, None, True),
        (19, False, None, False),
        (19, True, None, True),
        (20, False, ConsumedFrontier(20), False),
        (20, True, ConsumedFrontier(20), True),
    ],
)
def test_a_grant_that_ended_behind_a_range_has_done_it(
    reached: int, is_finished: bool, consumed: ConsumedFrontier | None, was_done: bool
) -> None:
    """Epochs may lie behind where it ended."""
    assert replace(BEGUN, consumed_frontier=consumed).was_done_under(reached, is_finished) == was_done


def test_a_finite_plan_of_epochs_ends_at_its_goal() -> None:
    """Which is known once the stream was looked at; no target counts, nor anything that is planned."""
    desk, held = stepping()
    targets = {1: 10}
    assert held.step_planner is not None
    assert (held.known_end, desk.planning.is_caught_up(targets)) == (10, False)
    held.goal = ConsumedFrontier(20)
    held.step_planner.consumed = ConsumedFrontier(15)
    assert desk.planning.is_caught_up(targets), "nothing of it is left"
    held.step_planner.scanned = 30
    assert (held.known_end, desk.planning.is_caught_up(targets)) == (30, False)
    held.goal = ConsumedFrontier(15)
    assert desk.planning.is_caught_up(targets)
    desk.planning.plan_steps({1: step((10, 20))})
    assert not desk.planning.is_caught_up(targets)


# --- how much of which ------------------------------------------------------------------------------------------------


def waiting(*lags: int) -> list[PlannerStream]:
    """Streams 1, 2, ... from offset 100 on."""
    grants = [
        Grant("a/1", 1, number, 50, 100, 1, 0, 99, "#", grant_key=GRANT_KEY) for number in range(1, len(lags) + 1)
    ]
    return [PlannerStream(grant, 100, plannable_end=100 + lag) for grant, lag in zip(grants, lags, strict=True)]


@pytest.mark.parametrize(
    ("lags", "most", "taken"),
    [
        ((), None, {}),
        ((), 5, {}),
        ((5, 7), None, {1: 5, 2: 7}),
        ((5, 7), 100, {1: 5, 2: 7}),
        ((10, 10), 10, {1: 5, 2: 5}),
        ((2, 10), 10, {1: 2, 2: 8}),
        ((10, 2, 10), 11, {1: 4, 2: 2, 3: 5}),
        ((10, 10, 10), 2, {1: 1, 2: 1}),
        ((10, 10), 1, {1: 1}),
    ],
)
def test_messages_are_shared_out(lags: tuple[int, ...], most: int | None, taken: dict[int, int]) -> None:
    assert {stream: end - 100 for stream, end in split_evenly(waiting(*lags), most).items()} == taken
