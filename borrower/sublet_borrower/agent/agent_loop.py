"""The agent on the network: an event loop around the pure `Agent`, one connection per node.

Members call it from their own threads; what it has for them arrives in their `SessionEventQueue`. It goes on pinging
while a session's user function runs, as long as that lets go of the interpreter now and then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Sequence

from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.machine.agent import (
    Agent,
    AgentEvent,
    AgentLockUnavailable,
    AgentOutcome,
    CloseSubscription,
    JoinGroup,
    NodeMessageReceived,
    NodesDiscovered,
    SessionProgressReported,
    SubscriptionClosed,
)
from sublet_borrower.machine.events import NodeLost, ProgressReported
from sublet_borrower.new_data.head_poll_scheduler import HeadSubscriptionId
from sublet_borrower.new_data.head_subscriptions import HeadSubscriptions
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.util.network_loop import network_loop
from sublet_borrower.util.session_fork_guard import new_agent_key
from sublet_protocol.domain.address import is_tls
from sublet_protocol.gate.client_access_token import load_access_token
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted, ToLeader
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason, ConnectionStatus, ReportConnectionLost
from sublet_protocol.pubsub.counters import AgentSideCounters
from sublet_protocol.pubsub.model import Channel, Command, MailboxOverflow, MessageToNode, SequencedMessage
from sublet_protocol.pubsub.node_connection import NodeConnection, truncate
from sublet_protocol.tick import Tick
from sublet_storage.db.database_url import format_url
from sublet_storage.db.liveness_lock import LivenessLockKeeper, LivenessLockLost
from sublet_storage.util.boottime_clock import boottime_clock

log = logging.getLogger(__name__)

LOOKUP_INTERVAL_S = 0.5
"""Least time between two look-ups of the live nodes."""

NO_NODE_WARNING_S = 10.0
"""How long sessions wait without a listed node before a warning. A single node that is restarted is back by then."""

REFUSAL_S = 10.0
"""How long a refusal holds: by then another release may serve at that address, or with a new certificate. For a fifth
of it per listed node at least: all of many must be able to refuse while the first refusal holds."""


class AgentLoop:
    """The agent of one session, or of several that share it. `find_nodes` returns the addresses of live nodes; it may
    block and raise. `lock_url`: of the database where it holds a lock as long as its process lives; None: it has none.
    """

    def __init__(
        self,
        find_nodes: Callable[[], Sequence[str]],
        settings: BorrowerSettings | None = None,
        lock_url: str | None = None,
    ) -> None:
        self._key = new_agent_key()
        self.agent_id = self._key.agent_id
        self._token = load_access_token()
        self._find_nodes = find_nodes
        settings = (settings or BorrowerSettings()).check()
        self._machine = Agent(self.agent_id, settings, awaits_lock=lock_url is not None)
        self._loop = network_loop()
        self._connections: dict[str, NodeConnection] = {}
        self._refusals: dict[str, tuple[float, str]] = {}
        self._listed: tuple[str, ...] = ()
        self._queues: dict[int, SessionEventQueue] = {}
        self._head_subscriptions = HeadSubscriptions(self._subscribe_to, self._unsubscribe_from)
        self.has_direct_heads = False
        self._timer: asyncio.TimerHandle | None = None
        self._handles = 0
        self._is_looking_up = False
        self._looked_up_at = float("-inf")
        self._warns_at: float | None = None
        self._is_closed = False
        self._database = None if lock_url is None else format_url(lock_url)
        self._lock = None if lock_url is None else self._make_lock_keeper(lock_url, settings)

    def _make_lock_keeper(self, url: str, settings: BorrowerSettings) -> LivenessLockKeeper:
        def on_failure(error: Exception) -> None:
            log.error("internal error, agent goes on without its lock: please report this", exc_info=error)
            self._post(LivenessLockLost(boottime_clock()))
            self._post(AgentLockUnavailable())

        keeper = LivenessLockKeeper(
            url,
            self.agent_id,
            settings.lock_times,
            tuple,
            self._post,
            boottime_clock,
            on_failure,
            always_checks=True,
            on_absent=lambda: self._post(AgentLockUnavailable()),
        )
        keeper.start()
        return keeper

    # --- for sessions, from any thread ------------------------------------------------------------------------------

    def subscribe(
        self,
        subscription: str,
        events: SessionEventQueue,
        *,
        weight: float = 1.0,
        session: str | None = None,
        start: str = "latest",
        session_epoch: int = 0,
    ) -> int:
        """Begin a subscription and return its handle. Its events arrive in the queue."""
        self._handles += 1
        handle = self._handles
        self._queues[handle] = events
        self._post(JoinGroup(handle, subscription, weight, session, start, session_epoch))
        return handle

    def unsubscribe(self, handle: int) -> None:
        """Hand everything over; `SubscriptionClosed` arrives in the queue when that is durable, or cannot be made so in
        time."""
        self._post(CloseSubscription(handle))

    def give_up(self, handle: int, reason: str) -> None:
        """Unsubscribe a session whose user does not poll; on the network's thread."""
        self._handle(CloseSubscription(handle, reason))

    def report_progress(self, handle: int, progress: ProgressReported) -> None:
        """Report how far a stream is consumed."""
        self._post(SessionProgressReported(handle, progress))

    def subscribe_head(self, handle: int, subscription: HeadSubscriptionId) -> None:
        """Subscribe to the stream's head: what is pushed arrives as `HeadPushed` in the queue."""
        self._loop.call_soon_threadsafe(self._head_subscriptions.add, handle, subscription)

    def unsubscribe_head(self, handle: int, subscription: HeadSubscriptionId) -> None:
        """End a subscription to the stream's head."""
        self._loop.call_soon_threadsafe(self._head_subscriptions.remove, handle, subscription)

    def set_direct_heads(self, has_direct_heads: bool) -> None:
        """Subscribe to heads at nodes, or not while they come from the database itself."""
        self.has_direct_heads = has_direct_heads
        self._loop.call_soon_threadsafe(self._move_head_subscriptions)

    def may_start_call(self, handle: int, stream_id: int, grant_id: int) -> bool:
        """Return whether a user call on this stream may begin now."""
        return self._machine.may_start_call(handle, stream_id, grant_id, boottime_clock())

    def may_continue(self, handle: int, stream_id: int, grant_id: int) -> bool:
        """Return whether another user call may begin on messages given out already."""
        return self._machine.may_continue(handle, stream_id, grant_id, boottime_clock())

    def group_id(self, handle: int) -> int | None:
        """Return the group of this subscription; None before a leader has answered."""
        return self._machine.group_id(handle)

    def connection_counters(self) -> dict[str, AgentSideCounters]:
        """Return {node address: counters of the connection between it and this agent}."""
        return {address: connection.counters for address, connection in self._connections.copy().items()}

    def close(self, timeout_s: float = 2.0) -> None:
        """End; messages queued to nodes have `timeout_s` to leave. Closing again has no effect."""
        if not self._is_closed:
            closing = asyncio.run_coroutine_threadsafe(self._close(timeout_s), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                closing.result(timeout_s + 1.0)
        if self._lock is not None:
            self._lock.stop()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _post(self, event: AgentEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is at its end
            self._loop.call_soon_threadsafe(self._handle, event)

    def _handle(self, event: AgentEvent) -> None:
        """Decide, then carry out the actions. An error here leaves the state incomplete, and ends all subscriptions:
        their leaders get no more messages of them.
        """
        if self._is_closed:
            return
        try:
            self._carry_out(event)
        except Exception as error:
            log.exception("internal error, agent stopped: please report this")
            self._is_closed = True
            self._machine = Agent(self.agent_id, self._machine.settings)
            for handle, events in tuple(self._queues.items()):
                events.put(
                    SubscriptionClosed(
                        handle, BorrowerEndReason.DENIED, f"its agent broke a rule of its own: {error!r}"
                    )
                )
            self._queues.clear()
            if self._lock is not None:
                self._lock.stop(0.0)  # no call begins any more, so its streams may go to others
            self._loop.create_task(self._end_connections(0.0))

    def _carry_out(self, event: AgentEvent) -> None:
        outcome = self._machine.decide(event, boottime_clock())
        for address, message in outcome.sends:
            self._send(address, message)
        self._queue_updates(outcome)
        self._move_head_subscriptions()
        if outcome.needs_discovery:
            self._look_up()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if outcome.wake_at is not None:
            self._timer = self._loop.call_later(max(outcome.wake_at - boottime_clock(), 0.001), self._handle, Tick())

    def _move_head_subscriptions(self) -> None:
        for handle in tuple(self._queues):  # others may begin or end meanwhile
            node = None if self.has_direct_heads else self._machine.leader_node(handle)
            self._head_subscriptions.set_leader_node(handle, node)

    def _queue_updates(self, outcome: AgentOutcome) -> None:
        for update in outcome.updates:
            events = self._queues.get(update.handle)
            if events is not None:
                events.put(update if isinstance(update, SubscriptionClosed) else update.update)
            if isinstance(update, SubscriptionClosed):
                self._queues.pop(update.handle, None)
                self._head_subscriptions.remove_session(update.handle)

    def _send(self, address: str, message: ToLeader) -> None:
        if self._is_refused(address):
            return  # a claim sent us there; the next leader may be another node
        connection = self._connections.get(address)
        if connection is None:
            if not is_tls(address) and self._listed and all(is_tls(listed) for listed in self._listed):
                self._loop.call_soon(self._deny, f"a node with TLS names {address}, which has none, as the leader's")
                return
            connection = NodeConnection(
                address,
                self._key,
                lambda delivery: self._delivered(address, delivery),
                lambda lost: self._lost(address, lost),
                on_refused=lambda command, text: self._refused(address, command, text),
                token=self._token,
            )
            self._connections[address] = connection
        connection.send(message)

    def _subscribe_to(self, address: str, stream_id: int) -> None:
        if (connection := self._connections.get(address)) is not None:
            connection.subscribe(Channel.STREAM, str(stream_id))

    def _unsubscribe_from(self, address: str, stream_id: int) -> None:
        if (connection := self._connections.get(address)) is not None:
            connection.unsubscribe(Channel.STREAM, str(stream_id))

    def _delivered(self, address: str, delivery: SequencedMessage) -> None:
        match delivery.body:
            case StreamHead() as head:
                for handle, pushed in self._head_subscriptions.route_head(address, head):
                    self._queues[handle].put(pushed)
            case MailboxOverflow(channels=channels):
                # A message to one of these borrowers is missing: all begin again, and reclaim what they hold.
                # Missing heads do not matter: a session polls those that it subscribes to.
                if Channel.BORROWER in channels:
                    self._handle(NodeLost(address))
            case message:
                self._handle(NodeMessageReceived(address, message))  # type: ignore[arg-type]

    def _refused(self, address: str, command: Command, text: str) -> None:
        """End the subscription: the same request for a leader would be rejected again."""
        request = command.body if isinstance(command, MessageToNode) else None
        if isinstance(request, LeaderWanted):
            reason = f"node {address} refuses: {truncate(text)}"
            self._handle(
                NodeMessageReceived(address, Invalidate(request.borrower_id, 0, BorrowerEndReason.DENIED, reason))
            )

    def _lost(self, address: str, lost: ReportConnectionLost) -> None:
        log.info("node connection lost: address=%s: %s", address, lost.detail)
        if lost.reason is ConnectionLostReason.REJECTED:
            self._refuse(address, lost.detail)
        self._handle(NodeLost(address))

    def _refuse(self, address: str, reason: str) -> None:
        """Exclude a node that does not serve this agent, such as one of another protocol version; others may."""
        log.error("agent refused by node: address=%s: %s", address, reason)
        hold_s = REFUSAL_S * max(1.0, len(self._listed) / 5)
        self._refusals[address] = (boottime_clock() + hold_s, reason)
        connection = self._connections.pop(address, None)
        if connection is not None:
            self._loop.create_task(connection.close(0.0))
        self._set_nodes(self._listed)

    def _is_refused(self, address: str) -> bool:
        """Return whether the node has rejected this agent lately."""
        return address in self._refusals and boottime_clock() < self._refusals[address][0]

    def _set_nodes(self, addresses: tuple[str, ...]) -> None:
        """Pass on the nodes that do not reject this agent. Where all do, every subscription is denied."""
        self._listed = addresses
        serving = tuple(address for address in addresses if not self._is_refused(address))
        self._handle(NodesDiscovered(serving))
        if addresses and not serving:
            self._deny("; ".join(self._refusals[address][1] for address in addresses))

    def _deny(self, reason: str) -> None:
        """End every subscription: their leaders get no more pings, and grant to other members."""
        for borrower in tuple(self._machine.borrowers.values()):
            self._handle(NodeMessageReceived("", Invalidate(borrower.borrower_id, 0, BorrowerEndReason.DENIED, reason)))

    def _look_up(self) -> None:
        """Query the live nodes in the background, not more often than every `LOOKUP_INTERVAL_S`."""
        if self._is_looking_up or self._is_closed:
            return
        self._is_looking_up = True
        self._loop.call_later(max(self._looked_up_at + LOOKUP_INTERVAL_S - boottime_clock(), 0.0), self._begin_look_up)

    def _begin_look_up(self) -> None:
        self._looked_up_at = boottime_clock()
        with contextlib.suppress(RuntimeError):  # the interpreter is at its end
            self._loop.run_in_executor(None, self._find).add_done_callback(self._looked_up)

    def _find(self) -> tuple[str, ...] | None:
        try:
            return tuple(self._find_nodes())
        except Exception as error:  # noqa: BLE001 the look-up is retried after any error
            if not self._is_closed:  # else its server may be gone with the last session
                log.warning("node list not read, retrying: %s", error)
            return None

    def _looked_up(self, lookup: asyncio.Future[tuple[str, ...] | None]) -> None:
        self._is_looking_up = False
        addresses = None if lookup.cancelled() else lookup.result()
        if addresses is not None:
            self._set_nodes(addresses)
            self._drop_unlisted(addresses)
            self._warn_without_nodes()
        if not addresses and self._queues:
            self._look_up()

    def _warn_without_nodes(self) -> None:
        """Warn once each time that sessions wait for a node and none is listed: nothing else would say so."""
        if self._listed or not self._queues:
            self._warns_at = None
        elif self._warns_at is None:
            self._warns_at = boottime_clock() + NO_NODE_WARNING_S
        elif boottime_clock() >= self._warns_at:
            self._warns_at = float("inf")
            log.warning("no leader node listed, sessions wait for `sublet leader`: database=%s", self._database)

    def _drop_unlisted(self, addresses: Sequence[str]) -> None:
        """Drop the connection to a dead node that is no longer listed: it would retry for ever."""
        for address, connection in tuple(self._connections.items()):
            if address not in addresses and connection.status is ConnectionStatus.DISCONNECTED:
                del self._connections[address]
                self._loop.create_task(connection.close(0.0))

    async def _close(self, timeout_s: float) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._end_connections(timeout_s)

    async def _end_connections(self, timeout_s: float) -> None:
        connections = list(self._connections.values())
        await asyncio.gather(*(c.close(timeout_s) for c in connections), return_exceptions=True)
