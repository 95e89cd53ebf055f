"""Lost replies, dead peers, refusals and bad input: what the session makes of them, over real gRPC."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from sublet_borrower.agent import agent_loop
from sublet_borrower.agent.agent_loop import AgentLoop
from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.messages.borrower_leader import (
    PROTOCOL_VERSION,
    BorrowerEndReason,
    LeaderWanted,
    Ping,
)
from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason, ConnectionStatus, ReportConnectionLost
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.server import make_node_side_machine
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.session_kit import FAST, Agent, a_node, an_agent, event, free_port, proven, until
from tests.kit import WAIT_S, in_loop
from tests.postgres_proxy import PostgresProxy

ROOT = Path(__file__).resolve().parents[2]


@in_loop
async def test_a_listed_node_that_is_away_is_lost_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often nodes are looked up meanwhile."""
    caplog.set_level(logging.INFO, "sublet_borrower.agent.agent_loop")
    address, lookups = f"127.0.0.1:{free_port()}", list[int]()

    def find() -> list[str]:
        lookups.append(1)
        return [address]

    agent = AgentLoop(find, BorrowerSettings().scaled(20))
    try:
        agent.subscribe("$share/g/a", SessionEventQueue())
        await until(lambda: f"connection lost: address={address}" in caplog.text)
        found = len(lookups)
        await until(lambda: len(lookups) >= found + 3)
    finally:
        await asyncio.to_thread(agent.close, 0.0)
    assert caplog.text.count("connection lost") == 1


