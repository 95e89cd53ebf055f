"""An agent's loop between its machine and its connections: which nodes it goes to, and which it leaves alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sublet_borrower.agent import agent_loop
from sublet_borrower.agent.agent_loop import AgentLoop
from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.util.network_loop import network_loop
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, LeaderConnectResponse, LeaderWanted, ToLeader
from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason, ConnectionStatus, ReportConnectionLost
from sublet_protocol.pubsub.model import Channel, MailboxOverflow, SequencedMessage
from sublet_storage.util.boottime_clock import boottime_clock
from tests.kit import WAIT_S, eventually

GROUP = "$queue/g/a"
Deliver = Callable[[SequencedMessage], None]
Lost = Callable[[ReportConnectionLost], None]


class Connection:
    """In a connection's place: it notes what is sent, and is connected as long as it is not closed."""

    def __init__(self, address: str, key: object, deliver: Deliver, lost: Lost, **_: Any) -> None:
        self.address, self.deliver, self.lost = address, deliver, lost
        self.sent: list[ToLeader] = []
        self.status = ConnectionStatus.CONNECTED
        self.counters, self.is_closed = None, False

    def send(self, message: ToLeader) -> None:
        self.sent.append(message)

    def subscribe(self, channel: Channel, key: str | None = None) -> None:
        """Nothing is pushed."""

    async def close(self, timeout_s: float) -> None:
        self.is_closed = True


