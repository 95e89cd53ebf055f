"""The node's side of a connection on the network: the gRPC service `Session` around a `NodeSideMachine`.

It does the waiting: polls are held here, silent subscribers are removed when they are due. All of it runs on one event
loop, and so do the callers of `publish` and `send`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from typing import Any, NoReturn

import grpc

from sublet_protocol.domain.errors import SubletError
from sublet_protocol.domain.limits import (
    ENVELOPE_BYTES,
    HANDSHAKE_TIMEOUT_S,
    IDLE_CONNECTION_S,
    MAX_CALLS_OF_CONNECTION,
    MAX_POLLS_OF_SUBSCRIBER,
    MAX_PUBLISH_BYTES,
    MAX_SUBSCRIBERS_OF_CONNECTION,
    MAX_SUBSCRIBERS_OF_PRINCIPAL,
)
from sublet_protocol.gate.bounded_request_parser import abort_busy
from sublet_protocol.gate.caller_turns import CallerTurns, SlicedWork
from sublet_protocol.gate.principal_concurrency_limiter import call_when_over
from sublet_protocol.messages.agent_secret import parse_agent_id
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.counters import NodeSideCounters
from sublet_protocol.pubsub.model import (
    CHANNELS,
    ChannelCatalog,
    CommandRefusal,
    ReceivedCommand,
    Subscribe,
    UndecodableCommand,
)
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine, SubscriberLimits
from sublet_protocol.pubsub.node_side_replies import (
    CommandsAccepted,
    CommandsAlreadyExecuted,
    HoldPoll,
    PollReply,
    SubscriberRefused,
    UnknownSubscriber,
)
from sublet_protocol.v1 import sublet_pb2_grpc

log = logging.getLogger(__name__)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_PUBLISH_BYTES + ENVELOPE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_REPLY_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression.value),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
    ("grpc.max_connection_idle_ms", round(IDLE_CONNECTION_S * 500)),  # gRPC closes it after one to two times that
    ("grpc.keepalive_time_ms", round(IDLE_CONNECTION_S * 1000)),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # what ends the connection, where this is the longer
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    # Against calls that are reset at once: others are read between two of a connection, and each reset takes a ping.
    ("grpc.http2.max_requests_per_read", 1),
    ("grpc.http2.ping_on_rst_stream_percent", 100),
)
"""The options of a `grpc.aio.server` that serves sessions."""

MISSING_S = 0.25
"""An agent whose poll was answered polls again sooner."""

OnMessage = Callable[[str, Any], Awaitable[None] | None]
OnExpired = Callable[[Sequence[str]], None]
OnPoll = Callable[[str, bool], None]
OnInterest = Callable[[str, str | None, bool], None]
CheckSubscribe = Callable[[str, str, str | None], None]
CheckAgent = Callable[[str], None]
OnSubscribed = Callable[[str], None]
Recheck = Callable[[str], Awaitable[None]]
Principal = Callable[[], str | None]


def make_node_side_machine(
    incarnation: str, settings: SubscriberLimits | None = None, channels: ChannelCatalog = CHANNELS
) -> NodeSideMachine:
    """Return the node-side machine for this project's bodies, whose mailboxes are bounded by their size on the wire."""
    return NodeSideMachine(incarnation, settings, channels=channels, size_of=wire.measure_body)


async def _recheck_nothing(subscriber_id: str) -> None:
    pass


