"""The stage of a scenario: the product's own nodes and agents, the in-memory store, and a clock that only it moves.

Nothing takes time by itself: a message arrives, and the database answers, in the moment of asking, unless the scenario
says otherwise. So whatever takes time is a timer of the protocol, and every scenario comes out the same each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sublet_borrower.machine.agent import NodeMessageReceived, NodesDiscovered
from sublet_borrower.machine.events import NodeLost
from sublet_leader.group.events import ForcedRevokeRequested
from sublet_leader.node.events import (
    AgentMessageReceived,
    DatabaseRequest,
    GroupLeaderEvent,
    NodeStarted,
    ShutdownRequested,
)
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import ToBorrower, ToLeader
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import LendingStatus
from tests.scenarios.lines import PINGS, BadLine, Lines, Message
from tests.scenarios.processes import SUBSCRIPTION, AgentProcess, NodeProcess, Process
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore

EPOCH_US = 1_700_000_000_000_000
ENDLESS = 10_000
"""More than ever happens in one moment."""


class Stage:
    """All processes, the store, and what has been said on the wire and to the sessions."""

    def __init__(self, nodes: tuple[str, ...], streams: int, messages: int) -> None:
        self.now = 0.0
        self.settings = LeaderSettings()
        self.streams = MemoryCatalogue()
        self.streams.add_space(shards=streams)
        for stream_id in self.streams.streams:
            self.streams.append(stream_id, messages)
        self.store = MemoryGroupStore(self.streams, lambda: EPOCH_US + round(self.now * 1_000_000))
        self.lines = Lines()
        self.said: list[str] = []
        self.queue: deque[Callable[[], None]] = deque()
        self.fates: dict[str, str] = {}
        self._late: list[tuple[str, str, Message]] = []
        self._hanging: dict[str, list[tuple[NodeProcess, DatabaseRequest]]] = {}
        self._forced_seen = 0
        self._group_id = 1
        self.nodes: dict[str, NodeProcess] = {}
        self.agents: dict[str, AgentProcess] = {}
        for name in nodes:
            self.start_node(name)
        self.settle()

    # --- time and order ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything happen that happens at this moment."""
        happened = 0
        while self.queue:
            self.queue.popleft()()
            happened += 1
            if happened > ENDLESS:
                raise BadLine(f"at {self.now:g} they talk without end, at last: " + "; ".join(self.said[-4:]))

    def pass_time(self, until: float) -> None:
        """Move the clock, ringing every timer on the way, those of `until` included."""
        while True:
            awake = [p for p in self._processes() if p.alive and not p.frozen]
            process = min(awake, key=lambda p: p.wake_at, default=None)
            if process is None or process.wake_at > until + 1e-6:
                break
            self.now = max(self.now, process.wake_at)
            process.tick()
            self.settle()
        self.now = max(self.now, until)

    def _processes(self) -> list[Process]:
        return [*self.nodes.values(), *self.agents.values()]

    # --- the wire ---------------------------------------------------------------------------------------------------

    def send(self, sender: str, receiver: str, message: Message) -> None:
        """Put a message on the wire, where it meets its fate."""
        text = self.lines.message(message)
        fate = self.fates.pop(text.partition(" ")[0], "")
        target = self.find(receiver)
        if not target.alive:
            fate = "lost"
        self.said.append(f"{sender} -> {receiver}: {text}" + (f" ({fate})" if fate else ""))
        if fate == "late":
            self._late.append((sender, receiver, message))
        elif fate != "lost":
            for _ in range(2 if fate == "twice" else 1):
                self.deliver(sender, receiver, message)

    def deliver(self, sender: str, receiver: str, message: Message) -> None:
        """A message arrives."""
        target = self.find(receiver)
        if isinstance(target, NodeProcess) and isinstance(message, ToLeader):
            target.soon(lambda: target.handle(AgentMessageReceived(sender, message)))
        elif isinstance(target, AgentProcess) and isinstance(message, ToBorrower):
            target.soon(lambda: target.handle(NodeMessageReceived(sender, message)))
        else:
            raise BadLine(f"{receiver} cannot receive {self.lines.message(message)!r}")

    def deliver_late(self) -> None:
        """What was late arrives."""
        late, self._late = self._late, []
        for sender, receiver, message in late:
            self.deliver(sender, receiver, message)

    # --- processes --------------------------------------------------------------------------------------------------

    def find(self, name: str) -> NodeProcess | AgentProcess:
        """The process of that name."""
        found = self.nodes.get(name) or self.agents.get(name)
        if found is None:
            raise BadLine(f"nobody is called {name!r}: {', '.join([*self.nodes, *self.agents])}")
        return found

    def start_node(self, name: str) -> None:
        """A node's first or next life."""
        before = self.nodes.get(name)
        node = self.nodes[name] = NodeProcess(self, name, before.life + 1 if before else 1)
        node.soon(lambda: node.handle(NodeStarted()))

    def agent(self, name: str) -> AgentProcess:
        """The agent of that name, which begins with its first subscription."""
        if name not in self.agents:
            agent = self.agents[name] = AgentProcess(self, name)
            agent.soon(lambda: agent.handle(NodesDiscovered(self.live_nodes())))
        return self.agents[name]

    def end(self, process: Process) -> None:
        """A process is gone; agents see their connections to a node break."""
        process.alive = False
        if isinstance(process, NodeProcess):
            for agent in self.agents.values():
                agent.soon(lambda agent=agent: agent.handle(NodeLost(process.name)))  # type: ignore[misc]

    def shut_down(self, name: str) -> None:
        """A node leaves gracefully."""
        node = self.nodes[name]
        node.soon(lambda: node.handle(ShutdownRequested(self.now + 5.0)))

    def operator_takes(self, stream_id: int) -> None:
        """The leader is asked to take a stream back."""
        event = GroupLeaderEvent(self._group_id, ForcedRevokeRequested((stream_id,), "operator"))
        for node in self.nodes.values():
            node.soon(lambda node=node: node.handle(event))  # type: ignore[misc]

    def delete_group(self) -> None:
        """An operator does; whoever subscribes next begins another life, under the next id."""
        if self.store.delete_group(SUBSCRIPTION) is not None:
            self._group_id += 1

    def live_nodes(self) -> tuple[str, ...]:
        """What the directory of nodes says."""
        return tuple(name for name, node in self.nodes.items() if node.alive)

    # --- the database -----------------------------------------------------------------------------------------------

    def ask_database(self, node: NodeProcess, request: DatabaseRequest) -> None:
        """Answered at once, unless it hangs."""
        if node.name in self._hanging:
            self._hanging[node.name].append((node, request))
        else:
            node.answer(request)

    def hang_database(self, name: str) -> None:
        """From now on it answers this node nothing."""
        self._hanging.setdefault(name, [])

    def wake_database(self, name: str) -> None:
        """It executes what the node asked meanwhile, whether or not that still lives."""
        for node, request in self._hanging.pop(name, []):
            node.answer(request)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def take_said(self, *, pings: bool) -> list[str]:
        """All that was said since the last time, folded."""
        said, self.said = self.said, []
        if not pings:
            said = [line for line in said if not line.partition(": ")[2].startswith(PINGS)]
        return fold(said)

    def take_forced(self) -> list[str]:
        """Grants that ended without their holder's final progress since the last time: from where on to repeat."""
        forced = [h for h in self.store.history(self._group_id) if h.is_forced]
        new, self._forced_seen = forced[self._forced_seen :], len(forced)
        return [f"stream {h.stream_id} from {h.borrower_id} at {h.position}: {h.event}, {h.reason}" for h in new]

    def borrowers(self) -> list[str]:
        """Every living agent's borrowers."""
        return [line for agent in self.agents.values() for line in agent.borrowers()]

    def lendings(self) -> list[str]:
        """The rows as the database has them."""
        return [self._lending(row) for _, row in sorted(self.store.rows(self._group_id).items())]

    def _lending(self, row: LendingRow) -> str:
        if row.status is not LendingStatus.HELD:
            return f"stream {row.stream_id} {row.status} at {row.position}"
        return f"{self.lines.grant(row.stream_id, row.grant_id)} held by {row.borrower_id} at {row.position}"


def fold(said: list[str]) -> list[str]:
    """One to three lines that come again and again stand there once, with a line that says how often."""
    folded: list[str] = []
    place = 0
    while place < len(said):
        length, times = _repeated(said[place:])
        folded += said[place : place + length]
        if times > 1:
            folded[-1:] = (
                [f"{folded[-1]} x{times}"] if length == 1 else [folded[-1], f"(these {length} lines x{times})"]
            )
        place += length * times
    return folded


def _repeated(said: list[str]) -> tuple[int, int]:
    """How many lines the repeated beginning has, and how often it stands there."""
    for length in (1, 2, 3):
        times = 1
        while said[times * length : (times + 1) * length] == said[:length]:
            times += 1
        if times > 1:
            return length, times
    return 1, 1
