"""Every row of the assignment's table happens for its reason: a story for each pair that can occur, on a bench."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_leader.group.assignments import Assignments
from sublet_leader.group.stream_table import Assignment
from sublet_leader.group.transitions import TRANSITIONS, Action, AssignmentStatus, EventKind
from sublet_protocol.messages.borrower_leader import (
    Grant,
    LeaderConnectResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokedReason,
    StreamProgress,
    ToBorrower,
    UpdateProgress,
)
from sublet_storage.groups.model.records import LendingStatus
from tests.unit.leader_bench import AGENT, BORROWER, HEAD, Bench

Pair = tuple[AssignmentStatus, EventKind]
Story = Callable[[Bench], None]
STORIES: dict[Pair, tuple[Story, Story, type[ToBorrower] | None]] = {}
"""(how to get to the status, what happens then, what the borrower is told)."""


def story(
    status: AssignmentStatus, kind: EventKind, before: Story, reported: type[ToBorrower] | None = None
) -> Callable[[Story], Story]:
    """Register what happens."""

    def register(happening: Story) -> Story:
        STORIES[status, kind] = (before, happening, reported)
        return happening

    return register


# --- how to get to a status -------------------------------------------------------------------------------------------


def unwritten(bench: Bench) -> None:
    """The grant is decided and not written."""
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)


def granting(bench: Bench) -> None:
    """The grant is written, the borrower was told."""
    unwritten(bench)
    bench.settle()


def granted(bench: Bench) -> None:
    """The borrower has confirmed it."""
    granting(bench)
    bench.confirm()


def revoking(bench: Bench) -> None:
    """An operator wants it back."""
    granted(bench)
    bench.revoke()
    bench.settle()


def revoking_unwritten(bench: Bench) -> None:
    """An operator wants it back before it is written."""
    unwritten(bench)
    bench.revoke()


def revoked(bench: Bench) -> None:
    """Its last word is durable, and the stream stays with nobody."""
    granted(bench)
    bench.join("z/1", leaving=True)
    bench.progress(7, final=True)
    bench.settle()


def reclaiming(bench: Bench) -> None:
    """A successor has asked for it under a new leader; the row does not say so yet."""
    granted(bench)
    bench.lead()
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))


def reclaiming_behind_progress(bench: Bench) -> None:
    """A successor has asked for it while its predecessor's progress is being written."""
    granted(bench)
    bench.progress(9)
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))


def absent(bench: Bench) -> None:
    """A member that has nothing."""
    bench.join(leaving=True)


# --- what happens -----------------------------------------------------------------------------------------------------


@story(AssignmentStatus.GRANTING, EventKind.GRANT_WRITTEN, unwritten, Grant)
@story(AssignmentStatus.REVOKING, EventKind.GRANT_WRITTEN, revoking_unwritten, Revoke)
def write(bench: Bench) -> None:
    bench.commit()


@story(AssignmentStatus.GRANTED, EventKind.GRANT_WRITTEN, reclaiming)
def use_before_it_is_written(bench: Bench) -> None:
    bench.progress(5, borrower_id="a/2")
    bench.sent.clear()
    bench.commit()


@story(AssignmentStatus.GRANTING, EventKind.GRANT_REFUSED, unwritten)
@story(AssignmentStatus.REVOKING, EventKind.GRANT_REFUSED, revoking_unwritten)
def refuse(bench: Bench) -> None:
    bench.change_row(status=LendingStatus.BLOCKED)
    bench.commit()


@story(AssignmentStatus.GRANTING, EventKind.PROGRESS, granting)
@story(AssignmentStatus.GRANTED, EventKind.PROGRESS, granted)
@story(AssignmentStatus.REVOKING, EventKind.PROGRESS, revoking)
def progress(bench: Bench) -> None:
    bench.progress(5)


@story(AssignmentStatus.GRANTING, EventKind.FINAL, granting)
@story(AssignmentStatus.GRANTED, EventKind.FINAL, granted)
@story(AssignmentStatus.REVOKING, EventKind.FINAL, revoking)
def final(bench: Bench) -> None:
    bench.progress(5, final=True)


@story(AssignmentStatus.GRANTING, EventKind.ABORTED, granting)
@story(AssignmentStatus.GRANTED, EventKind.ABORTED, granted)
@story(AssignmentStatus.REVOKING, EventKind.ABORTED, revoking)
def break_off(bench: Bench) -> None:
    bench.leave(bench.said(5, final=False))


