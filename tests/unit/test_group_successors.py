"""A stream that is revoked for another member is granted to it in the transaction that releases it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_leader.allocation import AllocationInput, AllocationPlan, EvenStrategy
from sublet_leader.group.events import MemberRightRevoked
from sublet_protocol.messages.borrower_leader import Grant, Revoke, Revoked
from sublet_storage.groups.model.desired_state import PauseGroup
from sublet_storage.groups.model.records import (
    SUSPECT_LOSSES,
    GroupOptions,
    LendingStatus,
    ReleaseStream,
    StartingPosition,
)
from tests.unit.leader_bench import SUBSCRIPTION, Bench, granted

A, B, C = "a/1", "b/1", "c/1"
Happening = Callable[[Bench], None]


def revoking(strategy: str = "even") -> Bench:
    """Two streams of A, of which the second is revoked, as B has joined; none of that is written yet."""
    bench = granted(2, A, options=GroupOptions(StartingPosition.EARLIEST, strategy=strategy))
    bench.pass_time(bench.settings.min_grant_duration_s, A)
    bench.join(B)
    bench.debounce()
    assert [revoke.stream_id for revoke in bench.received(Revoke)] == [2]
    return bench


def releasing() -> Bench:
    """The same, and its final progress, which is to be written."""
    bench = revoking()
    bench.commit()
    bench.progress(7, 2, final=True)
    return bench


def plan_again(bench: Bench) -> None:
    bench.leader.timers.rebalance_by(bench.now)
    bench.tick()


def successor(bench: Bench) -> str | None:
    """Return who is granted the stream by its release, which is to be written."""
    (release,) = [entry for entry in bench.entries if isinstance(entry, ReleaseStream)]
    return None if release.successor is None else release.successor.borrower_id


@pytest.mark.conforms("E10", "E17", "E18")
@pytest.mark.parametrize("strategy", ["even", "load"])
def test_a_stream_moves_in_one_transaction(strategy: str) -> None:
    bench = revoking(strategy)
    bench.commit()
    bench.progress(7, 2, final=True)
    bench.commit()
    assert [(revoked.borrower_id, revoked.stream_id) for to, revoked in bench.sent if isinstance(revoked, Revoked)] == [
        (A, 2)
    ]
    row = bench.row(2)
    grants = [(grant.borrower_id, grant.grant_id, grant.position) for grant in bench.received(Grant)]
    assert grants == [(B, row.grant_id, 7)]
    assert bench.holders() == {1: A, 2: B}
    assert [line.event for line in bench.history()[-2:]] == ["release", "grant"]
    assert bench.entries == []


@pytest.mark.conforms("E18")
@pytest.mark.parametrize("waits", [True, False], ids=["behind a line of history", "for the answer"])
def test_what_is_being_moved_counts_as_its_successors(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    bench, plan, holders = revoking(), EvenStrategy.plan, list[dict[int, str]]()

    def record(self: EvenStrategy, allocation_input: AllocationInput) -> AllocationPlan:
        holders.append(dict(allocation_input.holders))
        return plan(self, allocation_input)

    if not waits:
        bench.commit()
    bench.progress(7, 2, final=True)
    planned = list(bench.entries)
    monkeypatch.setattr(EvenStrategy, "plan", record)
    plan_again(bench)
    assert (holders, bench.entries, bench.received(Revoke)) == ([{1: A, 2: B}], planned, [])
    bench.settle()
    assert bench.holders() == {1: A, 2: B}


def leave(bench: Bench) -> None:
    bench.leave(borrower_id=B)


def stand_by(bench: Bench) -> None:
    bench.join(B, leaving=True)


def lose_its_right(bench: Bench) -> None:
    bench.give(MemberRightRevoked(B, "not any more"))


@pytest.mark.conforms("E10", "E20")
@pytest.mark.parametrize("happens", [leave, stand_by, lose_its_right])
@pytest.mark.parametrize("when", ["before it is written", "before the answer"])
def test_a_successor_that_goes_was_never_granted_it(happens: Happening, when: str) -> None:
    """It is free again where it was, and goes to somebody else."""
    bench = releasing()
    answer = bench.write() if when == "before the answer" else None
    happens(bench)
    bench.give(answer or bench.write())
    assert bench.received(Grant) == []
    assert bench.entries[-1].reason == "its borrower left before the grant"  # type: ignore[union-attr]
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01, A)
    assert (bench.holders(), bench.row(2).position, bench.forced()) == ({1: A, 2: A}, 7, [])


@pytest.mark.conforms("E10")
@pytest.mark.parametrize("is_noticed_first", [True, False])
def test_a_successor_in_a_paused_group_is_to_stop(is_noticed_first: bool) -> None:
    bench = revoking()
    if is_noticed_first:
        bench.progress(7, 2, final=True)  # waits behind the line of history that is to be written
    else:
        bench.commit()
        bench.progress(7, 2, final=True)
    bench.store.apply_command(SUBSCRIPTION, PauseGroup("why"))
    bench.renew = True
    bench.commit()
    bench.settle()
    assert [(to, message.stream_id) for to, message in bench.sent if isinstance(message, Revoke)][-1] == ("b", 2)
    bench.progress(7, 2, final=True, borrower_id=B)
    bench.progress(0, 1, final=True, borrower_id=A)
    bench.settle()
    bench.pass_time(bench.settings.rebalance_interval_s, A, B)
    assert bench.holders() == {}


@pytest.mark.conforms("E18", "E19")
def test_a_plan_from_before_a_join_is_forgotten() -> None:
    bench = revoking()
    bench.commit()
    bench.join(C)
    bench.progress(7, 2, final=True)
    assert successor(bench) is None


@pytest.mark.parametrize(
    "happens",
    [
        lambda bench: bench.leave(bench.said(7, 2), bench.said(0, 1)),
        lambda bench: (bench.leave(borrower_id=B), bench.progress(7, 2, final=True)),
    ],
    ids=["its holder leaves", "the other leaves"],
)
def test_whoever_leaves_has_no_successor(happens: Happening) -> None:
    bench = revoking()
    bench.commit()
    happens(bench)
    assert {entry.successor for entry in bench.entries if isinstance(entry, ReleaseStream)} == {None}


def test_a_stream_is_not_moved_to_its_holder() -> None:
    """It stops with what an operator takes back, and gets it again under another grant."""
    bench = granted(2, A)
    bench.revoke(2)
    bench.commit()
    plan_again(bench)
    bench.progress(7, 2, final=True)
    assert successor(bench) is None


def test_a_suspect_is_left_to_the_next_plan() -> None:
    """Which gives a borrower one at a time."""
    bench = granted(2, A)
    bench.change_row(2, losses=SUSPECT_LOSSES, lost_position=0)
    bench.save(0, 2)
    bench.pass_time(bench.settings.min_grant_duration_s + bench.settings.stream_sync_interval_s, A)
    bench.join(B)
    bench.debounce()
    bench.commit()
    bench.progress(0, 2, final=True)
    assert successor(bench) is None


def test_a_move_that_failed_is_written_again() -> None:
    bench = releasing()
    bench.fail()
    bench.tick(bench.settings.resend_interval_s)
    assert successor(bench) == B
    bench.settle()
    assert bench.holders() == {1: A, 2: B}


def test_what_its_release_blocks_is_not_granted() -> None:
    bench = revoking()
    bench.commit()
    bench.progress(7, 2, final=True, poison=9)
    assert successor(bench) == B
    bench.settle()
    assert bench.row(2).status is LendingStatus.BLOCKED
    assert bench.received(Grant) == []


@pytest.mark.conforms("E17")
def test_a_move_of_a_grant_that_was_over_is_none() -> None:
    """A reset has ended it meanwhile."""
    bench = releasing()
    bench.change_row(2, grant_id=bench.grant_id(2) + 1)
    bench.commit()
    assert bench.received(Grant) == []
