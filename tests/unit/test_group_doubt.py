"""What a session has planned: written before it gets the answer, given back to it alone, to others after its time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_leader.group.events import MemberRightRevoked
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Grant,
    Invalidate,
    ProgressSaved,
    Revoke,
)
from sublet_storage.groups.model.records import AdvancePosition, FreeReservedStream, GrantStream, LendingStatus
from tests.unit.leader_bench import HEAD, HOLD_S, Bench


def planned(settings: LeaderSettings | None = None) -> tuple[Bench, InDoubtRange]:
    """A session has planned, and that is written."""
    bench = Bench(settings=settings)
    bench.named("a/1", "etl")
    doubt = bench.plan()
    bench.settle()
    return bench, doubt


@pytest.mark.conforms("E26", "E27")
def test_a_plan_is_confirmed_when_it_is_written() -> None:
    """Said again it is confirmed again, and written once."""
    bench = Bench()
    bench.named("a/1", "etl")
    bench.sent.clear()
    doubt = bench.plan()
    assert bench.received(ProgressSaved) == []
    bench.settle()
    assert [(saved.position, saved.in_doubt) for saved in bench.received(ProgressSaved)] == [(2, doubt)]
    assert bench.row().in_doubt == doubt
    before = bench.row()
    bench.plan()
    bench.settle()
    assert bench.row() == before
    assert [saved.in_doubt for saved in bench.received(ProgressSaved)] == [doubt]


def test_a_plan_is_not_lost_among_reports_that_wait() -> None:
    bench = Bench()
    bench.named("a/1", "etl")
    bench.progress(1, borrower_id="a/1")
    doubt = bench.plan()
    entry = bench.leader.streams.get(1)
    assert entry is not None
    assert entry.queue == [AdvancePosition(1, bench.grant_id(), 2, in_doubt=doubt)]
    bench.save(3, borrower_id="a/1")
    assert (bench.row().position, bench.row().in_doubt) == (3, doubt)


@pytest.mark.conforms("E26")
def test_history_says_why_a_plan_was_reserved_and_over() -> None:
    bench, _ = planned()
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    bench.named("b/1", "other")
    bench.pass_time(HOLD_S, "b/1")
    lines = {line.event: line for line in bench.history()}
    assert "[2, 5) is in doubt: reserved for 60 s for session 'etl'" in lines["reserve"].reason
    end = lines["unreserve"]
    assert "session 'etl' has not come back" in end.reason
    assert (end.is_forced, end.position, end.redelivery_end) == (True, 2, 5)


@pytest.mark.conforms("E26", "E27")
def test_a_newer_process_goes_on_with_the_plan() -> None:
    bench, doubt = planned()
    bench.sent.clear()
    bench.named("b/1", "etl", 2)
    said = [(to, type(message), getattr(message, "in_doubt", None)) for to, message in bench.sent]
    assert ("a", Invalidate, None) in said
    assert ("b", Grant, doubt) in said


def reserved_for_long() -> tuple[Bench, InDoubtRange]:
    """A session has planned, was lost, and has not come back in time; nobody else is there."""
    bench, doubt = planned(LeaderSettings(leader_idle_timeout_s=1000.0))
    bench.pass_time(bench.settings.eviction_timeout_s + HOLD_S + bench.settings.rebalance_interval_s)
    return bench, doubt


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("is_led_anew", [False, True])
def test_a_session_alone_gets_its_plan_at_any_time(is_led_anew: bool) -> None:
    """Others who come together with it get what it had no share in."""
    bench, doubt = reserved_for_long()
    if is_led_anew:
        bench.lead()
    bench.join("b/1", session="other")
    bench.sent.clear()
    bench.named("a/2", "etl", 2)
    assert [(grant.borrower_id, grant.in_doubt) for grant in bench.received(Grant)] == [("a/2", doubt)]
    assert bench.history("unreserve") == []


@pytest.mark.conforms("E26")
def test_the_next_member_gets_what_is_in_doubt() -> None:
    """One that only hands over is none."""
    bench, doubt = reserved_for_long()
    bench.join("b/1", session="leaves", leaving=True)
    bench.share("b/1")
    assert bench.row().in_doubt == doubt
    bench.named("c/1", "other")
    assert (bench.holders(), bench.row().in_doubt) == ({1: "c/1"}, None)
    assert [(line.position, line.redelivery_end) for line in bench.history("unreserve")] == [(2, 5)]


def test_a_plan_outlives_its_leader() -> None:
    bench, doubt = planned()
    bench.lead()
    bench.pass_time(bench.settings.reclaim_grace_s + 1)
    assert bench.row().status is LendingStatus.RESERVED
    bench.lead()
    bench.sent.clear()
    bench.named("a/2", "etl", 2)
    assert [grant.in_doubt for grant in bench.received(Grant)] == [doubt]


def test_a_revoke_waits_for_what_is_planned() -> None:
    bench, doubt = planned()
    bench.sent.clear()
    bench.revoke()
    assert len(bench.received(Revoke)) == 1
    bench.save(doubt.end, borrower_id="a/1", final=True)
    ended = [(line.event, line.position) for line in bench.history()]
    assert ("release", 5) in ended
    assert "reserve" not in {event for event, _ in ended}


def leave_it_held(bench: Bench) -> None:
    """The session has its stream."""


def leave_it_being_handed_back(bench: Bench) -> None:
    """Its final progress is still to be written."""
    bench.progress(2, final=True, borrower_id="a/1")


def leave_it_reserved(bench: Bench) -> None:
    """It was lost, and has come back under the same id, and is granted nothing yet."""
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    assert bench.row().status is LendingStatus.RESERVED
    bench.join("a/2", session="etl", session_epoch=2)


def leave_it_being_granted(bench: Bench) -> None:
    """The same, and the grant is still to be written."""
    leave_it_reserved(bench)
    bench.debounce()
    assert [type(entry).__name__ for entry in bench.entries] == ["GrantStream"]


LEFT = [leave_it_held, leave_it_being_handed_back, leave_it_reserved, leave_it_being_granted]


@pytest.mark.conforms("X1")
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("leave_it", LEFT)
def test_nothing_is_reserved_for_who_may_not_return(leave_it: Callable[[Bench], None], is_written: bool) -> None:
    """Another gets it once the one that was denied begins no more calls."""
    bench, _ = planned()
    leave_it(bench)
    bench.sent.clear()
    for member in ("a/1", "a/2"):
        bench.give(MemberRightRevoked(member, "no right to join"))
    assert bench.ends() == [BorrowerEndReason.DENIED]
    pending = [type(change) for change in bench.leader.pending_changes()]
    assert sum(kind in (GrantStream, FreeReservedStream) for kind in pending) <= 1, "one after the other"
    if not is_written:
        bench.fail()
    denied_at = bench.now
    bench.named("b/1", "other")
    bench.pass_time(bench.settings.grant_validity_s + bench.settings.resend_interval_s, "b/1")
    assert bench.now < denied_at + HOLD_S / 2
    assert bench.holders() == {1: "b/1"}
    assert (bench.row().position, bench.row().in_doubt) == (2, None)
    assert (bench.forced()[-1].position, bench.forced()[-1].redelivery_end) in [(2, 5), (2, HEAD)]


@pytest.mark.conforms("X4")
def test_nothing_is_reserved_after_invalid_progress() -> None:
    bench, _ = planned()
    bench.sent.clear()
    bench.save(HEAD + 1, borrower_id="a/1")
    assert bench.ends() == [BorrowerEndReason.DENIED]
    bench.named("b/1", "other")
    bench.pass_time(bench.settings.grant_validity_s, "b/1")
    assert bench.holders() == {1: "b/1"}
    assert (bench.row().in_doubt, bench.forced()[-1].redelivery_end) == (None, HEAD)


def test_a_denied_name_for_display_frees_nothing() -> None:
    """Whoever shows another's name, and is denied, does not end what is reserved for that session."""
    bench, _ = planned()
    leave_it_reserved(bench)
    bench.settle()
    bench.join("b/1", session="etl")
    bench.give(MemberRightRevoked("b/1", "no right to join"))
    bench.settle()
    assert (bench.row().status, bench.row().session) == (LendingStatus.RESERVED, "etl")


def test_a_name_that_is_given_again_keeps_its_plans() -> None:
    bench, _ = planned()
    bench.give(MemberRightRevoked("a/1", "no right to join"))
    bench.pass_time(bench.settings.grant_validity_s + 1)
    bench.named("b/1", "etl", 2)
    bench.plan("b/1")
    bench.leave(bench.said(2), borrower_id="b/1")
    bench.settle()
    assert (bench.row().status, bench.row().session) == (LendingStatus.RESERVED, "etl")
