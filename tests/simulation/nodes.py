"""A node's shell in the simulator: the product's `Node`, a slow and fallible database, crashes and new lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leader.node_events import (
    Claimed,
    ClaimLeadership,
    Commit,
    Heard,
    Load,
    Loaded,
    NodeEvent,
    NotWritten,
    Open,
    Opened,
    Released,
    ReleaseLeaderships,
    Renewed,
    RenewLeaderships,
    Request,
    Shutdown,
    Tick,
    Written,
)
from leader.node_machine import Node
from leader.settings import LeaderSettings
from protocol.errors import LostLeadership
from protocol.messages import ToLeader
from storage.groups.model import NodeRef

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class SimulatedNode:
    """One address; each life has its own incarnation and machine."""

    def __init__(self, simulation: Simulation, name: str, settings: LeaderSettings) -> None:
        self.simulation, self.world, self.name, self.settings = simulation, simulation.world, name, settings
        self.address = f"{name}:1"
        self.alive = False
        self.stopping = False
        self.lives = 0
        self._wake_count = 0
        self._database_free_at = 0.0
        self.machine = self._new_machine()

    def _new_machine(self) -> Node:
        self.lives += 1
        return Node(NodeRef(self.name, f"{self.name}#{self.lives}", self.address), self.settings)

    def start(self) -> None:
        """A new life."""
        if not self.alive:
            self.machine, self.alive, self.stopping = self._new_machine(), True, False
            self._database_free_at = self.world.now
            self.world.say(self.name, "starts")

    def crash(self) -> None:
        """Gone, with everything it remembered."""
        if self.alive:
            self.alive = False
            self.world.say(self.name, "CRASHES")
            self.simulation.node_gone(self.address)

    def shut_down(self) -> None:
        """Leave gracefully."""
        if self.alive and not self.stopping:
            self.stopping = True
            self.world.say(self.name, "shuts down")
            self.handle(Shutdown(self.world.now + 5.0))

    def hear(self, agent: str, message: ToLeader) -> None:
        """A message has come over the network."""
        if self.alive:
            self.handle(Heard(agent, message))

    def handle(self, event: NodeEvent) -> None:
        """Give one event to the machine and do what it says."""
        outcome = self.machine.decide(event, self.world.now)
        self.world.say(self.name, event)
        self.simulation.checkers.node_acted(self)
        if outcome.stories:
            raise AssertionError(outcome.stories[0])
        for request in outcome.requests:
            self._ask_database(request)
        for agent, message in outcome.sends:
            self.simulation.to_agent(self.address, agent, message)
        if outcome.stopped:
            self.alive = False
            self.world.say(self.name, "has stopped")
            self.simulation.node_gone(self.address)
        elif outcome.wake_at is not None and outcome.wake_at != float("inf"):
            self._wake(max(outcome.wake_at - self.world.now, 0.0005))

    def _wake(self, delay_s: float) -> None:
        self._wake_count += 1
        mine = self._wake_count
        self.world.after(delay_s, self._in_this_life(lambda: mine == self._wake_count and self.handle(Tick())))

    def _in_this_life(self, happening: Callable[[], object]) -> Callable[[], None]:
        life = self.lives

        def if_alive() -> None:
            if self.alive and self.lives == life:
                happening()

        return if_alive

    # --- the database -----------------------------------------------------------------------------------------------

    def _ask_database(self, request: Request) -> None:
        """In order, each after the other; executed even if the node dies meanwhile, as a real one would be."""
        world = self.world
        slow = world.random.uniform(0.2, 2.5) if world.chance(world.weather.slow_database) else 0.0
        there = max(world.now, self._database_free_at) + world.random.uniform(0.001, 0.004)
        back = there + slow + world.random.uniform(0.0005, 0.002)
        self._database_free_at = back
        world.after(there - world.now, lambda: self._execute(request, self._in_this_life, back))

    def _execute(
        self, request: Request, alive: Callable[[Callable[[], object]], Callable[[], None]], back: float
    ) -> None:
        failing = self.world.chance(self.world.weather.failing_database)
        executed = not failing or self.world.chance(0.5)
        answer = self._answer(request) if executed else None
        if failing or answer is None:
            answer = _failure(request, unknown=executed)
        reply = answer
        self.world.after(back - self.world.now, alive(lambda: self.handle(reply)))

    def _answer(self, request: Request) -> NodeEvent:
        store, ref = self.simulation.store, self.machine.ref
        match request:
            case Open():
                return Opened(request, store.open_group(request.subscription, request.start))
            case ClaimLeadership():
                claim = store.claim(request.leadership_id, ref, self.settings.lease_s)
                return Claimed(request, claim, self.world.random.uniform(0, 0.3))
            case RenewLeaderships():
                return Renewed(request, store.renew(ref, request.terms, self.settings.lease_s))
            case ReleaseLeaderships():
                return Released(request, store.release(ref, request.terms))
            case Load():
                try:
                    return Loaded(request, store.load(request.group.group_id, request.term))
                except LostLeadership:
                    return Loaded(request, None)
            case Commit():
                results = store.commit(request.batch)
                self.simulation.checkers.committed(request.batch, results)
                return Written(request, results)


def _failure(request: Request, unknown: bool) -> NodeEvent:
    match request:
        case Open():
            return Opened(request, None, "the database did not answer")
        case ClaimLeadership():
            return Claimed(request, None)
        case RenewLeaderships():
            return Renewed(request, None)
        case ReleaseLeaderships():
            return Released(request, None)
        case Load():
            return Loaded(request, None)
        case Commit():
            return NotWritten(request, unknown)
