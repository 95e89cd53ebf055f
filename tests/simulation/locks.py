"""Advisory locks of nodes and agents in the simulated database, and each process's connection for them.

A connection holds one lock and checks others, as in `sublet_storage.db.liveness_lock`: that of a process that dies is
closed, mostly at once and now and then late; that of a running process is cut, or dead only for the node, which opens
another; a restart of the database closes all. It has its own random generator, and is part of most runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from sublet_borrower.machine.agent import AgentLockUnavailable
from sublet_leader.node.events import AgentLongPollChanged
from sublet_storage.db.liveness_lock import (
    LivenessLockLost,
    LivenessLockSettings,
    LockEvent,
    OwnLivenessLockAcquired,
    PeerLocksChecked,
    compute_lock_key,
)
from tests.simulation.world import BOTH_DIRECTIONS, Happenings

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent, SimulatedNode
    from tests.simulation.simulation import Simulation

_FAULTS = {
    "cut": "has the connection of its lock cut",
    "flap": "has the connection of its lock cut again and again",
    "break off": "has lost the connection of its lock, which the database does not know",
}
_RETRY_S = 0.02
_NO_ANSWER_S = 0.9


@dataclass(eq=False, slots=True)
class Session:
    """One connection, as the server has it. `opened_at`: by the node's clock."""

    opened_at: float
    is_open: bool = True
    key: int | None = None
    is_mute: bool = False


@dataclass(slots=True)
class AdvisoryLocks:
    """The server: the holder of each key, and the time at which each was first free after it was taken.

    `successor`: the one that was promoted, to which few of the new connections lead, and all if this one `is_down`.
    """

    held: set[int]
    first_freed_at: dict[int, float] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    restarted_at: float = float("-inf")
    timeline: int = 0
    successor: AdvisoryLocks | None = None
    former: AdvisoryLocks | None = None
    is_down: bool = False

    def acquire(self, session: Session, key: int) -> bool:
        if not session.is_open or key in self.held:
            return False
        self.held.add(key)
        session.key = key
        return True

    def close(self, session: Session, now: float) -> None:
        """Close a session, once the server has noticed that its client is gone."""
        if session.is_open and session.key is not None:
            self.held.discard(session.key)
            self.first_freed_at.setdefault(session.key, now)
        session.is_open = False
        if session in self.sessions:
            self.sessions.remove(session)

    def restart(self, now: float) -> None:
        self.restarted_at = now
        for session in tuple(self.sessions):
            self.close(session, now)


