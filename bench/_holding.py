"""The two sides of `bench subscriptions`, each run as a process.

`python -m bench._holding serve FILE` serves sessions, and a call that is held until its caller disconnects. `python -m
bench._holding session|call FILE ADDRESS AGENTS SUBSCRIPTIONS` runs AGENTS agents, each with a connection of its own and
an equal share of the subscriptions: either one session per agent, or one held call per subscription.

The server writes its address to FILE as a line of JSON, and then for each line it reads the counts of what it holds; if
the line is `close_out`, it collects its garbage first. The agents write a line once each has one subscription, continue
when they read a line, and write another one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from sublet_protocol.messages.agent_secret import AgentSecret
from sublet_protocol.pubsub import node_connection
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_connection import NodeConnection
from sublet_protocol.pubsub.server import SERVER_OPTIONS, PubSubServer, make_node_side_machine

HOLD = "/bench.Hold/Wait"
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Otherwise gRPC shares one connection between the channels of a process to an address; agents usually are
processes."""
TIDY = "tidy\n"
KEYS = 100_000
"""More than an agent may subscribe to."""
PATIENT = (
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
    ("grpc.server_max_unrequested_time_in_server", 3600),
)
"""Calls that arrive faster than the loop accepts them wait instead of being rejected."""
AT_ONCE = 200
"""Calls that are started before the event loop can run other tasks."""

Spread = Callable[[int, int], Awaitable[None]]
"""Subscribes each agent to the keys from the first number up to, but without, the second."""


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Holds every call without an answer: the counterpart of a subscription."""

    def __init__(self) -> None:
        self.held = 0
        self._never = asyncio.Event()

    def service(self, details: Any) -> Any:
        """Return the handler of every call with our name."""
        return grpc.unary_unary_rpc_method_handler(self._wait) if details.method == HOLD else None

    async def _wait(self, request: bytes, context: Any) -> bytes:
        self.held += 1
        try:
            await self._never.wait()
        finally:
            self.held -= 1
        return request


async def serve(file: Path) -> None:
    """Serve until standard input is closed."""
    server = grpc.aio.server(options=(*SERVER_OPTIONS, *PATIENT))
    publisher = make_node_side_machine("bench")
    sessions, calls = PubSubServer(publisher, lambda subscriber_id, message: None), Calls()
    server.add_generic_rpc_handlers((calls,))
    port = server.add_insecure_port("127.0.0.1:0")
    sessions.register(server)
    await server.start()
    _write(file, {"address": f"127.0.0.1:{port}"})
    while word := await _reported():
        if word == TIDY:
            gc.collect()
        subscribed = (keys for one in publisher.subscriber_ids for keys in publisher.subscriptions(one).values())
        _write(file, {"subscriptions": sum(map(len, subscribed)), "polls": sessions.held_polls, "calls": calls.held})
    await server.stop(None)


async def session(address: str, agents: int) -> Spread:
    """Open one session for each agent."""
    node_connection.CHANNEL_OPTIONS = (*node_connection.CHANNEL_OPTIONS, *OWN_CONNECTION)
    nodes = {
        number: NodeConnection(address, AgentSecret(f"agent-{number}"), lambda delivery: None)
        for number in _numbers(agents)
    }

    async def spread(first: int, end: int) -> None:
        for number, node in nodes.items():
            for key in range(first, end):
                node.subscribe(Channel.STREAM, _key(number, key))
            await asyncio.sleep(0)

    return spread


async def call(address: str, agents: int) -> Spread:
    """Open one call for each subscription, without keepalive pings, which a server rejects if nothing else is sent."""
    channels = {number: grpc.aio.insecure_channel(address, options=OWN_CONNECTION) for number in _numbers(agents)}
    held: list[Any] = []

    async def spread(first: int, end: int) -> None:
        for number, channel in channels.items():
            wait = channel.unary_unary(HOLD)
            for key in range(first, end):
                held.append(wait(_key(number, key).encode(), wait_for_ready=True))
                if len(held) % AT_ONCE == 0:
                    await asyncio.sleep(0.01)

    return spread


def _numbers(agents: int) -> range:
    """Return the agents' numbers: processes with different counts of agents have none in common."""
    return range(agents, 2 * agents)


def _key(agent: int, number: int) -> str:
    """Return a key that no other agent subscribes to."""
    return str(KEYS * agent + number)


async def subscribe(
    connect: Callable[[str, int], Awaitable[Spread]], file: Path, address: str, agents: int, each: int
) -> None:
    """Subscribe each agent to one key, and after a line on standard input to the others."""
    spread = await connect(address, agents)
    await spread(0, 1)
    _write(file, {"begun": True})
    if await _reported():
        await spread(1, each)
        _write(file, {"spread": True})
        await _reported()


async def _reported() -> str:
    """Wait for a line of standard input; return an empty text at its end."""
    return await asyncio.to_thread(sys.stdin.readline)


def _write(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def main(role: str, file: str, *arguments: str) -> None:
    """Serve or subscribe."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if role == "serve":
        asyncio.run(serve(Path(file)))
    else:
        address, agents, subscriptions = arguments
        connect = session if role == "session" else call
        asyncio.run(subscribe(connect, Path(file), address, int(agents), int(subscriptions) // int(agents)))


if __name__ == "__main__":
    main(*sys.argv[1:])