@in_loop
async def test_sessions_without_a_node_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again only when a node was there meanwhile."""
    monkeypatch.setattr(agent_loop, "NO_NODE_WARNING_S", 0.1)
    nodes, lookups = list[str](), list[int]()

    def find() -> list[str]:
        lookups.append(1)
        return nodes

    async def warned(times: int) -> None:
        await until(lambda: caplog.text.count("no leader node listed") == times)
        found = len(lookups)
        await until(lambda: len(lookups) >= found + 2)
        assert caplog.text.count("no leader node listed") == times

    agent = AgentLoop(find, BorrowerSettings().scaled(20))
    try:
        agent.subscribe("$share/g/a", SessionEventQueue())
        await warned(1)
        found, nodes[:] = len(lookups), [f"127.0.0.1:{free_port()}"]
        await until(lambda: len(lookups) >= found + 2)
        nodes.clear()
        await warned(2)
    finally:
        await asyncio.to_thread(agent.close, 0.0)


class _ServerGone(ConnectionError):
    """Unlike `ConnectionError` it can be referred to weakly."""


@in_loop
async def test_an_agent_that_ends_misses_no_node(caplog: pytest.LogCaptureFixture) -> None:
    """An embedded database ends with it, also while nodes are looked up."""
    asked, ended, handled = threading.Event(), threading.Event(), threading.Event()

    def gone() -> _ServerGone:
        error = _ServerGone("the server is gone")
        weakref.finalize(error, handled.set)
        return error

    def find() -> list[str]:
        asked.set()
        ended.wait(WAIT_S)
        raise gone()

    agent = AgentLoop(find, BorrowerSettings().scaled(20))
    agent.subscribe("$share/g/a", SessionEventQueue())
    await asyncio.to_thread(asked.wait, WAIT_S)
    await asyncio.to_thread(agent.close, 0.0)
    ended.set()
    await until(lambda: handled.is_set() or "node list not read" in caplog.text)
    assert "node list not read" not in caplog.text


@pytest.mark.conforms("R2")
@in_loop
async def test_a_batch_given_up_is_executed_once() -> None:
    """It is executed to its end, though the agent does not wait any more."""
    async with a_node() as node:
        gate = node.gate = asyncio.get_running_loop().create_future()
        agent = Agent(node.address, settings=FAST, answer_within_s=0.5)
        agent.node.subscribe(Channel.GROUP)
        for number in range(5):
            agent.node.send(Ping((), float(number)))
        await until(lambda: node.calls.count("Commands") == 3)  # the subscribe, the pings, and the pings again
        gate.set_result(None)
        assert await agent.node.close()
        assert [message for _, message in node.received] == [Ping((), float(number)) for number in range(5)]
        assert not agent.lost


@pytest.mark.conforms("R2")
@in_loop
async def test_a_repeat_is_answered_when_the_first_is_done() -> None:
    async with a_node() as node, grpc.aio.insecure_channel(node.address) as channel:
        gate = node.gate = asyncio.get_running_loop().create_future()
        stub, one = sublet_pb2_grpc.SessionStub(channel), proven("a")
        batch = pb.CommandBatch(**one, number=1)
        batch.commands.add(message=pb.ToLeader(ping=pb.Ping(borrower_ids=["b"], sent_at=1.0)))
        batch.commands.add()
        first = asyncio.ensure_future(stub.Commands(batch))
        await until(lambda: node.batches_inside == 1)
        again = asyncio.ensure_future(stub.Commands(batch))
        await until(lambda: node.calls.count("Commands") == 2)
        for _ in range(20):  # whoever does not wait for the first has been answered by then
            await stub.Poll(pb.PollRequest(**one))
        assert not again.done()
        gate.set_result(None)
        assert [error.index for error in (await first).errors] == [1]
        assert (await again).errors == (await first).errors
        assert [message for _, message in node.received] == [Ping(("b",), 1.0)]


@pytest.mark.conforms("R5")
@in_loop
async def test_a_lost_reply_is_given_again_and_seen_once() -> None:
    async with a_node() as node, an_agent(node.address, settings=FAST) as agent:
        agent.node.subscribe(Channel.GROUP)
        await until(node.subscriptions)
        await until(lambda: agent.node.status is ConnectionStatus.CONNECTED)
        for number in range(10):
            node.drop_replies = 1
            node.sessions.publish(Channel.GROUP, "k", event(number))
            await until(lambda number=number: len(agent.seen) == number + 1)  # type: ignore[misc]
            assert node.drop_replies == 0
        assert agent.bodies() == [event(number) for number in range(10)]
        assert not agent.lost


@pytest.mark.conforms("R5")
@in_loop
async def test_a_bad_link_to_a_node_is_got_over() -> None:
    """Cut or slow: nothing is missed. Refused, or half open until calls are given up: reported, subscribed again."""
    async with a_node() as node:

        def arrives(number: int) -> bool:
            node.sessions.publish(Channel.GROUP, "k", event(number))
            return event(number) in agent.bodies()

        with PostgresProxy(f"tcp://{node.address}") as way:
            agent = Agent(f"127.0.0.1:{way.port}", settings=FAST, answer_within_s=0.5)
            agent.node.subscribe(Channel.GROUP)
            await until(node.subscriptions)
            await until(lambda: agent.node.status is ConnectionStatus.CONNECTED)
            way.slow(0.02)
            way.hang_up()
            node.sessions.publish(Channel.GROUP, "k", event(0))
            await until(lambda: agent.bodies() == [event(0)])
            assert not agent.lost
            for number, trouble in enumerate((way.go_away, way.hold), 1):
                trouble()
                await until(lambda number=number: len(agent.lost) == number)  # type: ignore[misc]
                way.resume()
                await until(lambda number=number: arrives(number))  # type: ignore[misc]
            assert list(dict.fromkeys(agent.bodies())) == [event(number) for number in range(3)]
            assert {one.reason for one in agent.lost} == {ConnectionLostReason.UNREACHABLE}
            await agent.node.close(timeout_s=0)


@pytest.mark.conforms("R6")
@in_loop
async def test_a_restarted_node_is_subscribed_to_again() -> None:
    port = free_port()
    async with a_node("n1", port=port) as node, an_agent(node.address, settings=FAST) as agent:
        agent.node.subscribe(Channel.GROUP)
        agent.node.subscribe(Channel.STREAM, "7")
        await until(lambda: len(node.subscriptions()) == 2)
        await until(lambda: agent.node.status is ConnectionStatus.CONNECTED)
        # The same socket, another life: only the incarnation differs.
        fresh = make_node_side_machine("n2", node.sessions.machine.settings)
        fresh.on_ready = node.sessions.machine.on_ready
        polls = node.calls.count("Poll")
        node.sessions.machine = fresh
        await until(lambda: len(node.subscriptions()) == 2)
        assert [one.reason for one in agent.lost] == [ConnectionLostReason.RESTARTED]
        assert set(agent.lost[0].subscriptions) == {(Channel.GROUP, None), (Channel.STREAM, "7")}
        assert node.calls.count("Poll") - polls <= 3  # the held one, the one that noticed, the new life's first
        node.sessions.publish(Channel.GROUP, "k", event(1))
        await until(lambda: agent.bodies() == [event(1)])


@pytest.mark.conforms("R7")
@in_loop
async def test_the_forgotten_are_notified() -> None:
    async with a_node(hold_s=0.05) as node, grpc.aio.insecure_channel(node.address) as channel:
        stub, one = sublet_pb2_grpc.SessionStub(channel), proven("a")
        batch = pb.CommandBatch(**one, number=1)
        reply = await stub.Commands(batch)
        assert not reply.unknown_subscriber
        await until(lambda: node.expired == [one["subscriber_id"]])
        poll = pb.PollRequest(**one, incarnation=reply.incarnation)
        assert (await stub.Poll(poll)).unknown_subscriber
        for batch.number in (2, 1):
            assert (await stub.Commands(batch)).unknown_subscriber
        refused = proven("b")  # whoever was asked whether it may subscribe forgets it
        subscribe = pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_STREAM, key="1"))
        assert (await stub.Commands(pb.CommandBatch(**refused, number=2, commands=[subscribe]))).unknown_subscriber
        await until(lambda: refused["subscriber_id"] in node.expired)


@pytest.mark.conforms("X1")
@pytest.mark.parametrize("is_held", [False, True])
@in_loop
async def test_who_lost_a_right_gets_no_more_messages(is_held: bool) -> None:
    """Neither by a poll that comes, nor by one that is held."""
    async with a_node() as node, grpc.aio.insecure_channel(node.address) as channel:
        stub, one = sublet_pb2_grpc.SessionStub(channel), proven("a")
        subject = pb.Subject(channel=pb.CHANNEL_GROUP, key="k")
        reply = await stub.Commands(pb.CommandBatch(**one, number=1, commands=[pb.Command(subscribe=subject)]))
        assert node.subscribed == [[Channel.GROUP]], "whoever checks rights is called when it is subscribed"
        poll = stub.Poll(pb.PollRequest(**one, incarnation=reply.incarnation, hold_ms=5_000)) if is_held else None
        await until(lambda: node.sessions.held_polls == is_held)
        node.has_lost_rights = True
        node.sessions.publish(Channel.GROUP, "k", event(1))
        answer = await (poll or stub.Poll(pb.PollRequest(**one, incarnation=reply.incarnation)))
        assert (answer.unknown_subscriber, list(answer.messages)) == (True, [])


KILLED_AGENT = """
    import asyncio
    from sublet_protocol.messages.agent_secret import AgentSecret
    from sublet_protocol.pubsub.node_connection import NodeConnection
    from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings

    async def main():
        node = NodeConnection("{address}", AgentSecret("victim"), print, settings=AgentConnectionSettings(hold_s=0.4))
        for number in range(100):
            node.subscribe("stream", str(number))
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.conforms("R8")
@in_loop
async def test_a_killed_agent_is_gone_and_a_quiet_one_stays() -> None:
    hold_s = 0.4
    quiet = AgentConnectionSettings(hold_s=hold_s)
    async with a_node(hold_s=hold_s) as node, an_agent(node.address, "quiet", quiet) as agent:
        agent.node.subscribe(Channel.GROUP, "k")
        code = textwrap.dedent(KILLED_AGENT).format(address=node.address)
        victim = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            await until(lambda: len(node.subscriptions()) == 101, 30)
            await until(lambda: node.sessions.held_polls == 2)
        finally:
            victim.kill()
            victim.wait()
        await until(lambda: len(node.subscriptions()) == 1, 30)
        assert [one.partition(":")[0] for one in node.expired] == ["victim"]
        polls = node.calls.count("Poll")
        await until(lambda: node.calls.count("Poll") > polls + 5)
        assert node.subscriptions() == [(Channel.GROUP, "k")]
        assert not agent.lost


