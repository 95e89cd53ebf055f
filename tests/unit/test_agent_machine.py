"""An agent: routes to the right borrower, makes successors after doubts and none after final words, picks nodes."""

from __future__ import annotations

import pytest

from sublet_borrower.machine.agent import (
    SUSPECT_S,
    Agent,
    AgentEvent,
    AgentOutcome,
    CloseSubscription,
    JoinGroup,
    NodeMessageReceived,
    NodesDiscovered,
    SessionAssignmentUpdate,
    SessionProgressReported,
    SubscriptionClosed,
)
from sublet_borrower.machine.events import NodeLost, ProgressReported, StreamGranted, StreamRemoved
from sublet_borrower.settings import BorrowerSettings
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
    ToBorrower,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from tests.kit import GRANT_KEY

NODES = ("n1:1", "n2:1", "n3:1")
SUBSCRIPTION = "$share/g/#"
TERM, GROUP = 100, 7
SETTINGS = BorrowerSettings()


class Play:
    """An agent that knows three nodes."""

    def __init__(self, nodes: tuple[str, ...] = NODES) -> None:
        self.machine = Agent("a", SETTINGS)
        self.now = 0.0
        self.last = AgentOutcome()
        if nodes:
            self.do(NodesDiscovered(nodes))

    def do(self, event: AgentEvent, at: float | None = None) -> AgentOutcome:
        self.now = self.now if at is None else at
        self.last = self.machine.decide(event, self.now)
        return self.last

    def receive(self, message: ToBorrower, at: float | None = None, node: str = "n1:1") -> AgentOutcome:
        return self.do(NodeMessageReceived(node, message), at)

    def wanted(self) -> list[tuple[str, LeaderWanted]]:
        """Who was asked for a leader by the last event."""
        return [(node, m) for node, m in self.last.sends if isinstance(m, LeaderWanted)]

    def asked(self) -> list[str]:
        """The nodes of these."""
        return [node for node, _ in self.wanted()]

    def connect(self, handle: int, at: float | None = None) -> str:
        """Let a leader answer; the borrower's id."""
        borrower_id = self.machine.borrowers[handle].borrower_id
        self.receive(LeaderConnectResponse(borrower_id, TERM, GROUP), at)
        self.receive(PingResponse(borrower_id, TERM, self.now, 8.5))
        return borrower_id

    def grant(self, handle: int, stream_id: int, grant_id: int = 50) -> None:
        """Let the leader grant it a stream."""
        borrower_id = self.machine.borrowers[handle].borrower_id
        self.receive(Grant(borrower_id, TERM, stream_id, grant_id, 10, 1, 0, 9, "#", grant_key=GRANT_KEY))


def subscribed(*handles: int) -> Play:
    play = Play()
    for handle in handles:
        play.do(JoinGroup(handle, SUBSCRIPTION))
        play.connect(handle)
    return play


# --- which node is asked ----------------------------------------------------------------------------------------------


def preferred(nodes: tuple[str, ...], subscription: str, agent_id: str = "a") -> str:
    """The node that an agent asks first."""
    agent = Agent(agent_id, SETTINGS)
    agent.decide(NodesDiscovered(nodes), 0.0)
    [(node, _)] = agent.decide(JoinGroup(1, subscription), 0.0).sends
    return node


def test_every_agent_asks_the_same_node() -> None:
    """Not one node for all; and one that is gone moves only what preferred it."""
    texts = [f"$share/g{number}/#" for number in range(50)]
    asked = {text: preferred(NODES, text) for text in texts}
    assert asked == {text: preferred(NODES[::-1], text, "b") for text in texts}
    assert set(asked.values()) == set(NODES)
    without = {text: preferred(NODES[:2], text) for text in texts}
    assert all(without[text] == asked[text] for text in texts if asked[text] != "n3:1")


def test_a_node_whose_connection_died_is_asked_last() -> None:
    """For a while."""
    play = Play()
    play.do(JoinGroup(1, SUBSCRIPTION))
    [first] = play.asked()
    play.do(NodeLost(first), 0.1)
    assert play.last.needs_discovery
    play.do(Tick(), 1.0)
    [second] = play.asked()
    assert second != first
    play.do(Tick(), 0.1 + SUSPECT_S + 1.0)
    assert play.asked() == [first], "it has come back"


