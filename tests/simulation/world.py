"""The simulated world: virtual time, processes with clocks of their own, and the network between them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sublet_leader.node.events import AgentMessageReceived
from sublet_protocol.messages.borrower_leader import ToBorrower, ToLeader

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent, SimulatedNode
    from tests.simulation.simulation import Simulation

EPOCH_US = 1_700_000_000_000_000
"""The database's clock at virtual time 0."""
MAX_DRIFT = 0.08
"""How far a clock's rate may be off: a margin of 1 s in a lease of 10 s tolerates a little less than a tenth."""
BOTH_DIRECTIONS = ("there", "back")


@dataclass(frozen=True, slots=True)
class Weather:
    """Reliability of the network and the database. Probabilities are per message, times in seconds."""

    lost: float = 0.02
    repeated: float = 0.02
    delayed: float = 0.1
    slow_database: float = 0.01
    stalled_database: float = 0.0015
    failing_database: float = 0.008

    @classmethod
    def calm(cls) -> Weather:
        return _CALM


_CALM = Weather(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class World:
    """A heap of scheduled events; everything random comes from one generator."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.weather = Weather()
        self.lines: list[str] | None = [] if trace else None
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._clock_off_us = self._hours_us = 0

    @property
    def calm(self) -> bool:
        return self.weather is _CALM

    def clock_us(self) -> int:
        """Return the database's clock, by which all leases are checked."""
        return EPOCH_US + round(self.now * 1_000_000) + self._clock_off_us

    def wall_us(self) -> int:
        """Return the time of appended messages: between two of them hours may pass that leases do not see."""
        return self.clock_us() + self._hours_us

    def let_hours_pass(self, hours: float) -> None:
        self._hours_us += round(hours * 3_600_000_000)

    @property
    def hours_s(self) -> float:
        """Return the seconds that have passed in this way."""
        return self._hours_us / 1_000_000

    def shift_clock(self, seconds: float) -> None:
        """Shift the database's clock, to record events of the past."""
        self._clock_off_us += round(seconds * 1_000_000)

    def set_clock_back(self, seconds: float) -> None:
        self._clock_off_us -= round(seconds * 1_000_000)
        self.say("database", f"its clock is set back by {seconds:.1f} s")

    def after(self, delay_s: float, happening: Callable[[], object]) -> None:
        self.at(self.now + delay_s, happening)

    def at(self, moment: float, happening: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, happening))

    def run_until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, happening = heapq.heappop(self._heap)
            happening()
        self.now = end

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def say(self, who: str, *what: object) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:9.3f} {who:<8} {' '.join(map(str, what))}")


class Happenings:
    """Something that befalls a run, until the safety phase ends. It has its own random generator, so that all else in
    the run is the same as without it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation, self._world, self._streams = simulation, simulation.world, simulation.streams
        self._random = random.Random(f"{name} of {simulation.seed}")
        self._until = float("-inf")

    def _repeat(
        self,
        happening: Callable[[], object],
        interval_s: float,
        chance: random.Random | None = None,
        first_s: float | None = None,
    ) -> None:
        """Call it at random intervals of about that length until the phase ends; `first_s`: the first, 0: at once."""
        chance = chance or self._random

        def happen() -> None:
            if self._world.now < self._until:
                self._world.after(chance.expovariate(1 / interval_s), happen)
                happening()

        if first_s == 0.0:
            happen()
        else:
            self._world.after(first_s or chance.expovariate(1 / interval_s), happen)


class Process:
    """Base of simulated processes, which can be paused as by SIGSTOP: events during a pause wait in order.

    Its clock is monotonic, begins anywhere and runs a little too fast or too slow, the same in all incarnations:
    comparing the times of two processes fails at once. There is no wall clock that could jump, since no machine uses
    one; the only dates are the database's own, whose clock may jump.
    """

    def __init__(self, world: World, name: str, drift: float) -> None:
        self.world, self.name = world, name
        self.rate = 1.0 + world.random.uniform(-drift, drift)
        self._begun_at = world.random.uniform(0.0, 1e6)
        self._backlog: list[Callable[[], object]] | None = None
        self._tick_at = self._alarm_at = math.inf

    @property
    def now(self) -> float:
        return self._begun_at + self.world.now * self.rate

    def until(self, moment: float) -> float:
        """Return the real seconds until its clock has that time, always a little more than none."""
        return max((moment - self.now) / self.rate, 0.0005)

    def pause(self, duration_s: float) -> None:
        if self._backlog is None:
            self.world.say(self.name, f"pauses for {duration_s} s")
            self._backlog = []
            self.world.after(duration_s, self._resume)

    def awake(self, happening: Callable[[], object]) -> None:
        """Call it now, or as soon as the process is not paused."""
        if self._backlog is None:
            happening()
        else:
            self._backlog.append(happening)

    def tick(self) -> None:
        raise NotImplementedError

    def tick_at(self, moment: float) -> None:
        """Let it tick at that time of its clock, instead of the previously set one."""
        self._tick_at = self.world.now + self.until(moment)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Set an alarm; one that fires too early sets the next."""
        if self._tick_at < self._alarm_at:
            self._alarm_at = at = self._tick_at
            self.world.at(at, lambda: self._ring(at))

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = math.inf
            self.awake(self._tick_if_due)

    def _tick_if_due(self) -> None:
        if self.world.now >= self._tick_at:
            self._tick_at = math.inf
            self.tick()
        else:
            self._set_alarm()

    def _resume(self) -> None:
        backlog, self._backlog = self._backlog or [], None
        self.world.say(self.name, f"goes on, {len(backlog)} things waited")
        for happening in backlog:
            self.awake(happening)