class Play:
    """An agent among listed nodes, a subscription of it, and the connections that it makes."""

    def __init__(self) -> None:
        self.listed, self.lookups, self.connections = list[str](), 0, list[Connection]()
        self.gate = threading.Event()
        self.gate.set()
        self.queue = SessionEventQueue()

    def begin(self, *listed: str) -> None:
        self.listed = list(listed)
        self.agent = AgentLoop(self.find, BorrowerSettings())
        self.handle = self.agent.subscribe(GROUP, self.queue)

    def find(self) -> list[str]:
        self.lookups += 1
        self.gate.wait(WAIT_S)
        return self.listed

    def connect(self, *args: Any, **options: Any) -> Connection:
        self.connections.append(Connection(*args, **options))
        return self.connections[-1]

    def first(self) -> Connection:
        """The connection to the node that is asked first."""
        eventually(lambda: self.connections)
        return self.asked(self.connections[0].address)

    def settle(self) -> None:
        """Let look-ups come and go, if there are any."""

        async def wait() -> None:
            for _ in range(30):
                await asyncio.to_thread(int)

        asyncio.run_coroutine_threadsafe(wait(), network_loop()).result()

    def to(self, address: str) -> list[Connection]:
        """The connections to that node."""
        return [each for each in tuple(self.connections) if each.address == address]

    def asked(self, address: str) -> Connection:
        """The connection to that node, once it was asked for a leader."""
        eventually(lambda: any(isinstance(sent, LeaderWanted) for each in self.to(address) for sent in each.sent))
        return self.to(address)[-1]

    def run(self, call: Callable[[], object]) -> None:
        """Call it in the network's loop, and let that do all that results."""

        async def calling() -> None:
            call()
            for _ in range(5):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(calling(), network_loop()).result()

    def name_leader(self, by: Connection, address: str) -> None:
        """Let the node name that address as the leader's."""
        wanted = next(sent for sent in by.sent if isinstance(sent, LeaderWanted))
        self.deliver(by, LeaderConnectResponse(wanted.borrower_id, 0, 1, address))

    def deliver(self, by: Connection, body: object) -> None:
        self.run(lambda: by.deliver(SequencedMessage(1, Channel.BORROWER, "", body)))

    def look_again(self, by: Connection) -> None:
        """Let the agent miss a message of that node, and look the nodes up."""
        lookups = self.lookups
        self.deliver(by, MailboxOverflow(0, (Channel.BORROWER,)))
        eventually(lambda: self.lookups > lookups)
        self.run(lambda: None)

    def ends(self) -> list[SubscriptionClosed]:
        return [event for event in self.queue.take() if isinstance(event, SubscriptionClosed)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Play]]:
    plays = list[Play]()

    def connect(*args: Any, **options: Any) -> Connection:
        return plays[-1].connect(*args, **options)

    def make(*listed: str) -> Play:
        plays.append(Play())
        plays[-1].begin(*listed)
        return plays[-1]

    monkeypatch.setattr(agent_loop, "NodeConnection", connect)
    monkeypatch.setattr(agent_loop, "LOOKUP_INTERVAL_S", 0.0)
    yield make
    for play in plays:
        play.gate.set()
        play.agent.close(0.0)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_node_that_refuses_is_left_alone(
    make: Callable[..., Play], monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """For a while, also where another names it as the leader's; the subscription goes on. With more nodes for no
    longer."""
    late_s = [0.0]
    monkeypatch.setattr(agent_loop, "boottime_clock", lambda: boottime_clock() + late_s[0])
    play = make("h:1", "h:2")
    first = play.first()
    play.run(lambda: first.lost(ReportConnectionLost(ConnectionLostReason.REJECTED, "speaks 99", ())))
    other = play.asked("h:1" if first.address == "h:2" else "h:2")
    if is_over:
        late_s[0] = agent_loop.REFUSAL_S
    play.listed = [other.address] * 100
    play.look_again(other)
    play.name_leader(other, first.address)
    assert (len(play.to(first.address)), play.ends()) == (1 + is_over, [])
    assert list(play.agent.connection_counters()) == [other.address, first.address][: 1 + is_over]


def test_many_nodes_that_refuse_end_a_session(make: Callable[..., Play], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first has refused long before the last."""
    late_s = [0.0]
    monkeypatch.setattr(agent_loop, "boottime_clock", lambda: boottime_clock() + late_s[0])
    refused = ReportConnectionLost(ConnectionLostReason.REJECTED, "unknown token", ())
    play = make(*(f"h:{number}" for number in range(30)))
    for number in range(30):
        eventually(lambda number=number: len(play.connections) > number)  # type: ignore[misc]
        late_s[0] += 1.0
        play.run(lambda number=number: play.connections[number].lost(refused))  # type: ignore[misc]
    assert [end.reason for end in play.ends()] == [BorrowerEndReason.DENIED]


@pytest.mark.parametrize(
    ("listed", "leader", "is_denied"),
    [
        (["tls://h:1"], "h:2", True),
        (["tls://h:1"], "tls://h:2", False),
        (["h:1"], "h:2", False),
        (["h:1", "tls://h:1"], "h:2", False),
        ([], "h:2", False),
    ],
    ids=str,
)
def test_from_tls_none_goes_to_a_plain_leader(
    make: Callable[..., Play], listed: list[str], leader: str, is_denied: bool
) -> None:
    """Unless nodes without it are listed too, or none is known to have it by now."""
    play = make(*listed or ["tls://h:1"])
    asked = play.first()
    play.listed = listed
    play.look_again(asked)
    play.name_leader(asked, leader)
    assert ([end.reason for end in play.ends()], bool(play.to(leader))) == (
        [BorrowerEndReason.DENIED] * is_denied,
        not is_denied,
    )


@pytest.mark.parametrize(("is_listed", "is_away", "stays"), [(1, 1, True), (0, 0, True), (0, 1, False)])
def test_only_a_dead_unlisted_node_is_dropped(
    make: Callable[..., Play], is_listed: bool, is_away: bool, stays: bool
) -> None:
    play = make("h:1")
    asked = play.first()
    play.listed = ["h:1", "h:2"] if is_listed else ["h:2"]
    asked.status = ConnectionStatus.DISCONNECTED if is_away else ConnectionStatus.CONNECTED
    play.look_again(asked)
    assert ("h:1" in play.agent.connection_counters(), asked.is_closed) == (stays, not stays)


def test_nodes_are_looked_up_as_long_as_needed(make: Callable[..., Play]) -> None:
    """Once at a time: until some are listed, or nobody waits for one. No list ends no subscription."""
    play = make()
    eventually(lambda: play.lookups > 3)
    play.gate.clear()
    play.settle()
    lookups = play.lookups
    play.agent.subscribe(GROUP, SessionEventQueue())
    play.settle()
    assert (play.lookups, play.ends()) == (lookups, [])
    play.listed = ["h:1"]
    play.gate.set()
    play.first()
    play.settle()
    assert play.lookups <= lookups + 1
    idle = make()
    eventually(lambda: idle.lookups > 3)
    idle.agent.unsubscribe(idle.handle)
    eventually(idle.ends)
    idle.settle()
    lookups = idle.lookups
    idle.settle()
    assert idle.lookups == lookups


def test_a_closed_agent_says_nothing(make: Callable[..., Play]) -> None:
    play = make("h:1")
    play.first()
    play.agent.close(0.0)
    play.agent.unsubscribe(play.handle)
    play.run(lambda: None)
    assert play.queue.take() == ()
