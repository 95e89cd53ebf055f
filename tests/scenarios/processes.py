"""The processes of a scenario: nodes and agents, each the product's machine with the thinnest shell there can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet_borrower.machine.agent import (
    Agent,
    AgentEvent,
    CloseSubscription,
    JoinGroup,
    NodesDiscovered,
    SessionAssignmentUpdate,
    SessionProgressReported,
    SubscriptionClosed,
)
from sublet_borrower.machine.events import ProgressReported, StreamGranted, StreamRemoved
from sublet_borrower.machine.transitions import BorrowedStreamStatus
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.node.database_request_executor import execute
from sublet_leader.node.events import DatabaseRequest, NodeEvent
from sublet_leader.node.machine import Node
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.tick import Tick
from sublet_storage.node_directory import NodeIncarnation
from tests.scenarios.lines import BadLine

if TYPE_CHECKING:
    from tests.scenarios.stage import Stage

SUBSCRIPTION = Subscription.parse("$share/story/#")
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
        self.machine = Node(NodeIncarnation(name, f"{name}#{life}", name), stage.settings)

    def tick(self) -> None:
        self.handle(Tick())

    def handle(self, event: NodeEvent) -> None:
        """Give the machine one event and do what it says."""
        stage, outcome = self.stage, self.machine.decide(event, self.stage.now)
        assert not outcome.invariant_violations, outcome.invariant_violations[0]
        for request in outcome.requests:
            stage.queue.append(lambda request=request: stage.ask_database(self, request))  # type: ignore[misc]
        for agent, message in outcome.sends:
            stage.send(self.name, agent, message)
        self._wake(outcome.wake_at)
        if outcome.is_stopped:
            stage.end(self)

    def answer(self, request: DatabaseRequest) -> None:
        """The database executes the request; the answer comes back."""
        answer = execute(request, self.stage.store, self.machine.ref, self.stage.settings.lease_duration_s)
        self.soon(lambda: self.handle(answer))


class AgentProcess(Process):
    """An agent and its subscriptions' sessions, which do what the scenario says."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(stage, name)
        self.machine = Agent(name, BorrowerSettings())
        self.subscriptions = 0
        self._installed: dict[int, tuple[int, int]] = {}

    def tick(self) -> None:
        self.handle(Tick())

    def handle(self, event: AgentEvent) -> None:
        """Give the machine one event and do what it says."""
        stage, outcome = self.stage, self.machine.decide(event, self.stage.now)
        for reported in outcome.updates:
            stage.said.append(f"{self.name} notifies {stage.lines.reported(reported)}")
            self._take(reported)
        for node, message in outcome.sends:
            stage.send(self.name, node, message)
        if outcome.needs_discovery:
            self.soon(lambda: self.handle(NodesDiscovered(stage.live_nodes())))
        self._wake(outcome.wake_at)

    def subscribe(self) -> None:
        """The next subscription."""
        self.subscriptions += 1
        self.handle(JoinGroup(self.subscriptions, str(SUBSCRIPTION), starting_position="earliest"))

    def unsubscribe(self, handle: int) -> None:
        """End a subscription."""
        self.handle(CloseSubscription(handle))

    def consume(self, stream_id: int, position: int, *, final: bool) -> None:
        """The session that has the stream has consumed it so far."""
        if stream_id not in self._installed:
            raise BadLine(f"no session of {self.name} has stream {stream_id}")
        handle, grant_id = self._installed[stream_id]
        self.handle(SessionProgressReported(handle, ProgressReported(stream_id, grant_id, position, final)))

    def borrowers(self) -> list[str]:
        """Each borrower with its status and its streams."""
        return [self._borrower(handle) for handle in sorted(self.machine.borrowers)] if self.alive else []

    def _borrower(self, handle: int) -> str:
        borrower, now = self.machine.borrowers[handle], self.stage.now
        texts = [f"{borrower.borrower_id} {borrower.status.value}"]
        for stream in sorted(borrower.streams, key=lambda s: s.stream_id):
            may_start = self.machine.may_start_call(handle, stream.stream_id, stream.grant_id, now)
            held_up = stream.status is BorrowedStreamStatus.GRANTED and not may_start
            texts.append(f"stream {stream.stream_id} {stream.status.value}" + (" (no new call)" if held_up else ""))
        return ", ".join(texts)

    def _take(self, reported: SessionAssignmentUpdate | SubscriptionClosed) -> None:
        if not isinstance(reported, SessionAssignmentUpdate):
            return
        match reported.update:
            case StreamGranted(grant):
                self._installed[grant.stream_id] = (reported.handle, grant.grant_id)
            case StreamRemoved(stream_id, grant_id):
                if self._installed.get(stream_id) == (reported.handle, grant_id):
                    del self._installed[stream_id]
            case _:
                pass
