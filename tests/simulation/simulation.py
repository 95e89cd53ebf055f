"""One run: who is there, what befalls them, what must be true."""

from __future__ import annotations

from dataclasses import replace

from borrower.settings import BorrowerSettings
from leader.node_events import RevokeWanted
from leader.settings import LeaderSettings
from protocol.messages import ToBorrower, ToLeader
from protocol.words import Subscription
from storage.groups.memory import MemoryGroups
from storage.groups.memory_streams import MemoryStreams
from storage.groups.model import HistoryRecord, Start
from tests.simulation.agents import SimulatedAgent
from tests.simulation.checkers import Checkers
from tests.simulation.nodes import SimulatedNode
from tests.simulation.world import Weather, World

SUBSCRIPTION = "$share/sim/#"
SAFETY_S = 60.0
LIVENESS_S = 75.0


class Simulation:
    """Three nodes, a few agents, one group. `run` raises `Violation` if anything was wrong."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed = seed
        self.world = World(seed, trace)
        self.streams = MemoryStreams()
        self.store = MemoryGroups(self.streams, self.world.clock_us)
        self.checkers = Checkers(self)
        self.crashes = 0
        leader = replace(LeaderSettings(), revoke_deadline_s=6.0)
        self.nodes = [SimulatedNode(self, name, leader) for name in ("n1", "n2", "n3")]
        self.agents: dict[str, SimulatedAgent] = {}
        self._made = 0

    # --- the network ------------------------------------------------------------------------------------------------

    def to_node(self, agent: SimulatedAgent, address: str, message: ToLeader) -> None:
        """From an agent; where nobody lives, the connection breaks."""
        node = next(n for n in self.nodes if n.address == address)

        def deliver() -> None:
            if node.alive:
                node.hear(agent.agent_id, message)
            else:
                self.world.after(0.001, lambda: agent.lose(address))

        self.world.transmit(deliver)

    def to_agent(self, address: str, agent_id: str, message: ToBorrower) -> None:
        """From a node; to somebody who died it is lost."""
        self.world.say(address, f"-> {message}")
        agent = self.agents.get(agent_id)
        if agent is not None:
            self.world.transmit(lambda: agent.hear(address, message))

    def node_gone(self, address: str) -> None:
        """Most agents notice a broken connection; the others have their timers."""
        for agent in self.agents.values():
            if self.world.chance(0.8):
                self.world.after(self.world.random.uniform(0.001, 0.1), lambda a=agent: a.lose(address))

    def live_addresses(self) -> tuple[str, ...]:
        """What the node directory would say: a crashed node stays in it for a while."""
        return tuple(n.address for n in self.nodes if n.alive or self.world.chance(0.3))

    # --- what checkers ask ------------------------------------------------------------------------------------------

    def row(self, stream_id: int):  # type: ignore[no-untyped-def]
        """The lending row as the store has it."""
        return self.store._lives[1].rows[stream_id]

    def history(self) -> tuple[HistoryRecord, ...]:
        """Everything recorded of the group."""
        return self.store.history(1)

    def live_borrowers(self) -> list[str]:
        """The borrowers of all open subscriptions."""
        return [a.machine.borrowers[h].borrower_id for a in self.agents.values() if a.alive for h in a.open]

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Safety phase, then liveness phase, then the final checks."""
        self.streams.add_space(shards=self.world.random.randint(2, 5))
        self.store.open_group(Subscription.parse(SUBSCRIPTION), Start.EARLIEST)
        for node in self.nodes:
            node.start()
        for _ in range(self.world.random.randint(1, 4)):
            self.world.after(self.world.random.uniform(0, 5), self._join)
        self.world.after(0.5, self._befall)
        self.world.after(0.1, self._publish)
        self.world.run_until(SAFETY_S)
        self.world.weather = Weather.calm()
        self.world.say("world", "--- liveness phase ---")
        for node in self.nodes:
            node.start()
        if not any(a.open for a in self.agents.values() if a.alive):
            self._join()
        self.world.run_until(SAFETY_S + LIVENESS_S)
        self.checkers.check_end()

    def _join(self) -> None:
        self._made += 1
        agent = SimulatedAgent(self, f"a{self._made}", BorrowerSettings())
        self.agents[agent.agent_id] = agent
        self.world.say(agent.agent_id, "joins")
        for _ in range(2 if self.world.chance(0.2) else 1):
            agent.subscribe(SUBSCRIPTION)

    def _publish(self) -> None:
        if self.world.now >= SAFETY_S:
            return
        for stream_id, stream in self.streams.streams.items():
            if not stream.closed and self.world.chance(0.4):
                self.streams.append(stream_id, self.world.random.randint(1, 10))
        self.world.after(self.world.random.uniform(0.5, 2.0), self._publish)

    def _befall(self) -> None:
        """Now and then something goes wrong, or somebody comes or goes."""
        if self.world.now >= SAFETY_S:
            return
        self.world.after(self.world.random.expovariate(1 / 4.0), self._befall)
        choice = self.world.random.choice(
            [
                "node crash",
                "node stop",
                "node start",
                "node start",
                "agent crash",
                "leave",
                "join",
                "again",
                "roll",
                "revoke",
            ]
        )
        node = self.world.random.choice(self.nodes)
        living = [a for a in self.agents.values() if a.alive]
        agent = self.world.random.choice(living) if living else None
        match choice:
            case "node crash":
                self.crashes += node.alive
                node.crash()
            case "node stop":
                node.shut_down()
            case "node start":
                node.start()
            case "agent crash" if agent is not None:
                self.crashes += 1
                agent.crash()
            case "leave" | "again" if agent is not None:
                for handle in tuple(agent.open):
                    agent.leave(handle)
                    if choice == "again":
                        agent.subscribe(SUBSCRIPTION)
            case "join":
                self._join()
            case "roll" if len(self.streams.streams) < 16:
                self.streams.rollover(1, self.world.random.choice([None, 2, 3, 5]))
            case "revoke" if node.alive:
                streams = tuple(s for s in self.streams.streams if self.world.chance(0.3))
                node.handle(RevokeWanted(1, streams, "operator"))
