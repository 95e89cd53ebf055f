"""What both sides count."""

from __future__ import annotations

from sublet_protocol.pubsub.agent_side_events import (
    CallPoll,
    CommandsReplied,
    CommandsUnanswered,
    ConnectionLostReason,
    PollReplied,
    SendCommands,
    Tick,
)
from sublet_protocol.pubsub.agent_side_machine import AgentSideMachine, AgentSideSettings
from sublet_protocol.pubsub.counters import AgentSideCounters, NodeSideCounters
from sublet_protocol.pubsub.mailbox import MailboxLimits
from sublet_protocol.pubsub.model import (
    ChannelDelivery,
    CommandError,
    DeliveredMessage,
    MailboxOverflow,
    MessageToNode,
    ReceivedCommand,
    Subscribe,
    UndecodedCommand,
)
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine, NodeSideSettings

CHANNELS = {"news": ChannelDelivery.LOG}


def test_the_nodes_side() -> None:
    settings = NodeSideSettings(hold_s=5, mailbox=MailboxLimits(messages=2))
    node = NodeSideMachine("n1", settings, channels=CHANNELS)
    batch: list[ReceivedCommand] = [
        Subscribe("news", None),
        UndecodedCommand("broken"),
        MessageToNode("owner refuses it"),
    ]
    node.receive("a", 1, batch, 0)
    node.add_errors("a", 1, [CommandError(2, "no")])
    node.receive("a", 1, batch, 0)
    node.poll("a", 0, "n1", 0, 5)
    node.end_poll("a", 5)  # the hold is over, and nothing came
    for _ in range(4):
        node.publish("news", "k", "m")
    node.poll("a", 0, "n1", 5, 5)  # a gap of 3 and a message
    node.poll("a", 0, "n1", 5, 5)  # the reply was lost: both again
    node.poll("a", 1, "n1", 5, 5)
    node.poll("b", 0, "", 5, 5)
    node.poll("b", 9, "n1", 5, 5)  # breaks a rule
    node.poll("c", 7, "n1", 5, 5)  # never known
    node.poll("a", 2, "n0", 5, 5)  # meant for another life
    node.expire(100)
    assert node.counters == NodeSideCounters(
        batches=1,
        duplicate_batches=1,
        commands=3,
        rejected_commands=2,
        polls=8,
        empty_polls=1,
        deliveries=2,
        redeliveries=3,
        gaps=1,
        dropped=3,
        incarnations=2,
        expired=1,
        expelled=1,
        unknown_subscriber_replies=3,
    )


def test_the_agents_side() -> None:
    agent = AgentSideMachine("agent", AgentSideSettings(batch_commands=2), channels=CHANNELS)
    assert agent.counters == AgentSideCounters(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {})
    for number in range(3):
        agent.decide(Subscribe("news", str(number)), 0)
    agent.decide(CommandsReplied(1, 1, "n1", errors=(CommandError(0, "no"),)), 0)
    agent.decide(CommandsUnanswered(1, "lost"), 0)
    outcome = agent.decide(Tick(), 1)
    assert [one.number for one in outcome.sends if isinstance(one, SendCommands)] == [2]
    agent.decide(PollReplied(1, "n1"), 1)
    one, gap = DeliveredMessage(1, "news", "1", "m"), DeliveredMessage(2, "", "", MailboxOverflow(7, ("news",)))
    agent.decide(PollReplied(1, "n1", deliveries=(one,)), 1)
    agent.decide(PollReplied(1, "n1", deliveries=(one, gap)), 1)
    outcome = agent.decide(PollReplied(1, "n2", unknown=True), 1)
    assert [one.subscriber_incarnation for one in outcome.sends if isinstance(one, CallPoll)] == [2]
    agent.decide(PollReplied(2, "n2", unknown=True), 1)
    assert agent.counters == AgentSideCounters(
        batches=3,
        duplicate_batches=1,
        commands=5,
        rejected_commands=1,
        polls=5,
        empty_polls=1,
        deliveries=2,
        redeliveries=1,
        gaps=1,
        incarnations=3,
        connections_lost={ConnectionLostReason.RESTARTED: 1, ConnectionLostReason.EXPIRED: 1},
    )