@pytest.mark.conforms("R11", "X4")
@in_loop
async def test_bad_bytes_harm_their_sender_only() -> None:

    async with a_node() as node, an_agent(node.address, "good") as good:
        good.node.subscribe(Channel.GROUP, "k")
        async with grpc.aio.insecure_channel(node.address) as channel:
            stub, bad = sublet_pb2_grpc.SessionStub(channel), proven("bad")
            batch = pb.CommandBatch(**bad, number=1)
            batch.commands.add()
            batch.commands.add(subscribe=pb.Subject(channel=77, key="k"))  # type: ignore[arg-type]
            batch.commands.add(message=pb.ToLeader(ping=pb.Ping(sent_at=float("nan"))))
            batch.commands.add(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key="k"))
            reply = await stub.Commands(batch)
            assert [error.index for error in reply.errors] == [0, 1, 2]
            assert "77" in reply.errors[1].text
            assert (await stub.Commands(batch)).errors == reply.errors

            raw = channel.unary_unary("/sublet.v1.Session/Commands")
            big = b"\x12" + b"\xff\xff\xff\x07" + b"x" * (9 << 20)
            many = pb.CommandBatch(**bad, number=2)
            many.commands.extend([pb.Command()] * 10_001)
            nameless = pb.CommandBatch(protocol_version=PROTOCOL_VERSION, number=1)
            for hostile in (b"\xff" * 100, big, many.SerializeToString(), nameless.SerializeToString()):
                with pytest.raises(grpc.aio.AioRpcError):
                    await raw(hostile)
        await until(lambda: len(node.subscriptions()) == 2)
        assert node.sessions.publish(Channel.GROUP, "k", event(1)) == 2
        await until(lambda: good.bodies() == [event(1)])
        assert not good.lost


