"""A node that is to drain or to step down lets go, and leaves what it led to others."""

from __future__ import annotations

import pytest

from sublet_leader.node.events import (
    ClaimLeadership,
    LookUpLeader,
    NodeDesiredStateRead,
    NodeStarted,
    ReleaseLeaderships,
)
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderConnectResponse
from sublet_storage.groups.model.records import MAINTENANCE
from tests.unit.test_node_machine import SETTINGS, Play

pytestmark = pytest.mark.conforms("A6")


def leading() -> Play:
    play = Play()
    play.do(NodeStarted())
    play.granted()
    return play


def order(play: Play, *, draining: bool = False, step_down: dict[int, int] | None = None) -> None:
    play.do(NodeDesiredStateRead(draining, step_down or {}))


def test_a_draining_node_lets_everything_go() -> None:
    play = leading()
    order(play, draining=True)
    assert [m.reason for m in play.received(Invalidate)] == [BorrowerEndReason.RETRY]
    released = {i for request in play.waiting(ReleaseLeaderships) for i in request.terms}
    assert released == {MAINTENANCE, 1}
    play.settle()
    play.want("a/2")
    assert play.waiting(ClaimLeadership) == []
    play.settle()
    play.pass_time(2 * SETTINGS.lease_duration_s)
    assert (play.machine.election.leaderships(), play.admitted()) == ({}, []), "it does not lead, nor does anybody else"


def test_a_draining_node_names_the_leader() -> None:
    first = leading()
    order(first, draining=True)
    first.settle()
    second = Play("n2", first.store)
    second.join("a/2")
    first.sent.clear()
    first.want("a/3")
    first.want("b/3")
    assert len(first.waiting(LookUpLeader)) == 1, "one look for both"
    first.settle()
    reported = first.received(LeaderConnectResponse)
    assert [(m.borrower_id, m.address) for m in reported] == [("a/3", "n2:1"), ("b/3", "n2:1")]


def test_a_draining_node_opens_no_group() -> None:
    """Until it may lead again."""
    play = Play()
    order(play, draining=True)
    play.join()
    assert (play.store.rows(1), play.sent) == ({}, [])
    order(play)
    play.join("a/2")
    assert set(play.machine.election.leaderships()) == {MAINTENANCE, 1}
    assert play.admitted()[-1:] == ["a/2"]


def test_a_stopping_node_takes_no_orders() -> None:
    """Otherwise it would campaign again when it need not drain any more."""
    play = leading()
    order(play, draining=True)
    play.settle()
    play.shut_down()
    order(play)
    assert play.waiting(ClaimLeadership) == []


def test_a_node_that_drains_does_not_campaign() -> None:
    """For a group that it has asked for before."""
    play = Play()
    play.want()
    order(play, draining=True)
    play.settle()
    assert play.machine.election.leaderships() == {}


def test_stepping_down_leaves_a_group_for_a_lease() -> None:
    """All else that the node leads it keeps. An order for another term is ignored."""
    play = leading()
    term = play.machine.leaders[1].term
    order(play, step_down={1: term - 1})
    assert set(play.machine.election.leaderships()) == {MAINTENANCE, 1}
    assert play.received(Invalidate) == []
    order(play, step_down={1: term})
    play.settle()
    assert set(play.machine.election.leaderships()) == {MAINTENANCE}
    play.join("a/2")
    play.pass_time(SETTINGS.lease_duration_s - 0.1)
    assert set(play.machine.election.leaderships()) == {MAINTENANCE}
    play.pass_time(0.2)
    play.join("a/2")
    assert set(play.machine.election.leaderships()) == {MAINTENANCE, 1}, "nobody else has taken it"


def test_orders_that_are_said_again_change_nothing() -> None:
    play = leading()
    term = play.machine.leaders[1].term
    for _ in range(3):
        order(play, draining=True, step_down={1: term})
        play.settle()
    assert len(play.received(Invalidate)) == 1
    order(play, step_down={1: term})
    play.join("a/2")
    play.pass_time(SETTINGS.lease_duration_s)
    play.join("a/2")
    assert set(play.machine.election.leaderships()) == {MAINTENANCE, 1}, "under a later term"
