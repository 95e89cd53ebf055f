"""The checks for leaks see what they are for: each is shown something left behind."""

from __future__ import annotations

import pytest

from sublet_protocol.pubsub.agent_side_events import CommandsReplied, ConnectionRejected
from sublet_protocol.pubsub.agent_side_machine import AgentSideMachine
from sublet_protocol.pubsub.model import ChannelDelivery, MessageToNode, Subscribe, Unsubscribe
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine

CHANNELS = {"news": ChannelDelivery.LOG, "price": ChannelDelivery.STATE}


def publisher() -> NodeSideMachine:
    node = NodeSideMachine("n1", channels=CHANNELS)
    for name in ("a", "b"):
        node.receive(name, 1, [Subscribe("news", "k"), Subscribe("news", None), Subscribe("price", "gold")], 0.0)
    node.publish("news", "k", "m")
    node.publish("price", "gold", "g", 1)
    node.send("a", "news", "k", "once")
    return node


@pytest.mark.conforms("R8")
def test_a_node_keeps_nothing_of_who_is_gone() -> None:
    node = publisher()
    assert node.find_leaks() == ()
    node.receive("a", 2, [Unsubscribe("news", "k"), Unsubscribe("news", "never")], 0.0)
    node.poll("a", 0, "n1", 0.0, 5.0)
    assert node.find_leaks() == ()
    node.poll("a", 99, "n1", 0.0, 5.0)  # breaks a rule
    assert node.find_leaks() == ()
    assert node.expire(1e9) == ("b", "a"), "whoever keeps names of them hears of both"
    assert node.expire(1e9) == ()
    assert node.find_leaks() == ()
    assert not node._index._channels


def test_a_publisher_tells_what_is_left_behind() -> None:
    node = publisher()
    del node._subscribers["a"]
    assert len(node.find_leaks()) == 3
    node = publisher()
    node._index.remove("b", "news", None)
    assert [leak.split(":")[1] for leak in node.find_leaks()] == [" messages pass it by"]
    node = publisher()
    node._subscribers["a"].mailbox._waiting.clear()
    assert all(leak.startswith("mailbox of a") for leak in node.find_leaks())
    assert len(node.find_leaks()) == 2


def test_an_agent_that_rests_keeps_nothing() -> None:
    agent = AgentSideMachine("agent", channels=CHANNELS)
    agent.decide(Subscribe("news", "k"), 0)
    agent.decide(MessageToNode("m"), 0)
    assert agent.find_leaks() == ()
    agent.decide(Unsubscribe("news", "k"), 0)
    agent.decide(CommandsReplied(1, 1, "n1"), 0)
    agent.decide(CommandsReplied(1, 2, "n1"), 0)
    assert agent.find_leaks() == ()
    agent._queue.append(MessageToNode("forgotten"))
    assert agent.find_leaks() == ("commands: kept while idle",)
    agent._queue.clear()
    agent.decide(Subscribe("news", "k"), 0)
    agent.decide(ConnectionRejected(2, "version"), 0)
    assert agent.find_leaks() == ()
    agent._wanted["news", "k"] = None
    agent._unreported["news", "x"] = None
    assert len(agent.find_leaks()) == 2
