"""A node and agents for the session's tests, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import grpc
import grpc.aio

from sublet_protocol.domain.errors import UndeclaredQueue
from sublet_protocol.messages.agent_secret import AgentSecret
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION, LeaderWanted, Ping, PingResponse
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.agent_side_events import ReportConnectionLost
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings
from sublet_protocol.pubsub.model import CHANNELS, Channel, ChannelCatalog, Command, SequencedMessage
from sublet_protocol.pubsub.node_connection import NodeConnection
from sublet_protocol.pubsub.node_side_machine import SubscriberLimits
from sublet_protocol.pubsub.server import SERVER_OPTIONS, OnMessage, PubSubServer, make_node_side_machine
from sublet_protocol.pubsub.subscriber_mailbox import MailboxLimits
from tests.kit import WAIT_S

P = ParamSpec("P")
FAST = AgentConnectionSettings(hold_s=0.3, retry_s=0.02, max_retry_s=0.1)


async def until(fact: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, "not true in time"
        await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Node:
    """A node in this process: its session service on a real port."""

    def __init__(
        self,
        incarnation: str,
        hold_s: float,
        mailbox: MailboxLimits,
        port: int,
        channels: ChannelCatalog = CHANNELS,
        on_message: OnMessage | None = None,
    ) -> None:
        publisher = make_node_side_machine(incarnation, SubscriberLimits(hold_s=hold_s, mailbox=mailbox), channels)
        self.received: list[tuple[str, object]] = []
        self.expired: list[str] = []
        self.gate: Awaitable[object] | None = None
        self.came_to_gate = 0
        """Messages that have waited for the gate, or wait."""
        self.interest: list[tuple[str, str | None, bool]] = []
        self.sessions = PubSubServer(
            publisher,
            on_message or self.on_message,
            on_expired=self.expired.extend,
            on_interest=lambda *one: self.interest.append(one),
            on_subscribed=self.on_subscribed,
            recheck=self.recheck,
            channels=channels,
        )
        self.has_lost_rights = False
        self.subscribed: list[list[str]] = []
        """The channels that its subscriber was subscribed to after each batch."""
        self.calls: list[str] = []
        self.wanted = 0
        """Requests for a leader that have arrived, also repeated ones."""
        self.drop_replies = 0
        self.batches_inside = self.most_batches_inside = 0
        self.server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[Watcher(self)])
        self.sessions.register(self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    async def on_message(self, subscriber_id: str, message: object) -> None:
        if self.gate is not None:
            self.came_to_gate += 1
            await self.gate
        self.received.append((subscriber_id, message))
        if isinstance(message, LeaderWanted):
            raise UndeclaredQueue("queue '$queue/g/a': it is not declared. Create it first.")
        if isinstance(message, Ping):
            for borrower_id in message.borrower_ids:
                response = PingResponse(borrower_id, 1, message.sent_at, 8.5)
                self.sessions.send(subscriber_id, Channel.BORROWER, borrower_id, response)

    def on_subscribed(self, subscriber_id: str) -> None:
        self.subscribed.append(list(self.sessions.machine.subscriptions(subscriber_id)))

    async def recheck(self, subscriber_id: str) -> None:
        if self.has_lost_rights:
            self.sessions.machine.expel(subscriber_id)

    def subscriptions(self) -> list[tuple[str, str | None]]:
        publisher = self.sessions.machine
        subscribed = (publisher.subscriptions(name) for name in publisher.subscriber_ids)
        return [(channel, key) for each in subscribed for channel, keys in each.items() for key in keys]

    async def check_no_leak(self) -> None:
        """Once everybody is forgotten nothing may be left of anybody. Whoever fails here says what is."""
        publisher = self.sessions.machine
        assert publisher.find_leaks() == ()
        while publisher.subscriber_ids:
            publisher.expire(math.inf)
        await until(lambda: not self.sessions.find_leaks() and not self.sessions.held_polls)
        assert publisher.subscriber_ids == ()
        assert publisher.find_leaks() == ()

    async def stop(self) -> None:
        await self.sessions.close()
        await self.server.stop(0)


class Watcher(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts what arrives, and loses as many replies as asked."""

    def __init__(self, node: Node) -> None:
        self.node = node

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler, node = await continuation(details), self.node
        name = details.method.rsplit("/")[-1]

        async def watched(request: Any, context: Any) -> Any:
            node.calls.append(name)
            inside = name == "Commands"
            if inside:
                node.wanted += sum(command.message.HasField("leader_wanted") for command in request.commands)
            node.batches_inside += inside
            node.most_batches_inside = max(node.most_batches_inside, node.batches_inside)
            try:
                reply = await handler.unary_unary(request, context)
            finally:
                node.batches_inside -= inside
            if node.drop_replies and (name == "Commands" or reply.messages):
                node.drop_replies -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
            return reply

        return grpc.unary_unary_rpc_method_handler(watched, handler.request_deserializer, handler.response_serializer)


@asynccontextmanager
async def a_node(
    incarnation: str = "n1",
    *,
    hold_s: float = 5.0,
    mailbox: MailboxLimits | None = None,
    port: int = 0,
    channels: ChannelCatalog = CHANNELS,
    on_message: OnMessage | None = None,
) -> AsyncIterator[Node]:
    """`on_message` is called instead of the node's own."""
    node = Node(incarnation, hold_s, mailbox or MailboxLimits(), port, channels, on_message)
    await node.server.start()
    try:
        yield node
        await node.check_no_leak()
    finally:
        await node.stop()


class Agent:
    """A connection, and all that it called back."""

    def __init__(
        self,
        address: str,
        name: str = "agent",
        settings: AgentConnectionSettings | None = None,
        answer_within_s: float = 5.0,
        channels: ChannelCatalog = CHANNELS,
        key: AgentSecret | None = None,
    ) -> None:
        self.key = key or AgentSecret(name)
        self.seen: list[SequencedMessage] = []
        self.lost: list[ReportConnectionLost] = []
        self.refused: list[tuple[Command, str]] = []
        self.node = NodeConnection(
            address,
            self.key,
            self.seen.append,
            self.lost.append,
            on_refused=lambda command, text: self.refused.append((command, text)),
            settings=settings,
            answer_within_s=answer_within_s,
            channels=channels,
        )

    def bodies(self) -> list[object]:
        return [one.body for one in self.seen]


@asynccontextmanager
async def an_agent(
    address: str,
    name: str = "agent",
    settings: AgentConnectionSettings | None = None,
    channels: ChannelCatalog = CHANNELS,
) -> AsyncIterator[Agent]:
    agent = Agent(address, name, settings, channels=channels)
    try:
        yield agent
        assert agent.node.find_leaks() == ()
        await agent.node.close(timeout_s=0)
        assert agent.node.find_leaks() == ()
    finally:
        await agent.node.close(timeout_s=0)


def proven(name: str) -> dict[str, Any]:
    """Return the fields of every request of one agent, for clients written with only the proto."""
    key = AgentSecret(name)
    return {"protocol_version": PROTOCOL_VERSION, "subscriber_id": f"{key.agent_id}.1", "agent_key": key.reveal()}


def event(number: int) -> GroupEventPayload:
    return GroupEventPayload(str(number).encode())
