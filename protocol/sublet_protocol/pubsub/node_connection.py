"""The agent's side of a connection on the network, one `NodeConnection` per node.

It drives an `AgentSideMachine` on an asyncio loop: carries out the actions that the machine decides, in order, and
returns their results as events. Callbacks run on the loop, one after the other; they may call `send`, `subscribe` and
`unsubscribe`, and must not block.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, assert_never

import grpc
import grpc.aio

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_PUBLISH_BYTES
from sublet_protocol.domain.secret import Secret
from sublet_protocol.gate.client_access_token import call_metadata, is_replaced
from sublet_protocol.messages.agent_secret import AgentSecret
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.agent_side_events import (
    CallPoll,
    CancelCommandsCall,
    CancelPollCall,
    CommandsUnanswered,
    ConnectionRejected,
    ConnectionStatus,
    Deliver,
    Event,
    Instruction,
    PollUnanswered,
    ReportConnectionLost,
    ReportConnectionStillLost,
    ReportRejectedCommands,
    SendCommands,
)
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings, AgentSideMachine
from sublet_protocol.pubsub.callback_registry import CallbackRegistry, OnDelivery, OnLost, call_safely
from sublet_protocol.pubsub.counters import AgentSideCounters
from sublet_protocol.pubsub.model import CHANNELS, ChannelCatalog, Command, MessageToNode, Subscribe, Unsubscribe
from sublet_protocol.tick import Tick
from sublet_protocol.tls.channel import compute_channel_signature, explain_failure, is_outdated, open_aio_channel
from sublet_protocol.v1 import sublet_pb2_grpc

log = logging.getLogger(__name__)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", wire.MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_PUBLISH_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in truth how long an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute else, and it is this that ends the connection
)
"""The options of a channel to a node, which make it reconnect quickly when the node is back."""

CALL_TIMEOUT_S = 5.0
"""How long a call may take beyond the time it is held."""

_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

OnRefused = Callable[[Command, str], None]


SHOWN_CHARACTERS = 300
"""Longer texts of a peer are cut in logs and errors."""


def truncate(text: str) -> str:
    """Return as much of the text as one line of a log should have."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


