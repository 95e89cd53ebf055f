"""The process of a node: an event loop around the pure `Node`.

Everything that happens becomes an event on one loop. The outcome's requests go to the database worker, its sends into
the mailboxes of the connections, and a timer calls the machine again at `wake_at`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
import signal
import time
from collections.abc import Callable

import grpc.aio

from sublet_leader.feed.service import FeedServer
from sublet_leader.http.settings import HttpOptions
from sublet_leader.jobs.access_refresh import AccessRefreshThread
from sublet_leader.jobs.maintenance import MaintenanceThreads
from sublet_leader.jobs.node_registration import NodeRegistration
from sublet_leader.jobs.outbox_relay import OutboxRelay
from sublet_leader.listen_address import ListenAddress
from sublet_leader.node.caller_authorizer import CallerAuthorizer
from sublet_leader.node.database_worker import DatabaseWorker
from sublet_leader.node.events import (
    AgentLongPollChanged,
    AgentMessageReceived,
    AgentsExpired,
    GroupFoundOrCreated,
    NodeDesiredStateRead,
    NodeEvent,
    NodeSnapshot,
    NodeStarted,
    SessionEpochRead,
    ShutdownRequested,
    StreamsChanged,
    WatcherLeaderQueryReceived,
)
from sublet_leader.node.group_event_publisher import (
    GroupEventPublisher,
    WatcherLeaderQueryReply,
    parse_leader_query,
    to_microseconds,
)
from sublet_leader.node.machine import Node
from sublet_leader.node.notification_hub import NotificationHub
from sublet_leader.observe import history_logging
from sublet_leader.observe.health import evaluate_health
from sublet_leader.observe.health_service import HealthService
from sublet_leader.observe.health_signals import HealthSignals
from sublet_leader.observe.node_view import NodeView
from sublet_leader.run_with_timeout import run_with_timeout
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.address import TLS_SCHEME
from sublet_protocol.domain.errors import InvalidSetting, NodeInvariantViolated
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.gate.interceptor import GateInterceptor
from sublet_protocol.messages.agent_secret import parse_agent_id
from sublet_protocol.messages.borrower_leader import ToBorrower, ToLeader
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_side_machine import SubscriberLimits
from sublet_protocol.pubsub.server import SERVER_OPTIONS, PubSubServer, make_node_side_machine
from sublet_protocol.tick import Tick
from sublet_protocol.tls.files import TlsFiles
from sublet_protocol.tls.server import make_server_credentials
from sublet_storage.db.liveness_lock import LivenessLockKeeper
from sublet_storage.groups.admin.node_desired_state import NodeDesiredState
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.notify.changes import NotifySettings, group_change
from sublet_storage.notify.drivers import registry
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.util.boottime_clock import boottime_clock

log = logging.getLogger(__name__)

MIN_FREE_FILES = 400
"""How many files a node may open besides its main port's connections, where it may open twice as many."""
MAX_CONNECTIONS = 1 << 20
"""Where files are not limited."""

SHUTDOWN_S = 5.0
"""How long a stopping node waits for pending writes."""
DEREGISTER_TIMEOUT_S = 8.0
"""Time limit of the deregistration at the end, as clients still try a node that stays registered."""


