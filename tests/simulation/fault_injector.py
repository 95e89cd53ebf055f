"""Faults, and processes that come and go, during the safety phase."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from sublet_leader.node.events import CommitWrites, NodeDesiredStateRead, StreamsChanged
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import ForceRelease, GrantStream, GroupWrites, LendingOutcome, LendingStatus
from tests.simulation.database import StatementOutcome
from tests.simulation.world import BOTH_DIRECTIONS, Happenings

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent, SimulatedNode
    from tests.simulation.simulation import Simulation

_NODE = ("crash", "stop", "start", "start", "start", "pause", "flutter", "trouble", "trouble", "cut", "silence")
_GROUP = ("join", "join", "roll", "roll", "revoke", "lock", "take", "snatch", "delete", "retire", "retire")
_ALL = ("hang", "down", "rolling")
_AGENT = ("crash", "crash", "pause", "part", "part", "blip", "blip", "stray", "deny")
_USER = ("leave", "again", "again", "return", "twin")
_ALWAYS = {"join", "start", "crash"}
_MAX_STREAMS = 16
_MAX_BACK_S = 4.0
"""How far the database's clock is set back at once."""
_BACK_EVERY_S = 8.0
_ORDER_EVERY_S = 6.0
_MAX_AGENTS = 5


class FaultInjector(Happenings):
    """Each run has its own mixture: a third of the kinds never comes, so that the others come more often."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the faults")
        self._random = simulation.world.random
        spared = {k for k in (*_NODE, *_GROUP, *_ALL, *_AGENT, *_USER) if self._world.chance(0.3)} - _ALWAYS
        self._node, self._group, self._all, self._agent, self._user = (
            [kind for kind in kinds if kind not in spared] for kinds in (_NODE, _GROUP, _ALL, _AGENT, _USER)
        )

    def begin(self, until: float) -> None:
        self._until = until
        if self._world.chance(0.04):
            self._start_in_vain()
        self._snatching = False
        self._repeat(self._befall, 3.0, first_s=0.5)
        clock = Random(f"the clock of {self._simulation.seed}")
        if clock.random() < 0.3:
            self._world.after(clock.expovariate(1 / _BACK_EVERY_S), lambda: self._set_clock_back(clock))
        operator = Random(f"the operator of {self._simulation.seed}")
        if operator.random() < 0.3:
            self._world.after(operator.expovariate(1 / _ORDER_EVERY_S), lambda: self._order(operator))

    def _order(self, operator: Random) -> None:
        """Drain nodes, and ask others to step down, with a generator of its own. In the end none drains."""
        nodes = self._simulation.nodes
        if self._world.now >= self._until:
            for node in nodes:
                node.deliver(NodeDesiredStateRead(False, {}))
            return
        node = operator.choice(nodes)
        led = node.machine.election.leaderships()
        draining = operator.random() < 0.4
        some = {group_id: term for group_id, term in led.items() if operator.random() < 0.5 and group_id}
        self._world.say("operator", f"{'drains' if draining else 'orders'} {node.name}, which leads {led}: {some}")
        node.deliver(NodeDesiredStateRead(draining, some))
        self._world.after(operator.expovariate(1 / _ORDER_EVERY_S), lambda: self._order(operator))

    def _set_clock_back(self, clock: Random) -> None:
        """Set the clock back, with a generator of its own, so that all else in a run is the same."""
        if self._world.now < self._until:
            self._world.set_clock_back(clock.uniform(0.0, _MAX_BACK_S))
            self._world.after(clock.expovariate(1 / _BACK_EVERY_S), lambda: self._set_clock_back(clock))

    def asked(self, node: SimulatedNode, request: object) -> None:
        """Handle a request that a node has just sent to its database."""
        if not self._snatching or not isinstance(request, CommitWrites):
            return
        streams = self._simulation.streams.streams
        for writes in request.batch:
            for entry in writes.changes:
                if (
                    isinstance(entry, GrantStream)
                    and (stream := streams[entry.stream_id]).head == 0
                    and not stream.closed
                ):
                    self._snatching = False
                    self._world.say("operator", f"rolls over and revokes stream {entry.stream_id} while it is granted")
                    self._simulation.streams.rollover(stream.generation.space_id)
                    node.revoke(writes.group_id, entry.stream_id)
                    return

    def _befall(self) -> None:
        kind = self._random.random()
        living = self._simulation.living()
        if kind < 0.38:
            self.befall_node(self._random.choice(self._simulation.nodes), self._random.choice(self._node))
        elif kind < 0.45 and self._all:
            self._befall_all(self._random.choice(self._all))
        elif kind < 0.65 or not living:
            subscription = self._random.choice(self._simulation.groups.subscriptions)
            self._befall_group(subscription, self._random.choice(self._group))
        elif kind < 0.88 or not self._user:
            self._befall_agent(self._random.choice(living), self._random.choice(self._agent))
        else:
            self._befall_user(self._random.choice(living), self._random.choice(self._user))

    # --- nodes and their database -----------------------------------------------------------------------------------

    def befall_node(self, node: SimulatedNode, kind: str) -> None:
        """Apply this fault to a node, now or a little later."""
        rnd = self._random
        match kind:
            case "crash":
                self._simulation.crashes += node.alive
                node.crash()
            case "stop":
                node.shut_down()
            case "start":
                node.start()
            case "pause":
                node.pause(self._pause_s())
            case "flutter":
                node.start()
                self._shut_down_later(node, rnd.uniform(0.0, 0.01))
            case "trouble":
                self._world.say(node.name, "has a bad way to the database")
                node.way.trouble(rnd.uniform(1.0, 8.0))
                later_s = rnd.uniform(0.0, 6.0)
                if self._world.chance(0.5):
                    self._shut_down_later(node, later_s)
                else:
                    self._world.after(later_s, node.start)
            case "cut":
                self._world.say(node.name, "is cut off from the database")
                node.way.cut(StatementOutcome.LOST, rnd.uniform(1.0, 15.0))
            case "silence":
                self._world.say(node.name, "receives no answers of it")
                node.way.cut(StatementOutcome.SILENT, rnd.uniform(1.0, 15.0))

    def _shut_down_later(self, node: SimulatedNode, later_s: float) -> None:
        """Shut a node down later, unless it is the last one after the faults: without a node nothing can be
        consumed."""

        def unless_last() -> None:
            others = (other for other in self._simulation.nodes if other is not node)
            if not self._world.calm or any(other.alive and not other.stopping for other in others):
                node.shut_down()

        self._world.after(later_s, unless_last)

    def _befall_all(self, kind: str) -> None:
        rnd = self._random
        match kind:
            case "hang":
                self._hang_database(rnd.uniform(2.0, 6.0))
            case "down":
                duration_s = rnd.uniform(0.5, 12.0)
                self._world.say("database", f"is down for {duration_s:.1f} s")
                for node in self._simulation.nodes:
                    node.way.down(duration_s)
                self._simulation.lock_fault_injector.restart()
            case "rolling":
                self._world.say("operator", "restarts all nodes, one after the other")
                for turn, node in enumerate(self._simulation.nodes):
                    self._world.after(turn * rnd.uniform(0.5, 3.0), node.restart)

    def _hang_database(self, deaf_s: float) -> None:
        dumb_s = self._random.uniform(3.0, 9.0)
        self._world.say("database", f"says nothing for {deaf_s:.1f} s, then receives nothing for {dumb_s:.1f} s")
        for node in self._simulation.nodes:
            node.way.hang(deaf_s, dumb_s)

    def _start_in_vain(self) -> None:
        """Answer the first claims when their leases have almost expired, and let some nodes shut down meanwhile."""
        self._hang_database(self._random.uniform(9.5, 13.0))
        for node in self._simulation.nodes:
            self._shut_down_later(node, self._random.uniform(1.0, 9.0))

    def _pause_s(self) -> float:
        return self._random.choice((0.5, 3.0, 8.0, 11.0, 14.0))

    # --- groups and streams -----------------------------------------------------------------------------------------

    def _befall_group(self, subscription: Subscription, kind: str) -> None:
        rnd, simulation = self._random, self._simulation
        group = simulation.groups.live(subscription)
        rows = sorted(simulation.store.rows(group.group_id)) if group is not None else []
        if kind == "join" or group is None or not rows:
            if len(simulation.living()) < _MAX_AGENTS:
                simulation.join()
            return
        match kind:
            case "roll" | "retire" | "snatch":
                self._befall_streams(kind)
            case "delete" if not simulation.failover.runs:
                simulation.groups.delete(subscription)
            case "revoke":
                streams = tuple(s for s in rows if self._world.chance(0.3))
                for node in simulation.nodes:
                    node.revoke(group.group_id, *streams)
            case "lock":
                self._lock_row(group.group_id, rnd.choice(rows))
            case "take":
                self._take_stream(group.group_id, rnd.choice(rows))

    def _befall_streams(self, kind: str) -> None:
        streams = self._simulation.streams
        match kind:
            case "retire":
                self._retire()
            case "snatch":
                self._snatching = len(streams.streams) < _MAX_STREAMS
            case "roll" if len(streams.streams) < _MAX_STREAMS:
                self._world.say("operator", "rolls the streams over")
                streams.rollover(self._simulation.publishing.any_space(), self._random.choice([None, 2, 3, 5]))
                if self._world.chance(0.5):
                    self._announce()

    def _announce(self) -> None:
        for node in self._simulation.nodes:
            if self._world.chance(0.7):
                self._world.after(self._random.uniform(0.0, 0.3), partial(node.deliver, StreamsChanged()))

    def _retire(self) -> None:
        """Delete the oldest closed generation, if no group loses messages but those that skip them."""
        generations = self._simulation.streams.generations.values()
        oldest = next((g for g in generations if g.closed and not g.gone), None)
        if oldest is None:
            return
        for life in self._simulation.checkers.lives.live():
            rows = self._simulation.store.rows(life.group.group_id)
            unread = [s for s in oldest.stream_ids if s in rows and rows[s].status is not LendingStatus.FINISHED]
            if unread and life.group.options.on_data_loss != "skip":
                return
        self._world.say("retention", f"takes generation {oldest.generation_id}")
        self._simulation.streams.expire_generation(oldest.generation_id)

    def _lock_row(self, group_id: int, stream_id: int) -> float:
        """Lock a lending row for a while, as a user's transaction does."""
        duration_s = self._random.uniform(0.2, 4.0)
        locked = self._simulation.store.locked
        locked.add((group_id, stream_id))
        self._world.after(duration_s, lambda: locked.discard((group_id, stream_id)))
        return duration_s

    def _take_stream(self, group_id: int, stream_id: int) -> None:
        """Let an operator revoke a stream, and in the end take it by hand, in a transaction that its leader does not
        know of. Meanwhile its holder may lose its leader."""
        nodes, row = self._simulation.nodes, self._simulation.store.rows(group_id)[stream_id]
        if self._world.chance(0.5):
            for node in nodes:
                node.revoke(group_id, stream_id)
        if self._world.chance(0.5) and (holder := self._simulation.agents.get(row.agent or "")):
            for node in nodes:
                holder.lose(node.address)
        self._world.after(self._lock_row(group_id, stream_id), lambda: self._seize(group_id, stream_id))

    def _seize(self, group_id: int, stream_id: int) -> None:
        """Take a stream that is being consumed: its leader notices at the next progress."""
        row: LendingRow | None = self._simulation.store.rows(group_id).get(stream_id)
        claim = self._simulation.store.read_leaderships([group_id]).get(group_id)
        if claim is None or row is None or row.status is not LendingStatus.HELD:
            return
        done = row.position if row.consumed is None else row.consumed.upto
        holder = self._simulation.agents.get(row.agent or "")
        writes = holder is not None and self._simulation.users.is_used_by(holder)
        if done == self._simulation.streams.streams[stream_id].head or writes:
            return
        entry = ForceRelease(stream_id, row.grant_id, "by hand")
        result = self._simulation.store.commit([GroupWrites(group_id, claim.term, (entry,), needs_stream_sync=False)])[
            0
        ]
        if not result.has_stale_term and result.results[0].outcome is LendingOutcome.APPLIED:
            self._world.say("operator", f"takes stream {stream_id} of group {group_id} by hand")
            self._simulation.checkers.deliveries.taken(group_id, stream_id, row.grant_id)

    # --- agents -----------------------------------------------------------------------------------------------------

    def _befall_agent(self, agent: SimulatedAgent, kind: str) -> None:
        rnd, simulation = self._random, self._simulation
        node = rnd.choice(simulation.nodes)
        match kind:
            case "crash":
                simulation.crashes += 1
                agent.crash()
            case "pause":
                agent.pause(self._pause_s())
            case "part":
                paths = rnd.choice((BOTH_DIRECTIONS, BOTH_DIRECTIONS, *((way,) for way in BOTH_DIRECTIONS)))
                every = self._world.chance(0.3)
                for one in simulation.nodes if every else [node]:
                    simulation.network.part(agent.name, one.address, paths, rnd.uniform(1.0, 15.0))
            case "stray":
                agent.receive_strays(node.address)
            case "deny" if agent.session is None:
                agent.deny(node.address)
                simulation.crashes += 1
                agent.crash()
            case "blip":
                self._world.say("network", f"{agent.name} loses its connection to {node.name} for a moment")
                agent.lose(node.address)

    def _befall_user(self, agent: SimulatedAgent, kind: str) -> None:
        """Let a user leave or resubscribe, a named process return, or be started twice."""
        simulation = self._simulation
        if kind in ("leave", "again"):
            for handle, wish in tuple(agent.wishes.items()):
                agent.leave(handle)
                if kind == "again":
                    agent.subscribe(wish.subscription)
        elif agent.session is None:
            return
        elif kind == "return":
            simulation.crashes += 1
            agent.crash()
            later_s = self._random.choice((0.3, 2.0, 6.0, 20.0))
            if agent.checkpoint is None:
                self._world.after(later_s, lambda: simulation.join(like=agent))
        elif len(simulation.living()) < _MAX_AGENTS and agent.checkpoint is None:
            simulation.join(like=agent)
