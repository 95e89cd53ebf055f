"""One run: its processes, the order of its phases, what must be true at the end."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

from sublet_borrower.settings import BorrowerSettings
from sublet_leader.settings import LeaderSettings
from tests.simulation.checkers import Checkers, Violation
from tests.simulation.checkers.rest import check_rest
from tests.simulation.database import Failover, WatchedGroups
from tests.simulation.fault_injector import FaultInjector
from tests.simulation.locks import AdvisoryLocks, LockFaultInjector
from tests.simulation.operators import Groups, Operators
from tests.simulation.processes import SimulatedAgent, SimulatedNode
from tests.simulation.publishing import Journal, Publishing
from tests.simulation.queries import Checkpoint, Queries
from tests.simulation.streams import LoweredHeads, Maintenance, Rollovers
from tests.simulation.transactions import UsersDatabase
from tests.simulation.world import MAX_DRIFT, Network, Weather, World
from tests.support.memory_store.catalogue import MemoryCatalogue

SAFETY_S = 48.0
LIVENESS_S = 150.0
STILL_S = 7.0
"""Longer than the minimal duration of a grant."""
LOSSES_HERE = 1_000
"""Limit of losses before a stream is blocked. With these faults five holders in a row may be lost at one offset by
accident, about once in two thousand runs. Then the product rightly blocks the stream for an operator, whom a run does
not have."""
_NAMES = ("red", "blue")


class Simulation:
    """Three nodes, a few agents, one to three groups. `run` raises `Violation` if a check failed."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed = seed
        self.world = World(seed, trace)
        self.crashes = 0
        self._made = 0
        leader = replace(LeaderSettings(), revoke_deadline_s=8.0, leader_idle_timeout_s=11.0).check()
        self._borrower = BorrowerSettings().check()
        self.revoke_deadline_s = leader.revoke_deadline_s
        self.lease_s, self.fence_s, self.trust_s = (
            leader.lease_duration_s,
            leader.eviction_timeout_s,
            leader.ping_valid_for_s,
        )
        self._drift = self.world.random.choice((0.0, 0.001, MAX_DRIFT))
        self.streams = MemoryCatalogue()
        self.store = WatchedGroups(self.streams, self.world)
        self.locks = AdvisoryLocks(self.store.locks)
        self.journal = Journal(self)
        self.publishing = Publishing(self)
        self.store.meanwhile = self.publishing.intrude
        self.checkers = self.store.checkers = Checkers(self)
        self.nodes = [SimulatedNode(self, name, leader, self._drift) for name in ("n1", "n2", "n3")]
        self.agents: dict[str, SimulatedAgent] = {}
        self.failover = Failover(self)
        self.lowered_heads = LoweredHeads(self)
        self.store.on_sync = self.lowered_heads.synced
        self.network = Network(self.world, {node.address: node for node in self.nodes}, self.agents)
        self.groups = Groups(self)
        self.fault_injector = FaultInjector(self)
        self.lock_fault_injector = LockFaultInjector(self)
        self.queries = Queries(self)
        self.users = UsersDatabase(self)
        self.rollovers = Rollovers(self)
        self.maintenance = Maintenance(self)
        self.operators = Operators(self)
        self._named = self.world.chance(0.5)

    # --- used by other modules --------------------------------------------------------------------------------------

    def live_addresses(self) -> tuple[str, ...]:
        """Return the addresses in the node directory: a crashed node stays in it for a while."""
        return tuple(n.address for n in self.nodes if n.alive or self.world.chance(0.3))

    def living(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents.values() if agent.alive]

    def join(self, like: SimulatedAgent | None = None) -> SimulatedAgent:
        """Start a process, perhaps a named one; `like`: under the name of that one."""
        self._made += 1
        name = like.session if like is not None else self._new_name()
        agent = SimulatedAgent(self, f"a{self._made}", self._borrower, self._drift, name)
        self.agents[agent.name] = agent
        self.world.say(agent.name, f"joins as {name}" if name else "joins")
        for subscription in self.groups.subscriptions:
            if self.world.chance(0.7) or len(self.groups.subscriptions) == 1:
                agent.subscribe(subscription)
                if name is None and self.world.chance(0.2):
                    agent.subscribe(subscription)
        return agent

    def start_query(self, checkpoint: Checkpoint) -> SimulatedAgent:
        self._made += 1
        agent = SimulatedAgent(self, f"a{self._made}", self._borrower, self._drift, None, checkpoint)
        self.agents[agent.name] = agent
        self.world.say(agent.name, f"goes on with {checkpoint}")
        agent.subscribe(self.groups.subscriptions[0])
        return agent

    def _new_name(self) -> str | None:
        """Return a name, mostly a free one: of two processes of one name the first is soon fenced."""
        if not self._named or self.world.chance(0.4):
            return None
        free = [name for name in _NAMES if all(a.session != name for a in self.living())]
        return self.world.random.choice(free) if free else None

    # --- the run ----------------------------------------------------------------------------------------------------

    @mock.patch("sublet_storage.groups.model.lending_rules.MAX_LOSSES", LOSSES_HERE)
    @mock.patch("sublet_storage.db.reconnecting_connection.IDLE_S", math.inf)  # of this machine's clock
    def run(self) -> None:
        with mock.patch("sublet_borrower.consumer.transaction.connect", self.users.connect):
            self._run()

    def _run(self) -> None:
        self.streams.add_space(shards=self.world.random.randint(2, 5))
        self.publishing.begin()
        self.groups.begin()
        self.fault_injector.begin(SAFETY_S)
        self.lock_fault_injector.begin(SAFETY_S)
        if not self.failover.runs:
            self.queries.begin(SAFETY_S)
        self.rollovers.begin(SAFETY_S)
        self.maintenance.begin(SAFETY_S)
        self.failover.begin(SAFETY_S)
        self.lowered_heads.begin(SAFETY_S)
        if not self.failover.runs:
            self.operators.begin(SAFETY_S)
        for node in self.nodes:
            node.start()
        for _ in range(self.world.random.randint(1, 4)):
            self.world.after(self.world.random.uniform(0, 5), self.join)
        self.world.after(0.1, self._publish)
        self.world.run_until(SAFETY_S)
        self._end_faults()
        self._come_to_rest()
        self._relieve_a_holder()
        self._come_to_rest()
        self._stay_at_rest()

    def _end_faults(self) -> None:
        """End all faults, except that a node may stay dead; not all users that are leaving stay."""
        self.world.weather = Weather.calm()
        self.network.heal()
        self.store.locked.clear()
        self.world.say("world", "--- liveness phase ---")
        self.publishing.end()
        for node in self.nodes[self.world.random.randint(0, 1) :]:
            node.start()
        for subscription in self.groups.subscriptions:
            if subscription.kind == "queue":
                self.groups.declare(subscription)
        self._fill()

    def _fill(self) -> None:
        """Start a member for every group that has none."""
        for subscription in self.groups.subscriptions:
            if not any(w.subscription == subscription for a in self.living() for w in a.wishes.values()):
                self.join().subscribe(subscription)

    def _come_to_rest(self) -> None:
        """Continue until the run is at rest; fail after a time that is more than enough."""
        end = self.world.now + LIVENESS_S
        while self.world.now < end:
            self.world.run_until(self.world.now + 2.0)
            self._fill()
            self.operators.mend()
            if self._is_at_rest():
                return
        check_rest(self)

    def _stay_at_rest(self) -> None:
        """Wait until the last streams are balanced, and check that nothing moves afterwards."""
        for _ in range(6):
            moved = self.checkers.authority.moves
            self.world.run_until(self.world.now + STILL_S)
            if self.checkers.authority.moves == moved and self._is_at_rest():
                return
        check_rest(self)
        raise Violation("streams move on and on although nothing has changed")

    def _is_at_rest(self) -> bool:
        try:
            check_rest(self)
        except Violation as wrong:
            self.world.say("world", f"not at rest: {wrong}")
            return False
        return True

    def _relieve_a_holder(self) -> None:
        """Start a member and stop one that holds streams, so that streams move in every run."""
        self.join()
        rows = [row for group in self.checkers.live_groups() for row in self.store.rows(group.group_id).values()]
        leaver = self.agents[self.world.random.choice(sorted({row.agent for row in rows if row.agent}))]
        for handle in tuple(leaver.wishes):
            leaver.leave(handle)
        self._fill()

    def _publish(self) -> None:
        if self.world.now >= SAFETY_S:
            return
        for stream_id, stream in self.streams.streams.items():
            if not stream.closed and self.world.chance(0.4):
                self.publishing.publish(stream_id, self.world.random.randint(1, 10))
        self.publishing.turn()
        self.world.after(self.world.random.uniform(0.5, 2.0), self._publish)
