"""A reclaim, or a disconnect, of more streams than a message may have: split, and put together by the node."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from sublet_borrower.machine.agent import Agent, JoinGroup, NodeMessageReceived, NodesDiscovered
from sublet_borrower.machine.borrower import Borrower
from sublet_borrower.machine.events import LeaveRequested, ProgressReported
from sublet_borrower.machine.message_splitter import MAX_PART_BYTES, split_into_parts
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.node.events import AgentMessageReceived
from sublet_leader.node.message_reassembler import MESSAGE_BYTES, STREAM_BYTES, MessageReassembler
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import (
    MAX_BORROWERS,
    MAX_COMMAND_BYTES,
    MAX_DIMENSIONS,
    MAX_EXPLANATION_CHARACTERS,
    MAX_ITEMS,
    MAX_PARTIAL_BYTES_OF_AGENT,
    MAX_PARTIAL_BYTES_OF_NODE,
    MAX_STREAMS,
    PARTIAL_TIMEOUT_S,
)
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    StreamProgress,
)
from sublet_protocol.messages.borrower_leader_codec import count_items, decode_to_leader, encode_to_leader
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.tick import Tick
from tests.unit.test_borrower_machine import GRANT, ME, SETTINGS, WANTS, Play, connected

pytestmark = pytest.mark.conforms("X4")

M = TypeVar("M", Disconnect, LeaderWanted)
MANY = 9_000
"""Streams: three parts."""
PART = LeaderWanted("a/1", "$share/g/#", more=True, reclaim=(HeldGrant(1, 1, 1),))


class Node:
    """What a node keeps of parts; `principal`: whose all agents are that begin with it."""

    def __init__(self) -> None:
        self.parts = MessageReassembler()

    def take(self, message: Disconnect | LeaderWanted, now: float = 0.0, principal: str | None = None) -> object:
        """Return the message that is entire by then, or the answer."""
        agent = message.borrower_id.partition("/")[0]
        admitted = self.parts.admit(AgentMessageReceived(agent, message, principal), now)
        return admitted.message if isinstance(admitted, AgentMessageReceived) else admitted

    def fill(self, agent: str, principal: str | None = None) -> int:
        """Keep parts of the agent until there is no room for one more; return the bytes that it has."""
        before, number = self.parts.size, 0
        while True:
            number, size = number + 1, self.parts.size
            part = replace(PART, borrower_id=f"{agent}/{number}", reclaim=streams(MAX_STREAMS // 4))
            assert self.take(part, principal=principal) is None
            if self.parts.size <= size + MESSAGE_BYTES:
                return self.parts.size - before


def streams(count: int, first: int = 1) -> tuple[HeldGrant, ...]:
    return tuple(HeldGrant(number, 1, 1) for number in range(first, first + count))


def holding(count: int) -> Play:
    return connected(*(dataclasses.replace(GRANT, stream_id=number, grant_id=number) for number in range(1, count + 1)))


def with_streams(streams: tuple[Any, ...], *, more: bool = False) -> Disconnect | LeaderWanted:
    is_held = isinstance(streams[0], HeldGrant)
    return replace(PART, reclaim=streams, more=more) if is_held else Disconnect("a/1", 1, streams, more=more)


def fits(message: Disconnect | LeaderWanted) -> bool:
    encoded = encode_to_leader(message)
    assert decode_to_leader(encoded) == message
    return encoded.ByteSize() <= MAX_COMMAND_BYTES and count_items(encoded) <= MAX_ITEMS


def merged(messages: list[M]) -> M:
    """Return what several messages, none of which is too large, are together."""
    node = Node()
    assert [fits(message) for message in messages] == [True] * 3
    found = [node.take(message) for message in messages]
    assert (found[:-1], node.parts.size) == ([None] * 2, 0)
    assert isinstance(found[-1], type(messages[0]))
    return found[-1]


@pytest.mark.conforms("E16")
def test_a_large_reclaim_arrives_complete() -> None:
    play = Play(Borrower(ME, WANTS, SETTINGS, holding(MANY).machine.successor_state()))
    play.begin()
    wanted = play.said(LeaderWanted)
    assert [message.more for message in wanted] == [True, True, False]
    assert merged(wanted) == replace(wanted[-1], reclaim=play.machine.streams.held())


def test_a_large_disconnect_arrives_complete() -> None:
    play = holding(MANY)
    play.do(LeaveRequested(), at=play.now)
    for number in range(1, MANY + 1):
        play.do(ProgressReported(number, number, 10, True), at=play.now)
    assert [one.stream_id for one in merged(play.said(Disconnect)).streams] == list(range(1, MANY + 1))


def test_parts_are_bounded_by_streams_items_and_bytes() -> None:
    nothing = ConsumedFrontier(MAX_OFFSET)
    plain = [HeldGrant(number, MAX_OFFSET, MAX_OFFSET, nothing) for number in range(1, 3 * MAX_STREAMS)]
    wide = ConsumedFrontier(1, LowerFrontier(tuple((number, -number) for number in range(1_000))))
    epochs = [StreamProgress(number, 1, 1, consumed=wide) for number in range(1, 50)]
    cases: list[list[Any]] = [plain, epochs]
    for streams in cases:
        parts = list(split_into_parts(streams))
        assert [stream for part in parts for stream in part] == streams
        assert max(map(len, parts)) <= MAX_STREAMS
        assert all(fits(with_streams(part)) for part in parts)
    assert [len(part) for part in split_into_parts(epochs)] == [MAX_ITEMS // 1_000] * 4 + [9], "as few as they fit into"
    assert list(split_into_parts(())) == []
    alone = [StreamProgress(number, 1, 1, read_error="x" * MAX_PART_BYTES) for number in range(2)]
    assert list(split_into_parts(alone)) == [(each,) for each in alone]


@pytest.mark.parametrize(("count", "items"), [(MAX_ITEMS, 2 * MAX_ITEMS), (MAX_ITEMS + 1, MAX_ITEMS + 1)])
def test_epochs_of_too_many_streams_are_not_counted(count: int, items: int) -> None:
    """There may be hundreds of thousands: the streams alone are too many."""
    two = ConsumedFrontier(1, LowerFrontier(((1, 2), (2, 1))))
    streams = tuple(HeldGrant(number, 1, 1, two) for number in range(1, count + 1))
    assert count_items(encode_to_leader(with_streams(streams))) == items


def test_a_part_that_is_repeated_counts_once() -> None:
    node = Node()
    first = replace(PART, reclaim=streams(2))
    last = replace(first, reclaim=streams(1, first=3), more=False)
    assert node.take(first) is None
    size = node.parts.size
    for _ in range(3):
        assert node.take(first) is None
    assert node.parts.size == size
    assert node.take(replace(last, borrower_id="b/1")) == replace(last, borrower_id="b/1"), "it has no parts"
    assert node.take(last) == replace(last, reclaim=(*first.reclaim, *last.reclaim))
    assert node.parts.size == 0


WIDE = ConsumedFrontier(1, LowerFrontier(tuple((number,) * MAX_DIMENSIONS for number in range(1_000))))


@pytest.mark.parametrize(
    ("stream", "least_bytes"),
    [
        (HeldGrant(1, 1, 1), 200),
        (HeldGrant(1, 1, 1, WIDE), 300_000),
        (StreamProgress(1, 1, 1, consumed=WIDE), 300_000),
        (StreamProgress(1, 1, 1, in_doubt=InDoubtRange(1, 1, 1, 1.0, WIDE)), 300_000),
        (StreamProgress(1, 1, 1, read_error="\U0001f600" * MAX_EXPLANATION_CHARACTERS), 8_000),
    ],
)
def test_a_part_counts_by_its_size(stream: HeldGrant | StreamProgress, least_bytes: int) -> None:
    """With its epochs and texts, as it takes memory: with 8 numbers an epoch took 300 bytes of it."""
    node = Node()
    node.take(with_streams((stream,), more=True))
    assert least_bytes < node.parts.size - MESSAGE_BYTES < 2 * least_bytes


def test_an_agent_has_room_for_so_many_parts() -> None:
    node = Node()
    assert MAX_PARTIAL_BYTES_OF_AGENT * 0.9 < node.fill("a") <= MAX_PARTIAL_BYTES_OF_AGENT
    assert node.take(replace(PART, borrower_id="b/1")) is None
    last = replace(PART, borrower_id="b/1", reclaim=streams(1, first=2), more=False)
    assert node.take(last) == replace(last, reclaim=streams(2)), "another agent has room"


def test_a_principal_leaves_room_for_parts_of_others() -> None:
    """All of its agents have as much as they leave free, and the next one's, too."""
    node = Node()
    first = sum(node.fill(f"a{number}", "user:a") for number in range(6))
    assert MAX_PARTIAL_BYTES_OF_NODE * 0.4 < first <= MAX_PARTIAL_BYTES_OF_NODE / 2
    second = sum(node.fill(f"b{number}", "user:b") for number in range(6))
    assert MAX_PARTIAL_BYTES_OF_NODE * 0.2 < second <= (MAX_PARTIAL_BYTES_OF_NODE - first) / 2
    part = replace(PART, borrower_id="c/1", reclaim=streams(6_000))
    last = replace(part, reclaim=streams(6_000, first=12_000), more=False)
    assert node.take(part, principal="user:c") is None
    assert node.take(last, principal="user:c") == replace(last, reclaim=(*part.reclaim, *last.reclaim))


