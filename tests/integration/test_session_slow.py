"""An agent that does not keep up: its mailbox is bounded, it is notified of what it missed, and nobody else notices."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from sublet_protocol.messages.head_and_group_events import GroupEventPayload, StreamHead
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.subscriber_mailbox import MailboxLimits
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.session_kit import a_node, an_agent, event, proven, run, until


class Slow:
    """It subscribed, and polls only when the test says so."""

    def __init__(self, channel: Any, *subjects: pb.Subject) -> None:
        self._stub = sublet_pb2_grpc.SessionStub(channel)
        self._subjects = subjects
        self.one = proven("slow")
        self._acknowledged = 0

    async def subscribe(self) -> None:
        batch = pb.CommandBatch(**self.one, number=1)
        for subject in self._subjects:
            batch.commands.add(subscribe=subject)
        reply = await self._stub.Commands(batch)
        assert not reply.errors

    async def catch_up(self) -> list[Any]:
        """Return all messages that wait for it by now."""
        seen: list[Any] = []
        while True:
            request = pb.PollRequest(**self.one, acknowledged=self._acknowledged)
            messages = (await self._stub.Poll(request)).messages
            if not messages:
                return seen
            seen += messages
            self._acknowledged = messages[-1].sequence


def everything(channel: Any) -> pb.Subject:
    return pb.Subject(channel=channel, all=True)


@pytest.mark.conforms("R10")
@pytest.mark.parametrize(
    ("limits", "payload"),
    [(MailboxLimits(messages=500), b"small"), (MailboxLimits(bytes=200_000), b"x" * 1_000)],
    ids=["by number", "by bytes"],
)
def test_one_that_holds_no_poll_slows_nobody(limits: MailboxLimits, payload: bytes) -> None:
    """It is notified of what it has missed."""

    async def test() -> None:
        async with (
            a_node(mailbox=limits) as node,
            an_agent(node.address, "fast") as fast,
            grpc.aio.insecure_channel(node.address) as channel,
        ):
            slow = Slow(channel, everything(pb.CHANNEL_GROUP), everything(pb.CHANNEL_STREAM))
            await slow.subscribe()
            fast.node.subscribe(Channel.GROUP)
            await until(lambda: len(node.subscriptions()) == 3)
            for number in range(2_000):
                node.sessions.publish(Channel.GROUP, "k", GroupEventPayload(b"%d %s" % (number, payload)))
                node.sessions.publish(Channel.STREAM, str(number % 10), StreamHead(number % 10, number), number)
                if number % 100 == 99:  # what the others have, while nobody has taken what waits for the slow one
                    await until(lambda number=number: len(fast.seen) == number + 1)  # type: ignore[misc]
                    assert slow.one["subscriber_id"] in node.sessions.machine.subscriber_ids
            assert [
                int(body.payload.split()[0]) for body in fast.bodies() if isinstance(body, GroupEventPayload)
            ] == list(range(2_000))
            assert node.sessions.counters.gaps == 0  # the slow one has not asked yet, and the others have none
            gap, *rest = await slow.catch_up()
            assert gap.WhichOneof("body") == "gap"
            assert list(gap.gap.channels) == [pb.CHANNEL_GROUP]
            events = [int(one.group_event.split()[0]) for one in rest if one.WhichOneof("body") == "group_event"]
            assert events == list(range(2_000 - len(events), 2_000))  # the newest, without a hole
            assert gap.gap.dropped + len(events) == 2_000  # and nothing is dropped without a word
            heads = {one.key: one.stream_head.head for one in rest if one.WhichOneof("body") == "stream_head"}
            assert heads == {str(last): 1_990 + last for last in range(10)}
            counters = node.sessions.counters
            assert (counters.gaps, counters.dropped) == (1, gap.gap.dropped)

    run(test)


@pytest.mark.conforms("R10")
def test_after_a_gap_an_agent_goes_on_in_its_life() -> None:
    async def test() -> None:
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

    run(test)
