"""Locks of agents: when a consumer whose lock is free is gone, and what an agent does without its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from sublet_borrower.machine.agent import (
    Agent,
    AgentLockUnavailable,
    CloseSubscription,
    JoinGroup,
    NodeMessageReceived,
    NodesDiscovered,
    SubscriptionClosed,
)
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.election import dead_process_detectors
from sublet_leader.election.dead_process_detectors import DeadAgentDetector
from sublet_leader.group.events import AgentProcessesEnded
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    HeldGrant,
    Invalidate,
    LeaderWanted,
    Ping,
    PingResponse,
)
from sublet_storage.db.liveness_lock import (
    LivenessLockLost,
    OwnLivenessLockAcquired,
    PeerLocksChecked,
    compute_lock_key,
)
from tests.unit.leader_bench import Bench
from tests.unit.test_agent_machine import NODES, SUBSCRIPTION, TERM, Play

SETTINGS, BORROWER = LeaderSettings(), BorrowerSettings()
KEY = compute_lock_key("a")
WANTED = LeaderWanted("a/1", SUBSCRIPTION, lock_valid_s=BORROWER.lock_valid_s)
TIMELINE = 3
TERM_OF_TIMELINE = TIMELINE * TIMELINE_US + 1
HOLDERS = {"a": frozenset({"a/1"})}
PROCESS_ENDED = "evicted: its process has ended"


# --- the leader's look ------------------------------------------------------------------------------------------------


def look(
    at: float, *, is_free: bool = True, connected_at: float = 0.0, timeline: int | None = TIMELINE
) -> PeerLocksChecked:
    """It takes 10 ms."""
    key = frozenset({KEY})
    free, held = (key, frozenset[int]()) if is_free else (frozenset[int](), key)
    return PeerLocksChecked(connected_at, at, at + 0.01, free, held, timeline)


def watching(missing_at: float = 10.0) -> DeadAgentDetector:
    """A node that has seen the agent's lock held, and whose poll is missing now."""
    watch = DeadAgentDetector(SETTINGS)
    watch.note_message("a", WANTED, 9.0)
    watch.check(look(9.1, is_free=False))
    watch.note_poll("a", False, missing_at)
    return watch


def gone(watch: DeadAgentDetector, *looks: PeerLocksChecked) -> list[bool]:
    """For each of the looks, whether the agent counts as gone by then."""
    return ["a" in watch.check(each) for each in looks]


def informed() -> DeadAgentDetector:
    """A node that knows from a former leader that the lock was held when the row was granted."""
    watch = DeadAgentDetector(SETTINGS)
    watch.watch(HOLDERS, TERM_OF_TIMELINE, 10.0)
    return watch


def test_a_lock_is_free_for_all_of_the_grace() -> None:
    """On one connection, which has seen it held itself: after a failover the database may be another."""
    assert gone(watching(), look(10.1), look(10.5), look(11.1), look(11.2)) == [False, False, False, True]
    assert gone(watching(10.0), look(10.0), look(11.02)) == [False, True]
    for timeline in (TIMELINE, None):
        later = [look(at, connected_at=11.0, timeline=timeline) for at in (13.1, 14.2, 15.4)]
        assert gone(watching(), look(10.1), *later) == [False] * 4


def test_an_agent_that_polls_is_not_gone() -> None:
    watch = watching()
    gone(watch, look(10.1))
    for at in (10.5, 10.6):
        watch.note_poll("a", True, at)
    assert gone(watch, look(11.2), look(13.0)) == [False, False]
    assert watch.keys() == ()


def test_a_message_begins_the_grace_anew() -> None:
    """Also for a look that was under way by then."""
    watch = watching()
    gone(watch, look(10.1))
    watch.note_message("a", Ping(("a/1",), 0.0), 10.9)
    assert gone(watch, look(10.85), look(11.5), look(11.9), look(12.6)) == [False, False, False, True]


def test_a_lock_never_seen_held_means_nothing() -> None:
    """The agent's database may be another one, or a standby."""
    watch = DeadAgentDetector(SETTINGS)
    watch.note_message("a", WANTED, 9.0)
    watch.check(look(9.1))
    watch.note_poll("a", False, 10.0)
    assert gone(watch, look(10.1), look(11.2), look(12.4)) == [False] * 3


def test_a_watch_ends_with_the_eviction_time() -> None:
    watch = watching()
    watch.expire(10.0 + SETTINGS.eviction_timeout_s)
    assert watch.keys() == ()
    watch.note_message("b", WANTED, 20.0)
    assert watch.keys() == (compute_lock_key("b"),)
    watch.expire(20.0 + SETTINGS.eviction_timeout_s)
    assert watch.keys() == ()