class NodeConnection:
    """The connection of one agent to one node. Made and used on one event loop. `key` is the agent's, for all its
    nodes.

    `on_message(delivery)` is called once per delivery that no subscription's own callback takes, in order (a body may
    be a `MailboxOverflow`); `on_lost(lost)` once per lost connection, after which subscriptions are declared again by
    themselves; `on_refused(command, text)` for what the node rejected, which is also logged, at a falling rate. `token`
    goes with every call. `channels` are those that the node serves. With TLS where the address has its scheme: an error
    with it rejects the connection.
    """

    def __init__(
        self,
        address: str,
        key: AgentSecret,
        on_message: OnDelivery,
        on_lost: OnLost = lambda lost: None,
        *,
        on_refused: OnRefused = lambda command, text: None,
        settings: AgentConnectionSettings | None = None,
        answer_within_s: float = CALL_TIMEOUT_S,
        token: Secret | None = None,
        channels: ChannelCatalog = CHANNELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._key = key
        self._channels = channels
        # Microseconds: above all incarnations of an earlier connection to the node, which answers none of them again.
        last = round(clock() * 1e6)
        self._machine = AgentSideMachine(
            key.agent_id, settings, channels=channels, size_of=self._measure, last_incarnation=last
        )
        self._callbacks = CallbackRegistry(on_message, on_lost)
        self._on_refused = on_refused
        self._answer_within_s = answer_within_s
        self._token = token
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._channels_opened: list[Any] = []
        self._opened_with: object = None
        self._stub: Any = None
        self._is_lost = False
        self._events: deque[Event] = deque()
        self._busy = False
        self._closed = False
        self._batch: asyncio.Task[None] | None = None
        self._poll: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._receipt = asyncio.Event()
        self._losses = 0
        self._refusals = 0

    # --- for the agent ---

    @property
    def status(self) -> ConnectionStatus:
        """Return the status of the connection between this agent and the node."""
        return self._machine.status

    @property
    def subscriber_id(self) -> str:
        """Return the id under which the node has this agent at present."""
        return self._machine.subscriber_id

    @property
    def counters(self) -> AgentSideCounters:
        """Return the counters so far."""
        return self._machine.counters

    @property
    def unacknowledged_count(self) -> int:
        """Return the number of messages that the node has not acknowledged yet."""
        return self._machine.unacknowledged_count

    def find_leaks(self) -> tuple[str, ...]:
        """Return what is still stored though nothing needs it; empty unless there is a leak."""
        unsubscribed = [subject for subject in self._callbacks.subjects() if not self._machine.is_subscribed(*subject)]
        running = [task for task in (self._batch, self._poll) if task is not None and not task.done()]
        leaks = [f"callbacks of {subject}: it is not subscribed" for subject in unsubscribed]
        if self._closed and (running or self._timer is not None):
            leaks.append(f"closed, with {len(running)} calls under way and timer {self._timer}")
        return (*self._machine.find_leaks(), *leaks)

    def send(self, message: object) -> None:
        """Queue a message to the node, and hold a poll for its answers from now on."""
        command = MessageToNode(message)
        wire.encode_command(command, self._channels)
        self._decide(command)

    def subscribe(
        self,
        channel: str,
        key: str | None = None,
        *,
        on_message: OnDelivery | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        """Subscribe to one key of a channel or to all (None), at any time; again, to replace the callbacks.

        `on_message` is called instead of the connection's; where a key and all keys are subscribed, that of the key.
        `on_lost` is called besides the connection's, once for each loss: also where the connection is lost already, and
        where the node rejects this subscription (`lost.final`: it is over).
        """
        command = Subscribe(channel, key)
        wire.encode_command(command, self._channels)
        if self._closed or (self._busy and self.status is ConnectionStatus.REJECTED):
            return  # a callback that subscribes again at a final loss would be called without end
        self._callbacks.register((channel, key), on_message, on_lost)
        self._decide(command)

    def unsubscribe(self, channel: str, key: str | None = None) -> None:
        """Undo a subscribe. What is under way by then goes to the connection's `on_message`."""
        command = Unsubscribe(channel, key)
        wire.encode_command(command, self._channels)
        self._callbacks.unregister((channel, key))
        self._decide(command)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Wait until the node has all that was sent, then end; return False if the time was over first."""
        drained = await self._wait_until_drained(timeout_s)
        self._closed = True
        tasks = [task for task in (self._batch, self._poll) if task is not None]
        for task in tasks:
            task.cancel()
        self._wake_at(None)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels_opened))
        return drained

    async def _wait_until_drained(self, timeout_s: float) -> bool:
        """Return whether the node has confirmed everything. What a lost connection drops was not confirmed."""
        losses = self._losses
        try:
            async with asyncio.timeout(timeout_s):
                while self._machine.unacknowledged_count:
                    self._receipt.clear()
                    await self._receipt.wait()
        except TimeoutError:
            return False
        return losses == self._losses and self.status not in (ConnectionStatus.DISCONNECTED, ConnectionStatus.REJECTED)

    # --- driving the machine ---

    def _decide(self, event: Event) -> None:
        """Take events one at a time, also those that callbacks cause while one is being taken."""
        if self._closed:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and not self._closed:
                outcome = self._machine.decide(self._events.popleft(), self._clock())
                for instruction in outcome.sends:
                    self._carry_out(instruction)
                self._wake_at(outcome.wake_at)
        finally:
            self._busy = False
        self._receipt.set()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case SendCommands():
                self._batch = self._replace(self._batch, self._call_commands(instruction))
            case CallPoll():
                self._poll = self._replace(self._poll, self._call_poll(instruction))
            case CancelCommandsCall():
                _cancel(self._batch)
            case CancelPollCall():
                _cancel(self._poll)
            case Deliver(deliveries):
                self._callbacks.deliver(deliveries)
            case ReportRejectedCommands(refused):
                for command, text in refused:
                    self._refuse(command, text)
            case ReportConnectionLost():
                self._losses += 1
                self._callbacks.notify_lost(instruction)
            case ReportConnectionStillLost(lost):
                self._callbacks.notify_failed(lost)
            case _:
                assert_never(instruction)

    def _refuse(self, command: Command, text: str) -> None:
        self._log_refusal(command, text)
        if isinstance(command, Subscribe) and not self._machine.is_subscribed(command.channel, command.key):
            self._callbacks.notify_rejected((command.channel, command.key), text)
        call_safely(self._on_refused, command, text)

    def _log_refusal(self, command: Command, reason: str) -> None:
        """Log the first, the second, the fourth, the eighth ... refusal of this connection."""
        self._refusals += 1
        if self._refusals & (self._refusals - 1) == 0:
            kind = type(command.body if isinstance(command, MessageToNode) else command).__name__
            text = "command refused by node: address=%s command=%s refusal_count=%d: %s"
            log.warning(text, self.address, kind, self._refusals, truncate(reason))

    def _measure(self, command: Command) -> tuple[int, int]:
        return wire.measure_command(command, self._channels)

    def _replace(self, task: asyncio.Task[None] | None, call: Any) -> asyncio.Task[None]:
        _cancel(task)
        return self._loop.create_task(call)

    def _wake_at(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_later(max(at - self._clock(), 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._decide(Tick())

    # --- calls ---

    async def _call_commands(self, batch: SendCommands) -> None:
        def read(reply: Any) -> Event:
            return wire.decode_batch_reply(batch, reply, random.random())

        def encode() -> Any:
            return wire.encode_batch_request(batch, self._key, self._channels)

        timeout = self._answer_within_s
        self._decide(
            await self._call("Commands", encode, batch.subscriber_incarnation, timeout, CommandsUnanswered, read)
        )

    async def _call_poll(self, poll: CallPoll) -> None:
        def read(reply: Any) -> Event:
            return wire.decode_poll_reply(poll, reply, random.random(), self._channels)

        def encode() -> Any:
            return wire.encode_poll_request(poll, self._key)

        timeout = poll.hold_s + self._answer_within_s
        self._decide(await self._call("Poll", encode, poll.subscriber_incarnation, timeout, PollUnanswered, read))

    async def _call(
        self,
        method: str,
        encode: Callable[[], Any],
        incarnation: int,
        timeout: float,
        failed: type[CommandsUnanswered] | type[PollUnanswered],
        read: Callable[[Any], Event],
    ) -> Event:
        """Return the outcome of a call as an event."""
        opened_with: object = None
        try:
            sent = call_metadata(self._token)
            call: Callable[..., Awaitable[Any]] = getattr(self._open(), method)
            opened_with = self._opened_with
            return read(await call(encode(), timeout=timeout, metadata=sent))
        except InvalidSetting as error:
            return ConnectionRejected(incarnation, f"{self.address}: {error}")
        except grpc.aio.AioRpcError as error:
            if reason := await self._explain(error):
                return ConnectionRejected(incarnation, reason)
            is_retried = False
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                has_other_files = is_outdated(self.address, opened_with)
                self._is_lost |= has_other_files
                is_retried = has_other_files or is_replaced(self._token, sent)
            if error.code() in _FINAL_CODES and not is_retried:
                return ConnectionRejected(incarnation, f"{self.address}: {error.code().name}: {error.details()}")
            return failed(incarnation, f"{self.address}: {error.code().name}: {error.details()}", random.random())
        except MalformedMessage as error:
            return failed(incarnation, f"{self.address}: {error}", random.random())
        except Exception as error:
            log.exception("internal error in a call: address=%s", self.address)
            return failed(incarnation, f"{self.address}: {error!r}", random.random())

    def _open(self) -> Any:
        """Return the stub, on a new channel if this is the first call, or the files for TLS have changed."""
        if self._stub is None or self._is_lost:
            self._is_lost = False
            signature = compute_channel_signature(self.address)
            if self._stub is None or signature != self._opened_with:
                channel = open_aio_channel(self.address, CHANNEL_OPTIONS)
                self._opened_with, self._stub = signature, sublet_pb2_grpc.SessionStub(channel)
                self._channels_opened.append(channel)
        return self._stub

    async def _explain(self, error: grpc.aio.AioRpcError) -> str | None:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return None
        self._is_lost = True
        return await asyncio.to_thread(explain_failure, self.address, error.details() or "")


def _cancel(task: asyncio.Task[None] | None) -> None:
    """Cancel the task, unless it is the current one, which has done its call already."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()
