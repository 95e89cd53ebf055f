"""The stage of a story: the product's own nodes and agents, the in-memory store, a clock that only the story moves.

Nothing takes time by itself: a message arrives, and the database answers, in the moment of asking, unless the story
says otherwise. So whatever takes time is a timer of the protocol, and every story comes out the same each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from borrower.machine.agent import (
    Agent,
    AgentEvent,
    Closed,
    Consumed,
    FromNode,
    NodeLost,
    NodesKnown,
    Subscribe,
    Told,
    Unsubscribe,
)
from borrower.machine.agent import Tick as AgentTick
from borrower.machine.events import Install, Progressed, Remove
from borrower.machine.table import StreamStatus
from borrower.settings import BorrowerSettings
from leader.node_events import Begin, Heard, NodeEvent, Request, RevokeWanted, Shutdown
from leader.node_events import Tick as NodeTick
from leader.node_machine import Node
from leader.requests import execute
from leader.settings import LeaderSettings
from protocol.messages import ToBorrower, ToLeader
from protocol.words import Subscription
from storage.groups.memory import MemoryGroups
from storage.groups.memory_streams import MemoryStreams
from storage.groups.model import LendingStatus, NodeRef
from storage.groups.rules import Row
from tests.scenarios.lines import PINGS, BadLine, Lines, Message

EPOCH_US = 1_700_000_000_000_000
SUBSCRIPTION = Subscription.parse("$share/story/#")
GROUP_ID = 1
NEVER = float("inf")


class Process:
    """Something that can be stopped for a while, as by SIGSTOP, and killed. What arrives while it is stopped waits."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.name = stage, name
        self.alive, self.frozen = True, False
        self.wake_at = NEVER
        self._waiting: list[Callable[[], None]] = []

    def soon(self, happening: Callable[[], None]) -> None:
        """In its turn, if it is alive; if it is stopped, when it goes on."""

        def happen() -> None:
            if self.alive and self.frozen:
                self._waiting.append(happening)
            elif self.alive:
                happening()

        self.stage.queue.append(happen)

    def thaw(self) -> None:
        """Go on, with what waited first."""
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for happening in waiting:
            self.soon(happening)

    def tick(self) -> None:
        """Time has passed."""
        raise NotImplementedError

    def _wake(self, at: float | None) -> None:
        self.wake_at = NEVER if at is None else max(at, self.stage.now + 0.0005)


class NodeProcess(Process):
    """One life of a node."""

    def __init__(self, stage: Stage, name: str, life: int) -> None:
        super().__init__(stage, name)
        self.life = life
        self.machine = Node(NodeRef(name, f"{name}#{life}", name), stage.settings)

    def tick(self) -> None:
        self.handle(NodeTick())

    def handle(self, event: NodeEvent) -> None:
        """Give the machine one event and do what it says."""
        stage, outcome = self.stage, self.machine.decide(event, self.stage.now)
        assert not outcome.stories, outcome.stories[0]
        for request in outcome.requests:
            stage.queue.append(lambda request=request: stage.ask_database(self, request))  # type: ignore[misc]
        for agent, message in outcome.sends:
            stage.send(self.name, agent, message)
        self._wake(outcome.wake_at)
        if outcome.stopped:
            stage.end(self)

    def answer(self, request: Request) -> None:
        """The database executes the request; the answer comes back."""
        answer = execute(request, self.stage.store, self.machine.ref, self.stage.settings.lease_s)
        self.soon(lambda: self.handle(answer))


