"""Shell of a node: the product's `Node`, its database connection, crashes and restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

from sublet_leader.group.events import ForcedRevokeRequested
from sublet_leader.node.events import (
    AgentLongPollChanged,
    AgentMessageReceived,
    GroupLeaderEvent,
    NodeDesiredStateRead,
    NodeEvent,
    NodeStarted,
    ShutdownRequested,
    StreamsChanged,
)
from sublet_leader.node.machine import Node
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import ToLeader
from sublet_protocol.tick import Tick
from sublet_storage.node_directory import NodeIncarnation
from tests.simulation.database import DatabaseLink
from tests.simulation.locks import NodeLock
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class SimulatedNode(Process):
    """One address; each start has its own incarnation and machine."""

    def __init__(self, simulation: Simulation, name: str, settings: LeaderSettings, drift: float) -> None:
        super().__init__(simulation.world, name, drift)
        self.simulation, self.settings = simulation, settings
        self.address = f"{name}:1"
        self.way = DatabaseLink(simulation.world, simulation.store)
        self.lock = NodeLock(self, simulation.locks, Random(f"the lock of {name}, {simulation.seed}"))
        self.alive = self.stopping = self._again = False
        self.lives = 0
        self.machine = self._new_machine()

    def _new_machine(self) -> Node:
        self.lives += 1
        return Node(NodeIncarnation(self.name, f"{self.name}#{self.lives}", self.address), self.settings)

    def start(self) -> None:
        """Start a new incarnation; if the present one is ending, as soon as it has ended."""
        self._again = self.alive and self.stopping
        if not self.alive:
            self.machine, self.alive, self.stopping = self._new_machine(), True, False
            self.way.begin_life()
            self.lock.begin_life()
            self.world.say(self.name, "starts")
            self.handle(NodeStarted())

    def crash(self) -> None:
        if self.alive:
            self.alive = False
            self.world.say(self.name, "CRASHES")
            self.lock.end_life(killed=True)
            self.simulation.network.node_gone(self.address)

    def shut_down(self) -> None:
        """Shut down gracefully, and stay away."""
        self._again = False
        if self.alive and not self.stopping:
            self.stopping = True
            self.world.say(self.name, "shuts down")
            self._in_this_life(lambda: self.handle(ShutdownRequested(self.now + 5.0)))

    def restart(self) -> None:
        self.shut_down()
        self.start()

    def revoke(self, group_id: int, streams: tuple[int, ...]) -> None:
        self._in_this_life(lambda: self.handle(GroupLeaderEvent(group_id, ForcedRevokeRequested(streams, "operator"))))

    def order(self, *, draining: bool, step_down: Mapping[int, int]) -> None:
        """Deliver an operator's desired state: to lead nothing, or not under these terms."""
        self._in_this_life(lambda: self.handle(NodeDesiredStateRead(draining, step_down)))

    def learn_of_streams(self) -> None:
        self._in_this_life(lambda: self.handle(StreamsChanged()))

    def learn_of_desired_state(self, group_id: int) -> None:
        self._in_this_life(lambda: self.handle(StreamsChanged(group_id=group_id)))

    def learn_of_poll(self, changed: AgentLongPollChanged) -> None:
        if self.alive:
            self._in_this_life(lambda: self.handle(changed))

    def receive(self, agent: str, message: ToLeader) -> None:
        self._in_this_life(lambda: self.handle(AgentMessageReceived(agent, message)))

    def handle(self, event: NodeEvent) -> None:
        outcome = self.machine.decide(event, self.now)
        self.world.say(self.name, event)
        self.simulation.checkers.node_acted(self, outcome)
        for request in outcome.requests:
            self.way.ask(request, self.machine.ref, self.settings.lease_duration_s, self._answers())
            self.simulation.fault_injector.asked(self, request)
        for agent, message in outcome.sends:
            self.simulation.network.to_agent(self.address, agent, message)
        if outcome.is_stopped:
            self.alive = False
            self.world.say(self.name, "has stopped")
            self.lock.end_life(killed=False)
            self.simulation.network.node_gone(self.address)
            if self._again:
                self.start()
        elif outcome.wake_at is not None and outcome.wake_at != float("inf"):
            self.tick_at(outcome.wake_at)

    def tick(self) -> None:
        if self.alive:
            self.handle(Tick())

    def _answers(self) -> Callable[[NodeEvent], None]:
        """Return a function that handles the database's answer in this incarnation only."""
        life = self.lives
        return lambda answer: self._in_this_life(lambda: self.handle(answer), life)

    def _in_this_life(self, happening: Callable[[], object], life: int | None = None) -> None:
        life = self.lives if life is None else life

        def if_alive() -> None:
            if self.alive and self.lives == life:
                happening()

        self.awake(if_alive)
