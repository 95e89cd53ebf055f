"""Shells of the processes: a node with the product's `Node`, an agent with the product's `Agent` and its user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sublet_borrower.machine.agent import (
    Agent,
    AgentEvent,
    CloseSubscription,
    JoinGroup,
    NodeMessageReceived,
    NodesDiscovered,
    SessionAssignmentUpdate,
    SessionProgressReported,
    SubscriptionClosed,
)
from sublet_borrower.machine.events import NodeLost, ProgressReported
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.group.events import ForcedRevokeRequested
from sublet_leader.node.events import GroupLeaderEvent, NodeEvent, NodeStarted, ShutdownRequested
from sublet_leader.node.machine import Node
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    PingResponse,
    ProgressSaved,
    RevokeFinished,
    ToBorrower,
)
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.lending_row import is_of_former_timeline
from sublet_storage.node_directory import NodeIncarnation
from tests.simulation.database import DatabaseLink
from tests.simulation.locks import AgentLock, NodeLock
from tests.simulation.queries import Checkpoint, Query
from tests.simulation.sessions import BEYOND_HEAD, CountedWork, Session, Work
from tests.simulation.transactions import WritingSession
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


@dataclass(slots=True)
class Wish:
    """A subscription that its user has open. `group_id`: the group of which it has been a member."""

    handle: int
    subscription: Subscription
    epoch: int
    group_id: int | None = None


class SimulatedAgent(Process):
    """One process. With a `session` it has that stable name, and each of its subscriptions draws an epoch. With a
    `checkpoint` it runs that query, and has its name."""

    def __init__(
        self,
        simulation: Simulation,
        agent_id: str,
        settings: BorrowerSettings,
        drift: float,
        session: str | None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        super().__init__(simulation.world, agent_id, drift)
        self.simulation, self.checkpoint = simulation, checkpoint
        self.session = session if checkpoint is None else checkpoint.name
        self.lock = AgentLock(self, settings.lock_times, simulation.locks, Random(f"{agent_id}, {simulation.seed}"))
        self.machine = Agent(agent_id, settings, awaits_lock=self.lock.is_used)
        self.weight = simulation.world.random.choice((1.0, 1.0, 1.0, 2.0, 0.5))
        self.alive = True
        self.slow_until = 0.0
        self.wishes: dict[int, Wish] = {}
        self.sessions: dict[int, Session] = {}
        self.epochs: dict[Subscription, list[int]] = {}
        self._leaving: dict[int, Wish] = {}
        self._handles = 0
        self.lock.begin_life()

    def subscribe(self, subscription: Subscription) -> None:
        self._handles += 1
        handle = self._handles
        epoch = 0 if self.session is None else self.simulation.store.next_session_epoch(subscription, self.session)
        self.wishes[handle] = Wish(handle, subscription, epoch)
        self.epochs.setdefault(subscription, []).append(epoch)
        query = self.checkpoint
        self.sessions[handle] = self._session(handle) if query is None else Query(self, handle, query)
        start = str(self.simulation.groups.start_of(subscription))
        self._happens(JoinGroup(handle, str(subscription), self.weight, self.session, start, epoch))

    def _session(self, handle: int) -> Session:
        return (WritingSession if self.simulation.users.is_used_by(self) else Session)(self, handle)

    def leave(self, handle: int) -> None:
        """End a subscription gracefully; some users do so twice."""
        if self.alive and handle in self.wishes:
            self._leaving[handle] = self.wishes.pop(handle)
            self.world.say(self.name, f"leaves {handle}")
            self.sessions[handle].leave()
            self._happens(CloseSubscription(handle))
            if self.world.chance(0.3):
                self.world.after(self.world.random.uniform(0.0, 0.5), lambda: self._happens(CloseSubscription(handle)))

    def crash(self) -> None:
        if self.alive:
            self.alive = False
            self.wishes.clear()
            self.world.say(self.name, "CRASHES")
            self.lock.end_life(killed=True)
            self.simulation.lock_fault_injector.agent_gone(self)

    def may_read(self, grant_id: int) -> bool:
        """Return whether a reader of the grant may read from the connected database."""
        return not is_of_former_timeline(grant_id, self.simulation.store.timeline * TIMELINE_US)

    def receive(self, node: str, message: ToBorrower) -> None:
        self._happens(NodeMessageReceived(node, message))

    def receive_strays(self, node: str) -> None:
        """Deliver messages under a term without a leader, as only a faulty node would send them."""
        for borrower in tuple(self.machine.borrowers.values()):
            self.receive(node, PingResponse(borrower.borrower_id, 1, self.now, 60.0))
            self.receive(node, ProgressSaved(borrower.borrower_id, 1, stream_id=1, grant_id=1, position=1))

    def deny(self, node: str) -> None:
        """Report idle streams as not held although they are, as only a faulty process would."""
        for handle, borrower in self.machine.borrowers.items():
            for stream in borrower.streams:
                if borrower.node == node and stream.is_settled and self.sessions[handle].is_idle(stream.stream_id):
                    denial = RevokeFinished(borrower.borrower_id, borrower.term, stream.stream_id, stream.grant_id)
                    self.simulation.network.to_node(self, node, denial)

    def lose(self, node: str) -> None:
        self._happens(NodeLost(node))

    def report(self, handle: int, work: CountedWork, final: bool, until: int = 0) -> None:
        """Report the session's progress, and the end of what an aborting user had in hand."""
        lag = self.simulation.streams.streams[work.stream_id].head - work.position
        size = 100 * (1 + work.stream_id % 3) * (work.position - work.begun)  # the messages of some streams are larger
        place, beyond_head = (work.stream_id, work.grant_id, work.position), final and work.beyond_head
        reported = ProgressReported(*place, is_final=final, size=size, lag=max(lag, 0), delivered_end=until)
        if beyond_head:
            reported = replace(reported, read_error=BEYOND_HEAD, is_beyond_head=True)
        self.say(handle, work, reported)

    def say(self, handle: int, work: Work, reported: ProgressReported) -> None:
        self.simulation.checkers.reported(work, reported)
        self.handle(SessionProgressReported(handle, reported))

    def _happens(self, event: AgentEvent) -> None:
        """Handle the event once the process is awake, unless it is dead."""

        def if_alive() -> None:
            if self.alive:
                self.handle(event)

        self.awake(if_alive)

    def handle(self, event: AgentEvent) -> None:
        outcome = self.machine.decide(event, self.now)
        self.world.say(self.name, event)
        if isinstance(event, NodeMessageReceived):
            for wish in (*self.wishes.values(), *self._leaving.values()):
                wish.group_id = self.machine.group_id(wish.handle) or wish.group_id
        for node, message in outcome.sends:
            self.simulation.network.to_node(self, node, message)
        for notify in outcome.updates:
            self._reported(notify)
        if outcome.needs_discovery:
            self.world.after(0.05, lambda: self.awake(self._look_nodes_up))
        if outcome.wake_at is not None:
            self.tick_at(outcome.wake_at)

    def tick(self) -> None:
        if self.alive:
            self.handle(Tick())

    def _look_nodes_up(self) -> None:
        if self.alive:
            self.handle(NodesDiscovered(self.simulation.live_addresses()))

    # --- its user ---------------------------------------------------------------------------------------------------

    def _reported(self, reported: SessionAssignmentUpdate | SubscriptionClosed) -> None:
        wish = self.wishes.get(reported.handle) or self._leaving.get(reported.handle)
        if isinstance(reported, SubscriptionClosed):
            self._closed(reported, wish)
            return
        self.sessions[reported.handle].reported(reported.update, wish.group_id if wish is not None else None)

    def _closed(self, closed: SubscriptionClosed, wish: Wish | None) -> None:
        """End a closed subscription. If its group was deleted the user mostly subscribes again; a query fails."""
        self.world.say(self.name, closed)
        self.simulation.checkers.names.closed(self, closed, wish, left=closed.handle in self._leaving)
        self.sessions.pop(closed.handle).close()
        self._leaving.pop(closed.handle, None)
        wanted = self.wishes.pop(closed.handle, None)
        again = closed.reason in (BorrowerEndReason.DELETED, BorrowerEndReason.DENIED) and self.checkpoint is None
        if wanted is not None and again and self.world.chance(0.8):
            self.world.after(self.world.random.uniform(0.01, 2.0), lambda: self._again(wanted.subscription))

    def _again(self, subscription: Subscription) -> None:
        if self.alive:
            self.subscribe(subscription)
