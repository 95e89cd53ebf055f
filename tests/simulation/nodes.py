"""A node's shell in the simulator: the product's `Node`, a slow and fallible database, crashes and new lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leader.node_events import Begin, Heard, NodeEvent, Request, RevokeWanted, Shutdown, Tick, Written
from leader.node_machine import Node
from leader.requests import execute, failed
from leader.settings import LeaderSettings
from protocol.messages import ToLeader
from storage.groups.model import NodeRef
from tests.simulation.world import Process, Weather

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class SimulatedNode(Process):
    """One address; each life has its own incarnation and machine."""

    def __init__(self, simulation: Simulation, name: str, settings: LeaderSettings) -> None:
        super().__init__(simulation.world)
        self.simulation, self.world, self.name, self.settings = simulation, simulation.world, name, settings
        self.address = f"{name}:1"
        self.alive = False
        self.stopping = False
        self._again = False
        self.lives = 0
        self._wake_count = 0
        self._database_free_at = 0.0
        self._database_bad_until = self._deaf_until = self._dumb_until = 0.0
        self.machine = self._new_machine()

    def _new_machine(self) -> Node:
        self.lives += 1
        return Node(NodeRef(self.name, f"{self.name}#{self.lives}", self.address), self.settings)

    def start(self) -> None:
        """A new life; if the present one is ending, as soon as it has ended."""
        self._again = self.alive and self.stopping
        if not self.alive:
            self.machine, self.alive, self.stopping = self._new_machine(), True, False
            self._database_free_at = self.world.now
            self.world.say(self.name, "starts")
            self.handle(Begin())

    def crash(self) -> None:
        """Gone, with everything it remembered."""
        if self.alive:
            self.alive = False
            self.world.say(self.name, "CRASHES")
            self.simulation.node_gone(self.address)

    def shut_down(self) -> None:
        """Leave gracefully, and stay away."""
        self._again = False
        if self.alive and not self.stopping:
            self.stopping = True
            self.world.say(self.name, "shuts down")
            self._in_this_life(lambda: self.handle(Shutdown(self.world.now + 5.0)))()

    def revoke(self, streams: tuple[int, ...]) -> None:
        """An operator takes streams back."""
        self._in_this_life(lambda: self.handle(RevokeWanted(1, streams, "operator")))()

    def hear(self, agent: str, message: ToLeader) -> None:
        """A message has come over the network."""
        self._in_this_life(lambda: self.handle(Heard(agent, message)))()

    def handle(self, event: NodeEvent) -> None:
        """Give one event to the machine and do what it says."""
        outcome = self.machine.decide(event, self.world.now)
        self.world.say(self.name, event)
        self.simulation.checkers.node_acted(self, outcome.stories)
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
            if self._again:
                self.start()
        elif outcome.wake_at is not None and outcome.wake_at != float("inf"):
            self._wake(max(outcome.wake_at - self.world.now, 0.0005))

    def _wake(self, delay_s: float) -> None:
        self._wake_count += 1
        mine = self._wake_count

        def tick() -> None:
            if mine == self._wake_count:
                self.handle(Tick())

        self.world.after(delay_s, self._in_this_life(tick))

    def _in_this_life(self, happening: Callable[[], object]) -> Callable[[], None]:
        life = self.lives

        def if_alive() -> None:
            if self.alive and self.lives == life:
                happening()

        return lambda: self.awake(if_alive)

    # --- the database -----------------------------------------------------------------------------------------------

    def _ask_database(self, request: Request) -> None:
        """In order, each after the other; executed even if the node dies meanwhile, as a real one would be."""
        world = self.world
        there = max(world.now, self._database_free_at) + world.random.uniform(0.001, 0.004)
        back = there + self._slowness() + world.random.uniform(0.0005, 0.002)
        if there < self._deaf_until:
            back = max(back, self._deaf_until)
        elif there < self._dumb_until:
            there, back = self._dumb_until, self._dumb_until + back - there
        self._database_free_at = back
        replies: list[NodeEvent] = []
        ref = self.machine.ref
        world.after(there - world.now, lambda: replies.append(self._execute(request, ref)))
        world.after(back - world.now, self._in_this_life(lambda: self.handle(replies[0])))

    def trouble_database(self, duration_s: float) -> None:
        """For so long this node's way to the database is bad."""
        self._database_bad_until = self.world.now + duration_s

    def hang_database(self, deaf_s: float, dumb_s: float) -> None:
        """For so long no answer comes, and then for so long no request gets there: who counts its lease from the late
        answer trusts it for too long."""
        self._deaf_until = self.world.now + deaf_s
        self._dumb_until = self._deaf_until + dumb_s

    def _is_database_bad(self) -> bool:
        return self.world.now < self._database_bad_until and self.world.weather != Weather.calm()

    def _slowness(self) -> float:
        """Now and then some seconds; rarely so many that a lease is over before the answer comes."""
        world = self.world
        if world.chance(0.35 if self._is_database_bad() else world.weather.stalled_database):
            return world.random.uniform(3.0, 14.0)
        return world.random.uniform(0.2, 2.5) if world.chance(world.weather.slow_database) else 0.0

    def _execute(self, request: Request, ref: NodeRef) -> NodeEvent:
        failing = self.world.chance(0.3 if self._is_database_bad() else self.world.weather.failing_database)
        executed = not failing or self.world.chance(0.5)
        jitter_s = self.world.random.uniform(0, 0.3)
        answer = execute(request, self.simulation.store, ref, self.settings.lease_s, jitter_s) if executed else None
        if isinstance(answer, Written):
            self.simulation.checkers.committed(answer.request.batch, answer.results)
        return failed(request, unknown=executed) if failing or answer is None else answer