def test_a_lock_that_is_not_declared_is_not_watched() -> None:
    watch = DeadAgentDetector(SETTINGS)
    watch.note_message("a", replace(WANTED, lock_valid_s=0.0), 9.0)
    assert watch.keys() == ()
    watch = informed()
    watch.note_message("a", Ping(("a/1",), 0.0), 10.1)
    assert watch.keys() == (KEY,), "once, as it was"


def test_a_lock_seen_held_is_not_checked_again() -> None:
    watch = watching()
    watch.note_poll("a", True, 10.1)
    watch.note_message("a", WANTED, 10.2)
    assert watch.keys() == ()


@pytest.mark.conforms("E39")
def test_the_lock_of_a_gone_agent_is_forgotten() -> None:
    """A new connection has to see held only what may live; one that comes back declares its lock anew."""
    watch = watching()
    assert gone(watch, look(10.1), look(11.2)) == [False, True]
    gone(watch, look(12.0, connected_at=12.0))
    assert watch.keys() == ()
    watch.note_message("a", WANTED, 12.1)
    assert watch.keys() == (KEY,)


@pytest.mark.conforms("X4")
def test_locks_to_be_seen_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest count: others were checked before, or declare what nobody holds."""
    monkeypatch.setattr(dead_process_detectors, "MAX_SUBSCRIBERS", 2)
    watch = DeadAgentDetector(SETTINGS)
    for agent in ("a", "b", "b", "c"):
        watch.note_message(agent, WANTED, 9.0)
    assert watch.keys() == (compute_lock_key("b"), compute_lock_key("c"))


def test_a_former_leaders_word_counts() -> None:
    """Where this connection has never seen the lock held."""
    assert gone(informed(), look(9.9), look(10.1), look(10.95), look(11.2)) == [False, False, False, True]


def test_a_lock_free_before_the_watch_began_is_new() -> None:
    """Between two looks it may have been held, and the row granted."""
    watch = watching()
    gone(watch, look(10.1))
    watch.watch(HOLDERS, TERM_OF_TIMELINE, 10.9)
    assert gone(watch, look(11.2), look(11.9), look(12.3)) == [False, False, True]


@pytest.mark.parametrize("timeline", [TIMELINE - 1, None])
def test_a_former_leaders_word_is_of_its_timeline(timeline: int | None) -> None:
    assert gone(informed(), *(look(at, timeline=timeline) for at in (10.1, 11.2, 12.4))) == [False] * 3


SUCCESSOR = replace(WANTED, borrower_id="a/2", predecessor="a/1")


@pytest.mark.conforms("E16")
@pytest.mark.parametrize("made", [informed, watching])
@pytest.mark.parametrize("comes", [WANTED, SUCCESSOR, Ping(("a/2",), 0.0), "poll"])
def test_who_comes_and_dies_at_once_is_found(
    made: Callable[[], DeadAgentDetector], comes: LeaderWanted | Ping | str
) -> None:
    """Before anybody has seen its lock held, or seen it held again: the grace begins anew."""
    watch = made()
    gone(watch, look(10.1))
    if isinstance(comes, str):
        watch.note_poll("a", True, 10.9)
        watch.note_poll("a", False, 10.95)
    else:
        watch.note_message("a", comes, 10.9)
    assert gone(watch, look(11.2), look(11.9), look(12.3)) == [False, False, True]


@pytest.mark.parametrize(
    "comes",
    [replace(SUCCESSOR, lock_valid_s=0.0), replace(SUCCESSOR, borrower_id="a/3", predecessor="a/2")],
    ids=["lost", "acquired again"],
)
def test_who_comes_with_another_lock_is_not_watched(comes: LeaderWanted) -> None:
    """It may be that of another server, and the agent be well."""
    watch = informed()
    gone(watch, look(10.1))
    watch.note_message("a", comes, 10.9)
    assert gone(watch, look(11.2), look(12.4)) == [False, False]


# --- the leader of a group --------------------------------------------------------------------------------------------


def declare(bench: Bench, lock_valid_s: float) -> Bench:
    """A stream is granted to a/1."""
    bench.join("a/1", lock_valid_s=lock_valid_s)
    bench.pass_time(1.0, "a/1")
    bench.confirm()
    assert bench.holders() == {1: "a/1"}
    return bench


def declared(lock_valid_s: float = BORROWER.lock_valid_s) -> Bench:
    """A stream granted to a/1, whose ping was just answered, and b/1 waits."""
    bench = declare(Bench(), lock_valid_s)
    bench.join("b/1", lock_valid_s=BORROWER.lock_valid_s)
    bench.receive(Ping(("a/1",), 0.0), "a")
    return bench


@pytest.mark.conforms("E7")
def test_streams_of_a_gone_agent_move_at_once() -> None:
    """The validity of its grants counts no more; the move is a forced one."""
    bench = declared()
    bench.give(AgentProcessesEnded(frozenset({"a"})))
    bench.pass_time(0.3, "b/1")
    assert (bench.holders(), [moved.reason for moved in bench.forced()]) == ({1: "b/1"}, [PROCESS_ENDED])
    assert [(m.borrower_id, m.reason) for m in bench.received(Invalidate, "a")] == [("a/1", BorrowerEndReason.RETRY)]


@pytest.mark.parametrize(
    ("lock_valid_s", "timeline"),
    [(0.0, None), (0.9, None), (BORROWER.lock_valid_s, TIMELINE)],
    ids=["none declared", "valid for too long", "another timeline"],
)
def test_an_agent_that_may_go_on_is_not_gone(lock_valid_s: float, timeline: int | None) -> None:
    """It goes on for longer than the grace lasts by any clock, or the lock that was looked at is another server's."""
    bench = declared(lock_valid_s)
    bench.give(AgentProcessesEnded(frozenset({"a"}), timeline))
    bench.pass_time(0.3, "b/1")
    assert (bench.holders(), bench.leader.members.get("a/1") is None) == ({1: "a/1"}, False)


