"""Both halves of the session against each other, over a network that loses requests and replies; one seed is one run.

Checked from outside: within one life of a subscriber id, commands are executed once and in order, and every message of
the log is seen once and in order, or a gap or a lost connection says that something is missing. At no time is anything
remembered of what is over, and both sides count what happened.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.pubsub import agent_side_events
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings, AgentSideMachine
from sublet_protocol.pubsub.model import ChannelKind, MailboxOverflow, MessageToNode, Subscribe
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine, SubscriberLimits
from sublet_protocol.pubsub.node_side_replies import CommandsAccepted, HoldPoll, PollReply, UnknownSubscriber
from sublet_protocol.pubsub.subscriber_mailbox import MailboxLimits
from sublet_protocol.tick import Tick

CHANNELS = {"log": ChannelKind.LOG, "state": ChannelKind.STATE}
LIMITS = MailboxLimits(messages=8, reply_messages=3)


class World:
    """One agent, one node that may restart, and a clock."""

    def __init__(self, seed: int, loss: float, restarts: float) -> None:
        self.random = random.Random(seed)
        self.loss, self.restarts = loss, restarts
        self.now = 0.0
        self.node_number = 0
        self.node = self.new_node()
        settings = AgentConnectionSettings(hold_s=5, retry_s=0.5, batch_commands=3)
        self.agent = AgentSideMachine("agent", settings, channels=CHANNELS)
        self.calls: dict[str, agent_side_events.SendCommands | agent_side_events.CallPoll] = {}
        self.wake_at: float | None = None
        self.executed: list[tuple[str, object]] = []
        self.seen: list[object] = []  # since the last doubt
        self.doubts = 0
        self.published = 0
        self.newest: dict[str, int] = {}
        self.sent = self.delivered = self.gaps = self.losses = 0

    def new_node(self) -> NodeSideMachine:
        self.node_number += 1
        return NodeSideMachine(f"n{self.node_number}", SubscriberLimits(hold_s=5, mailbox=LIMITS), channels=CHANNELS)

    def decide(self, event: agent_side_events.Event) -> None:
        outcome = self.agent.decide(event, self.now)
        for instruction in outcome.sends:
            self.carry_out(instruction)
        self.wake_at = outcome.wake_at

    def carry_out(self, instruction: agent_side_events.Instruction) -> None:
        match instruction:
            case agent_side_events.SendCommands():
                assert "batch" not in self.calls, "two batches in flight"
                self.calls["batch"] = instruction
            case agent_side_events.CallPoll():
                assert "poll" not in self.calls, "two polls held"
                self.calls["poll"] = instruction
            case agent_side_events.CancelCommandsCall():
                del self.calls["batch"]
            case agent_side_events.CancelPollCall():
                del self.calls["poll"]
            case agent_side_events.ReportConnectionLost():
                self.doubts += 1
                self.losses += 1
                self.seen.clear()
            case agent_side_events.Deliver(deliveries):
                self.delivered += len(deliveries)
                for delivery in deliveries:
                    self.take(delivery.channel, delivery.body)

    def take(self, channel: str, body: object) -> None:
        if isinstance(body, MailboxOverflow):
            self.doubts += 1
            self.gaps += 1
            self.seen.clear()
        elif channel == "log":
            assert not self.seen or self.seen[-1] == body - 1, (self.seen, body)  # type: ignore[operator]
            self.seen.append(body)
        else:
            assert isinstance(body, int)
            self.newest["k"] = body

    def answer(self, kind: str) -> None:
        """Decide the outcome of a call under way."""
        call = self.calls[kind]
        fails = (
            agent_side_events.CommandsUnanswered(call.subscriber_incarnation, "lost")
            if isinstance(call, agent_side_events.SendCommands)
            else agent_side_events.PollUnanswered(call.subscriber_incarnation, "lost")
        )
        if self.random.random() < self.loss:
            del self.calls[kind]
            self.decide(fails)
            return
        event = self.execute(call) if isinstance(call, agent_side_events.SendCommands) else self.poll(call)
        del self.calls[kind]
        self.decide(fails if self.random.random() < self.loss else event)

    def execute(self, call: agent_side_events.SendCommands) -> agent_side_events.Event:
        answer = self.node.receive(call.subscriber_id, call.number, call.commands, self.now)
        if isinstance(answer, CommandsAccepted):
            self.executed += [(call.subscriber_id, body) for _, body in answer.messages]
        return agent_side_events.CommandsReplied(
            call.subscriber_incarnation, call.number, self.node.incarnation, isinstance(answer, UnknownSubscriber)
        )

    def poll(self, call: agent_side_events.CallPoll) -> agent_side_events.Event:
        answer = self.node.poll(call.subscriber_id, call.acknowledged, call.node_incarnation, self.now, call.hold_s)
        if isinstance(answer, HoldPoll):
            answer = self.node.end_poll(call.subscriber_id, self.now)
        deliveries = answer.deliveries if isinstance(answer, PollReply) else ()
        return agent_side_events.PollReplied(
            call.subscriber_incarnation, self.node.incarnation, isinstance(answer, UnknownSubscriber), deliveries
        )

    def step(self) -> None:
        self.now += self.random.random()
        self.node.expire(self.now)
        chance = self.random.random()
        if chance < self.restarts:
            self.node = self.new_node()
        elif chance < 0.4:
            self.publish()
        elif chance < 0.5:
            self.sent += 1
            self.decide(MessageToNode(self.sent))
        elif self.calls:
            self.answer(self.random.choice(sorted(self.calls)))
        if self.wake_at is not None and self.now >= self.wake_at:
            self.decide(Tick())
        if self.published % 8 == 0:
            assert self.node.find_leaks() == self.agent.find_leaks() == ()

    def check_counters(self) -> None:
        agent, node = self.agent.counters, self.node.counters
        assert (agent.deliveries, agent.gaps) == (self.delivered, self.gaps)
        assert sum(agent.connections_lost.values()) == agent.incarnations - 1 >= self.losses
        assert agent.polls >= agent.empty_polls
        assert node.deliveries >= node.gaps
        assert node.polls >= node.empty_polls

    def publish(self) -> None:
        self.published += 1
        self.node.publish("log", "k", self.published)
        self.node.publish("state", "k", self.published, version=self.published)


def calm(world: World) -> None:
    """Lose nothing from now on: everything must arrive."""
    world.loss = world.restarts = 0.0
    for _ in range(200):
        world.now += 1.0
        world.decide(Tick())
        for kind in sorted(world.calls):
            if kind in world.calls:
                world.answer(kind)
    assert world.agent.status is agent_side_events.ConnectionStatus.CONNECTED


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]), st.sampled_from([0.0, 0.02]))
def test_nothing_is_lost_or_repeated_silently(seed: int, loss: float, restarts: float) -> None:
    world = World(seed, loss, restarts)
    for event in (
        Subscribe("log", "k"),
        Subscribe("log", None),
        Subscribe("state", None),
        MessageToNode("m"),
    ):
        world.decide(event)
    for _ in range(300):
        world.step()
    calm(world)
    messages = [body for _, body in world.executed if isinstance(body, int)]
    assert len(messages) == len(set(messages)), "executed twice"
    assert messages == sorted(messages), "out of order"
    if loss == restarts == 0.0:
        assert messages == list(range(1, world.sent + 1))
        assert world.agent.unacknowledged_count == 0

    doubts, before = world.doubts, len(world.seen)
    for _ in range(5):
        world.publish()
    calm(world)
    assert world.doubts == doubts
    assert world.seen[before:] == list(range(world.published - 4, world.published + 1))
    assert world.newest["k"] == world.published
    world.check_counters()