def test_a_suspect_node_is_asked_if_there_is_no_other() -> None:
    play = Play(("n1:1",))
    play.do(JoinGroup(1, SUBSCRIPTION))
    play.do(NodeLost("n1:1"), 0.1)
    play.do(Tick(), 1.0)
    assert play.asked() == ["n1:1"]


def test_a_node_that_was_not_known_is_asked_soon() -> None:
    """By one whose leader's node has died, and which could ask no other."""
    play = Play(("n1:1",))
    assert play.machine.leader_node(1) is None
    play.do(JoinGroup(1, SUBSCRIPTION))
    assert play.machine.leader_node(1) is None
    play.connect(1)
    assert play.machine.leader_node(1) == "n1:1"
    play.do(NodeLost("n1:1"), at=0.1)
    assert play.asked() == ["n1:1"]
    play.do(NodesDiscovered(("n1:1",)), at=0.2)
    play.do(Tick(), at=0.2 + SETTINGS.leader_lookup_interval_s / 4)
    assert play.asked() == [], "that one was known"
    play.do(NodesDiscovered(("n1:1", "n2:1")), at=0.5)
    play.do(Tick(), at=0.5 + SETTINGS.leader_lookup_interval_s / 4)
    assert play.asked() == ["n2:1"]


def test_a_leader_that_may_be_dead_is_not_waited_for() -> None:
    """The node that names it is asked again, as it may be the next; what lives and answers is the leader."""
    play = subscribed(1)
    play.do(NodeLost("n1:1"), at=0.1)
    [other] = play.asked()
    borrower_id = play.machine.borrowers[1].borrower_id
    play.receive(LeaderConnectResponse(borrower_id, 0, GROUP, "n1:1"), 0.2, other)
    assert play.asked() == ["n1:1"]
    play.do(Tick(), at=0.2 + SETTINGS.leader_lookup_interval_s / 4)
    assert play.asked() == [other]
    play.receive(LeaderConnectResponse(borrower_id, TERM, GROUP))
    play.receive(LeaderConnectResponse(borrower_id, 0, GROUP, "n1:1"), node=other)
    assert play.machine.leader_node(1) == "n1:1"
    assert play.machine.borrowers[1].borrower_id == borrower_id
    play.grant(1, 5)
    play.do(CloseSubscription(1))
    assert play.machine.leader_node(1) is None, "it grants no more"


def test_without_nodes_it_asks_for_them_and_goes_on() -> None:
    play = Play(())
    play.do(JoinGroup(1, SUBSCRIPTION))
    assert (play.last.sends, play.last.needs_discovery) == ((), True)
    play.do(NodesDiscovered(("n1:1",)), 0.4)
    play.do(Tick(), play.last.wake_at)
    assert play.asked() == ["n1:1"]
    assert play.now < SETTINGS.leader_lookup_interval_s


@pytest.mark.conforms("E6")
def test_a_disconnect_goes_to_the_node_that_was_asked() -> None:
    """By a session that leaves before an answer, as that node may be granting streams to it."""
    play = Play()
    play.do(JoinGroup(1, SUBSCRIPTION))
    [asked] = play.asked()
    play.do(CloseSubscription(1), 0.1)
    assert play.last.sends == ((asked, Disconnect("a/1", 0, ())),)


def test_a_disconnect_goes_to_all_asked_nodes() -> None:
    """Also to one that has named a leader which is gone by now: each may take over and grant to it."""
    play = Play()
    play.do(JoinGroup(1, SUBSCRIPTION))
    [first] = play.asked()
    play.do(Tick(), SETTINGS.leader_lookup_interval_s)
    [second] = play.asked()
    assert first != second
    play.do(CloseSubscription(1), SETTINGS.leader_lookup_interval_s + 0.1)
    assert play.last.sends == tuple((node, Disconnect("a/1", 0, ())) for node in sorted((first, second)))


def test_without_a_query_nobody_gets_a_disconnect() -> None:
    play = Play(())
    play.do(JoinGroup(1, SUBSCRIPTION))
    play.do(NodesDiscovered(NODES), 0.1)
    assert (play.asked(), play.do(CloseSubscription(1), 0.2).sends) == ([], ())


