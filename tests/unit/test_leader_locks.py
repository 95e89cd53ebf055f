"""Leaders' locks: when one that is free means that its leader is gone, and what a leader does without its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublet_leader.election import (
    ClaimCompleted,
    Election,
    ElectionOutcome,
    Event,
    LeadershipAcquired,
    LeadershipHeldElsewhere,
    LivenessLockLost,
    OwnLivenessLockAcquired,
    PeerLocksChecked,
    RenewCompleted,
    StartCampaign,
)
from sublet_leader.election.dead_process_detectors import FreeLockDetector
from sublet_leader.node.events import ClaimLeadership, RenewLeaderships
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import LeaderConnectResponse, Ping, PingResponse
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import LeaderLivenessLock, Leadership, LendingStatus, StartingPosition
from sublet_storage.node_directory import NodeIncarnation
from tests.unit.leader_bench import granted
from tests.unit.test_node_machine import WANTED, Play, leading

SETTINGS = LeaderSettings()
RECHECK_S = SETTINGS.lock_recheck_delay_s
ME, OTHER, THIRD = (NodeIncarnation(name, f"{name}-1", f"{name}:1") for name in ("me", "other", "third"))
MINE, RIVAL = LeaderLivenessLock.of(ME.incarnation), LeaderLivenessLock.of(OTHER.incarnation)
FREE, HELD = frozenset({RIVAL.key}), frozenset[int]()


def look(
    at: float, free: frozenset[int] = FREE, connected_at: float = 0.0, timeline: int | None = None
) -> PeerLocksChecked:
    """It takes 10 ms."""
    return PeerLocksChecked(connected_at, at, at + 0.01, free, timeline=timeline)


@pytest.mark.parametrize(
    ("looks", "gone"),
    [
        # From the answer to the first to the start of the second: between them the lock was free twice.
        pytest.param([look(3.0), look(3.159), look(3.0 + 0.01 + RECHECK_S)], "..x", id="some time apart"),
        pytest.param([look(3.0), look(3.1, HELD), look(3.2), look(3.4)], "...x", id="a lock taken again"),
        # After a restart of the database all locks are free.
        pytest.param(
            [look(1.0), look(1.9), look(SETTINGS.lock_watch_age_s), look(2.3)], "...x", id="a young connection"
        ),
        pytest.param([look(3.0), look(6.0, connected_at=3.1), look(6.2, connected_at=3.1)], "..x", id="one connection"),
        pytest.param([look(3.0), look(3.2), look(3.4), look(3.6)], ".x.x", id="twice more after a failed claim"),
    ],
)
def test_two_looks_have_to_find_a_lock_free(looks: list[PeerLocksChecked], gone: str) -> None:
    watch = FreeLockDetector(SETTINGS, RECHECK_S)
    assert "".join("x" if RIVAL.key in watch.check(each) else "." for each in looks) == gone


def lost_to(node: NodeIncarnation, lock_key: int | None, started: float = 0.0) -> ClaimCompleted:
    return ClaimCompleted(1, started, Leadership(1, node, 7, 9.0, lock_key))


def standby(lock_key: int | None = RIVAL.key) -> Election:
    """A node that would lead, and knows that another does."""
    machine = Election(SETTINGS, ME.incarnation)
    play(machine, (0.0, StartCampaign(1)), (0.1, lost_to(OTHER, lock_key)))
    return machine


def play(machine: Election, *steps: tuple[float, Event]) -> ElectionOutcome:
    """Feed all steps; the last outcome."""
    outcome = ElectionOutcome()
    for now, event in steps:
        outcome = machine.decide(event, now)
    return outcome


@pytest.mark.conforms("E15")
def test_a_leader_that_is_gone_is_succeeded_at_once() -> None:
    machine = standby()
    assert machine.rival_keys() == (RIVAL.key,)
    assert play(machine, (3.01, look(3.0, timeline=0))).claims == ()
    outcome = play(machine, (3.21, look(3.2, timeline=0)))
    assert (outcome.claims, outcome.rivals) == ((1,), {1: RIVAL})
    assert machine.rival_keys() == (), "it is being claimed"
    won = ClaimCompleted(1, 3.21, Leadership(1, ME, 8, 10.0, None, 5.95))
    assert play(machine, (3.3, won)).notices == (LeadershipAcquired(1, 8, 3.3 + 5.95 / 0.85),)


@pytest.mark.conforms("E38")
def test_a_clock_set_back_revives_no_deposed_leader() -> None:
    """By it, a lease that was over long ago had an hour left."""
    won = ClaimCompleted(1, 0.0, Leadership(1, ME, 8, 10.0, None, 3600.0))
    (acquired,) = play(Election(SETTINGS, ME.incarnation), (0.0, StartCampaign(1)), (0.1, won)).notices
    assert acquired == LeadershipAcquired(1, 8, 0.1 + SETTINGS.lease_duration_s / 0.85)


@pytest.mark.conforms("E15")
def test_a_lock_on_another_timeline_says_nothing() -> None:
    """On a former primary that goes on after a failover it is free, though the leader holds it on the promoted one."""
    assert play(standby(), (3.01, look(3.0, timeline=1)), (3.21, look(3.2, timeline=1))).claims == ()


@pytest.mark.conforms("E15")
def test_two_checks_count_for_all_that_a_rival_led() -> None:
    """For a moment: what is asked for just after is claimed by the free lock too, and nobody is sent to that node. Not
    again where the claim has found the lock held."""
    other = Leadership(2, OTHER, 7, 9.0, RIVAL.key)
    machine = standby()
    play(machine, (3.01, look(3.0)), (3.21, look(3.2)), (3.3, StartCampaign(2)))
    outcome = play(machine, (3.4, ClaimCompleted(2, 3.3, other)))
    assert (outcome.claims, outcome.rivals, outcome.notices) == ((2,), {2: RIVAL}, ())
    outcome = play(machine, (3.5, ClaimCompleted(2, 3.4, other)))
    assert (outcome.claims, [type(each) for each in outcome.notices]) == ((), [LeadershipHeldElsewhere])
    late = standby()
    play(late, (3.01, look(3.0)), (3.21, look(3.2)), (4.2, StartCampaign(2)))
    assert play(late, (3.21 + SETTINGS.lock_grace_s, ClaimCompleted(2, 4.2, other))).claims == ()


@pytest.mark.parametrize("key", [None, MINE.key], ids=["no lock", "the key of another"])
def test_without_a_lock_its_lease_decides(key: int | None) -> None:
    """The key of another was left behind by a leader whose release knows no locks."""
    machine = standby(key)
    assert machine.rival_keys() == ()
    assert play(machine, (3.0, look(3.0)), (3.2, look(3.2))).claims == ()
    assert play(machine, (9.2, Tick())).claims == (1,)


def test_a_successor_has_a_lock_of_its_own() -> None:
    machine = standby()
    third = LeaderLivenessLock.of(THIRD.incarnation)
    play(machine, (3.0, look(3.0)), (3.2, look(3.2)), (3.3, lost_to(THIRD, third.key, 3.2)))
    assert machine.rival_keys() == (third.key,)
    assert play(machine, (3.4, look(3.4)), (3.6, look(3.6))).claims == (), "that is free which nobody waits for"


def test_a_node_declares_the_lock_that_it_holds() -> None:
    node = Play()
    node.do(OwnLivenessLockAcquired(MINE.key))
    node.want()
    node.answer()
    assert node.waiting(ClaimLeadership) == [ClaimLeadership(1, 0.0, MINE.key)]
    node.settle()
    node.do(LivenessLockLost(1.0), at=1.0)
    node.do(Tick(), at=2.0)
    assert node.waiting(RenewLeaderships)[0].lock_key is None, "without it leases alone decide, as soon as it says so"


def test_a_leader_without_its_lock_is_silent() -> None:
    """If it has not got it back in time; it answers again once it has, or has renewed its leases without one."""
    for until in ("held", "renewed"):
        node = leading()
        node.do(OwnLivenessLockAcquired(MINE.key))
        node.pass_time(SETTINGS.lease_renew_interval_s)
        node.requests.clear()
        node.do(LivenessLockLost(node.now))
        lost_at = node.now
        assert answers(node, lost_at + 0.9)
        assert not answers(node, lost_at + 1.0)
        assert not node.machine.election.is_silent(9, lost_at + 1.0), "which it does not lead"
        if until == "held":
            node.do(OwnLivenessLockAcquired(MINE.key))
        else:
            node.do(Tick())
            node.settle()
        assert answers(node, lost_at + 1.1)


def answers(node: Play, at: float) -> bool:
    """Whether the leader answers a ping then."""
    node.sent.clear()
    node.now = at
    node.receive(Ping(("a/1",), at))
    return bool(node.received(PingResponse))


def sent_to_other() -> Play:
    """A node that has sent a first subscriber to another, which leads and has a lock."""
    node = Play()
    node.store.claim(node.store.open_group(WANTED, StartingPosition.EARLIEST).group_id, OTHER, 10.0, RIVAL.key)
    node.join()
    assert node.received(LeaderConnectResponse) == [LeaderConnectResponse("a/1", 0, 1, OTHER.address)]
    assert node.machine.leaders == {}
    return node


@pytest.mark.conforms("E12", "E15")
def test_who_was_sent_to_a_dead_leader_is_admitted() -> None:
    """It was sent there before the lock was found free, and need not ask again."""
    node = sent_to_other()
    for at in (0.1, 0.3):
        node.do(look(at, connected_at=-10.0), at=at)
    node.settle()
    assert [(each.borrower_id, each.address) for each in node.received(LeaderConnectResponse)] == [("a/1", "")]


def test_who_was_sent_to_a_leader_is_soon_forgotten() -> None:
    node = sent_to_other()
    node.pass_time(3.0)
    assert node.machine.registry.take_waiters(WANTED) == ()


def test_an_unanswered_renewal_may_have_declared() -> None:
    """That the lock was lost afterwards silences the leader, too."""
    machine = Election(SETTINGS, ME.incarnation)
    play(
        machine,
        (0.0, StartCampaign(1)),
        (0.1, ClaimCompleted(1, 0.0, Leadership(1, ME, 7, 10.0))),
        (1.0, OwnLivenessLockAcquired(MINE.key)),
        (3.0, Tick()),
        (3.1, LivenessLockLost(3.1)),
        (3.2, RenewCompleted(3.0, None)),
    )
    assert not machine.is_silent(1, 4.0)
    assert machine.is_silent(1, 4.2)


@pytest.mark.conforms("E16")
def test_a_holder_comes_back_in_the_grace_of_both() -> None:
    """It may not know for as long that its leader was deposed."""
    bench = granted()
    held = bench.held()
    bench.lead(previous_leader_until=bench.now + 6.0)
    bench.pass_time(SETTINGS.reclaim_grace_s + 2.0)
    bench.join("a/2", reclaim=(held,))
    bench.pass_time(6.0, "a/2")
    assert (bench.holders(), bench.grant_id()) == ({1: "a/2"}, held.grant_id)


@pytest.mark.conforms("E7", "E16")
def test_grace_begins_when_the_deposed_lease_ends() -> None:
    """The leader before may be alive and answer pings until then."""
    bench = granted()
    bench.lead(previous_leader_until=bench.now + 6.0)
    bench.pass_time(5.9 + SETTINGS.reclaim_grace_s)
    assert bench.row().status is LendingStatus.HELD
    bench.pass_time(1.0)
    assert bench.row().status is LendingStatus.FREE


def test_settings_leave_a_leader_time_to_lock_again() -> None:
    """Whoever looks is older than that."""
    settings = replace(SETTINGS, lock_check_interval_s=1.2).check()
    assert settings.lock_recheck_delay_s < settings.lock_grace_s < settings.lock_watch_age_s < settings.lease_duration_s