class ProcessLock:
    """A process's thread with its connection, in each of its incarnations; it does nothing if a pooler is between."""

    def __init__(
        self, process: SimulatedNode | SimulatedAgent, times: LivenessLockSettings, locks: AdvisoryLocks, random: Random
    ) -> None:
        self._process, self._locks, self._random, self._world = process, locks, random, process.world
        self._times = times
        self._is_pooled = random.random() < 0.1
        self._session: Session | None = None
        self._turns = itertools.count()
        self._turn = 0
        self._is_held = False
        self._used_at = self._lost_at = float("-inf")

    def begin_life(self) -> None:
        self._is_held, self._lost_at = False, float("-inf")
        self._key = compute_lock_key(self._name())
        if not self._is_pooled:
            self._after(self._random.uniform(0.002, 0.05), self._connect)

    def end_life(self, *, killed: bool) -> None:
        """End the process's connection: the server notices at once, or later if the machine is dead."""
        self._turn = next(self._turns)
        session, self._session = self._session, None
        if session is not None:
            late = killed and self._random.random() < 0.15
            self._close_after(session, self._random.uniform(1.0, 12.0) if late else self._random.uniform(0.001, 0.02))

    def cut(self) -> None:
        """Close the connection by the server; the node notices at once, unless it is paused."""
        if self._session is not None:
            self._locks.close(self._session, self._world.now)
            self._lose(self._random.uniform(0.0005, 0.01))

    def move(self, former: AdvisoryLocks, promoted: AdvisoryLocks) -> None:
        """Connect to that server instead; one of another database stays there."""
        if self._locks is former:
            self.cut()
            self._locks = promoted

    def cut_unnoticed(self) -> None:
        """Close the connection by the server; the process learns nothing, and gets no answers, for a while."""
        if self._session is not None:
            self._locks.close(self._session, self._world.now)
            self._session.is_mute = True

    def break_off(self) -> None:
        """Break the connection for the node only; the server does not notice yet."""
        if self._session is not None:
            self._close_after(self._session, self._random.uniform(1.0, 8.0))
            self._lose(self._random.uniform(0.0005, 0.01))

    def _close_after(self, session: Session, delay_s: float) -> None:
        locks = self._locks
        self._world.after(delay_s, lambda: locks.close(session, self._world.now))

    def _lose(self, delay_s: float) -> None:
        session, self._session = self._session, None
        self._after(delay_s, lambda: self._lost(session))

    def _lost(self, session: Session | None) -> None:
        was_held, self._is_held = self._is_held, False
        if was_held:
            self._lost_at = self._used_at
            self._say(LivenessLockLost(self._used_at))
        self._after(self._random.uniform(0.003, 0.12) if was_held else self._pause_s(frozenset()), self._connect)

    def _connect(self) -> None:
        self._used_at = self._process.now
        if not self._is_reachable():
            self._after(self._times.check_interval_s, self._connect)
            return
        successor = self._locks.successor
        if successor is not None and (self._locks.is_down or self._random.random() < 0.1):
            self._locks = successor
        self._session = Session(self._process.now)
        self._locks.sessions.append(self._session)
        self._use(frozenset())

    def _use(self, before: frozenset[int]) -> None:
        """Run one turn of the loop: acquire the lock, check those of others, wait."""
        session = self._session
        if session is None:
            return
        if not session.is_open or not self._is_reachable():
            self._close_after(session, self._random.choice((0.01, 0.01, 5.0)))
            self._lose(_NO_ANSWER_S if session.is_open or session.is_mute else 0.001)
            return
        self._used_at = self._process.now
        if not self._is_held and self._locks.acquire(session, self._key):
            self._is_held = True
            self._say(OwnLivenessLockAcquired(self._key))
        keys = self._keys()
        if not (keys or before or self._always_checks):
            self._after(self._pause_s(frozenset()), lambda: self._use(frozenset()))
            return
        sent_at = self._process.now
        self._after(self._random.uniform(0.0005, 0.003), lambda: self._look(session, sent_at, keys))

    def _look(self, session: Session, sent_at: float, keys: tuple[int, ...]) -> None:
        if session.is_mute:
            self._lose(self._random.uniform(0.5, 4.0))
            return
        free = frozenset(key for key in keys if key not in self._locks.held)
        held = frozenset(keys) - free
        self._after(self._random.uniform(0.0005, 0.003), lambda: self._looked(session, sent_at, free, held))

    def _looked(self, session: Session, sent_at: float, free: frozenset[int], held: frozenset[int]) -> None:
        if session is not self._session:
            return
        timeline = self._locks.timeline
        self._say(PeerLocksChecked(session.opened_at, sent_at, self._process.now, free, held, timeline))
        self._after(self._pause_s(free), lambda: self._use(free))

    def _pause_s(self, free: frozenset[int]) -> float:
        times = self._times
        if not self._is_held and self._process.now < self._lost_at + times.retry_grace_s:
            return _RETRY_S
        if free:
            return times.recheck_delay_s
        interval_s = times.check_interval_s
        # A new rival is checked at once.
        return self._random.choice((interval_s, self._random.uniform(0.0, interval_s)))

    _always_checks = False

    def _name(self) -> str:
        raise NotImplementedError

    def _keys(self) -> tuple[int, ...]:
        return ()

    def _is_reachable(self) -> bool:
        raise NotImplementedError

    def _say(self, event: LockEvent) -> None:
        self._process.handle(event)

    def _after(self, delay_s: float, happening: object) -> None:
        """Call it after a delay by the node's clock, unless the process has ended or something else was scheduled
        since."""
        self._turn = turn = next(self._turns)

        def if_due() -> None:
            if self._turn == turn and self._process.alive:
                happening()  # type: ignore[operator]

        self._world.after(delay_s / self._process.rate, lambda: self._process.awake(if_due))


