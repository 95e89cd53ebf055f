"""What the session promises while nothing goes wrong, over real gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest

from sublet_protocol.messages.borrower_leader import Ping, PingResponse
from sublet_protocol.messages.head_and_group_events import GroupEventPayload, StreamHead
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.session_kit import a_node, an_agent, event, proven, run, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.conforms("R1")
def test_an_agent_with_10000_keys_holds_one_poll() -> None:
    subscriptions = 10_000

    async def test() -> None:
        async with a_node() as node, an_agent(node.address, "a") as agent, an_agent(node.address, "b") as other:
            for number in range(subscriptions):
                agent.node.subscribe(Channel.STREAM, str(number))
            other.node.subscribe(Channel.GROUP)
            await until(lambda: len(node.subscriptions()) == subscriptions + 1)
            await until(lambda: node.sessions.held_polls == 2)
            assert node.calls.count("Poll") == 2
            for number in range(subscriptions):
                node.sessions.publish(Channel.STREAM, str(number), StreamHead(number, 7), version=7)
            await until(lambda: len(agent.seen) == subscriptions)
            await until(lambda: node.sessions.held_polls == 2)
            assert not other.seen

    run(test)


@pytest.mark.conforms("R1")
def test_as_many_polls_are_held_as_there_are_agents() -> None:
    async def test() -> None:
        async with a_node() as node, AsyncExitStack() as stack:
            agents = [await stack.enter_async_context(an_agent(node.address, f"a{number}")) for number in range(20)]
            for agent in agents:
                for key in range(50):
                    agent.node.subscribe(Channel.GROUP, str(key))
            await until(lambda: len(node.subscriptions()) == 1_000 and node.sessions.held_polls == 20)
            assert node.calls.count("Poll") == 20
            node.sessions.publish(Channel.GROUP, "7", event(1))
            await until(lambda: all(agent.seen for agent in agents) and node.sessions.held_polls == 20)
            assert node.calls.count("Poll") == 40

    run(test)


@pytest.mark.conforms("R2")
def test_commands_arrive_in_order_behind_a_slow_one() -> None:
    """There is one batch at a time."""

    async def test() -> None:
        async with a_node() as node, an_agent(node.address) as agent:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            node.gate = gate
            agent.node.send(Ping((), 0.0))
            await until(lambda: node.batches_inside == 1)
            agent.node.subscribe(Channel.GROUP, "k")
            agent.node.unsubscribe(Channel.GROUP, "k")
            for number in range(1, 2_500):
                agent.node.send(Ping((), float(number)))
            agent.node.subscribe(Channel.GROUP, "k")
            gate.set_result(None)
            await until(lambda: len(node.received) == 2_500 and node.subscriptions())
            assert [message.sent_at for _, message in node.received if isinstance(message, Ping)] == list(range(2_500))
            assert node.subscriptions() == [(Channel.GROUP, "k")]
            assert node.most_batches_inside == 1
            assert node.calls.count("Commands") < 10

    run(test)


@pytest.mark.conforms("R4")
def test_a_message_without_a_poll_waits_for_the_next() -> None:
    """A poll that is held is answered at once, and not at the end of its hold, which outlasts the test."""

    async def test() -> None:
        async with a_node(hold_s=600.0) as node, grpc.aio.insecure_channel(node.address) as channel:
            stub, early, late = sublet_pb2_grpc.SessionStub(channel), proven("early"), proven("late")
            request = pb.PollRequest(**early, hold_ms=500_000)
            held = asyncio.ensure_future(stub.Poll(request))
            await until(lambda: node.sessions.held_polls == 1)
            for one in (early, late):
                subject = pb.Subject(channel=pb.CHANNEL_GROUP, key="k")
                batch = pb.CommandBatch(**one, number=1)
                batch.commands.add(subscribe=subject)
                await stub.Commands(batch)
            node.sessions.publish(Channel.GROUP, "k", event(1))
            assert [one.group_event for one in (await held).messages] == [b"1"]
            reply = await stub.Poll(pb.PollRequest(**late))
            assert [one.group_event for one in reply.messages] == [b"1"]

    run(test)


@pytest.mark.conforms("R12")
def test_all_channels_are_served_alike() -> None:
    async def test() -> None:
        async with a_node() as node, an_agent(node.address) as agent:
            node.sessions.publish(Channel.STREAM, "7", StreamHead(7, 100), version=100)
            agent.node.subscribe(Channel.STREAM, "7")
            agent.node.subscribe(Channel.GROUP)
            agent.node.subscribe(Channel.BORROWER, "b")
            await until(lambda: len(node.subscriptions()) == 3)
            node.sessions.publish(Channel.GROUP, "$share/g/a", GroupEventPayload(b"{}"))
            node.sessions.publish(Channel.BORROWER, "b", PingResponse("b", 1, 0.5, 8.5))
            await until(lambda: len(agent.seen) == 3)
            assert {(one.channel, one.key, one.body) for one in agent.seen} == {
                (Channel.STREAM, "7", StreamHead(7, 100)),
                (Channel.GROUP, "$share/g/a", GroupEventPayload(b"{}")),
                (Channel.BORROWER, "b", PingResponse("b", 1, 0.5, 8.5)),
            }

    run(test)


@pytest.mark.conforms("R12")
def test_the_machines_import_nothing_of_their_owners() -> None:
    code = (
        "import sys, sublet_protocol.pubsub.node_side_machine, sublet_protocol.pubsub.agent_side_machine\n"
        "ours = ('grpc', 'google', 'sublet_leader', 'sublet_borrower', 'sublet_storage', 'sublet_protocol.messages')\n"
        "print([name for name in sys.modules if f'{name}.'.startswith(tuple(f'{each}.' for each in ours))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
