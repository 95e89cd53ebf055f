"""An agent's shell in the simulator, with sessions that pretend to work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from borrower.machine.agent import (
    Agent,
    AgentEvent,
    Closed,
    Consumed,
    FromNode,
    NodeLost,
    NodesKnown,
    Subscribe,
    Tick,
    Told,
    Unsubscribe,
)
from borrower.machine.events import Install, Progressed, Remove, Saved, Stop
from borrower.settings import BorrowerSettings
from protocol.messages import PingResponse, ProgressSaved, RevokedReason, ToBorrower
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


@dataclass(slots=True)
class Work:
    """A stream installed in a session."""

    handle: int
    stream_id: int
    grant_id: int
    position: int
    busy: bool = False
    stopping: bool = False
    over: bool = False


class SimulatedAgent(Process):
    """One process: an agent and, per subscription, a session that works on all its streams at once."""

    def __init__(self, simulation: Simulation, agent_id: str, settings: BorrowerSettings) -> None:
        super().__init__(simulation.world)
        self.simulation, self.world, self.agent_id = simulation, simulation.world, agent_id
        self.machine = Agent(agent_id, settings)
        self.alive = True
        self.work: dict[tuple[int, int], Work] = {}
        self.open: set[int] = set()
        self._wake_count = 0
        self._handles = 0

    def subscribe(self, subscription: str) -> int:
        """Begin a subscription."""
        self._handles += 1
        handle = self._handles
        self.open.add(handle)
        self.awake(lambda: self.handle(Subscribe(handle, subscription, start="earliest")))
        return handle

    def leave(self, handle: int) -> None:
        """End a subscription gracefully; some say it twice."""
        if self.alive and handle in self.open:
            self.open.discard(handle)
            self.world.say(self.agent_id, f"leaves {handle}")
            self._happens(Unsubscribe(handle))
            if self.world.chance(0.3):
                self.world.after(self.world.random.uniform(0.0, 0.5), lambda: self._happens(Unsubscribe(handle)))

    def crash(self) -> None:
        """Gone, in the middle of whatever it did."""
        if self.alive:
            self.alive = False
            self.open.clear()
            self.world.say(self.agent_id, "CRASHES")

    def hear(self, node: str, message: ToBorrower) -> None:
        """A message has come over the network."""
        self._happens(FromNode(node, message))

    def hear_strays(self, node: str) -> None:
        """Words out of turn, under a term that nobody leads by, as only a node with a fault would say them."""
        for borrower in tuple(self.machine.borrowers.values()):
            self.hear(node, PingResponse(borrower.borrower_id, 1, self.world.now))
            self.hear(node, ProgressSaved(borrower.borrower_id, 1, stream_id=1, grant_id=1, position=1))

    def lose(self, node: str) -> None:
        """The connection to a node broke."""
        self._happens(NodeLost(node))

    def _happens(self, event: AgentEvent) -> None:
        """Unless it is dead, once it is awake."""

        def if_alive() -> None:
            if self.alive:
                self.handle(event)

        self.awake(if_alive)

    def handle(self, event: AgentEvent) -> None:
        """Give one event to the machine and do what it says."""
        outcome = self.machine.decide(event, self.world.now)
        self.world.say(self.agent_id, event)
        for node, message in outcome.sends:
            self.simulation.to_node(self, node, message)
        for tell in outcome.tells:
            self._told(tell)
        if outcome.nodes_wanted:
            self.world.after(0.05, lambda: self.awake(self._look_nodes_up))
        if outcome.wake_at is not None:
            self._wake(max(outcome.wake_at - self.world.now, 0.0005))

    def _look_nodes_up(self) -> None:
        if self.alive:
            self.handle(NodesKnown(self.simulation.live_addresses()))

    def _wake(self, delay_s: float) -> None:
        self._wake_count += 1
        mine = self._wake_count

        def tick() -> None:
            if self.alive and mine == self._wake_count:
                self.handle(Tick())

        self.world.after(delay_s, lambda: self.awake(tick))

    # --- the session ------------------------------------------------------------------------------------------------

    def _told(self, told: Told | Closed) -> None:
        if isinstance(told, Closed):
            self.simulation.checkers.closed(self.agent_id, told)
            return
        key = (told.handle, told.tell.grant.stream_id if isinstance(told.tell, Install) else told.tell.stream_id)
        match told.tell:
            case Install(grant):
                work = Work(told.handle, grant.stream_id, grant.grant_id, grant.position)
                self.work[key] = work
                self._next(work)
            case Stop():
                work = self.work[key]
                work.stopping = True
                if not work.busy:
                    self._report(work)
            case Remove(reason=reason):
                work = self.work.pop(key)
                work.over = True
                self.simulation.checkers.removed(work, reason is RevokedReason.LOST)
            case Saved():
                pass

    def _next(self, work: Work) -> None:
        """Begin a user call if there is something to do and it is allowed, else look again later."""
        if not self.alive or work.over or work.stopping:
            return
        now, rnd = self.world.now, self.world.random
        allowed = self.machine.may_start(work.handle, work.stream_id, work.grant_id, now)
        ready = self.simulation.streams.streams[work.stream_id].head - work.position
        if not allowed or ready <= 0:
            self.world.after(rnd.uniform(0.2, 0.8), lambda: self.awake(lambda: self._next(work)))
            return
        count = rnd.randint(1, ready)
        work.busy = True
        self.simulation.checkers.call_started(self.agent_id, work, count)
        slow = rnd.uniform(5, 15) if self.world.chance(0.02) else rnd.uniform(0.05, 0.6)
        self.world.after(slow, lambda: self.awake(lambda: self._finish(work, count)))

    def _finish(self, work: Work, count: int) -> None:
        work.busy = False
        if not self.alive:
            return
        work.position += count
        self._report(work)
        self._next(work)

    def _report(self, work: Work) -> None:
        if not work.over:
            self.simulation.checkers.reported(work)
            progress = Progressed(work.stream_id, work.grant_id, work.position, final=work.stopping)
            self.handle(Consumed(work.handle, progress))