class PubSubServer(sublet_pb2_grpc.SessionServicer):  # type: ignore[misc]
    """The server of sessions. `on_message(subscriber_id, message)` is called once per message, in each agent's order;
    for a long one once per slice of it, between which others have their turn.

    The agent's receipt waits for `on_message`, so that one must not wait for the database. What it raises goes back to
    the sender as that message's error. `on_expired` is called with subscriber ids that were dropped because they were
    silent or broke a rule, and with those that were refused after `check_subscribe` may have been called for them.
    `on_interest(channel, key or None for all, is_subscribed)` is called when its first subscriber has come, or the last
    has gone. `check_subscribe(subscriber id, channel, key or None for all)` raises a `SubletError` where the caller may
    not subscribe to it, `check_agent(subscriber id)` where the agent is another principal's. `on_subscribed(subscriber
    id)` is called when what `check_subscribe` has let through is subscribed. `recheck(subscriber id)` is awaited
    before messages are taken: it expels a subscriber that must not have all that it subscribed to. `principal()`
    returns the caller's principal; None: unknown. `channels` are those of the machine. `on_poll(agent, is_held)` is
    called when no poll of an agent is held: at once where one was broken, else when no next one has come for a moment;
    and when that agent polls again.
    """

    def __init__(
        self,
        machine: NodeSideMachine,
        on_message: OnMessage,
        *,
        on_expired: OnExpired = lambda subscriber_ids: None,
        on_interest: OnInterest = lambda channel, key, is_subscribed: None,
        check_subscribe: CheckSubscribe = lambda subscriber_id, channel, key: None,
        on_poll: OnPoll = lambda agent, is_held: None,
        on_subscribed: OnSubscribed = lambda subscriber_id: None,
        recheck: Recheck = _recheck_nothing,
        check_agent: CheckAgent = lambda subscriber_id: None,
        principal: Principal = lambda: None,
        channels: ChannelCatalog = CHANNELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = machine
        self._on_message = on_message
        self._on_expired = on_expired
        self._on_interest = on_interest
        self._check_subscribe = check_subscribe
        self._check_agent = check_agent
        self._on_subscribed, self._recheck = on_subscribed, recheck
        self._principal = principal
        self._presence = _PollPresence(on_poll, clock)
        self._channels = channels
        self._clock = clock
        self._polls: Counter[str] = Counter()
        self._held: dict[str, asyncio.Future[bool]] = {}
        self._turns: dict[str, asyncio.Task[Any]] = {}
        self._loop_turns = CallerTurns()
        self._unknown: set[str] = set()
        self._of_connection: dict[str, set[str]] = {}
        self._of_principal: dict[str, set[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        machine.on_ready = self._end_hold
        machine.on_interest = self._notify_interest

    def register(self, server: Any) -> None:
        """Add the service to a `grpc.aio.server` (made with `SERVER_OPTIONS`) and begin to sweep."""
        sublet_pb2_grpc.add_SessionServicer_to_server(self, server)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._expire_subscribers()), loop.create_task(self._presence.run())]

    async def close(self) -> None:
        """Release all held polls and stop sweeping. The caller stops the gRPC server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscriber_id in tuple(self._held):
            self._end_hold(subscriber_id)

    def publish(self, channel: str, key: str, body: object, version: int = 0) -> int:
        """Publish as `NodeSideMachine.publish` does; return the number of subscribers it is queued for."""
        return self.machine.publish(channel, key, body, version)

    def send(self, subscriber_id: str, channel: str, key: str, body: object) -> bool:
        """Send as `NodeSideMachine.send` does; return False if the node does not know the subscriber."""
        return self.machine.send(subscriber_id, channel, key, body)

    @property
    def held_polls(self) -> int:
        """Return how many polls are held at this instant."""
        return len(self._held)

    @property
    def counters(self) -> NodeSideCounters:
        """Return the counters so far."""
        return self.machine.counters

    def find_leaks(self) -> tuple[str, ...]:
        """Return what is still stored though its subscriber is gone; empty unless there is a leak or a call is under
        way."""
        leaks = list(self.machine.find_leaks())
        for activity, names in (("poll is held", self._held), ("batch is executed", self._turns)):
            leaks += [
                f"{name}: its {activity}, and it is forgotten"
                for name in names
                if not self.machine.has_subscriber(name)
            ]
        return tuple(leaks)

    # --- the service ---

    async def Commands(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        """Execute a batch of commands, once."""
        if (excess := wire.find_excess(request)) is not None:
            del request  # it may be large, and the refusal waits for the network
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, excess)
        subscriber_id = await _check_request(request, context)
        await self._check_owner(subscriber_id, context)
        if (refused := self.machine.admit_batch(subscriber_id, request.number, self._principal())) is not None:
            await abort_busy(context, refused.reason)
        await self._admit(subscriber_id, context)
        turn = self._begin_in_turn(subscriber_id, request)
        try:
            reply = await asyncio.shield(turn)
        except asyncio.CancelledError:
            await asyncio.wait([turn])  # so long it counts as its caller's
            raise
        if isinstance(reply, SubscriberRefused):
            await abort_busy(context, reply.reason)
        return reply

    async def Poll(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        """Answer with what waits; with nothing waiting, hold the call until something does, or the hold is over."""
        subscriber_id = await _check_request(request, context)
        await self._check_owner(subscriber_id, context)
        await self._admit(subscriber_id, context)
        if self._polls[subscriber_id] >= MAX_POLLS_OF_SUBSCRIBER:
            rule = f"{MAX_POLLS_OF_SUBSCRIBER} polls of {subscriber_id} are under way, which is the limit"
            await abort_busy(context, f"{rule}. Take their answers.")
        self._polls[subscriber_id] += 1
        call_when_over(lambda: self._end_poll(subscriber_id))
        with self._presence.polling(parse_agent_id(subscriber_id)):
            return await self._answer_poll(subscriber_id, request, context)

    # --- inside ---

    async def _answer_poll(self, subscriber_id: str, request: Any, context: Any) -> Any:
        await self._recheck(subscriber_id)
        self._end_hold(subscriber_id, superseded=True)
        now, hold_s = self._clock(), request.hold_ms / 1000
        answer = self.machine.poll(
            subscriber_id, request.acknowledged, request.incarnation, now, hold_s, self._principal()
        )
        if isinstance(answer, HoldPoll):
            if not await self._hold(subscriber_id, answer.hold_until - now):
                return wire.encode_poll_reply(self.machine.incarnation)
            await self._recheck(subscriber_id)
            answer = self.machine.end_poll(subscriber_id, self._clock())
        match answer:
            case PollReply(deliveries):
                return wire.encode_poll_reply(self.machine.incarnation, deliveries, channels=self._channels)
            case UnknownSubscriber(reason):
                log.info("unknown subscriber: subscriber_id=%s: %s", subscriber_id, reason)
                return wire.encode_poll_reply(self.machine.incarnation, unknown=True)
            case SubscriberRefused():
                return await abort_busy(context, answer.reason)

    def _end_poll(self, subscriber_id: str) -> None:
        self._polls[subscriber_id] -= 1
        if not self._polls[subscriber_id]:
            del self._polls[subscriber_id]

    async def _check_owner(self, subscriber_id: str, context: Any) -> None:
        try:
            self._check_agent(subscriber_id)
        except SubletError as error:
            await _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(error))

    async def _admit(self, subscriber_id: str, context: Any) -> None:
        """Refuse one more subscriber on a connection, or of a principal, that has as many as it may."""
        if self.machine.has_subscriber(subscriber_id):
            return
        connection_ids = self._of_connection.setdefault(context.peer(), set())
        if self._has_reached(connection_ids, MAX_SUBSCRIBERS_OF_CONNECTION):
            rule = f"{len(connection_ids)} subscriber ids are on this connection, which is the limit"
            await abort_busy(context, f"{rule}. Take another one.")
        if (principal := self._principal()) is not None:
            principal_ids = self._of_principal.setdefault(principal, set())
            if self._has_reached(principal_ids, MAX_SUBSCRIBERS_OF_PRINCIPAL):
                rule = f"{principal} has {len(principal_ids)} subscriber ids at this node, which is the limit"
                await abort_busy(context, f"{rule}. Close some, or take another node.")
            principal_ids.add(subscriber_id)
        connection_ids.add(subscriber_id)

    def _has_reached(self, subscriber_ids: set[str], limit: int) -> bool:
        if len(subscriber_ids) >= limit:
            subscriber_ids.intersection_update(self.machine.subscriber_ids)
        return len(subscriber_ids) >= limit

    def _forget_absent(self) -> None:
        alive = set(self.machine.subscriber_ids)
        for counted in (self._of_connection, self._of_principal):
            for name, subscriber_ids in tuple(counted.items()):
                subscriber_ids &= alive
                if not subscriber_ids:
                    del counted[name]

    def _begin_in_turn(self, subscriber_id: str, request: Any) -> asyncio.Task[Any]:
        """Execute a batch to its end even if the agent stops waiting: it repeats the batch, which is executed only
        once."""
        previous_task = self._turns.get(subscriber_id)
        turn = asyncio.get_running_loop().create_task(self._execute_after(previous_task, subscriber_id, request))
        self._turns[subscriber_id] = turn
        turn.add_done_callback(functools.partial(self._end_turn, subscriber_id))
        return turn

    def _end_turn(self, subscriber_id: str, turn: asyncio.Task[Any]) -> None:
        if self._turns.get(subscriber_id) is turn:
            del self._turns[subscriber_id]

    async def _execute_after(self, previous_task: asyncio.Task[Any] | None, subscriber_id: str, request: Any) -> Any:
        if previous_task is not None:
            await asyncio.wait([previous_task])
        return await self._execute(subscriber_id, request)

    async def _execute(self, subscriber_id: str, request: Any) -> Any:
        async with SlicedWork(self._loop_turns, self._principal() or parse_agent_id(subscriber_id)) as turn:
            return await self._execute_in_slices(subscriber_id, request, turn)

    async def _execute_in_slices(self, subscriber_id: str, request: Any, turn: SlicedWork) -> Any:
        commands: list[ReceivedCommand] = []
        for command in request.commands:
            commands.append(self._authorize(subscriber_id, wire.decode_command(command, self._channels)))
            await turn.spend(wire.count_items(command))
        answer = self.machine.receive(subscriber_id, request.number, commands, self._clock(), self._principal())
        self._on_subscribed(subscriber_id)
        if not self.machine.has_subscriber(subscriber_id):
            self._unknown.add(subscriber_id)
        match answer:
            case CommandsAccepted(messages, errors):
                failures = [error for each in messages if (error := await self._hand_over(subscriber_id, *each, turn))]
                errors = self.machine.add_errors(subscriber_id, request.number, failures) if failures else errors
                return wire.encode_batch_reply(self.machine.incarnation, errors)
            case CommandsAlreadyExecuted(errors):
                return wire.encode_batch_reply(self.machine.incarnation, errors)
            case UnknownSubscriber(reason):
                log.info("unknown subscriber: subscriber_id=%s: %s", subscriber_id, reason)
                return wire.encode_batch_reply(self.machine.incarnation, unknown=True)
            case SubscriberRefused():
                return answer

    def _authorize(self, subscriber_id: str, command: ReceivedCommand) -> ReceivedCommand:
        """Return the command, or what is executed instead of one that the caller may not give."""
        if isinstance(command, Subscribe):
            try:
                self._check_subscribe(subscriber_id, command.channel, command.key)
            except SubletError as error:
                return UndecodableCommand(str(error))
        return command

    async def _hand_over(
        self, subscriber_id: str, index: int, message: object, turn: SlicedWork
    ) -> CommandRefusal | None:
        """Hand the message over; return an error with it as a refusal, to affect its sender only, or None."""
        try:
            for part, items in wire.split_message(message):
                result = self._on_message(subscriber_id, part)
                if inspect.isawaitable(result):
                    await turn.wait(result)
                await turn.spend(items)
        except SubletError as error:
            return CommandRefusal(index, str(error))
        except Exception:
            log.exception("message handler failed: subscriber_id=%s message=%r", subscriber_id, message)
            return CommandRefusal(index, "the node failed at this message; its log says why")
        return None

    async def _hold(self, subscriber_id: str, seconds: float) -> bool:
        """Wait until a message waits or the time is over; return False if a newer poll has replaced this one."""
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._held[subscriber_id] = held
        try:
            return await asyncio.wait_for(held, seconds)
        except TimeoutError:
            return True
        finally:
            if self._held.get(subscriber_id) is held:
                del self._held[subscriber_id]

    def _end_hold(self, subscriber_id: str, *, superseded: bool = False) -> None:
        held = self._held.get(subscriber_id)
        if held is not None and not held.done():
            held.set_result(not superseded)

    async def _expire_subscribers(self) -> None:
        """Drop silent subscribers when they are due. Later subscribers are due later, so none is missed."""
        longest = self.machine.settings.hold_s
        while True:
            wake_at = self.machine.wake_at
            wait = longest if wake_at is None else min(wake_at - self._clock(), longest)
            await asyncio.sleep(max(wait, 0.01))
            silent = self.machine.expire(self._clock())
            self._forget_absent()
            self._presence.forget_absent({parse_agent_id(each) for each in self.machine.subscriber_ids})
            gone = {*silent, *(each for each in self._unknown if not self.machine.has_subscriber(each))}
            self._unknown.clear()
            if gone:
                self._notify_expired(tuple(gone))

    def _notify_expired(self, subscriber_ids: Sequence[str]) -> None:
        try:
            self._on_expired(subscriber_ids)
        except Exception:
            log.exception("expiry handler failed")

    def _notify_interest(self, channel: str, key: str | None, is_subscribed: bool) -> None:
        try:
            self._on_interest(channel, key, is_subscribed)
        except Exception:
            log.exception("interest handler failed")


class _PollPresence:
    """Counts the polls of each agent, and reports those that have none any more, and those of them that poll again."""

    def __init__(self, on_poll: OnPoll, clock: Callable[[], float]) -> None:
        self._on_poll, self._clock = on_poll, clock
        self._polls: Counter[str] = Counter()
        self._ended_at: dict[str, float] = {}
        self._missing: set[str] = set()

    @contextlib.contextmanager
    def polling(self, agent: str) -> Iterator[None]:
        """Count a poll of that agent while it is answered."""
        self._polls[agent] += 1
        self._ended_at.pop(agent, None)
        if agent in self._missing:
            self._missing.discard(agent)
            self._notify(agent, True)
        is_broken = True
        try:
            yield
            is_broken = False
        finally:
            self._polls[agent] -= 1
            if not self._polls[agent]:
                del self._polls[agent]
                self._end(agent, is_broken)

    def _end(self, agent: str, is_broken: bool) -> None:
        if is_broken:
            self._miss(agent)
        else:
            self._ended_at[agent] = self._clock()

    async def run(self) -> None:
        """Look for agents that have not polled again, until cancelled."""
        while True:
            await asyncio.sleep(MISSING_S)
            for agent in [agent for agent, at in self._ended_at.items() if at + MISSING_S <= self._clock()]:
                del self._ended_at[agent]
                self._miss(agent)

    def forget_absent(self, present: Set[str]) -> None:
        """Forget agents that are no subscribers any more."""
        self._missing &= present

    def _miss(self, agent: str) -> None:
        self._missing.add(agent)
        self._notify(agent, False)

    def _notify(self, agent: str, is_held: bool) -> None:
        try:
            self._on_poll(agent, is_held)
        except Exception:
            log.exception("poll handler failed")


async def _check_request(request: Any, context: Any) -> str:
    """Return the subscriber id of a request of this version, which proves that it is from that agent."""
    if request.protocol_version != PROTOCOL_VERSION:
        text = (
            f"protocol version {request.protocol_version}: this node speaks {PROTOCOL_VERSION}, "
            f"the agent {request.protocol_version}. Bring both to the same release of sublet."
        )
        await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, text)
    try:
        subscriber_id = wire.check_request(request)
    except MalformedMessage as error:
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if not wire.take_agent_key(request):
        await _abort(context, grpc.StatusCode.UNAUTHENTICATED, wire.NOT_THE_AGENT)
    return subscriber_id


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("abort raises")