class Network:
    """Carries messages by name of agent and address of node: it loses, delays, duplicates, reorders, and partitions.
    This is worse than what the product's pub/sub layer lets through, which delivers each message once and in order
    within an incarnation of both sides: the machines are tested on weaker guarantees than they get."""

    def __init__(self, world: World, nodes: dict[str, SimulatedNode], agents: dict[str, SimulatedAgent]) -> None:
        self._world, self._nodes, self._agents = world, nodes, agents
        self._broken: set[tuple[str, str, int]] = set()
        self._parted: dict[tuple[str, str, str], float] = {}

    def to_node(self, agent: SimulatedAgent, address: str, message: ToLeader) -> None:
        """Send to a node. To a dead node the connection breaks once; later messages are lost silently."""
        if self._is_parted(agent.name, address, "there"):
            return
        node = self._nodes[address]

        def deliver() -> None:
            if node.alive:
                node.deliver(AgentMessageReceived(agent.name, message))
            elif (broken := (agent.name, address, node.lives)) not in self._broken:
                self._broken.add(broken)
                self._world.after(0.001, lambda: agent.lose(address))

        self._transmit(deliver)

    def to_agent(self, address: str, agent_id: str, message: ToBorrower) -> None:
        """Send to an agent; a message to a dead one is lost."""
        self._world.say(address, "->", message)
        agent = self._agents.get(agent_id)
        if agent is not None and not self._is_parted(agent_id, address, "back"):
            self._transmit(lambda: agent.receive(address, message))

    def part(self, agent_id: str, address: str, paths: tuple[str, ...], duration_s: float) -> None:
        """For that long, lose all messages from the agent to the node (`there`), or from it (`back`)."""
        self._world.say("network", f"{agent_id} and {address} are parted ({', '.join(paths)}) for {duration_s:.1f} s")
        for way in paths:
            self._parted[agent_id, address, way] = self._world.now + duration_s

    def isolate(self, agent_id: str, paths: tuple[str, ...], duration_s: float) -> None:
        """For that long, part the agent from all nodes."""
        for address in self._nodes:
            self.part(agent_id, address, paths, duration_s)

    def heal(self) -> None:
        self._parted.clear()

    def node_gone(self, address: str) -> None:
        """Let most agents notice the broken connection; the others have their timers."""
        for agent in self._agents.values():
            if self._world.chance(0.8):
                self._world.after(self._world.random.uniform(0.001, 0.1), partial(agent.lose, address))

    def _is_parted(self, agent_id: str, address: str, way: str) -> bool:
        return bool(self._parted) and self._world.now < self._parted.get((agent_id, address, way), 0.0)

    def _transmit(self, deliver: Callable[[], None]) -> None:
        """Deliver usually within milliseconds, sometimes late, never or twice."""
        world, weather = self._world, self._world.weather
        if world.chance(weather.lost):
            return
        for _ in range(2 if world.chance(weather.repeated) else 1):
            late = world.random.uniform(0.1, 3.0) if world.chance(weather.delayed) else 0.0
            world.after(late + world.random.uniform(0.0005, 0.005), deliver)
