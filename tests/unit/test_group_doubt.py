"""What a session has planned: written before it gets the answer, given back to it alone, to others after its time."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import (
    Grant,
    Invalidate,
    ProgressSaved,
    Revoke,
    StreamProgress,
    UpdateProgress,
)
from sublet_storage.groups.model.records import AdvancePosition, LendingStatus
from tests.unit.leader_bench import Bench

HOLD_S = 60.0


def named(bench: Bench, borrower_id: str, name: str = "etl", epoch: int = 1) -> None:
    """A process of that name joins and gets what there is for it."""
    bench.join(borrower_id, session=name, session_epoch=epoch)
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01, borrower_id)
    bench.confirm()


def plan(bench: Bench, start: int = 2, end: int = 5, borrower_id: str = "a/1", stream_id: int = 1) -> InDoubtRange:
    """It plans a part of its stream."""
    doubt = InDoubtRange(bench.grant_id(stream_id), start, end, HOLD_S)
    said = StreamProgress(stream_id, bench.grant_id(stream_id), start, in_doubt=doubt)
    bench.receive(UpdateProgress(borrower_id, bench.term, (said,)), borrower_id.partition("/")[0])
    return doubt


def planned() -> tuple[Bench, InDoubtRange]:
    """A session has planned, and that is written."""
    bench = Bench()
    named(bench, "a/1")
    doubt = plan(bench)
    bench.settle()
    return bench, doubt


@pytest.mark.conforms("E26", "E27")
def test_a_plan_is_confirmed_when_it_is_written() -> None:
    """Said again it is confirmed again, and written once."""
    bench = Bench()
    named(bench, "a/1")
    bench.sent.clear()
    doubt = plan(bench)
    assert bench.received(ProgressSaved) == []
    bench.settle()
    assert [(saved.position, saved.in_doubt) for saved in bench.received(ProgressSaved)] == [(2, doubt)]
    assert bench.row().in_doubt == doubt
    before = bench.row()
    plan(bench)
    bench.settle()
    assert bench.row() == before
    assert [saved.in_doubt for saved in bench.received(ProgressSaved)] == [doubt]


def test_a_plan_is_not_lost_among_reports_that_wait() -> None:
    bench = Bench()
    named(bench, "a/1")
    bench.progress(1, borrower_id="a/1")
    doubt = plan(bench)
    entry = bench.leader.streams.get(1)
    assert entry is not None
    assert entry.queue == [AdvancePosition(1, bench.grant_id(), 2, in_doubt=doubt)]
    bench.progress(3, borrower_id="a/1")
    bench.settle()
    assert (bench.row().position, bench.row().in_doubt) == (3, doubt)


@pytest.mark.conforms("E26", "E27")
def test_only_its_session_gets_what_it_planned() -> None:
    bench, doubt = planned()
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    assert bench.row().status is LendingStatus.RESERVED
    named(bench, "b/1", "other")
    bench.pass_time(HOLD_S / 2, "b/1")
    assert bench.holders() == {}
    bench.sent.clear()
    named(bench, "c/1", "etl", 2)
    (grant,) = bench.received(Grant, "c")
    assert (grant.position, grant.in_doubt) == (2, doubt)
    assert grant.grant_id > doubt.grant_id


@pytest.mark.conforms("E26")
@pytest.mark.parametrize("is_led_anew", [False, True])
def test_after_its_time_another_gets_it(is_led_anew: bool) -> None:
    """Under a new leader too; history says why."""
    bench, _ = planned()
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    if is_led_anew:
        bench.lead()
    named(bench, "b/1", "other")
    bench.sent.clear()
    bench.pass_time(HOLD_S, "b/1")
    assert bench.holders() == {1: "b/1"}
    (grant,) = bench.received(Grant)
    assert (grant.position, grant.in_doubt) == (2, None)
    lines = {line.event: line for line in bench.store.history(bench.group.group_id)}
    assert "[2, 5) is in doubt: reserved for 60 s for session 'etl'" in lines["reserve"].reason
    end = lines["unreserve"]
    assert "session 'etl' has not come back" in end.reason
    assert (end.is_forced, end.position, end.redelivery_end) == (True, 2, 5)


@pytest.mark.conforms("E26", "E27")
def test_a_newer_process_goes_on_with_the_plan() -> None:
    bench, doubt = planned()
    bench.sent.clear()
    named(bench, "b/1", "etl", 2)
    said = [(to, type(message), getattr(message, "in_doubt", None)) for to, message in bench.sent]
    assert ("a", Invalidate, None) in said
    assert ("b", Grant, doubt) in said


def test_a_plan_outlives_its_leader() -> None:
    bench, doubt = planned()
    bench.lead()
    bench.pass_time(bench.settings.reclaim_grace_s + 1)
    assert bench.row().status is LendingStatus.RESERVED
    bench.lead()
    bench.sent.clear()
    named(bench, "a/2", "etl", 2)
    assert [grant.in_doubt for grant in bench.received(Grant)] == [doubt]


def test_what_was_being_granted_is_reserved_again() -> None:
    """Its session was lost meanwhile."""
    bench, doubt = planned()
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    bench.join("a/2", session="etl", session_epoch=2)
    bench.tick(bench.settings.rebalance_debounce_s + 0.01)
    assert [type(entry).__name__ for entry in bench.entries] == ["GrantStream"]
    bench.tick(bench.settings.eviction_timeout_s + 1)
    bench.settle()
    assert (bench.row().status, bench.row().in_doubt) == (LendingStatus.RESERVED, doubt)


def test_a_revoke_waits_for_what_is_planned() -> None:
    bench, doubt = planned()
    bench.sent.clear()
    bench.revoke()
    assert len(bench.received(Revoke)) == 1
    bench.progress(doubt.end, borrower_id="a/1", final=True)
    bench.settle()
    ended = [(line.event, line.position) for line in bench.store.history(bench.group.group_id)]
    assert ("release", 5) in ended
    assert "reserve" not in {event for event, _ in ended}