@story(AssignmentStatus.GRANTING, EventKind.SAVED, reclaiming_behind_progress)
def the_predecessors_progress_is_saved(bench: Bench) -> None:
    bench.commit()


@story(AssignmentStatus.GRANTED, EventKind.SAVED, granted, ProgressSaved)
@story(AssignmentStatus.REVOKING, EventKind.SAVED, revoking, ProgressSaved)
def progress_is_saved(bench: Bench) -> None:
    bench.progress(5)
    bench.commit()


@story(AssignmentStatus.GRANTING, EventKind.ENDED, reclaiming_behind_progress, Revoked)
@story(AssignmentStatus.GRANTED, EventKind.ENDED, granted, Revoked)
def read_to_the_end(bench: Bench) -> None:
    bench.streams.rollover(1)
    if not bench.entries:
        bench.progress(HEAD)
    bench.change_row(position=HEAD)
    bench.commit()


@story(AssignmentStatus.REVOKING, EventKind.ENDED, revoking, Revoked)
def the_last_word_is_saved(bench: Bench) -> None:
    bench.progress(5, final=True)
    bench.commit()


@story(AssignmentStatus.GRANTING, EventKind.LOST, reclaiming, Revoked)
def somebody_reset_it_before_the_reclaim(bench: Bench) -> None:
    bench.change_row(status=LendingStatus.FREE, grant_id=bench.grant_id() + 1)
    bench.commit()


@story(AssignmentStatus.GRANTED, EventKind.LOST, granted, Revoked)
@story(AssignmentStatus.REVOKING, EventKind.LOST, revoking, Revoked)
def somebody_reset_it(bench: Bench) -> None:
    bench.progress(5)
    bench.change_row(status=LendingStatus.FREE, grant_id=bench.grant_id() + 1)
    bench.commit()


@story(AssignmentStatus.GRANTING, EventKind.REVOKE, granting, Revoke)
@story(AssignmentStatus.GRANTED, EventKind.REVOKE, granted, Revoke)
@story(AssignmentStatus.REVOKING, EventKind.REVOKE, revoking)
def revoke(bench: Bench) -> None:
    bench.revoke()


@story(AssignmentStatus.GRANTING, EventKind.REVOKE_FINISHED, granting)
@story(AssignmentStatus.GRANTED, EventKind.REVOKE_FINISHED, granted)
@story(AssignmentStatus.REVOKING, EventKind.REVOKE_FINISHED, revoking)
def never_had_it(bench: Bench) -> None:
    bench.finished()


@story(AssignmentStatus.GRANTING, EventKind.RESEND, granting, Grant)
@story(AssignmentStatus.REVOKING, EventKind.RESEND, revoking, Revoke)
@story(AssignmentStatus.REVOKED, EventKind.RESEND, revoked, Revoked)
def wait(bench: Bench) -> None:
    bench.tick(bench.settings.resend_interval_s)


@story(AssignmentStatus.REVOKING, EventKind.DEADLINE, revoking)
def wait_too_long(bench: Bench) -> None:
    while (assignment := bench.assignment()) is not None and not assignment.is_final_queued:
        bench.sent.clear()
        bench.leader.members.get(BORROWER).last_heard_at = bench.now  # type: ignore[union-attr]
        bench.tick(2.0)


def old_grant(bench: Bench) -> int:
    """The grant id that is over."""
    return next((g for _, g in bench.leader.members.unconfirmed), 77)


@story(AssignmentStatus.REVOKED, EventKind.PROGRESS, revoked, Revoked)
@story(AssignmentStatus.ABSENT, EventKind.PROGRESS, absent, Revoked)
def progress_of_the_past(bench: Bench) -> None:
    bench.receive(UpdateProgress(BORROWER, bench.term, (StreamProgress(1, old_grant(bench), 5),)))


@story(AssignmentStatus.REVOKED, EventKind.FINAL, revoked, Revoked)
@story(AssignmentStatus.ABSENT, EventKind.FINAL, absent, Revoked)
def final_word_of_the_past(bench: Bench) -> None:
    bench.receive(UpdateProgress(BORROWER, bench.term, (StreamProgress(1, old_grant(bench), 5, final=True),)))