class AgentProcess(Process):
    """An agent and its subscriptions' sessions, which do what the story says."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(stage, name)
        self.machine = Agent(name, BorrowerSettings())
        self.subscriptions = 0
        self._installed: dict[int, tuple[int, int]] = {}

    def tick(self) -> None:
        self.handle(AgentTick())

    def handle(self, event: AgentEvent) -> None:
        """Give the machine one event and do what it says."""
        stage, outcome = self.stage, self.machine.decide(event, self.stage.now)
        for told in outcome.tells:
            stage.said.append(f"{self.name} tells {stage.lines.told(told)}")
            self._take(told)
        for node, message in outcome.sends:
            stage.send(self.name, node, message)
        if outcome.nodes_wanted:
            self.soon(lambda: self.handle(NodesKnown(stage.live_nodes())))
        self._wake(outcome.wake_at)

    def subscribe(self) -> None:
        """The next subscription."""
        self.subscriptions += 1
        self.handle(Subscribe(self.subscriptions, str(SUBSCRIPTION), start="earliest"))

    def unsubscribe(self, handle: int) -> None:
        """End a subscription."""
        self.handle(Unsubscribe(handle))

    def consume(self, stream_id: int, position: int, *, final: bool) -> None:
        """The session that has the stream has consumed it so far."""
        if stream_id not in self._installed:
            raise BadLine(f"no session of {self.name} has stream {stream_id}")
        handle, grant_id = self._installed[stream_id]
        self.handle(Consumed(handle, Progressed(stream_id, grant_id, position, final)))

    def borrowers(self) -> list[str]:
        """Each borrower with its status and its streams."""
        return [self._borrower(handle) for handle in sorted(self.machine.borrowers)] if self.alive else []

    def _borrower(self, handle: int) -> str:
        borrower, now = self.machine.borrowers[handle], self.stage.now
        texts = [f"{borrower.borrower_id} {borrower.status.value}"]
        for stream in sorted(borrower.streams, key=lambda s: s.stream_id):
            may_start = self.machine.may_start(handle, stream.stream_id, stream.grant_id, now)
            held_up = stream.status is StreamStatus.GRANTED and not may_start
            texts.append(f"stream {stream.stream_id} {stream.status.value}" + (" (no new call)" if held_up else ""))
        return ", ".join(texts)

    def _take(self, told: Told | Closed) -> None:
        if not isinstance(told, Told):
            return
        match told.tell:
            case Install(grant):
                self._installed[grant.stream_id] = (told.handle, grant.grant_id)
            case Remove(stream_id, grant_id):
                if self._installed.get(stream_id) == (told.handle, grant_id):
                    del self._installed[stream_id]
            case _:
                pass


class Stage:
    """All processes, the store, and what has been said on the wire and to the sessions."""

    def __init__(self, nodes: tuple[str, ...], streams: int, messages: int) -> None:
        self.now = 0.0
        self.settings = LeaderSettings()
        self.streams = MemoryStreams()
        self.streams.add_space(shards=streams)
        for stream_id in self.streams.streams:
            self.streams.append(stream_id, messages)
        self.store = MemoryGroups(self.streams, lambda: EPOCH_US + round(self.now * 1_000_000))
        self.lines = Lines()
        self.said: list[str] = []
        self.queue: deque[Callable[[], None]] = deque()
        self.fates: dict[str, str] = {}
        self._late: list[tuple[str, str, Message]] = []
        self._hanging: list[tuple[NodeProcess, Request]] | None = None
        self._forced_seen = 0
        self.nodes: dict[str, NodeProcess] = {}
        self.agents: dict[str, AgentProcess] = {}
        for name in nodes:
            self.start_node(name)
        self.settle()

    # --- time and order ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything happen that happens at this moment."""
        while self.queue:
            self.queue.popleft()()

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
            target.soon(lambda: target.handle(Heard(sender, message)))
        elif isinstance(target, AgentProcess) and isinstance(message, ToBorrower):
            target.soon(lambda: target.handle(FromNode(sender, message)))
        else:
            raise BadLine(f"{receiver} cannot be told {self.lines.message(message)!r}")

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
        node.soon(lambda: node.handle(Begin()))

    def agent(self, name: str) -> AgentProcess:
        """The agent of that name, which begins with its first subscription."""
        if name not in self.agents:
            agent = self.agents[name] = AgentProcess(self, name)
            agent.soon(lambda: agent.handle(NodesKnown(self.live_nodes())))
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
        node.soon(lambda: node.handle(Shutdown(self.now + 5.0)))

    def operator_takes(self, stream_id: int) -> None:
        """Whoever leads is told to take a stream back."""
        for node in self.nodes.values():
            node.soon(lambda node=node: node.handle(RevokeWanted(GROUP_ID, (stream_id,), "operator")))  # type: ignore[misc]

    def live_nodes(self) -> tuple[str, ...]:
        """What the directory of nodes says."""
        return tuple(name for name, node in self.nodes.items() if node.alive)

    # --- the database -----------------------------------------------------------------------------------------------

    def ask_database(self, node: NodeProcess, request: Request) -> None:
        """Answered at once, unless it hangs."""
        if self._hanging is None:
            node.answer(request)
        else:
            self._hanging.append((node, request))

    def hang_database(self) -> None:
        """From now on it answers nothing."""
        self._hanging = self._hanging or []

    def wake_database(self) -> None:
        """It executes what it was asked meanwhile."""
        waiting, self._hanging = self._hanging or [], None
        for node, request in waiting:
            node.answer(request)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def take_said(self, *, pings: bool) -> list[str]:
        """All that was said since the last time; the same line again and again is one line."""
        said, self.said = self.said, []
        if not pings:
            said = [line for line in said if not line.partition(": ")[2].startswith(PINGS)]
        found: list[tuple[str, int]] = []
        for line in said:
            before, count = found[-1] if found else ("", 0)
            if line == before:
                found[-1] = (line, count + 1)
            else:
                found.append((line, 1))
        return [line if count == 1 else f"{line} x{count}" for line, count in found]

    def take_forced(self) -> list[str]:
        """Grants that ended without their holder's last word since the last time: from there on, a second delivery."""
        forced = [h for h in self.store.history(GROUP_ID) if h.forced]
        new, self._forced_seen = forced[self._forced_seen :], len(forced)
        return [f"stream {h.stream_id} from {h.borrower_id} at {h.position}: {h.event}, {h.reason}" for h in new]

    def borrowers(self) -> list[str]:
        """Every living agent's borrowers."""
        return [line for agent in self.agents.values() for line in agent.borrowers()]

    def lendings(self) -> list[str]:
        """The rows as the database has them."""
        return [self._lending(row) for _, row in sorted(self.store.rows(GROUP_ID).items())]

    def _lending(self, row: Row) -> str:
        if row.status is not LendingStatus.HELD:
            return f"stream {row.stream_id} {row.status} at {row.position}"
        return f"{self.lines.grant(row.stream_id, row.grant_id)} held by {row.borrower_id} at {row.position}"
