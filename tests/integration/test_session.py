"""What the session promises, over real gRPC: who is called with what, if an agent is slow or a node is killed too."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from sublet_protocol.messages.borrower_leader import Ping
from sublet_protocol.messages.head_and_group_events import GroupEventPayload, StreamHead
from sublet_protocol.pubsub.agent_side_events import (
    ConnectionLostReason,
    ConnectionStatus,
    ReportConnectionLost,
)
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings
from sublet_protocol.pubsub.model import Channel, SequencedMessage
from sublet_protocol.pubsub.node_side_machine import SubscriberLimits
from sublet_protocol.pubsub.subscriber_mailbox import MailboxLimits
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.session_kit import FAST, Agent, a_node, an_agent, event, free_port, proven, until
from tests.kit import in_loop

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.conforms("R1", "R12")
@in_loop
async def test_an_agent_with_10000_keys_holds_one_poll() -> None:
    subscriptions = 10_000
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


@pytest.mark.conforms("R2")
@in_loop
async def test_commands_arrive_in_order_behind_a_slow_one() -> None:
    """There is one batch at a time."""
    async with a_node() as node, an_agent(node.address) as agent:
        gate = node.gate = asyncio.get_running_loop().create_future()
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


@pytest.mark.conforms("R4")
@in_loop
async def test_a_message_without_a_poll_waits_for_the_next() -> None:
    """A poll that is held is answered at once, and not at the end of its hold, which outlasts the test."""
    async with a_node(hold_s=600.0) as node, grpc.aio.insecure_channel(node.address) as channel:
        stub, early, late = sublet_pb2_grpc.SessionStub(channel), proven("early"), proven("late")
        request = pb.PollRequest(**early, hold_ms=500_000)
        held = asyncio.ensure_future(stub.Poll(request))
        await until(lambda: node.sessions.held_polls == 1)
        subscribe = pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key="k"))
        for one in (early, late):
            await stub.Commands(pb.CommandBatch(**one, number=1, commands=[subscribe]))
        node.sessions.publish(Channel.GROUP, "k", event(1))
        assert [one.group_event for one in (await held).messages] == [b"1"]
        reply = await stub.Poll(pb.PollRequest(**late))
        assert [one.group_event for one in reply.messages] == [b"1"]


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


async def catch_up(stub: Any, one: dict[str, Any]) -> list[Any]:
    """Return all messages that wait for it by now."""
    seen: list[Any] = []
    while True:
        request = pb.PollRequest(**one, acknowledged=seen[-1].sequence if seen else 0)
        messages = (await stub.Poll(request)).messages
        if not messages:
            return seen
        seen += messages


@pytest.mark.conforms("R10")
@in_loop
async def test_one_that_holds_no_poll_slows_nobody() -> None:
    """It is notified of what it has missed."""
    async with (
        a_node(mailbox=MailboxLimits(messages=500)) as node,
        an_agent(node.address, "fast") as fast,
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        stub, slow = sublet_pb2_grpc.SessionStub(channel), proven("slow")
        subscribe = [
            pb.Command(subscribe=pb.Subject(channel=each, all=True)) for each in (pb.CHANNEL_GROUP, pb.CHANNEL_STREAM)
        ]
        await stub.Commands(pb.CommandBatch(**slow, number=1, commands=subscribe))
        fast.node.subscribe(Channel.GROUP)
        await until(lambda: len(node.subscriptions()) == 3)
        for number in range(2_000):
            node.sessions.publish(Channel.GROUP, "k", GroupEventPayload(b"%d" % number))
            node.sessions.publish(Channel.STREAM, str(number % 10), StreamHead(number % 10, number), number)
            if number % 100 == 99:  # what the others have, while nobody has taken what waits for the slow one
                await until(lambda number=number: len(fast.seen) == number + 1)  # type: ignore[misc]
                assert slow["subscriber_id"] in node.sessions.machine.subscriber_ids
        assert fast.bodies() == [event(number) for number in range(2_000)]
        assert node.sessions.counters.gaps == 0  # the slow one has not asked yet, and the others have none
        gap, *rest = await catch_up(stub, slow)
        assert (gap.WhichOneof("body"), list(gap.gap.channels)) == ("gap", [pb.CHANNEL_GROUP])
        events = [int(one.group_event) for one in rest if one.WhichOneof("body") == "group_event"]
        assert events == list(range(2_000 - len(events), 2_000))  # the newest, without a hole
        assert gap.gap.dropped + len(events) == 2_000  # and nothing is dropped without a word
        heads = {one.key: one.stream_head.head for one in rest if one.WhichOneof("body") == "stream_head"}
        assert heads == {str(last): 1_990 + last for last in range(10)}
        assert (node.sessions.counters.gaps, node.sessions.counters.dropped) == (1, gap.gap.dropped)


@pytest.mark.conforms("R10")
@in_loop
async def test_after_a_gap_an_agent_goes_on_in_its_life() -> None:
    async with a_node(mailbox=MailboxLimits(messages=5)) as node, an_agent(node.address) as agent:
        agent.node.subscribe(Channel.GROUP)
        agent.node.subscribe(Channel.STREAM)
        await until(lambda: len(node.subscriptions()) == 2 and node.sessions.held_polls)
        for round_ in range(3):
            for number in range(6):
                node.sessions.publish(Channel.GROUP, "k", event(number))
                node.sessions.publish(Channel.STREAM, "7", StreamHead(7, number), 10 * round_ + number)
            await until(lambda round_=round_: agent.node.counters.gaps == round_ + 1)  # type: ignore[misc]
            node.sessions.publish(Channel.GROUP, "k", event(100 + round_))
            await until(lambda round_=round_: event(100 + round_) in agent.bodies())  # type: ignore[misc]
        assert not agent.lost
        assert agent.node.counters.incarnations == 1


ROOT = Path(__file__).resolve().parents[2]
KEYS = [str(number) for number in range(100)]
KILLED_NODE = """
    import asyncio, grpc.aio
    from sublet_protocol.pubsub.server import SERVER_OPTIONS, PubSubServer, make_node_side_machine

    async def main():
        sessions = PubSubServer(make_node_side_machine("victim"), lambda subscriber_id, message: None)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        sessions.register(server)
        server.add_insecure_port("127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(main())
"""


class Subscriptions:
    """What each subscription of an agent was called with."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.seen: dict[str, list[object]] = {}
        self.failures: Counter[str] = Counter()
        self.reasons: list[ConnectionLostReason] = []

    def add(self, channel: str, key: str | None) -> None:
        name = f"{channel}/{key or 'all'}"
        seen = self.seen.setdefault(name, [])

        def on_message(delivery: SequencedMessage) -> None:
            seen.append(delivery.body)

        def on_lost(lost: ReportConnectionLost) -> None:
            assert (channel, key) in lost.subscriptions
            self.failures[name] += 1
            self.reasons.append(lost.reason)

        self.agent.node.subscribe(channel, key, on_message=on_message, on_lost=on_lost)


@pytest.mark.conforms("R3")
@in_loop
async def test_each_has_every_message_once_and_in_order() -> None:
    """Who subscribes to a key, to all keys or to both is called once for each."""
    async with a_node() as node, an_agent(node.address, "one") as one, an_agent(node.address, "other") as other:
        of_one, of_other = Subscriptions(one), Subscriptions(other)
        of_one.add(Channel.GROUP, "k")
        of_one.add(Channel.GROUP, None)
        of_other.add(Channel.GROUP, "k")
        await until(lambda: len(node.subscriptions()) == 3)
        for number in range(1_000):
            node.sessions.publish(Channel.GROUP, "k" if number % 2 else "x", event(number))
        even, odd = ([event(number) for number in range(first, 1_000, 2)] for first in (0, 1))
        await until(lambda: of_other.seen == {"group/k": odd})
        await until(lambda: of_one.seen == {"group/k": odd, "group/all": even})
        one.node.unsubscribe(Channel.GROUP, "k")
        await until(lambda: len(node.subscriptions()) == 2)
        node.sessions.publish(Channel.GROUP, "k", event(1_000))
        await until(lambda: of_one.seen["group/all"][-1] == event(1_000))
        assert not one.seen  # the connection's own callback has nothing left to take


@pytest.mark.conforms("R9", "R6")
@in_loop
async def test_a_killed_node_fails_each_subscription_once() -> None:
    """The node's next life serves them all."""
    port = free_port()
    victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED_NODE).format(port=port)], cwd=ROOT)
    try:
        async with an_agent(f"127.0.0.1:{port}", settings=FAST) as agent:
            reported = Subscriptions(agent)
            agent.node.send(Ping((), 1.0))  # it polls from now on, without a subscription
            await until(lambda: agent.node.status is ConnectionStatus.CONNECTED, 30)
            agent.lost.clear()
            reported.add(Channel.GROUP, None)
            for key in KEYS:
                reported.add(Channel.STREAM, key)
            agent.node.send(Ping((), 1.0))
            await until(lambda: not agent.node.unacknowledged_count)
            victim.kill()
            victim.wait()
            await until(lambda: agent.node.status is ConnectionStatus.DISCONNECTED)
            reported.add(Channel.GROUP, "late")  # no node to receive it: it fails once as well
            lives = agent.node.counters.incarnations
            await until(lambda: agent.node.counters.incarnations > lives + 2)  # it tries again and again
            assert set(reported.failures.values()) == {1}
            assert set(reported.failures) == {"group/all", "group/late", *(f"stream/{key}" for key in KEYS)}
            assert set(reported.reasons) == {ConnectionLostReason.UNREACHABLE}
            assert [one.reason for one in agent.lost] == [ConnectionLostReason.UNREACHABLE]

            async with a_node("next", port=port) as node:
                await until(lambda: len(node.subscriptions()) == 102)
                for key in KEYS:
                    node.sessions.publish(Channel.STREAM, key, StreamHead(int(key), 5), 10)
                node.sessions.publish(Channel.GROUP, "late", event(1))
                node.sessions.publish(Channel.GROUP, "k", event(2))
                await until(lambda: all(reported.seen.values()))
                assert reported.seen["group/late"] == [event(1)]
                assert reported.seen["group/all"] == [event(2)]
                assert all(reported.seen[f"stream/{key}"] == [StreamHead(int(key), 5)] for key in KEYS)
                assert set(reported.failures.values()) == {1}
                await agent.node.close()
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.conforms("R9")
@in_loop
async def test_a_refused_subscription_fails_once_and_alone() -> None:
    async with a_node() as node, an_agent(node.address) as agent:
        node.sessions.machine.settings = type(node.sessions.machine.settings)(subscriptions_each=2)
        reported = Subscriptions(agent)
        for key in ("a", "b", "c"):
            reported.add(Channel.GROUP, key)
        await until(lambda: agent.refused)
        assert reported.failures == {"group/c": 1}
        assert reported.reasons == [ConnectionLostReason.REJECTED]
        node.sessions.publish(Channel.GROUP, "b", event(1))
        await until(lambda: reported.seen["group/b"] == [event(1)])
        assert not agent.lost