@story(AssignmentStatus.REVOKED, EventKind.REVOKE_FINISHED, revoked)
@story(AssignmentStatus.ABSENT, EventKind.REVOKE_FINISHED, absent)
def forgotten(bench: Bench) -> None:
    bench.finished(grant_id=old_grant(bench))


# --- the tests --------------------------------------------------------------------------------------------------------

POSSIBLE = {(status, kind) for status, row in TRANSITIONS.items() for kind in row}


@pytest.mark.conforms("E7")
def test_every_pair_of_the_table_has_a_story() -> None:
    assert set(TRANSITIONS) == set(AssignmentStatus)
    assert set(STORIES) == POSSIBLE


@pytest.mark.conforms("E7")
@pytest.mark.parametrize(("status", "kind"), sorted(STORIES, key=str), ids=lambda part: part.name.lower())
def test_each_pair_leads_where_the_table_says(
    status: AssignmentStatus, kind: EventKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, happening, reported = STORIES[status, kind]
    bench = Bench()
    before(bench)
    bench.sent.clear()
    seen: list[tuple[Pair, AssignmentStatus]] = []
    happen = Assignments.apply_event

    def watch(self: Assignments, assignment: Assignment, what: EventKind, now: float, position: int = 0) -> None:
        was = assignment.status
        happen(self, assignment, what, now, position)
        seen.append(((was, what), assignment.status))

    monkeypatch.setattr(Assignments, "apply_event", watch)
    happening(bench)
    assert ((status, kind), TRANSITIONS[status][kind][0]) in seen
    answers = [m for to, m in bench.sent if to == AGENT and not isinstance(m, LeaderConnectResponse)]
    assert [type(m) for m in answers] == ([reported] if reported else [])


def test_statuses_go_only_forward() -> None:
    rank = {
        AssignmentStatus.GRANTING: 0,
        AssignmentStatus.GRANTED: 1,
        AssignmentStatus.REVOKING: 2,
        AssignmentStatus.REVOKED: 3,
        AssignmentStatus.ABSENT: 4,
    }
    for status, row in TRANSITIONS.items():
        for kind, (after, _) in row.items():
            assert rank[after] >= rank[status], (status, kind)


def test_every_status_is_reached() -> None:
    reached = {AssignmentStatus.GRANTING} | {after for row in TRANSITIONS.values() for after, _ in row.values()}
    assert reached == set(AssignmentStatus)


def test_every_action_is_used_and_is_a_method() -> None:
    assert {action for row in TRANSITIONS.values() for _, action in row.values()} == set(Action)
    for action in Action:
        assert callable(getattr(Assignments, action.value))


@pytest.mark.conforms("E7")
def test_whatever_a_borrower_may_say_has_an_answer_in_every_status() -> None:
    """Where a message finds its assignment; last words are of streams that it has, so neither revoked nor absent."""
    at_any_time = {EventKind.PROGRESS, EventKind.FINAL, EventKind.REVOKE_FINISHED}
    assert all(at_any_time <= set(row) for row in TRANSITIONS.values())
    assert all(
        EventKind.ABORTED in TRANSITIONS[s]
        for s in (AssignmentStatus.GRANTING, AssignmentStatus.GRANTED, AssignmentStatus.REVOKING)
    )


NEVER = sorted({(s, k) for s in AssignmentStatus for k in EventKind} - POSSIBLE, key=str)


@pytest.mark.parametrize(("status", "kind"), NEVER, ids=lambda part: part.name.lower())
def test_what_cannot_happen_tells_its_story(status: AssignmentStatus, kind: EventKind) -> None:
    bench = Bench()
    assignment = Assignment(1, BORROWER, AGENT, 0.0, status, 5)
    with pytest.raises(AssertionError, match=rf"the table says that this cannot happen.*stream_id=1.*{kind.value}"):
        bench.leader._assignments.apply_event(assignment, kind, 1.0)
    assert assignment.status is status


@pytest.mark.conforms("E8", "E11")
def test_reasons_of_an_end_say_whether_work_may_be_done_twice() -> None:
    for last, reason, forced in ((True, RevokedReason.SAVED, False), (False, RevokedReason.LOST, True)):
        bench = Bench()
        granted(bench)
        bench.leave(bench.said(5, final=last))
        bench.settle()
        assert [m.reason for m in bench.received(Revoked)] == [reason]
        assert bench.row().position == 5
        assert [h.is_forced for h in bench.store.history(1) if h.event not in ("takeover", "grant")] == [forced]