@in_loop
async def test_another_protocol_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal has both numbers. Each later subscription fails once, but for one that its own failure makes."""
    async with a_node() as node:
        monkeypatch.setattr("sublet_protocol.pubsub.wire.PROTOCOL_VERSION", 99)
        async with an_agent(node.address) as agent:
            failed: list[str] = []

            def subscribe(key: str) -> None:
                def on_lost(lost: ReportConnectionLost) -> None:
                    failed.append(key)
                    if len(failed) < 9:
                        agent.node.send(Ping((), 1.0))
                        subscribe(key)

                agent.node.subscribe(Channel.GROUP, key, on_lost=on_lost)

            subscribe("first")
            agent.node.subscribe(Channel.GROUP)
            await until(lambda: agent.lost)
            subscribe("late")
            await until(lambda: "late" in failed)
            assert failed == ["first", "late"]
            assert agent.lost[0].is_final
            assert "99" in agent.lost[0].detail
            assert f"speaks {PROTOCOL_VERSION}" in agent.lost[0].detail
            assert agent.node.status is ConnectionStatus.REJECTED
        assert node.subscriptions() == []


@in_loop
async def test_an_agent_that_connects_again_is_let_in() -> None:
    """By a node where its former incarnation lives, or is over."""
    async with a_node() as node:
        agent = Agent(node.address)
        for number in range(4):
            agent.node.send(Ping((), float(number)))
            assert await agent.node.close()
            if number == 1:
                node.sessions.machine.expel(agent.node.subscriber_id)
            agent = Agent(node.address, key=agent.key)
        assert [message for _, message in node.received] == [Ping((), float(number)) for number in range(4)]


@in_loop
async def test_closing_delivers_or_reports_that_it_did_not() -> None:
    async with a_node() as node:
        agent = Agent(node.address)
        for number in range(3_000):
            agent.node.send(Ping((), float(number)))
        assert await agent.node.close()
        assert len(node.received) == 3_000
        forgotten = Agent(node.address)
        forgotten.node.subscribe(Channel.GROUP)
        await until(lambda: forgotten.node.status is ConnectionStatus.CONNECTED and node.subscriptions())
        node.sessions.machine.expel(forgotten.node.subscriber_id)
        forgotten.node.send(Ping((), 1.0))
        assert not await forgotten.node.close()
    nobody = Agent(f"127.0.0.1:{free_port()}", settings=FAST)
    nobody.node.send(Ping((), 1.0))
    assert not await nobody.node.close(timeout_s=5)
    assert not await nobody.node.close(timeout_s=5), "nor was it by now"
    assert [one.reason for one in nobody.lost] == [ConnectionLostReason.UNREACHABLE]


GROUP = "$queue/g/a"
SETTINGS = BorrowerSettings().scaled(20)


async def the_end(agent: AgentLoop, subscribe: Callable[[SessionEventQueue], int]) -> list[Any]:
    """Return all events of a subscription, up to its end."""
    inbox, events = SessionEventQueue(), list[Any]()

    def ended() -> bool:
        events.extend(inbox.take())
        return any(isinstance(one, SubscriptionClosed) for one in events)

    subscribe(inbox)
    await until(ended)
    return events


@pytest.mark.conforms("E30", "R11")
@in_loop
async def test_a_refused_subscription_ends_with_the_reason() -> None:
    async with a_node() as node:
        agent = AgentLoop(lambda: [node.address], SETTINGS)
        try:
            malformed = await the_end(agent, lambda inbox: agent.subscribe(GROUP, inbox, session="n" * 600))
            unknown = await the_end(agent, lambda inbox: agent.subscribe(GROUP, inbox))
            for _ in range(10):  # what waits behind the refused ones is sent first
                wanted = node.wanted
                await asyncio.sleep(4 * SETTINGS.leader_lookup_interval_s)
                if node.wanted == wanted:
                    break
            assert node.wanted == wanted > 0, "it is asked no more"
        finally:
            await asyncio.to_thread(agent.close, 0.0)
        (first,), (second,) = malformed, unknown
        assert first.reason == second.reason == BorrowerEndReason.DENIED
        assert first.detail.startswith(f"node {node.address} refuses: session 'nnn")
        assert first.detail.endswith("600 bytes of UTF-8, and the limit is 255")
        assert "it is not declared" in second.detail


@in_loop
async def test_refusals_are_logged_seldom_and_in_short(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sublet_protocol.pubsub.node_connection")
    async with a_node() as node, an_agent(node.address) as agent:
        for number in range(40):
            agent.node.send(LeaderWanted(f"b{number}", "$queue/g/" + "a" * 5_000, session="s" * 50_000))
        await until(lambda: len(agent.refused) == 40)

    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("refusal_count=")[2].partition(":")[0] for line in lines] == ["1", "2", "4", "8", "16", "32"]
    assert all("command=LeaderWanted" in line for line in lines)
    assert max(map(len, lines)) < 500
