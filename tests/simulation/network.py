"""The network between agents and nodes: it loses, delays, duplicates, reorders, and partitions.

This is worse than what the product's pub/sub layer lets through, which delivers each message once and in order within
an incarnation of both sides: the machines are tested on weaker guarantees than they get.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sublet_protocol.messages.borrower_leader import ToBorrower, ToLeader
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.agents import SimulatedAgent
    from tests.simulation.nodes import SimulatedNode

BOTH_DIRECTIONS = ("there", "back")


class Network:
    """Carries messages by name of agent and address of node."""

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
                node.receive(agent.name, message)
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