@in_loop
async def test_a_refusal_ends_no_later_subscription() -> None:
    """It was undone and made again before the refusal came."""
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    async with a_node() as node, an_agent(node.address) as agent:
        node.gate, node.sessions.machine.settings = first, SubscriberLimits(subscriptions_each=0)
        reported = Subscriptions(agent)
        agent.node.send(Ping((), 1.0))
        await until(lambda: node.came_to_gate == 1)
        node.gate = second
        reported.add(Channel.GROUP, "k")
        agent.node.send(Ping((), 2.0))
        first.set_result(None)
        await until(lambda: node.came_to_gate == 2)
        agent.node.unsubscribe(Channel.GROUP, "k")
        reported.add(Channel.GROUP, "k")
        node.sessions.machine.settings = SubscriberLimits()
        second.set_result(None)
        await until(node.subscriptions)
        node.sessions.publish(Channel.GROUP, "k", event(1))
        await until(lambda: reported.seen["group/k"] == [event(1)])
        assert (len(agent.refused), reported.failures) == (1, {})


@pytest.mark.conforms("R9")
@in_loop
async def test_subscribing_from_a_callback_at_any_time() -> None:
    async with a_node() as node, an_agent(node.address, settings=AgentConnectionSettings(hold_s=0.2)) as agent:
        reported = Subscriptions(agent)
        agent.node.subscribe(Channel.GROUP, "first", on_message=lambda delivery: reported.add(Channel.GROUP, "second"))
        await until(node.subscriptions)
        node.sessions.publish(Channel.GROUP, "first", event(1))
        await until(lambda: len(node.subscriptions()) == 2)
        node.sessions.publish(Channel.GROUP, "second", event(2))
        await until(lambda: reported.seen["group/second"] == [event(2)])
