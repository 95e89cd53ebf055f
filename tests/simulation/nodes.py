"""Shell of a node: the product's `Node`, its database connection, crashes and restarts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from sublet_leader.group.events import ForcedRevokeRequested
from sublet_leader.node.events import (
    GroupLeaderEvent,
    NodeEvent,
    NodeStarted,
    ShutdownRequested,
)
from sublet_leader.node.machine import Node
from sublet_leader.settings import LeaderSettings
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

    def revoke(self, group_id: int, *streams: int) -> None:
        self.deliver(GroupLeaderEvent(group_id, ForcedRevokeRequested(streams, "operator")))

    def deliver(self, event: NodeEvent, life: int | None = None) -> None:
        """Deliver an event to the present incarnation, or to that one only, once it is awake."""
        self._in_this_life(lambda: self.handle(event), life)

    def handle(self, event: NodeEvent) -> None:
        outcome = self.machine.decide(event, self.now)
        self.world.say(self.name, event)
        self.simulation.checkers.node_acted(self, outcome)
        answered = partial(self.deliver, life=self.lives)
        for request in outcome.requests:
            self.way.ask(request, self.machine.ref, self.settings.lease_duration_s, answered)
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

    def _in_this_life(self, happening: Callable[[], object], life: int | None = None) -> None:
        life = self.lives if life is None else life

        def if_alive() -> None:
            if self.alive and self.lives == life:
                happening()

        self.awake(if_alive)
