"""Subscriptions with callbacks of their own, over real gRPC: what each is called with, also when its node is killed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from sublet_protocol.messages.borrower_leader import Ping
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub.agent_side_events import (
    ConnectionLostReason,
    ConnectionStatus,
    ReportConnectionLost,
)
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings
from sublet_protocol.pubsub.model import Channel, MailboxOverflow, SequencedMessage
from sublet_protocol.pubsub.subscriber_mailbox import MailboxLimits
from tests.integration.session_kit import FAST, Agent, a_node, an_agent, event, free_port, run, until

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
def test_each_has_every_message_once_and_in_order() -> None:
    """Who subscribes to a key, to all keys or to both is called once for each."""

    async def test() -> None:
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

    run(test)


@pytest.mark.conforms("R9", "R6")
def test_a_killed_node_fails_each_subscription_once() -> None:
    """The node's next life serves them all."""

    async def test() -> None:
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

    run(test)


@pytest.mark.conforms("R9")
def test_a_refused_subscription_fails_once_and_alone() -> None:
    async def test() -> None:
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

    run(test)


@pytest.mark.conforms("R10")
def test_a_gap_is_reported_to_who_reads_its_channel() -> None:
    async def test() -> None:
        async with a_node(mailbox=MailboxLimits(messages=50)) as node, an_agent(node.address) as agent:
            reported = Subscriptions(agent)
            reported.add(Channel.GROUP, "k")
            reported.add(Channel.GROUP, None)
            reported.add(Channel.STREAM, "7")
            await until(lambda: len(node.subscriptions()) == 3 and node.sessions.held_polls)
            node.sessions.publish(Channel.STREAM, "7", StreamHead(7, 1), 2)
            for number in range(60):
                node.sessions.publish(Channel.GROUP, "k", event(number))
            await until(lambda: reported.seen["group/k"] and reported.seen["group/k"][-1] == event(59))
            gap = MailboxOverflow(50, (Channel.GROUP,))
            assert reported.seen["group/k"] == [gap, *(event(number) for number in range(50, 60))]
            assert reported.seen["group/all"] == [gap]
            assert reported.seen["stream/7"] == [StreamHead(7, 1)]
            assert agent.bodies() == [gap]

    run(test)


@pytest.mark.conforms("R9")
def test_subscribing_from_a_callback_at_any_time() -> None:
    async def test() -> None:
        async with a_node() as node, an_agent(node.address, settings=AgentConnectionSettings(hold_s=0.2)) as agent:
            reported = Subscriptions(agent)
            agent.node.subscribe(
                Channel.GROUP, "first", on_message=lambda delivery: reported.add(Channel.GROUP, "second")
            )
            await until(node.subscriptions)
            node.sessions.publish(Channel.GROUP, "first", event(1))
            await until(lambda: len(node.subscriptions()) == 2)
            node.sessions.publish(Channel.GROUP, "second", event(2))
            await until(lambda: reported.seen["group/second"] == [event(2)])

    run(test)