class NodeLock(ProcessLock):
    """That of a node."""

    def __init__(self, node: SimulatedNode, locks: AdvisoryLocks, random: Random) -> None:
        super().__init__(node, node.settings.lock_times, locks, random)
        self._node = node

    def _name(self) -> str:
        return self._node.machine.ref.incarnation

    def _keys(self) -> tuple[int, ...]:
        return self._node.machine.lock_keys()

    def _is_reachable(self) -> bool:
        return self._node.way.is_open()


class AgentLock(ProcessLock):
    """That of an agent. Some have none; the database of some is another than that of the nodes, who cannot see it."""

    _always_checks = True

    def __init__(
        self, agent: SimulatedAgent, times: LivenessLockSettings, locks: AdvisoryLocks, random: Random
    ) -> None:
        self.is_used = random.random() < 0.85
        super().__init__(agent, times, locks if random.random() < 0.9 else AdvisoryLocks(set()), random)
        self._agent = agent

    def begin_life(self) -> None:
        if self.is_used:
            super().begin_life()
            if self._is_pooled:
                self._world.after(0.01, lambda: self._agent.awake(lambda: self._agent.handle(AgentLockUnavailable())))

    def _name(self) -> str:
        return self._agent.name

    def _is_reachable(self) -> bool:
        return self._world.now >= self._agent.simulation.lock_fault_injector.down_until


