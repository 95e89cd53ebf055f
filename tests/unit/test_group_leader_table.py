"""Every row of the assignment's table happens for its reason: a story for each pair that can occur, on a bench."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from sublet_leader.group.assignment_manager import AssignmentManager
from sublet_leader.group.grant_actions import GrantActionHandlers
from sublet_leader.group.grant_transitions import TRANSITIONS, GrantAction, GrantStatus, GrantTransitionEvent
from sublet_leader.group.stream_table import StreamAssignment
from sublet_protocol.messages.borrower_leader import (
    Grant,
    LeaderConnectResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    StreamProgress,
    ToBorrower,
)
from sublet_storage.groups.model.records import LendingStatus
from tests.unit.leader_bench import AGENT, BORROWER, HEAD, Bench, granted, unwritten

S, K = GrantStatus, GrantTransitionEvent
Pair = tuple[GrantStatus, GrantTransitionEvent]
TransitionCase = tuple[Callable[[], Bench], Callable[[Bench], None], type[ToBorrower] | None]
"""(how to get to the status, what happens then, what the borrower is sent)"""


# --- how to get to a status -------------------------------------------------------------------------------------------


def granting() -> Bench:
    """The grant is written, the borrower was notified."""
    bench = unwritten()
    bench.settle()
    return bench


def revoking() -> Bench:
    """An operator wants it back."""
    bench = granted()
    bench.revoke()
    bench.settle()
    return bench


def revoking_unwritten() -> Bench:
    """An operator wants it back before the grant is written."""
    bench = unwritten()
    bench.revoke()
    return bench


def revoked() -> Bench:
    """Its final progress is durable, and the stream stays with nobody."""
    bench = granted()
    bench.join("z/1", leaving=True)
    bench.progress(7, final=True)
    bench.settle()
    return bench


def reclaiming() -> Bench:
    """A successor has asked for it under a new leader; the row does not say so yet."""
    bench = granted()
    bench.lead()
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    return bench


def reclaiming_behind_progress() -> Bench:
    """A successor has asked for it while its predecessor's progress is being written."""
    bench = granted()
    bench.progress(9)
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    return bench


def absent() -> Bench:
    """A member that has nothing."""
    bench = Bench()
    bench.join(leaving=True)
    return bench


# --- what happens -----------------------------------------------------------------------------------------------------


def use_before_it_is_written(bench: Bench) -> None:
    bench.progress(5, borrower_id="a/2")
    bench.sent.clear()
    bench.commit()


def refuse(bench: Bench) -> None:
    bench.change_row(status=LendingStatus.BLOCKED)
    bench.commit()


progress, final = partial(Bench.progress, position=5), partial(Bench.progress, position=5, final=True)


def break_off(bench: Bench) -> None:
    bench.leave(bench.said(5, final=False))


def save_progress(bench: Bench, *, is_final: bool = False) -> None:
    bench.progress(5, final=is_final)
    bench.commit()


def read_to_the_end(bench: Bench) -> None:
    bench.streams.rollover(1)
    if not bench.entries:
        bench.progress(HEAD)
    bench.change_row(position=HEAD)
    bench.commit()


def reset_by_somebody(bench: Bench) -> None:
    if not bench.entries:
        bench.progress(5)
    bench.change_row(status=LendingStatus.FREE, grant_id=bench.grant_id() + 1)
    bench.commit()


def wait(bench: Bench) -> None:
    bench.tick(bench.settings.resend_interval_s)


def wait_too_long(bench: Bench) -> None:
    while (assignment := bench.assignment()) is not None and not assignment.is_final_queued:
        bench.sent.clear()
        bench.leader.members.get(BORROWER).last_message_at = bench.now  # type: ignore[union-attr]
        bench.tick(2.0)


def old_grant(bench: Bench) -> int:
    """The grant id that is over."""
    return next((g for _, g in bench.leader.members.unconfirmed), 77)


def progress_of_the_past(bench: Bench, *, is_final: bool = False) -> None:
    bench.report(StreamProgress(1, old_grant(bench), 5, is_final))


def finish_the_past(bench: Bench) -> None:
    bench.finished(grant_id=old_grant(bench))