def compute_max_connections() -> int:
    """Return the maximum number of connections on the main port: some files are left for the node's own connections,
    and for those over HTTP. Clients could otherwise take the files of its database connections, and with them its
    leases."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(limit // 2, limit - MIN_FREE_FILES, 1)


class NodeServer:
    """One incarnation of one node. `announce` is called with texts for the operator. `http`: the address for probes and
    browsers; None: no port. `tls`: its certificate; its address is then one with `tls://`. `is_auth_required`: callers
    authenticate, by a certificate where `tls` requests one, and may do what a rule allows."""

    def __init__(
        self,
        database_url: str,
        name: str,
        listen: ListenAddress,
        settings: LeaderSettings | None = None,
        announce: Callable[[str], None] = log.info,
        notify: str = "postgres",
        http: HttpOptions | None = None,
        tls: TlsFiles | None = None,
        is_auth_required: bool = False,
    ) -> None:
        self.settings = (settings or LeaderSettings()).check()
        self._url, self._name, self._listen, self._announce = database_url, name, listen, announce
        self._tls = None if tls is None else make_server_credentials(tls)
        self._by_certificate = tls is not None and tls.authorities is not None
        self._driver = registry.create_driver(notify, database_url, host=listen.host)
        self._hub: NotificationHub | None = None
        self._incarnation = f"{name}-{secrets.token_hex(6)}"
        self._health_signals = HealthSignals(boottime_clock, self._incarnation)
        self._http = None
        if http is not None:
            from sublet_leader.http.app import NodeHttpService  # brings Starlette and uvicorn

            self._http = NodeHttpService(http, database_url)
        self._gate = AccessGate(by_certificate=self._by_certificate)
        self._access = (
            AccessRefreshThread(database_url, self._on_access_changed, boottime_clock) if is_auth_required else None
        )
        self._subscribers: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()
        self._broken: Exception | None = None
        self.stopped_by: signal.Signals | None = None

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`. Raise what prevents it from starting."""
        loop = self._loop = asyncio.get_running_loop()
        await self._open_gate()
        options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", compute_max_connections()))
        server = grpc.aio.server(options=options, interceptors=(GateInterceptor(self._gate),))
        self._make_services()
        health = HealthService(
            server, self._health_signals.beat, lambda: evaluate_health(self._health_signals, self.settings)
        )
        ref = self._bind(server)
        if self._http is not None:
            self._http.start()
        self._machine = Node(ref, self.settings)
        self._lock_keys: frozenset[int] = frozenset()
        self._start_hub()
        on_failure = self._make_failure_callback(loop)
        self._registration = self._make_registration(ref, on_failure)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await loop.run_in_executor(None, self._registration.register, self._announce)
        if self._stopped.is_set() and self._broken is None:
            await self._abandon_start()
            return
        store = self._start_database_worker(ref, on_failure)
        self._start_lock_keeper(ref, on_failure)
        self._sessions.register(server)
        self._feed.register(server)
        await server.start()
        serving = asyncio.create_task(self._watch_server(server))
        maintenance, relay = self._start_jobs()
        self._follow_access()
        self._handle(NodeStarted())
        await health.start()
        if self._http is not None:
            self._http.attach_node(
                NodeView(ref, self.settings, self._health_signals, self._machine, self._sessions, self._hub), self._gate
            )
            self._announce(f"node {ref.name} answers at {self._http.url}")
        self._announce(f"node {ref.name} serves on {ref.address}")
        try:
            await self._stopped.wait()
        finally:
            serving.cancel()
            await health.stop()
            maintenance.stop()
            relay.stop(0)
            await self._close_gate()
            await self._close_services(server, store)
            self._announce(f"node {ref.name} has stopped")
        if self._broken is not None:
            raise NodeInvariantViolated(
                f"node {ref.name} broke a rule of its own and has ended: {self._broken!r}. Its leases run out, and "
                "other nodes lead on. Start it again, and please report what it has logged."
            ) from self._broken

    def _make_services(self) -> None:
        """Make what answers the calls of gRPC, and sends to subscribers."""
        self._publisher = make_node_side_machine(self._incarnation, SubscriberLimits(hold_s=self.settings.poll_hold_s))
        self._callers = CallerAuthorizer(self._gate, self._publisher, self._handle)
        self._sessions = PubSubServer(
            self._publisher,
            self._on_message,
            on_expired=self._on_expired,
            on_interest=self._on_interest,
            check_subscribe=self._callers.check_subscribe,
            on_poll=self._on_poll,
            on_subscribed=self._callers.on_subscribed,
            recheck=self._callers.recheck,
            check_agent=self._callers.check_agent,
            principal=lambda: self._gate.get_caller().principal,
            clock=boottime_clock,
        )
        self._group_event_publisher = GroupEventPublisher(
            self._name, self._sessions.publish, lambda: to_microseconds(time.time())
        )
        self._feed = FeedServer(self._url, on_stored=shared_publisher(self._url).publish_heads, gate=self._gate)

    def _start_hub(self) -> None:
        """Start receiving notifications, if the driver pushes any."""
        if self._driver.capabilities.is_push:
            self._hub = NotificationHub(
                self._url,
                self._driver,
                self._publisher,
                lambda is_epochs_only: self._handle(StreamsChanged(is_epochs_only)),
                lambda group_id: self._handle(StreamsChanged(group_id=group_id)),
                self._feed.head_poller.poll_soon,
                NotifySettings.from_env(),
            )

    def _make_registration(self, ref: NodeIncarnation, on_failure: Callable[[Exception], None]) -> NodeRegistration:
        return NodeRegistration(
            self._url,
            ref,
            self.settings.lease_duration_s,
            None if self._hub is None else self._hub.endpoint,
            self._make_desired_state_callback(self._loop),
            None if self._http is None else self._http.resolve_advertised_url(self._listen),
            self._health_signals,
            on_failure,
        )

    def _start_database_worker(
        self, ref: NodeIncarnation, on_failure: Callable[[Exception], None]
    ) -> PostgresGroupStore:
        """Start the worker; return the store it uses, which is to be closed after it."""
        store = PostgresGroupStore(
            self._url,
            lock_timeout_s=self.settings.lock_timeout_s,
            statement_timeout_s=self.settings.statement_timeout_s,
            receive_timeout_s=self.settings.receive_timeout_s,
        )
        observers = (self._health_signals,) if self._http is None else (self._health_signals, self._http.counters)
        self._worker = DatabaseWorker(
            store, ref, self.settings, self._make_answer_callback(self._loop), observers, on_failure
        )
        self._worker.start()
        return store

    def _start_lock_keeper(self, ref: NodeIncarnation, on_failure: Callable[[Exception], None]) -> None:
        self._lock = LivenessLockKeeper(
            self._url,
            ref.incarnation,
            self.settings.lock_times,
            self._machine.lock_keys,
            self._make_event_callback(self._loop),
            boottime_clock,
            on_failure,
        )
        self._lock.start()

    def _start_jobs(self) -> tuple[MaintenanceThreads, OutboxRelay]:
        """Start what works only while this node leads maintenance, and return it."""
        maintenance = MaintenanceThreads(
            self._url,
            self._find_maintenance_term,
            self.settings.history_retention_s,
            grace_s=self.settings.payload_deletion_grace_s,
            on_connected=self._health_signals.on_job_connected,
        )
        maintenance.start()
        relay = OutboxRelay(self._url, self._find_maintenance_term, self._health_signals.on_job_connected)
        relay.start()
        return maintenance, relay

    async def _abandon_start(self) -> None:
        """End a node that was stopped while it registered, and has served nobody."""
        await run_with_timeout("deregister node", self._registration.deregister, DEREGISTER_TIMEOUT_S)
        if self._hub is not None:
            await run_with_timeout("close notification hub", self._hub.close)
        await self._close_gate()
        if self._http is not None:
            await run_with_timeout("close HTTP port", self._http.close)
        self._announce(f"node {self._name} has stopped")

    async def _close_services(self, server: grpc.aio.Server, store: PostgresGroupStore) -> None:
        """Deregister the node and give up its lock first, so that others take over, then end connections."""
        deregistering = asyncio.create_task(
            run_with_timeout("deregister node", self._registration.deregister, DEREGISTER_TIMEOUT_S)
        )
        if self._hub is not None:
            await run_with_timeout("close notification hub", self._hub.close)
        self._worker.stop(self.settings.lease_margin_s)
        await run_with_timeout("release lock", self._lock.stop)
        # Held polls carry the last messages; the mailboxes get a moment to send the rest.
        await self._sessions.close()
        await server.stop(grace=0.5)
        await self._feed.close()
        await deregistering
        await run_with_timeout("close leaders' connection", store.close)
        if self._http is not None:
            await run_with_timeout("close HTTP port", self._http.close)

    def stop(self) -> None:
        """Hand over what is led, then end `run`; a second call changes nothing."""
        self._health_signals.is_stopping = True
        self._handle(ShutdownRequested(boottime_clock() + SHUTDOWN_S))
        if self._stopped.is_set():  # it leads nothing, and may wait for its name yet
            self._registration.stop(0)

    def state(self) -> NodeSnapshot:
        """Return the present state and the counters; on the node's loop, while it serves."""
        agents, sessions = len(self._publisher.subscriber_ids), self._sessions
        hub = self._hub
        notifications, heads = ({}, {}) if hub is None else (hub.subscriber.counters(), hub.known_heads())
        return NodeSnapshot(agents, sessions.held_polls, sessions.counters, sessions.find_leaks(), notifications, heads)

    def _on_signal(self, number: signal.Signals) -> None:
        self.stopped_by = number
        self.stop()

    async def _watch_server(self, server: grpc.aio.Server) -> None:
        """End this node if its gRPC server ends by itself: nobody could reach it, and it would lead on."""
        try:
            await asyncio.shield(server.wait_for_termination())  # canceled, it would cancel the stop of the server
            self._break(RuntimeError("the gRPC server has ended"))
        except Exception as error:  # noqa: BLE001 whatever has ended it
            self._break(error)

    def _bind(self, server: grpc.aio.Server) -> NodeIncarnation:
        try:
            port = self._add_port(server) if self._listen.is_free() else 0
        except RuntimeError:
            port = 0
        if port == 0:
            raise InvalidSetting(
                f"cannot listen on {self._listen}: the port is in use, or not this machine's. A second node has a name "
                "and a port of its own: `sublet leader --name n2 --listen 127.0.0.1:7412`"
            )
        scheme = "" if self._tls is None else TLS_SCHEME
        return NodeIncarnation(self._name, self._incarnation, f"{scheme}{ListenAddress(self._listen.host, port)}")

    def _add_port(self, server: grpc.aio.Server) -> int:
        if self._tls is None:
            return int(server.add_insecure_port(str(self._listen)))
        return int(server.add_secure_port(str(self._listen), self._tls))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _handle(self, event: NodeEvent) -> None:
        """Handle one event and execute its outcome. An error leaves a partial state, and ends the node."""
        if self._broken is None:
            try:
                self._carry_out(event)
            except Exception as error:  # noqa: BLE001 any error leaves the node's state unknown
                self._break(error)

    def _break(self, error: Exception) -> None:
        """End without sending anything: leases that are not renewed run out."""
        if self._broken is None:
            log.critical("internal error, node stopped: please report this", exc_info=error)
            self._broken = error
            self._health_signals.is_stopping = True
            self._stopped.set()

    def _carry_out(self, event: NodeEvent) -> None:
        outcome = self._machine.decide(event, boottime_clock())
        for violation in outcome.invariant_violations:
            log.error("invariant violated, leadership ended: please report this: %s", violation)
        for request in outcome.requests:
            self._worker.submit(request)
        for agent, message in outcome.sends:
            self._send(agent, message)
        lock_keys = frozenset(self._machine.lock_keys())
        if lock_keys - self._lock_keys:
            self._lock.wakeup()
        self._lock_keys = lock_keys
        self._group_event_publisher.publish(outcome.history)
        if self._http is not None:
            self._http.counters.record_history(outcome.history, len(outcome.invariant_violations))
        history_logging.log_history(outcome.history)
        for answer in outcome.leader_locations:
            self._send_leader_answer(answer)
        if self._timer is not None:
            self._timer.cancel()
        if outcome.is_stopped:
            self._stopped.set()
        elif outcome.wake_at < float("inf"):
            delay = max(outcome.wake_at - boottime_clock(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._handle, Tick())

    def _make_failure_callback(self, loop: asyncio.AbstractEventLoop) -> Callable[[Exception], None]:
        def on_failure(error: Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node has stopped
                loop.call_soon_threadsafe(self._break, error)

        return on_failure

    def _make_answer_callback(self, loop: asyncio.AbstractEventLoop) -> Callable[[NodeEvent], None]:
        def answer(event: NodeEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no answer is waited for any more
                loop.call_soon_threadsafe(self._handle, event)
            if isinstance(event, GroupFoundOrCreated) and event.group is not None:
                shared_publisher(self._url).publish([group_change(str(event.group.subscription), event.group.group_id)])
            if isinstance(event, SessionEpochRead | GroupFoundOrCreated):
                self._callers.note_refusal(event)

        return answer

    def _make_event_callback(self, loop: asyncio.AbstractEventLoop) -> Callable[[NodeEvent], None]:
        def on_event(event: NodeEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node has stopped
                loop.call_soon_threadsafe(self._handle, event)

        return on_event

    def _make_desired_state_callback(self, loop: asyncio.AbstractEventLoop) -> Callable[[NodeDesiredState], None]:
        on_event = self._make_event_callback(loop)
        return lambda read: on_event(NodeDesiredStateRead(read.is_draining, read.step_down))

    def _on_message(self, subscriber_id: str, message: ToLeader | GroupEventPayload) -> None:
        if not self._callers.check_message(subscriber_id, message):
            return
        agent = parse_agent_id(subscriber_id)
        if isinstance(message, GroupEventPayload):
            caller = self._callers.find_principal(agent) or agent
            self._handle(WatcherLeaderQueryReceived(subscriber_id, parse_leader_query(message), caller))
            return
        self._subscribers[agent] = subscriber_id
        for denied in self._callers.find_denied_on_return(agent, self._machine.leaders.values()):
            self._handle(denied)
        self._handle(AgentMessageReceived(agent, message, self._callers.find_principal(agent)))

    def _send(self, agent: str, message: ToBorrower) -> None:
        """Queue the message for the agent's present subscriber; without one it is lost, and resent if necessary."""
        subscriber_id = self._subscribers.get(agent)
        if subscriber_id is not None:
            self._sessions.send(subscriber_id, Channel.BORROWER, message.borrower_id, message)

    def _send_leader_answer(self, answer: WatcherLeaderQueryReply) -> None:
        """Queue the answer for all that have queried; it may list a thousand members, and is made once."""
        payload = self._group_event_publisher.leader_event(answer)
        for subscriber_id in answer.subscriber_ids:
            self._sessions.send(subscriber_id, Channel.GROUP, answer.subscription, payload)

    def _on_poll(self, agent: str, is_held: bool) -> None:
        self._handle(AgentLongPollChanged(agent, is_held))

    def _on_expired(self, subscriber_ids: object) -> None:
        expired_ids = set(subscriber_ids)  # type: ignore[call-overload]
        self._callers.forget(expired_ids)
        agents = frozenset(agent for agent, subscriber in self._subscribers.items() if subscriber in expired_ids)
        for agent in agents:
            del self._subscribers[agent]
        self._handle(AgentsExpired(agents))

    def _on_interest(self, channel: str, key: str | None, is_subscribed: bool) -> None:
        if channel == Channel.GROUP:
            self._group_event_publisher.set_interest(key, is_subscribed)
        if self._hub is not None and channel == Channel.STREAM and key is not None:
            self._hub.set_interest(key, is_subscribed)

    async def _open_gate(self) -> None:
        """Read the rights before any call is admitted. Raise what prevents that."""
        if self._access is not None:
            rules = await self._loop.run_in_executor(None, self._access.open)
            self._gate = AccessGate(rules, self._access.read_anew, self._by_certificate)

    def _follow_access(self) -> None:
        if self._access is not None:
            self._access.start()

    async def _close_gate(self) -> None:
        if self._access is not None:
            await run_with_timeout("close connection for rights", self._access.stop)

    def _on_access_changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node has stopped
            self._loop.call_soon_threadsafe(self._recheck_rights)

    def _recheck_rights(self) -> None:
        """Check the rights of all members and watchers again: what is no longer allowed ends."""
        self._callers.recheck_all(self._machine.leaders.values())

    def _find_maintenance_term(self) -> int | None:
        return self._machine.election.trusted_term(MAINTENANCE, boottime_clock())
