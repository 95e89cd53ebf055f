"""A node: the first subscriber's flow, who waits, who is sent elsewhere, and how it lets go of what it leads."""

from __future__ import annotations

from typing import TypeVar

import pytest
from msgspec.structs import replace

from sublet_leader.group.events import BorrowerMessageReceived, ForcedRevokeRequested, GroupOutcome
from sublet_leader.group.events import Event as GroupEvent
from sublet_leader.group.machine import GroupLeader
from sublet_leader.group.stream_table import StreamEntry
from sublet_leader.group.watch_events import GroupWatchEvent
from sublet_leader.node import group_registry
from sublet_leader.node.database_request_executor import execute
from sublet_leader.node.events import (
    AgentMessageReceived,
    AgentsExpired,
    ClaimLeadership,
    CommitWrites,
    DatabaseRequest,
    FindOrCreateGroup,
    GroupFoundOrCreated,
    GroupLeaderEvent,
    GroupLoadCompleted,
    LeaderLookupCompleted,
    LoadGroup,
    LookUpLeader,
    NodeDesiredStateRead,
    NodeEvent,
    NodeOutcome,
    NodeStarted,
    ReleaseLeaderships,
    RenewLeaderships,
    ShutdownRequested,
    StreamsChanged,
    WatcherLeaderQueryReceived,
    WritesCommitFailed,
    WritesCommitted,
)
from sublet_leader.node.group_event_publisher import MAX_QUERIES_OF_CALLER
from sublet_leader.node.machine import Node
from sublet_leader.node.pending_writes import (
    MAX_CHANGES_PER_COMMIT,
    MAX_SYNCS_PER_COMMIT,
    PendingWrites,
    take_batch,
)
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import PARTIAL_TIMEOUT_S
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Grant,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    Revoke,
    Revoked,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from sublet_storage.db.liveness_lock import PeerLocksChecked, compute_lock_key