STORIES: dict[Pair, TransitionCase] = {
    (S.GRANTING, K.GRANT_WRITTEN): (unwritten, Bench.commit, Grant),
    (S.REVOKING, K.GRANT_WRITTEN): (revoking_unwritten, Bench.commit, Revoke),
    (S.GRANTED, K.GRANT_WRITTEN): (reclaiming, use_before_it_is_written, None),
    (S.GRANTING, K.GRANT_REFUSED): (unwritten, refuse, None),
    (S.REVOKING, K.GRANT_REFUSED): (revoking_unwritten, refuse, None),
    (S.GRANTING, K.PROGRESS): (granting, progress, None),
    (S.GRANTED, K.PROGRESS): (granted, progress, None),
    (S.REVOKING, K.PROGRESS): (revoking, progress, None),
    (S.REVOKED, K.PROGRESS): (revoked, progress_of_the_past, Revoked),
    (S.ABSENT, K.PROGRESS): (absent, progress_of_the_past, Revoked),
    (S.GRANTING, K.FINAL): (granting, final, None),
    (S.GRANTED, K.FINAL): (granted, final, None),
    (S.REVOKING, K.FINAL): (revoking, final, None),
    (S.REVOKED, K.FINAL): (revoked, partial(progress_of_the_past, is_final=True), Revoked),
    (S.ABSENT, K.FINAL): (absent, partial(progress_of_the_past, is_final=True), Revoked),
    (S.GRANTING, K.ABORTED): (granting, break_off, None),
    (S.GRANTED, K.ABORTED): (granted, break_off, None),
    (S.REVOKING, K.ABORTED): (revoking, break_off, None),
    (S.GRANTING, K.SAVED): (reclaiming_behind_progress, Bench.commit, None),
    (S.GRANTED, K.SAVED): (granted, save_progress, ProgressSaved),
    (S.REVOKING, K.SAVED): (revoking, save_progress, ProgressSaved),
    (S.GRANTING, K.ENDED): (reclaiming_behind_progress, read_to_the_end, Revoked),
    (S.GRANTED, K.ENDED): (granted, read_to_the_end, Revoked),
    (S.REVOKING, K.ENDED): (revoking, partial(save_progress, is_final=True), Revoked),
    (S.GRANTING, K.LOST): (reclaiming, reset_by_somebody, Revoked),
    (S.GRANTED, K.LOST): (granted, reset_by_somebody, Revoked),
    (S.REVOKING, K.LOST): (revoking, reset_by_somebody, Revoked),
    (S.GRANTING, K.REVOKE): (granting, Bench.revoke, Revoke),
    (S.GRANTED, K.REVOKE): (granted, Bench.revoke, Revoke),
    (S.REVOKING, K.REVOKE): (revoking, Bench.revoke, None),
    (S.GRANTING, K.REVOKE_FINISHED): (granting, Bench.finished, None),
    (S.GRANTED, K.REVOKE_FINISHED): (granted, Bench.finished, None),
    (S.REVOKING, K.REVOKE_FINISHED): (revoking, Bench.finished, None),
    (S.REVOKED, K.REVOKE_FINISHED): (revoked, finish_the_past, None),
    (S.ABSENT, K.REVOKE_FINISHED): (absent, finish_the_past, None),
    (S.GRANTING, K.RESEND): (granting, wait, Grant),
    (S.REVOKING, K.RESEND): (revoking, wait, Revoke),
    (S.REVOKED, K.RESEND): (revoked, wait, Revoked),
    (S.REVOKING, K.DEADLINE): (revoking, wait_too_long, None),
}


# --- the tests --------------------------------------------------------------------------------------------------------

POSSIBLE = {(status, kind) for status, row in TRANSITIONS.items() for kind in row}
NEVER = sorted({(s, k) for s in S for k in K} - POSSIBLE, key=str)


@pytest.mark.conforms("E7")
def test_every_pair_and_action_of_the_table_is_real() -> None:
    """Statuses go only forward; whatever a borrower may say of a stream that it has, or had, has an answer."""
    assert (set(TRANSITIONS), set(STORIES)) == (set(S), POSSIBLE)
    assert {action for row in TRANSITIONS.values() for _, action in row.values()} == set(GrantAction)
    assert all(callable(getattr(GrantActionHandlers, action.value)) for action in GrantAction)
    order = [S.GRANTING, S.GRANTED, S.REVOKING, S.REVOKED, S.ABSENT]
    moves = [(status, after) for status, row in TRANSITIONS.items() for after, _ in row.values()]
    assert [(a, b) for a, b in moves if order.index(b) < order.index(a)] == []
    assert {S.GRANTING} | {after for _, after in moves} == set(S)
    assert all({K.PROGRESS, K.FINAL, K.REVOKE_FINISHED} <= set(row) for row in TRANSITIONS.values())
    assert all(K.ABORTED in TRANSITIONS[status] for status in (S.GRANTING, S.GRANTED, S.REVOKING))


@pytest.mark.conforms("E7")
@pytest.mark.parametrize(("status", "kind"), STORIES, ids=lambda part: part.name.lower())
def test_each_pair_leads_where_the_table_does(
    status: GrantStatus, kind: GrantTransitionEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, happening, reported = STORIES[status, kind]
    bench = before()
    bench.sent.clear()
    seen: list[tuple[Pair, GrantStatus]] = []
    happen = AssignmentManager.apply_event

    def watch(
        self: AssignmentManager, assignment: StreamAssignment, what: GrantTransitionEvent, now: float, position: int = 0
    ) -> None:
        was = assignment.status
        happen(self, assignment, what, now, position)
        seen.append(((was, what), assignment.status))

    monkeypatch.setattr(AssignmentManager, "apply_event", watch)
    happening(bench)
    assert ((status, kind), TRANSITIONS[status][kind][0]) in seen
    answers = [m for to, m in bench.sent if to == AGENT and not isinstance(m, LeaderConnectResponse)]
    assert [type(m) for m in answers] == ([reported] if reported else [])


@pytest.mark.parametrize(("status", "kind"), NEVER, ids=lambda part: part.name.lower())
def test_what_cannot_happen_is_explained(status: GrantStatus, kind: GrantTransitionEvent) -> None:
    bench = Bench()
    streams, members = bench.leader.streams, bench.leader.members
    assignments = AssignmentManager(bench.group, bench.term, streams, members, bench.settings, lambda *_: None)
    assignment = StreamAssignment(1, BORROWER, AGENT, 0.0, status, 5)
    with pytest.raises(AssertionError, match=rf"the table says that this cannot happen.*stream_id=1.*{kind.value}"):
        assignments.apply_event(assignment, kind, 1.0)
    assert assignment.status is status