def test_who_finds_no_room_for_parts_repeats_them() -> None:
    """It is not over: what others have is free again. Nothing counts for entire that lacks a part."""
    node = Node()
    for number in range(6):
        node.fill(f"a{number}", "user:a")
    parts = [replace(PART, borrower_id="a9/1", reclaim=streams(MAX_STREAMS, 1 + n * MAX_STREAMS)) for n in range(3)]
    parts.append(replace(parts[0], reclaim=streams(1, 9 * MAX_STREAMS), more=False))
    assert [node.take(part, principal="user:a") for part in parts] == [None] * 4
    node.parts.remove_agents({f"a{number}" for number in range(6)})
    assert node.parts.size == 0
    *waiting, entire = [node.take(part, principal="user:a") for part in parts]
    assert waiting == [None] * 3
    assert isinstance(entire, LeaderWanted)
    assert len(entire.reclaim) == 3 * MAX_STREAMS + 1


def test_a_message_with_too_many_streams_is_denied() -> None:
    """It is larger than an agent may have alone: to repeat it cannot help."""
    node = Node()
    parts = [replace(PART, reclaim=streams(MAX_STREAMS, 1 + number * MAX_STREAMS)) for number in range(12)]
    (denied,) = [found for part in (*parts, replace(PART, more=False)) if (found := node.take(part)) is not None]
    assert isinstance(denied, Invalidate)
    assert denied.reason is BorrowerEndReason.DENIED
    assert f"the limit is {MAX_PARTIAL_BYTES_OF_AGENT}. Hold fewer streams" in denied.detail
    assert node.parts.size == 0