from sublet_storage.groups.model.records import (
    AdvancePosition,
    GroupOptions,
    GroupWrites,
    Leadership,
    LendingStatus,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.support.memory_store import groups
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore

SUBSCRIPTION = "$share/g/#"
WANTED = Subscription.parse(SUBSCRIPTION)
OTHER = NodeIncarnation("n2", "n2#1", "n2:1")
SETTINGS = LeaderSettings()
M = TypeVar("M")
R = TypeVar("R")


class Play:
    """A node and the memory twin; requests wait until `answer` executes the first of them."""

    def __init__(self, name: str = "n1", store: MemoryGroupStore | None = None, shards: int = 2) -> None:
        self.now = 0.0
        streams = MemoryCatalogue()
        streams.add_space(shards=shards)
        for stream_id in streams.streams:
            streams.append(stream_id, 100)
        self.store = store or self.new_store(streams)
        self.ref = NodeIncarnation(name, f"{name}#1", f"{name}:1")
        self.machine = Node(self.ref, SETTINGS)
        self.requests: list[DatabaseRequest] = []
        self.sent: list[tuple[str, ToBorrower]] = []
        self.stories: list[str] = []
        self.reported: list[GroupWatchEvent] = []
        self.last = NodeOutcome()

    def new_store(self, streams: MemoryCatalogue) -> MemoryGroupStore:
        return MemoryGroupStore(streams, lambda: 1_700_000_000_000_000 + round(self.now * 1_000_000))

    def do(self, event: NodeEvent, at: float | None = None) -> NodeOutcome:
        self.now = self.now if at is None else at
        self.last = self.machine.decide(event, self.now)
        self.requests += self.last.requests
        self.sent += self.last.sends
        self.stories += self.last.invariant_violations
        self.reported += self.last.history
        return self.last

    def receive(self, message: ToLeader, agent: str = "a") -> None:
        self.do(AgentMessageReceived(agent, message))

    def want(self, borrower_id: str = "a/1", **wanted: object) -> None:
        agent = borrower_id.partition("/")[0]
        message = LeaderWanted(borrower_id, SUBSCRIPTION, starting_position="earliest")
        self.receive(replace(message, **wanted), agent)

    def answer(self) -> NodeOutcome:
        """Execute the first request that waits."""
        return self.do(self.execute(self.requests.pop(0)))

    def execute(self, request: DatabaseRequest) -> NodeEvent:
        """Return what the database answers."""
        return execute(request, self.store, self.ref, SETTINGS.lease_duration_s)

    def settle(self) -> None:
        while self.requests:
            self.answer()

    def join(self, borrower_id: str = "a/1", **wanted: object) -> None:
        """Ask for the leader, and let the database answer all."""
        self.want(borrower_id, **wanted)
        self.settle()

    def shut_down(self) -> None:
        self.do(ShutdownRequested(self.now + 5.0))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, waking when it wants to, answering at once."""
        end = self.now + seconds
        while self.now < end:
            wake = min(self.last.wake_at, end)
            self.do(Tick(), min(end, max(wake, self.now + 0.0005)))
            self.settle()

    def granted(self) -> None:
        """A first subscriber has its streams."""
        self.join()
        self.pass_time(0.3)
        for stream_id, row in self.store.rows(1).items():
            self.progress(stream_id, 0, row.grant_id)
        self.settle()
        self.sent.clear()

    def progress(self, stream_id: int, position: int, grant_id: int | None = None, *, final: bool = False) -> None:
        grant = self.store.rows(1)[stream_id].grant_id if grant_id is None else grant_id
        term = self.machine.leaders[1].term if 1 in self.machine.leaders else 0
        self.receive(UpdateProgress("a/1", term, (StreamProgress(stream_id, grant, position, final),)))

    def received(self, kind: type[M]) -> list[M]:
        """Messages of one type sent since the last look at any."""
        said: list[object] = [m for _, m in self.sent]
        self.sent.clear()
        return [m for m in said if isinstance(m, kind)]

    def admitted(self) -> list[str]:
        """Who was sent to a leader since the last look, to this node or another."""
        return [message.borrower_id for message in self.received(LeaderConnectResponse)]

    def answers(self) -> list[tuple[str, object]]:
        """Who was admitted to which group since the last look, or why it was not."""
        sent = [m for _, m in self.sent if isinstance(m, Invalidate | LeaderConnectResponse)]
        self.sent.clear()
        return [(m.borrower_id, m.reason if isinstance(m, Invalidate) else m.group_id) for m in sent]

    def waiting(self, kind: type[R]) -> list[R]:
        return [r for r in self.requests if isinstance(r, kind)]

    def take(self, kind: type[R]) -> R:
        """Take the one request of that type, which nobody executes, nor any other."""
        (request,) = self.waiting(kind)
        self.requests.clear()
        return request


def leading() -> Play:
    """A node that leads the group 1, whose first subscriber has its streams."""
    play = Play()
    play.granted()
    return play


def writing() -> tuple[Play, CommitWrites]:
    """Progress has come, and its commit is under way."""
    play = leading()
    play.progress(1, 5)
    return play, play.take(CommitWrites)


# --- finding and making leaders ---------------------------------------------------------------------------------------


@pytest.mark.conforms("E1")
def test_a_first_subscriber_makes_a_leader_appear() -> None:
    play = Play()
    play.want()
    assert play.requests == [FindOrCreateGroup(WANTED, StartingPosition.EARLIEST)]
    play.answer()
    assert play.requests == [ClaimLeadership(1, 0.0)]
    play.answer()
    assert ([type(r) for r in play.requests], play.sent) == ([LoadGroup], [])
    play.answer()
    assert play.answers() == [("a/1", 1)]
    play.settle()
    play.pass_time(0.3)
    assert {g.stream_id for g in play.received(Grant)} == {1, 2}


def test_who_asks_meanwhile_is_admitted_once() -> None:
    play = Play()
    for borrower_id in ("a/1", "b/1", "a/1"):
        play.want(borrower_id)
    assert len(play.waiting(FindOrCreateGroup)) == 1
    play.settle()
    assert play.admitted() == ["a/1", "b/1"]
    play.want("c/1")
    assert play.admitted() == ["c/1"], "at once: the leader is here"


@pytest.mark.conforms("X4")
def test_groups_opened_at_a_time_are_bounded() -> None:
    """Of one caller, which asks again for the rest; others have room."""
    play = Play()
    for number in range(MAX_QUERIES_OF_CALLER + 5):
        play.want(f"x/{number}", subscription=f"$share/own/x/{number}")
    play.want("a/1")
    assert len(play.waiting(FindOrCreateGroup)) == MAX_QUERIES_OF_CALLER + 1
    assert len(play.machine.registry) == MAX_QUERIES_OF_CALLER + 1
    play.settle()
    assert len(play.received(LeaderConnectResponse)) == MAX_QUERIES_OF_CALLER + 1
    play.join("x/54", subscription="$share/own/x/54")
    assert play.admitted() == ["x/54"]


@pytest.mark.conforms("X4")
def test_sessions_of_one_caller_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have room, and so has it again once its sessions are gone."""
    monkeypatch.setattr(group_registry, "MAX_BORROWERS_OF_PRINCIPAL", 3)
    play = Play()
    for borrower_id in ("a/1", "a/2", "a/2", "a/3", "a/4", "b/1"):
        play.want(borrower_id)
    assert play.answers() == [("a/4", BorrowerEndReason.DENIED)]
    play.settle()
    assert play.admitted() == ["a/1", "a/2", "a/3", "b/1"]
    play.pass_time(3 * SETTINGS.eviction_timeout_s)  # those that are silent are evicted, and then forgotten
    play.sent.clear()
    play.want("a/5")
    assert play.admitted() == ["a/5"]


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("state", ["waiting", "led", "gone"])
def test_who_is_replaced_soon_takes_no_room(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Nor does what is waited for by an agent that is gone."""
    monkeypatch.setattr(group_registry, "MAX_BORROWERS_OF_PRINCIPAL", 2)
    play = Play()
    for number in range(1, 6):
        play.want(f"a/{number}", predecessor=None if state == "gone" else f"a/{number - 1}")
        if state == "gone":
            play.do(AgentsExpired(frozenset({"a"})))
        elif state == "led":
            play.settle()
        play.do(Tick(), play.now + 1.1)
    assert play.received(Invalidate) == []


@pytest.mark.conforms("X4")
def test_who_is_sent_on_soon_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_registry, "MAX_BORROWERS_OF_PRINCIPAL", 1)
    play = Play()
    play.store.claim(play.store.open_group(WANTED).group_id, OTHER, 60.0)
    play.join("a/1")
    assert play.admitted() == ["a/1"]
    for borrower_id, answers in (("a/2", [("a/2", BorrowerEndReason.DENIED)]), ("a/3", [])):
        play.want(borrower_id)
        assert play.answers() == answers
        play.do(Tick(), group_registry.REDIRECT_EXPIRY_S)


@pytest.mark.conforms("X4")
def test_a_borrower_waits_for_its_last_group() -> None:
    """So that who asks for ever new groups takes no more room; a disconnect from no leader, and nothing else, ends its
    own wait."""
    play = Play()
    for number in range(3):
        play.want("a/1", subscription=f"$share/g{number}/#")
        play.want("b/1", subscription=f"$share/g{number}/#")
    play.receive(Disconnect("b/1", 0, ()), "b")
    play.receive(RevokeFinished("a/1", 0, 1, 1))
    play.receive(Disconnect("a/1", 1, ()))  # from a leader before
    play.settle()
    assert [(one.borrower_id, one.group_id) for one in play.received(LeaderConnectResponse)] == [("a/1", 3)]


@pytest.mark.parametrize("how", ["its time is over", "its agent has gone"])
@pytest.mark.conforms("X4")
def test_parts_end_without_anybody_elses_help(how: str) -> None:
    """What comes after that is all there is."""
    play = Play()
    play.want("b/1", reclaim=(HeldGrant(98, 1, 1),), more=True)
    assert play.last.wake_at == PARTIAL_TIMEOUT_S
    if how == "its agent has gone":
        play.do(AgentsExpired(frozenset({"b"})))
    else:
        play.do(Tick(), PARTIAL_TIMEOUT_S)
    assert play.last.wake_at == float("inf")
    play.join("b/1", reclaim=(HeldGrant(99, 1, 1),))
    assert [message.stream_id for message in play.received(Revoked)] == [99]


@pytest.mark.conforms("X4")
def test_parts_under_anothers_id_are_not_stored() -> None:
    play, streams = Play(), (StreamProgress(1, 1, 1, True),)
    play.receive(Disconnect("a/1", 1, streams, more=True), "x")
    assert play.answers() == [("a/1", BorrowerEndReason.DENIED)]
    play.receive(Disconnect("a/1", 1, streams, more=True))
    assert play.answers() == [], "its own waits for the last part"


@pytest.mark.parametrize(("more_s", "admitted"), [(0.0, ["a/1", "b/1"]), (0.1, ["b/1"])])
def test_who_fell_silent_by_then_is_not_admitted(more_s: float, admitted: list[str]) -> None:
    play = Play()
    play.want("a/1")
    play.do(Tick(), SETTINGS.ping_timeout_s + more_s)
    play.join("b/1")
    assert play.admitted() == admitted


@pytest.mark.conforms("E7", "E16")
def test_who_asked_before_the_claim_and_died_is_found() -> None:
    """Its lock was never seen held by this node, which makes it a member though it is gone."""
    before = Play()
    before.store.locks.add(compute_lock_key("a"))
    before.join(lock_valid_s=0.7)
    before.pass_time(0.3)
    held = tuple(HeldGrant(stream_id, row.grant_id, 0) for stream_id, row in before.store.rows(1).items())
    before.store.locks.clear()
    play = Play("n2", before.store)
    play.now = before.now = before.now + SETTINGS.lease_duration_s
    play.join("a/2", predecessor="a/1", reclaim=held, borrower_number=2, lock_valid_s=0.7)
    assert {row.borrower_id for row in play.store.rows(1).values()} == {"a/2"}
    play.want("b/1")
    for seconds in (0.1, 0.1 + SETTINGS.reconnect_grace_s):
        play.pass_time(seconds)
        play.do(PeerLocksChecked(-9.0, play.now, play.now, frozenset(play.machine.lock_keys()), timeline=0))
        play.settle()
    play.pass_time(0.3)
    assert {row.borrower_id for row in play.store.rows(1).values()} == {"b/1"}


@pytest.mark.parametrize(
    ("node", "remaining_s", "is_sent_on"), [(OTHER, 0.0, False), (OTHER, 0.1, True), (Play().ref, 0.1, False)]
)
def test_nobody_is_sent_to_a_former_leader(node: NodeIncarnation, remaining_s: float, is_sent_on: bool) -> None:
    """Neither to this node, which does not lead any more."""
    play = Play()
    play.want("a/1")
    play.do(WatcherLeaderQueryReceived("w.1", WANTED, "user"))
    play.do(LeaderLookupCompleted(play.take(LookUpLeader), None, Leadership(1, node, 1, remaining_s)))
    assert bool(play.admitted()) is is_sent_on


def test_a_group_that_is_loaded_too_late_is_not_led() -> None:
    """The lease is over by then."""
    play = Play()
    play.want()
    while not play.waiting(LoadGroup):
        play.answer()
    play.do(play.execute(play.take(LoadGroup)), play.now + SETTINGS.lease_duration_s)
    assert play.machine.leaders == {}


def test_a_group_loaded_too_late_is_claimed_again() -> None:
    """A renewal's answer behind the load would have kept the trust: nobody would load the group again."""
    play = Play()
    play.want()
    while not play.waiting(LoadGroup):
        play.answer()
    (load,) = play.waiting(LoadGroup)
    play.requests.clear()
    play.do(Tick(), 3.0)
    renewed = play.execute(play.take(RenewLeaderships))
    play.do(play.execute(load), 9.2)
    play.do(renewed, 9.2)
    play.settle()
    play.pass_time(1.0)
    assert list(play.machine.leaders) == [1]


def test_who_asks_again_is_served() -> None:
    play = Play()
    play.want()
    play.do(GroupFoundOrCreated(play.take(FindOrCreateGroup), None, "the database did not answer"))
    assert play.sent == []
    play.want()
    play.answer()
    play.answer()
    play.do(GroupLoadCompleted(play.take(LoadGroup), None))
    assert len(play.waiting(ReleaseLeaderships)) == 1, "the claim is given back"
    play.settle()
    play.want()
    play.now = 1.0
    play.settle()
    assert play.admitted() == ["a/1"]


@pytest.mark.conforms("E2")
def test_an_undeclared_queue_is_refused() -> None:
    play = Play()
    play.join(subscription="$queue/g/#")
    [reported] = play.received(Invalidate)
    assert reported.reason is BorrowerEndReason.DENIED
    assert "declared before it is used" in reported.detail
    play.store.declare_group(Subscription.parse("$queue/g/#"))
    play.join("b/1", subscription="$queue/g/#")
    assert play.admitted() == ["b/1"]


@pytest.mark.conforms("E24", "R11")
@pytest.mark.parametrize(
    "wanted", [{"subscription": "x"}, {"subscription": "$share/g/a#"}, {"starting_position": "yesterday"}], ids=str
)
def test_a_malformed_request_is_denied(wanted: dict[str, object]) -> None:
    play = Play()
    play.want(**wanted)  # type: ignore[arg-type]
    [reported] = play.received(Invalidate)
    assert reported.reason is BorrowerEndReason.DENIED
    assert reported.detail
    assert play.requests == []


@pytest.mark.conforms("X5")
def test_a_borrower_is_named_by_its_agent_only() -> None:
    """Also one that is not there yet: whoever came first with the next name would keep its agent out."""
    play = leading()
    for taken in ("a/1", "a/2", "a", "evil"):
        play.receive(LeaderWanted(taken, SUBSCRIPTION, predecessor="a/1"), "evil")
        ((to, refusal),) = play.sent
        assert isinstance(refusal, Invalidate)
        assert (to, refusal.borrower_id, refusal.reason) == ("evil", taken, BorrowerEndReason.DENIED)
        assert "evil/" in refusal.detail
        play.sent.clear()
    play.want("a/2", predecessor="a/1")
    assert play.admitted() == ["a/2"]


@pytest.mark.conforms("E10", "X4", "X5")
def test_agents_do_not_meet_over_borrower_ids() -> None:
    play = leading()
    play.receive(LeaderWanted("a/1", "$share/other/#"), "evil")
    play.settle()
    play.sent.clear()
    play.receive(Ping(("a/1",), 1.0), "a")
    assert [m.term for m in play.received(PingResponse)] == [play.machine.leaders[1].term]
    play.receive(Ping(("a/1",), 1.0), "third")
    assert [m for to, m in play.sent if to == "third"] == []
    assert play.machine.foreign_pings == 1


# --- deleted groups ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E23", "X4")
def test_a_deleted_group_is_not_made_again() -> None:
    """Another group's id leads nowhere, too."""
    play = Play()
    secret = play.store.open_group(Subscription.parse("$share/secret/#"))
    for group_id in (9, secret.group_id):
        play.want(group_id=group_id)
        assert play.requests == [FindOrCreateGroup(WANTED, StartingPosition.EARLIEST, group_id)]
        play.settle()
        assert play.answers() == [("a/1", BorrowerEndReason.DELETED)]
        assert (play.store.find_live_group(WANTED), play.machine.leaders) == (None, {})
    play.join("b/1")
    assert play.answers() == [("b/1", 2)]


@pytest.mark.conforms("E23")
def test_members_of_a_deleted_group_are_notified() -> None:
    """Those who come anew get a new group."""
    play = leading()
    play.store.delete_group(WANTED)
    play.progress(1, 5, 1)
    play.pass_time(4.0)
    assert play.machine.leaders == {}
    play.sent.clear()
    play.want("a/2", group_id=1, predecessor="a/1")
    play.want("b/1")
    play.pass_time(2.0)
    assert play.answers() == [("a/2", BorrowerEndReason.DELETED), ("b/1", 2)]
    assert set(play.machine.leaders) == {2}
    play.want("c/1", group_id=1)
    assert play.answers() == [("c/1", BorrowerEndReason.DELETED)]


@pytest.mark.conforms("E23")
def test_who_knows_a_newer_group_is_admitted() -> None:
    play = leading()
    play.store.delete_group(WANTED)
    assert play.store.open_group(WANTED).group_id == 2
    play.want("b/1", group_id=2)
    assert play.sent == []
    play.settle()
    assert play.answers() == [("b/1", 2)]


@pytest.mark.conforms("X4")
def test_one_group_too_many_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its borrower is sent nothing, and repeats its request."""
    play = Play()
    wanted = AgentMessageReceived("a", LeaderWanted("a/1", SUBSCRIPTION), "user:a")
    monkeypatch.setattr(groups, "MAX_GROUPS_PER_MINUTE", 0)
    play.do(wanted)
    limited = play.execute(play.requests.pop(0))
    assert isinstance(limited, GroupFoundOrCreated)
    assert (limited.is_limited, limited.is_final) == (True, False)
    play.do(limited)
    play.settle()
    assert (play.sent, play.store.find_live_group(WANTED), len(play.machine.registry)) == ([], None, 0)
    monkeypatch.undo()
    play.do(wanted)
    play.settle()
    assert play.answers() == [("a/1", 1)]


def fail_over(play: Play, first: str) -> None:
    """To a server that had not got the group yet: that of the subscription `first` has the id 1 there."""
    play.store = play.new_store(play.store.streams)
    play.store.timeline = 1
    assert play.store.open_group(Subscription.parse(first)).group_id == 1
    play.pass_time(SETTINGS.lease_duration_s)
    play.sent.clear()


@pytest.mark.conforms("E23")
def test_a_lost_group_is_over_for_its_members() -> None:
    """A failover lost it, and another group has its id now."""
    play = leading()
    fail_over(play, "$share/secret/#")
    play.want("a/2", group_id=1, predecessor="a/1")
    play.want("b/1")
    play.pass_time(1.0)
    assert play.answers() == [("a/2", BorrowerEndReason.DELETED), ("b/1", 2)]


@pytest.mark.conforms("E23")
def test_a_lost_group_is_over_though_its_id_is_higher() -> None:
    """Higher than that of the group that has its name now."""
    play = Play()
    play.store.open_group(Subscription.parse("$share/other/#"))
    play.join()
    assert play.answers() == [("a/1", 2)]
    fail_over(play, SUBSCRIPTION)
    play.want("b/1")
    play.pass_time(1.0)
    play.sent.clear()
    play.want("a/2", group_id=2, predecessor="a/1")
    play.want("a/3", group_id=3)
    play.want("c/1")
    play.pass_time(1.0)
    assert dict(play.answers()) == {"a/2": BorrowerEndReason.DELETED, "a/3": BorrowerEndReason.DELETED, "c/1": 1}


@pytest.mark.conforms("E23")
def test_a_leader_admits_nobody_of_a_lost_group() -> None:
    """That group had the id that its own group has."""
    play = Play()
    group = play.store.open_group(WANTED, StartingPosition.EARLIEST)
    play.store.claim(group.group_id, OTHER, 60.0)
    play.join()
    fail_over(play, "$share/secret/#")
    play.want("b/1", subscription="$share/secret/#")
    play.pass_time(1.0)
    play.want("a/2", group_id=1, predecessor="a/1")
    play.pass_time(1.0)
    assert play.answers() == [("b/1", 1), ("a/2", BorrowerEndReason.DELETED)]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_one_commit_at_a_time() -> None:
    """What comes meanwhile is the next."""
    play = leading()
    play.progress(1, 5)
    for position in (6, 7):
        play.progress(1, position)
    play.progress(2, 9)
    [first] = play.waiting(CommitWrites)
    assert [e.stream_id for w in first.batch for e in w.changes] == [1]
    play.answer()
    [second] = play.waiting(CommitWrites)
    assert sorted((e.stream_id, e.position) for w in second.batch for e in w.changes) == [(1, 7), (2, 9)]  # type: ignore[union-attr]


def test_many_changes_leave_in_several_commits() -> None:
    """One transaction of all would be canceled on a busy machine, and be done again for ever."""
    play = Play(shards=2 * MAX_CHANGES_PER_COMMIT + 1)
    play.want()
    play.now = 1.0
    play.do(Tick())
    sizes = []
    while play.requests:
        if isinstance(commit := play.requests[0], CommitWrites):
            sizes.append(sum(len(writes.changes) for writes in commit.batch))
        play.answer()
        play.do(Tick(), play.now + 0.1)
    assert max(sizes) <= MAX_CHANGES_PER_COMMIT
    assert all(row.status is LendingStatus.HELD for row in play.store.rows(1).values())


def test_a_failed_commit_is_written_again() -> None:
    play, commit = writing()
    play.do(WritesCommitFailed(commit, is_outcome_unknown=False))
    play.pass_time(SETTINGS.resend_interval_s + 0.1)
    assert play.store.rows(1)[1].position == 5
    assert 1 in play.machine.leaders


@pytest.mark.conforms("E13")
def test_after_an_unknown_outcome_it_steps_down() -> None:
    play, commit = writing()
    play.do(WritesCommitFailed(commit, is_outcome_unknown=True))
    assert play.machine.leaders == {}
    assert play.answers() == [("a/1", BorrowerEndReason.RETRY)]
    assert len(play.waiting(ReleaseLeaderships)) == 1
    play.settle()
    play.join("a/2", group_id=1, predecessor="a/1")
    assert 1 in play.machine.leaders, "under a new term, from the rows as they are"


@pytest.mark.conforms("E13")
def test_an_unknown_outcome_ends_only_its_group() -> None:
    """Of several that were written in parts."""
    play, commit = writing()
    answer = play.execute(commit)
    assert isinstance(answer, WritesCommitted)
    for is_unknown in (False, True):
        play.do(WritesCommitted(commit, (replace(answer.results[0], is_outcome_unknown=is_unknown),)))
        assert (1 in play.machine.leaders) is not is_unknown


@pytest.mark.conforms("E13")
def test_an_answer_to_a_former_leader_is_dropped() -> None:
    play, commit = writing()
    answer = play.execute(commit)
    play.do(Tick(), SETTINGS.lease_duration_s + 1)
    play.settle()
    play.join("b/1")
    leader = play.machine.leaders[1]
    assert isinstance(answer, WritesCommitted)
    for is_unknown in (False, True):
        play.do(replace(answer, results=(replace(answer.results[0], is_outcome_unknown=is_unknown),)))
        assert play.machine.leaders[1] is leader
    assert play.stories == []


@pytest.mark.conforms("E13")
def test_a_deposed_leader_steps_down_and_reports_it() -> None:
    play = leading()
    first = play.machine.leaders[1].term
    play.store.release(play.ref, {1: first})
    play.store.claim(1, OTHER, 10.0)
    play.progress(1, 5)
    play.settle()
    assert play.machine.leaders == {}
    assert play.answers()[:1] == [("a/1", BorrowerEndReason.RETRY)]
    assert play.store.read_leaderships([1])[1].node.name == "n2", "its successor's claim is untouched"


@pytest.mark.conforms("E13")
def test_outside_its_trust_a_leader_is_silent() -> None:
    play = leading()
    play.now = SETTINGS.lease_duration_s
    play.receive(Ping(("a/1",), play.now))
    assert play.received(PingResponse) == []


@pytest.mark.conforms("E13")
def test_no_answer_is_lost_when_the_trust_is_over() -> None:
    """The process slept; the commit's answer is handled first, then a renewal that would have kept the trust."""
    play = leading()
    play.do(Tick(), 3.0)
    renewed = play.execute(play.take(RenewLeaderships))
    play.progress(1, 5)
    play.do(play.execute(play.take(CommitWrites)), 9.5)
    play.do(renewed, 9.5)
    leader = play.machine.leaders.get(1)
    assert leader is None or not leader.pending_changes()


def test_a_broken_leader_costs_only_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    play = leading()
    play.join("b/1", subscription="$share/other/#")

    def broken(*_: object) -> None:
        raise AssertionError("the story")

    monkeypatch.setattr(play.machine.leaders[1], "decide", broken)
    play.progress(1, 5)
    assert "the story" in play.stories[0]
    assert set(play.machine.leaders) == {2}
    assert [m.borrower_id for m in play.received(Invalidate)] == ["a/1"]


def test_a_leader_that_breaks_keeps_no_borrower(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    play.want("a/1")
    play.want("b/1")
    decide = GroupLeader.decide

    def break_at_a_member(leader: GroupLeader, event: GroupEvent, now: float) -> GroupOutcome:
        assert not isinstance(event, BorrowerMessageReceived)
        return decide(leader, event, now)

    monkeypatch.setattr(GroupLeader, "decide", break_at_a_member)
    play.settle()
    assert (len(play.stories), play.machine.leaders) == (1, {})
    play.pass_time(1.1)
    assert [play.machine.registry.group_of_borrower(name[0], name) for name in ("a/1", "b/1")] == [None, None]


@pytest.mark.parametrize(
    ("group_id", "is_epochs_only", "reading"),
    [(None, False, [1, 2]), (1, False, [1]), (None, True, [2]), (1, True, []), (2, True, [2])],
)
def test_leaders_read_what_concerns_them(group_id: int | None, is_epochs_only: bool, reading: list[int]) -> None:
    """Completed epochs are for atomic groups."""
    play = leading()
    play.store.declare_group(Subscription.parse("$share/atomic/#"), GroupOptions(atomic=True))
    play.join("b/1", subscription="$share/atomic/#")
    play.pass_time(1.0)
    play.do(StreamsChanged(is_epochs_only, group_id))
    play.do(Tick(), play.now + SETTINGS.rebalance_debounce_s)
    batch = [writes for commit in play.waiting(CommitWrites) for writes in commit.batch]
    assert [writes.group_id for writes in batch if writes.needs_stream_sync] == reading


def test_a_revoke_is_given_to_its_leader() -> None:
    play = leading()
    play.do(GroupLeaderEvent(1, ForcedRevokeRequested((1,), "operator")))
    play.do(GroupLeaderEvent(9, ForcedRevokeRequested((1,), "operator")))
    assert [m.stream_id for m in play.received(Revoke)] == [1]


# --- letting go -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E8", "E15")
def test_a_shutdown_writes_then_releases() -> None:
    """Final progress that comes meanwhile, too. Only then the borrowers are let go."""
    play = leading()
    play.progress(1, 5, final=True)
    play.shut_down()
    play.progress(2, 7, final=True)
    assert (play.waiting(ReleaseLeaderships), play.received(Invalidate)) == ([], [])
    while play.waiting(CommitWrites):
        play.answer()
    assert len(play.waiting(ReleaseLeaderships)) == 1
    assert [m.borrower_id for m in play.received(Invalidate)] == ["a/1"]
    assert not play.last.is_stopped
    assert play.answer().is_stopped
    assert play.store.rows(1)[1].position == 5
    assert ("release", 7, False) in [(h.event, h.position, h.is_forced) for h in play.store.history(1)]
    assert play.store.read_leaderships([1])[1].remaining_s <= 0


@pytest.mark.conforms("E15")
def test_steady_progress_does_not_delay_a_shutdown() -> None:
    play = leading()
    play.shut_down()
    position, began = 0, play.now
    while not play.last.is_stopped:
        position += 1
        play.now += 0.01
        for _ in range(2):
            play.progress(1, position)
        if play.requests:
            play.answer()
        assert play.now < began + 1.0
    assert play.store.read_leaderships([1])[1].remaining_s <= 0


@pytest.mark.conforms("E15")
def test_a_stopping_node_begins_nothing_new() -> None:
    play = Play()
    play.want("a/1")
    request = play.take(FindOrCreateGroup)
    play.shut_down()
    play.do(play.execute(request))
    play.want("b/1")
    assert (play.requests, play.last.is_stopped) == ([], True)


@pytest.mark.conforms("E15")
def test_a_shutdown_waits_for_no_database() -> None:
    play = leading()
    play.progress(1, 5)
    play.shut_down()
    play.requests.clear()
    end = play.now + 5.0
    play.now += 4.0
    play.shut_down()  # a second time, which puts nothing off
    play.do(Tick(), end)
    assert len(play.waiting(ReleaseLeaderships)) == 1
    assert not play.last.is_stopped
    play.do(Tick(), end + SETTINGS.lease_margin_s)
    assert play.last.is_stopped


class CountingAgent(str):
    """An agent that counts its lookups, as part of a key or alone."""

    lookups = 0

    def __hash__(self) -> int:
        self.lookups += 1
        return super().__hash__()


def test_a_stopping_node_looks_up_each_borrower_once() -> None:
    """10,000 groups with 100,000 borrowers stood still for longer than a stopping node has."""
    play, agent, group_count = Play(), CountingAgent("a"), 50
    for number in range(group_count):
        play.receive(LeaderWanted(f"a/{number}", f"$share/g{number}/#", starting_position="earliest"), agent)
        play.settle()
    assert len(play.machine.leaders) == group_count
    agent.lookups = 0
    play.shut_down()
    assert not play.machine.leaders
    assert len(play.received(Invalidate)) == group_count
    assert agent.lookups <= 4 * group_count


@pytest.mark.conforms("E15")
def test_a_shutdown_waits_for_a_former_leaders_commit() -> None:
    play, commit = writing()
    play.do(NodeDesiredStateRead(False, {1: play.machine.leaders[1].term}))
    play.settle()
    play.shut_down()
    assert (play.machine.leaders, play.last.is_stopped) == ({}, False)
    assert play.do(play.execute(commit)).is_stopped


@pytest.mark.conforms("E22")
def test_an_idle_leader_frees_its_claim() -> None:
    """Who comes in that moment is served."""
    play = leading()
    play.receive(Disconnect("a/1", play.machine.leaders[1].term, ()))
    play.settle()
    while 1 in play.machine.leaders:
        play.do(Tick(), play.last.wake_at)
        if not play.waiting(ReleaseLeaderships):
            play.settle()
    assert play.now >= SETTINGS.leader_idle_timeout_s
    play.want("b/1")
    play.sent.clear()
    play.settle()
    assert play.admitted() == ["b/1"]


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    first = Play()
    first.join("a/1")
    second = Play("n2", first.store)
    for number in range(50):
        second.want(f"b/{number}", subscription=f"$share/g{number}/#", group_id=1000)
    second.join("c/1")
    assert second.machine.registry.find_group(WANTED) is not None
    first.now = second.now
    second.do(Tick(), SETTINGS.leader_idle_timeout_s)
    registry = second.machine.registry
    assert len(registry) == 0
    second.settle()
    second.do(Tick(), second.now + 1.0)
    assert registry.wake_at() == float("inf"), "no subscription is left to look at"
    assert (registry.take_waiters(WANTED), registry.send_on(WANTED)) == ((), ())
    assert {registry.find_group_by_id(group_id) for group_id in range(100)} == {None}
    assert {registry.group_of_borrower("b", f"b/{number}") for number in range(50)} == {None}
    assert not second.machine.election.is_busy()


# --- what is written in one transaction, where much waits -------------------------------------------------------------


def advances(count: int) -> tuple[AdvancePosition, ...]:
    return tuple(AdvancePosition(stream_id, 1, 1) for stream_id in range(1, count + 1))


def no_stream(stream_id: int) -> StreamEntry | None:
    return None


def test_a_change_counts_by_its_epochs() -> None:
    """And by those of its row: a few leave in each commit, and those of other groups with them."""
    many = ConsumedFrontier(1, LowerFrontier(tuple((number, -number) for number in range(500))))
    row = writing()[0].machine.leaders[1].streams.get(1)
    assert row is not None
    doubt = InDoubtRange(1, 0, 1, 0.0, many)
    row.lending = replace(row.lending, consumed=many, in_doubt=doubt)
    heavy = PendingWrites(7, no_stream, [AdvancePosition(1, 1, 1, many), AdvancePosition(2, 1, 1, ConsumedFrontier(1))])
    assert [heavy.take(1, 1, may_sync=True)[1] for _ in range(3)] == [26, 1, 0], "one at least"
    plain, reports = advances(40), [AdvancePosition(number, 1, 1, many, doubt) for number in range(1, 41)]
    for changes, entry, of_first in ((plain, None, 40), (plain, row, 9), (reports, None, 9), (reports, row, 4)):
        streams = {} if entry is None else dict.fromkeys(range(1, 41), entry)
        pending = {1: PendingWrites(7, streams.get), 2: PendingWrites(8, no_stream)}
        pending[1].add(changes, needs_sync=False)
        pending[2].add(advances(1), needs_sync=False)
        assert [len(writes.changes) for writes in take_batch(pending)] == [of_first, 1], entry


def test_a_large_group_comes_behind_the_others() -> None:
    pending = {
        1: PendingWrites(7, no_stream),
        2: PendingWrites(8, no_stream),
        3: PendingWrites(9, no_stream),
    }
    pending[1].add(advances(MAX_CHANGES_PER_COMMIT + 2), needs_sync=False)
    pending[2].add(advances(1), needs_sync=False)
    pending[3].add((), needs_sync=True)
    first, second = take_batch(pending), take_batch(pending)
    assert first == (GroupWrites(1, 7, advances(MAX_CHANGES_PER_COMMIT)), GroupWrites(3, 9, (), needs_stream_sync=True))
    assert second == (GroupWrites(2, 8, advances(1)), GroupWrites(1, 7, advances(MAX_CHANGES_PER_COMMIT + 2)[-2:]))
    assert not pending


def test_many_syncs_leave_in_several_commits() -> None:
    """Behind the changes before them, which do not wait."""
    pending = {group_id: PendingWrites(7, no_stream) for group_id in range(MAX_SYNCS_PER_COMMIT + 2)}
    for writes in pending.values():
        writes.add((), needs_sync=True)
    pending[MAX_SYNCS_PER_COMMIT].add(advances(1), needs_sync=False)
    first, second = take_batch(pending), take_batch(pending)
    synced = [[writes.group_id for writes in batch if writes.needs_stream_sync] for batch in (first, second)]
    assert synced == [[*range(MAX_SYNCS_PER_COMMIT)], [MAX_SYNCS_PER_COMMIT + 1, MAX_SYNCS_PER_COMMIT]]
    assert first[-1] == GroupWrites(MAX_SYNCS_PER_COMMIT, 7, advances(1))
    assert not pending


def test_a_sync_waits_for_the_changes_before_it() -> None:
    pending = {1: PendingWrites(7, no_stream)}
    pending[1].add(advances(MAX_CHANGES_PER_COMMIT + 1), needs_sync=True)
    pending[1].add(advances(MAX_CHANGES_PER_COMMIT), needs_sync=True)
    parts = take_batch(pending) + take_batch(pending) + take_batch(pending)
    assert [(len(part.changes), part.needs_stream_sync) for part in parts] == [
        (MAX_CHANGES_PER_COMMIT, False),
        (MAX_CHANGES_PER_COMMIT, True),
        (1, False),
    ]


def test_a_node_stopped_early_claims_nothing() -> None:
    play = Play()
    play.shut_down()
    assert play.last.is_stopped
    play.do(NodeStarted())
    assert play.waiting(ClaimLeadership) == []