def taken_over(lock_valid_s: float = BORROWER.lock_valid_s, *, is_held: bool = True) -> Bench:
    """A stream granted to a/1, whose lock was held, by a leader whose successor may last have answered its ping up to
    5 s from now; b/1 waits."""
    bench = Bench()
    bench.store.timeline = TIMELINE
    bench.lead()
    if is_held:
        bench.store.locks.add(KEY)
    declare(bench, lock_valid_s)
    bench.store.locks.clear()
    bench.lead(previous_leader_until=bench.now + 5.0)
    bench.join("b/1")
    return bench


@pytest.mark.conforms("E7", "E16")
def test_a_new_leader_takes_streams_of_a_gone_agent() -> None:
    """Long before its reclaim grace ends, however long grants of the leader before are valid."""
    bench = taken_over()
    assert bench.leader.streams.absent_holders() == {"a": {"a/1"}}
    bench.give(AgentProcessesEnded(frozenset({"c"}), TIMELINE))
    bench.pass_time(0.3, "b/1")
    assert bench.holders() == {1: "a/1"}, "another's process has ended"
    bench.give(AgentProcessesEnded(frozenset({"a"}), TIMELINE))
    bench.pass_time(0.3, "b/1")
    assert (bench.holders(), [moved.reason for moved in bench.forced()]) == ({1: "b/1"}, [PROCESS_ENDED])


@pytest.mark.conforms("E7")
@pytest.mark.parametrize(
    ("lock_valid_s", "is_held", "timeline"),
    [
        (0.0, True, TIMELINE),
        (0.9, True, TIMELINE),
        (BORROWER.lock_valid_s, False, TIMELINE),
        (BORROWER.lock_valid_s, True, TIMELINE - 1),
        (BORROWER.lock_valid_s, True, None),
    ],
    ids=["none declared", "valid for too long", "held elsewhere", "looked at another timeline", "timeline not known"],
)
def test_other_holders_have_the_reclaim_grace(lock_valid_s: float, is_held: bool, timeline: int | None) -> None:
    bench = taken_over(lock_valid_s, is_held=is_held)
    assert bool(bench.leader.streams.absent_holders()) is (is_held and lock_valid_s == BORROWER.lock_valid_s)
    bench.give(AgentProcessesEnded(frozenset({"a"}), timeline))
    bench.pass_time(9.9, "b/1")
    assert bench.holders() == {1: "a/1"}
    bench.pass_time(20.0, "b/1")
    assert bench.holders() == {1: "b/1"}


@pytest.mark.conforms("E7", "E16")
def test_a_grant_of_a_former_timeline_stays_valid() -> None:
    """Its leader there may have granted it to another, which goes on for a while."""
    bench = taken_over()
    bench.store.timeline += 1
    bench.lead()
    bench.join("b/1")
    bench.join("a/2", reclaim=(bench.held(),), borrower_number=2, lock_valid_s=BORROWER.lock_valid_s)
    bench.settle()
    bench.give(AgentProcessesEnded(frozenset({"a"}), TIMELINE + 1))
    assert bench.leader.members.get("a/2") is None
    bench.pass_time(SETTINGS.lease_duration_s + SETTINGS.grant_validity_s - 0.1, "b/1")
    assert bench.holders() == {1: "a/2"}
    bench.pass_time(1.0, "b/1")
    assert bench.holders() == {1: "b/1"}