# --- pings ------------------------------------------------------------------------------------------------------------


def test_pings_to_one_node_are_one_command() -> None:
    play = subscribed(1, 2, 3)
    play.do(Tick(), SETTINGS.ping_interval_s)
    pings = [m for _, m in play.last.sends if isinstance(m, Ping)]
    assert pings == [Ping(("a/1", "a/2", "a/3"), SETTINGS.ping_interval_s)]


def test_it_is_woken_for_the_borrower_due_first() -> None:
    play = subscribed(1)
    play.do(JoinGroup(2, "$share/h/#"), 0.3)
    assert play.last.wake_at == 1.0
    play.do(Tick(), 1.0)
    assert play.last.wake_at == pytest.approx(1.3)


@pytest.mark.conforms("E9")
def test_ten_rounds_of_subscribing_within_50_ms() -> None:
    play = Play()
    closed, asked = [], set()
    for handle in range(1, 11):
        play.do(JoinGroup(handle, SUBSCRIPTION), handle * 0.005)
        asked |= {m.borrower_id for _, m in play.wanted()}
        play.do(CloseSubscription(handle))
        closed += [t.handle for t in play.last.updates if isinstance(t, SubscriptionClosed)]
    assert asked == {f"a/{n}" for n in range(1, 11)}
    assert closed == list(range(1, 11))
    assert play.machine.borrowers == {}
    assert play.last.wake_at is None


def test_messages_for_the_past_reach_nobody() -> None:
    play = subscribed(1)
    play.receive(Invalidate("a/1", TERM, BorrowerEndReason.RETRY))
    outcome = play.receive(Grant("a/1", TERM, 5, 50, 0, 1, 0, 9, "#", grant_key=GRANT_KEY))
    assert (outcome.sends, outcome.updates) == ((), ())
    assert play.do(SessionProgressReported(77, ProgressReported(5, 50, 1))).sends == ()
    assert play.do(CloseSubscription(77)).updates == ()


# --- successors -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E3", "E16")
def test_after_a_doubt_a_successor_inherits_at_once() -> None:
    play = subscribed(1)
    play.grant(1, 5)
    play.do(SessionProgressReported(1, ProgressReported(5, 50, 30)), 0.5)
    play.receive(Invalidate("a/1", TERM, BorrowerEndReason.RETRY), 0.6)
    [(_, wanted)] = play.wanted()
    assert (wanted.borrower_id, wanted.predecessor, wanted.group_id, wanted.borrower_number) == ("a/2", "a/1", GROUP, 2)
    assert wanted.reclaim == (HeldGrant(5, 50, 30),)
    assert not play.last.updates, "the session's running call goes on"
    assert play.machine.may_start_call(1, 5, 50, 1.0)
    play.connect(1, 0.7)
    play.grant(1, 5)
    updates = [each.update for each in play.last.updates if isinstance(each, SessionAssignmentUpdate)]
    assert not [update for update in updates if isinstance(update, StreamGranted | StreamRemoved)]
    assert next(m for _, m in play.last.sends if isinstance(m, UpdateProgress)).streams[0].position == 30


@pytest.mark.conforms("E5", "E3")
def test_a_dead_connection_makes_successors_of_all() -> None:
    play = subscribed(1, 2)
    play.do(NodeLost("n1:1"), 0.5)
    assert {m.borrower_id for _, m in play.wanted()} == {"a/3", "a/4"}
    assert all(node != "n1:1" for node, _ in play.wanted())


@pytest.mark.conforms("E30", "E23")
@pytest.mark.parametrize(
    "reason", [BorrowerEndReason.DELETED, BorrowerEndReason.FENCED, BorrowerEndReason.DENIED, BorrowerEndReason.DONE]
)
def test_after_a_final_message_none_is_made(reason: BorrowerEndReason) -> None:
    play = subscribed(1)
    play.grant(1, 5)
    play.receive(Invalidate("a/1", TERM, reason, "why"))
    assert play.last.updates == (SubscriptionClosed(1, reason, "why"),)
    assert play.wanted() == []
    assert play.machine.borrowers == {}
    for seconds in range(1, 20):
        assert play.do(Tick(), float(seconds)).sends == ()
    assert not play.machine.may_start_call(1, 5, 50, 20.0)