class LockFaultInjector(Happenings):
    """Faults of these connections, and of agents' polls, during the safety phase."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the locks")
        self._of_agents = Random(f"the agents' locks of {simulation.seed}")
        self._of_failover = Random(f"the locks in the failover of {simulation.seed}")
        self._of_both = Random(f"leaders and holders of {simulation.seed}")
        self.down_until = float("-inf")

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.8:
            self._repeat(self._befall, 6.0)
        if self._of_agents.random() < 0.8:
            self._repeat(self._befall_agent, 3.0, self._of_agents)
        if self._of_both.random() < 0.6:
            self._repeat(self._befall_both, 10.0, self._of_both)

    def restart(self) -> None:
        self._simulation.locks.restart(self._world.now)
        for lock in self._all_locks():
            lock.cut()

    def _all_locks(self) -> list[ProcessLock]:
        return [*(node.lock for node in self._simulation.nodes), *(agent.lock for agent in self._simulation.living())]

    def fail_over(self) -> None:
        """Let another server be the database, where nobody holds a lock. The former one mostly goes on for a while,
        with the connections of locks that some processes have to it."""
        random, former, now = self._of_failover, self._simulation.locks, self._world.now
        promoted = AdvisoryLocks(set(), restarted_at=now, timeline=self._simulation.store.timeline, former=former)
        former.successor, self._simulation.locks, self._simulation.store.locks = promoted, promoted, promoted.held
        if random.random() < 0.3:
            self._end_server(former)
            return
        self._world.say("database", "goes on as the former primary, too")
        for lock in self._all_locks():
            if random.random() < 0.5:
                lock.move(former, promoted)
        self._world.after(min(random.uniform(10.0, 40.0), self._until - now), lambda: self._end_server(former))
        for _ in range(3):  # by then streams are granted again
            self._world.after(random.uniform(20.0, 30.0), self._part_both)

    def _end_server(self, former: AdvisoryLocks) -> None:
        former.is_down = True
        for lock in self._all_locks():
            lock.move(former, self._simulation.locks)
        former.restart(self._world.now)

    def agent_gone(self, agent: SimulatedAgent) -> None:
        """End a dead agent's polls: nodes mostly notice at once."""
        late_s = self._of_agents.uniform(1.0, 12.0) if self._of_agents.random() < 0.15 else 0.0
        for node in self._simulation.nodes:
            self._report_poll(node, agent, late_s + self._of_agents.uniform(0.001, 0.01), is_held=False)

    def _report_poll(self, node: SimulatedNode, agent: SimulatedAgent, delay_s: float, *, is_held: bool) -> None:
        changed = AgentLongPollChanged(agent.name, is_held)
        self._world.after(delay_s, lambda: node.deliver(changed) if node.alive else None)

    def _break_polls(self, agent: SimulatedAgent, for_s: float) -> None:
        """Nodes hold no poll of a living agent; some of them for ever."""
        self._world.say(agent.name, f"has its polls broken for {for_s:.1f} s")
        for node in self._simulation.nodes:
            self._report_poll(node, agent, self._of_agents.uniform(0.0, 0.01), is_held=False)
            if self._of_agents.random() < 0.8:
                self._report_poll(node, agent, for_s, is_held=True)

    def _lose_messages(self, agent: SimulatedAgent, for_s: float) -> None:
        """Lose what a living agent sends, as a gateway does that has forgotten its connections, and mostly the rest."""
        paths = BOTH_DIRECTIONS if self._of_agents.random() < 0.7 else ("there",)
        self._simulation.network.isolate(agent.name, paths, for_s)

    def _befall_agent(self) -> None:
        if agents := self._simulation.living():
            self._disturb_agent(self._of_agents.choice(agents), self._of_agents)

    def _befall_both(self) -> None:
        """Crash a node together with an agent; or the agent has faults of its lock, or is only cut off."""
        kind = self._of_both.choice(("crash", "crash", "trouble", "part", "part"))
        if kind == "part":
            self._part_both()
        elif (agent := self._crash_leader()) is not None:
            if kind == "crash":
                self._simulation.crashes += 1
                agent.crash()
            else:
                self._disturb_agent(agent, self._of_both)

    def _part_both(self) -> None:
        """Crash a node; meanwhile an agent is cut off, whose lock is where it was."""
        if self._world.now < self._until and (agent := self._crash_leader()) is not None:
            self._break_polls(agent, for_s := self._of_both.uniform(1.0, 8.0))
            self._lose_messages(agent, for_s)

    def _crash_leader(self) -> SimulatedAgent | None:
        """Crash a node that leads, for a while, and return an agent that holds what it led, if one lives."""
        random, simulation = self._of_both, self._simulation
        leaders = [node for node in simulation.nodes if node.alive and node.machine.leaders]
        if not leaders:
            return None
        node = random.choice(leaders)
        rows = [row for group_id in node.machine.leaders for row in simulation.store.rows(group_id).values()]
        holders = {row.agent for row in rows if row.agent is not None}
        simulation.crashes += 1
        node.crash()
        self._world.after(random.uniform(0.5, 12.0), node.start)
        living = [agent for agent in simulation.living() if agent.name in holders]
        return random.choice(living) if living else None

    def _disturb_agent(self, agent: SimulatedAgent, random: Random) -> None:
        for_s = random.uniform(0.05, 6.0)
        if random.random() < 0.8:
            self._break_polls(agent, for_s)
        if is_cut_off := random.random() < 0.6:
            self._lose_messages(agent, for_s)
        faults = ("flap", "unnoticed", "unnoticed") if is_cut_off else ("none", "cut", "flap", "unnoticed", "break off")
        fault = random.choice(faults)
        self._world.say(agent.name, f"fault of its lock: {fault}")
        self._disturb_lock(agent.lock, fault, random, 40)

    def _disturb_lock(self, lock: ProcessLock, fault: str, random: Random, most_cuts: int) -> None:
        match fault:
            case "cut":
                lock.cut()
            case "flap":
                for turn in range(random.randint(3, most_cuts)):
                    self._world.after(turn * random.uniform(0.02, 0.15), lock.cut)
            case "unnoticed":
                lock.cut_unnoticed()
            case "break off":
                lock.break_off()

    def _befall(self) -> None:
        node = self._random.choice(self._simulation.nodes)
        fault = self._random.choice(("cut", "cut", "cut", "flap", "break off", "restart"))
        if fault != "restart":
            self._world.say(node.name, _FAULTS[fault])
            self._disturb_lock(node.lock, fault, self._random, 20)
            return
        down_s = self._random.uniform(0.05, 3.0)
        self._world.say("database", f"restarts, for {down_s:.1f} s")
        self.down_until = self._world.now + down_s
        for each in self._simulation.nodes:
            each.way.down(down_s)
        self.restart()
