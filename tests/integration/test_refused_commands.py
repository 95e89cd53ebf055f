"""What a node refuses: a subscription it will never take is over, with the node's reason, and the log stays short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from sublet_borrower.agent.agent_loop import AgentLoop
from sublet_borrower.agent.session_event_queue import SessionEvent, SessionEventQueue
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, LeaderWanted
from tests.integration.session_kit import a_node, an_agent, run, until

GROUP = "$queue/g/a"
SETTINGS = BorrowerSettings().scaled(20)


async def the_end(agent: AgentLoop, subscribe: Callable[[SessionEventQueue], int]) -> list[SessionEvent]:
    """Return all events of a subscription, up to its end."""
    inbox, events = SessionEventQueue(), list[SessionEvent]()

    def ended() -> bool:
        events.extend(inbox.take())
        return any(isinstance(one, SubscriptionClosed) for one in events)

    subscribe(inbox)
    await until(ended)
    return events


@pytest.mark.conforms("E30", "R11")
def test_a_refused_subscription_ends_with_the_reason() -> None:
    async def test() -> None:
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
            assert isinstance(first, SubscriptionClosed)
            assert isinstance(second, SubscriptionClosed)
            assert (first.reason, second.reason) == (BorrowerEndReason.DENIED, BorrowerEndReason.DENIED)
            assert first.detail.startswith(f"node {node.address} refuses: session 'nnn")
            assert first.detail.endswith("600 bytes of UTF-8, and the limit is 255")
            assert "it is not declared" in second.detail

    run(test)


def test_refusals_are_logged_seldom_and_in_short(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with a_node() as node, an_agent(node.address) as agent:
            for number in range(40):
                agent.node.send(LeaderWanted(f"b{number}", "$queue/g/" + "a" * 5_000, session="s" * 50_000))
            await until(lambda: len(agent.refused) == 40)

    caplog.set_level(logging.WARNING, "sublet_protocol.pubsub.node_connection")
    run(test)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("refusal_count=")[2].partition(":")[0] for line in lines] == ["1", "2", "4", "8", "16", "32"]
    assert all("command=LeaderWanted" in line for line in lines)
    assert max(map(len, lines)) < 500