@pytest.mark.conforms("E16")
def test_what_is_reclaimed_is_not_taken() -> None:
    """By an undeclared borrower of the agent, as it has lost its lock."""
    bench = taken_over()
    held = HeldGrant(1, bench.row(1).grant_id, 0)
    bench.join("a/2", predecessor="a/1", reclaim=(held,), borrower_number=2)
    assert bench.leader.streams.absent_holders() == {}
    bench.give(AgentProcessesEnded(frozenset({"a"}), TIMELINE))
    bench.settle()
    assert (bench.holders(), bench.row(1).lock_valid_s) == ({1: "a/2"}, 0.0)


# --- the agent --------------------------------------------------------------------------------------------------------


class LockPlay(Play):
    """An agent that awaits its lock."""

    def __init__(self) -> None:
        super().__init__(())
        self.machine = Agent("a", BORROWER, awaits_lock=True)
        self.do(NodesDiscovered(NODES))

    def see_lock(self, at: float) -> None:
        self.do(PeerLocksChecked(0.0, at, at + 0.01), at + 0.01)

    def may(self, at: float, grant_id: int = 50) -> bool:
        may = {ask(1, 5, grant_id, at) for ask in (self.machine.may_start_call, self.machine.may_continue)}
        assert len(may) == 1
        return may.pop()


def holding() -> LockPlay:
    """Its lock was seen at 1.0; it has stream 5 under grant 50, and a ping answered then."""
    play = LockPlay()
    play.do(OwnLivenessLockAcquired(KEY), 0.5)
    play.do(JoinGroup(1, SUBSCRIPTION))
    play.connect(1, 1.0)
    play.grant(1, 5)
    play.see_lock(1.0)
    return play


def test_the_first_subscription_waits_for_the_lock() -> None:
    """And declares it; meanwhile nodes are looked up."""
    play = LockPlay()
    play.do(JoinGroup(1, SUBSCRIPTION))
    assert (play.wanted(), play.last.needs_discovery) == ([], True)
    play.see_lock(1.0)
    assert play.wanted() == []
    play.do(OwnLivenessLockAcquired(KEY))
    assert [message.lock_valid_s for _, message in play.wanted()] == [BORROWER.lock_valid_s]


def test_without_a_lock_nothing_is_declared() -> None:
    """Its calls go by its pings alone."""
    play = LockPlay()
    play.do(JoinGroup(1, SUBSCRIPTION))
    play.do(AgentLockUnavailable(), 1.0)
    assert [message.lock_valid_s for _, message in play.wanted()] == [0.0]
    play.connect(1)
    play.grant(1, 5)
    assert play.may(8.0)


def test_a_subscription_that_waits_can_be_closed() -> None:
    play = LockPlay()
    play.do(JoinGroup(1, SUBSCRIPTION))
    play.do(CloseSubscription(1))
    assert play.last.updates == (SubscriptionClosed(1, BorrowerEndReason.DONE, "left before it began"),)
    play.do(OwnLivenessLockAcquired(KEY))
    assert play.wanted() == []


@pytest.mark.conforms("E7")
def test_calls_begin_only_soon_after_a_lock_check() -> None:
    play = holding()
    assert play.may(1.69)
    assert not play.may(1.69, grant_id=49)
    assert not play.may(1.7), "its ping is valid for 8.5 s, its lock is not"
    play.see_lock(1.8)
    assert play.may(2.49)


@pytest.mark.conforms("E7")
def test_who_has_lost_its_lock_needs_a_leaders_answer() -> None:
    """To a new borrower: pings of the former one count no more, though the lock is held again."""
    play = holding()
    play.do(LivenessLockLost(1.1), 1.2)
    [(_, undeclared)] = play.wanted()
    assert (undeclared.lock_valid_s, undeclared.predecessor, len(undeclared.reclaim)) == (0.0, "a/1", 1)
    assert play.may(1.69)
    assert not play.may(1.7)
    play.do(OwnLivenessLockAcquired(KEY), 1.75)
    [(_, declared)] = play.wanted()
    assert (declared.lock_valid_s, declared.predecessor) == (BORROWER.lock_valid_s, "a/2")
    play.see_lock(1.8)
    play.do(NodeMessageReceived("n1:1", PingResponse("a/1", TERM, 1.8, 8.5)))
    assert not play.may(1.9)
    play.connect(1, 1.9)
    play.grant(1, 5)
    assert play.may(1.95)


def test_settings_of_both_sides_fit() -> None:
    assert BORROWER.lock_valid_s <= SETTINGS.max_lock_valid_s
    longest_s = SETTINGS.max_lock_valid_s
    short = [each for each in (0.0, 0.001, longest_s, longest_s + 0.001) if SETTINGS.is_lock_short(each)]
    assert short == [0.001, longest_s]
    assert dataclasses.replace(SETTINGS, reconnect_grace_s=0.5).max_lock_valid_s < BORROWER.lock_valid_s