@pytest.mark.parametrize("excess", [0, 1])
def test_the_largest_message_of_an_agent_is_repeated(excess: int) -> None:
    """It has room once the other parts of its agent are gone, and only a larger one never has."""
    count, rest = divmod(MAX_PARTIAL_BYTES_OF_AGENT - MESSAGE_BYTES, STREAM_BYTES)
    last = StreamProgress(count, 1, 1, read_error="x" * (rest + excess - sys.getsizeof("")))
    large = Disconnect("a/1", 1, (*(StreamProgress(number, 1, 1) for number in range(1, count)), last), more=True)
    node = Node()
    node.take(replace(PART, borrower_id="a/2"))
    assert (node.take(large) is None) is (excess == 0)
    node.parts.remove_agents({"a"})
    assert (node.take(large) is None) is (excess == 0)
    assert node.parts.size == (MESSAGE_BYTES if excess else MAX_PARTIAL_BYTES_OF_AGENT)


def test_parts_are_dropped_when_their_time_is_over() -> None:
    """Each has its own, from its last part on; nobody else has to send one for it."""
    node, size = Node(), MESSAGE_BYTES + STREAM_BYTES
    assert node.parts.wake_at() == float("inf")
    for number, at in ((1, 0.0), (2, 1.0), (1, 2.0)):
        node.take(replace(PART, borrower_id=f"a/{number}"), at)
    assert (node.parts.size, node.parts.wake_at()) == (2 * size, 1.0 + PARTIAL_TIMEOUT_S)
    node.parts.expire(1.0 + PARTIAL_TIMEOUT_S)
    assert (node.parts.size, node.parts.wake_at()) == (size, 2.0 + PARTIAL_TIMEOUT_S)
    node.parts.expire(node.parts.wake_at())
    assert (node.parts.size, node.parts.wake_at()) == (0, float("inf"))


@pytest.mark.parametrize("message", [Disconnect("a/1", 1, (), more=True), LeaderWanted("a/1", "$share/g/#", more=True)])
def test_a_part_without_streams_is_refused(message: Disconnect | LeaderWanted) -> None:
    wire = encode_to_leader(message)
    with pytest.raises(MalformedMessage, match="none, in a part that others follow"):
        decode_to_leader(wire)
    assert decode_to_leader(encode_to_leader(replace(message, more=False))) == replace(message, more=False)


def test_pings_of_very_many_borrowers_are_split() -> None:
    agent = Agent("a", BorrowerSettings())
    agent.decide(NodesDiscovered(("n:1",)), 0.0)
    for handle in range(2 * MAX_BORROWERS + 1):
        agent.decide(JoinGroup(handle, f"$share/g{handle}/#"), 0.0)
        answer = LeaderConnectResponse(f"a/{handle + 1}", 1, handle + 1)
        agent.decide(NodeMessageReceived("n:1", answer), 0.0)
    sent = [message for _, message in agent.decide(Tick(), 2.0).sends if isinstance(message, Ping)]
    assert [len(ping.borrower_ids) for ping in sent] == [MAX_BORROWERS, MAX_BORROWERS, 1]
