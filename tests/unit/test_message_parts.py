"""A reclaim, or a disconnect, of more streams than a message may have: split, and put together by the node."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from sublet_borrower.machine.agent import Agent, JoinGroup, NodeMessageReceived, NodesDiscovered
from sublet_borrower.machine.borrower import Borrower
from sublet_borrower.machine.events import LeaveRequested, ProgressReported
from sublet_borrower.machine.message_splitter import split_into_parts
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.node import message_reassembler
from sublet_leader.node.message_reassembler import EXPIRY_S, MAX_STREAMS_OF_AGENT, MessageReassembler
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.limits import MAX_BORROWERS, MAX_COMMAND_BYTES, MAX_ITEMS, MAX_STREAMS
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

MANY = 12_000


def holding(count: int) -> Play:
    return connected(*(dataclasses.replace(GRANT, stream_id=number, grant_id=number) for number in range(1, count + 1)))


def fits(message: Disconnect | LeaderWanted) -> bool:
    encoded = encode_to_leader(message)
    assert decode_to_leader(encoded) == message
    return encoded.ByteSize() <= MAX_COMMAND_BYTES and count_items(encoded) <= MAX_ITEMS


def merged(messages: list[Disconnect] | list[LeaderWanted]) -> object:
    parts = MessageReassembler()
    found = [parts.merge("a", message, 0.0) for message in messages]
    assert found[:-1] == [None] * (len(messages) - 1)
    assert len(parts) == 0
    return found[-1]


@pytest.mark.conforms("E16")
def test_a_large_reclaim_arrives_complete() -> None:
    play = Play(Borrower(ME, WANTS, SETTINGS, holding(MANY).machine.successor_state()))
    play.begin()
    wanted = play.said(LeaderWanted)
    assert len(wanted) > 1
    assert all(fits(message) for message in wanted)
    assert [message.more for message in wanted] == [True] * (len(wanted) - 1) + [False]
    entire = merged(wanted)
    assert isinstance(entire, LeaderWanted)
    assert entire == replace(wanted[-1], reclaim=play.machine.streams.held())


def test_a_large_disconnect_arrives_complete() -> None:
    play = holding(MANY)
    play.do(LeaveRequested(), at=play.now)
    for number in range(1, MANY + 1):
        play.do(ProgressReported(number, number, 10, True), at=play.now)
    said = play.said(Disconnect)
    assert len(said) > 1
    assert all(fits(message) for message in said)
    entire = merged(said)
    assert isinstance(entire, Disconnect)
    assert [one.stream_id for one in entire.streams] == list(range(1, MANY + 1))


def test_parts_are_bounded_by_streams_items_and_bytes() -> None:
    plain = [HeldGrant(number, MAX_OFFSET, MAX_OFFSET) for number in range(1, 3 * MAX_STREAMS)]
    wide = ConsumedFrontier(1, LowerFrontier(tuple((number, -number) for number in range(1_000))))
    epochs = [StreamProgress(number, 1, 1, consumed=wide) for number in range(1, 50)]
    cases: list[list[Any]] = [plain, epochs]
    for streams in cases:
        parts = list(split_into_parts(streams))
        assert [stream for part in parts for stream in part] == streams
        for part in parts:
            is_held = isinstance(part[0], HeldGrant)
            message = LeaderWanted("a/1", "$share/g/#", reclaim=part) if is_held else Disconnect("a/1", 1, part)
            assert fits(message)
            assert len(part) <= MAX_STREAMS
    assert [len(part) for part in split_into_parts(epochs)] == [MAX_ITEMS // 1_000] * 4 + [9], "as few as they fit into"
    assert list(split_into_parts(())) == []


def test_a_part_that_is_repeated_counts_once() -> None:
    parts = MessageReassembler()
    first = LeaderWanted("a/1", "$share/g/#", reclaim=(HeldGrant(1, 1, 1), HeldGrant(2, 1, 1)), more=True)
    last = replace(first, reclaim=(HeldGrant(3, 1, 1),), more=False)
    for _ in range(3):
        assert parts.merge("a", first, 0.0) is None
    assert parts.merge("b", replace(last, borrower_id="b/1"), 0.0) == replace(last, borrower_id="b/1"), (
        "it has no parts"
    )
    assert parts.merge("a", last, 0.0) == replace(last, reclaim=(*first.reclaim, *last.reclaim))


def test_unfinished_parts_are_bounded_and_forgotten() -> None:
    parts, streams = MessageReassembler(), tuple(HeldGrant(number, 1, 1) for number in range(1, MAX_STREAMS + 1))
    part = LeaderWanted("a/1", "$share/g/#", reclaim=streams, more=True)
    for number in range(MAX_STREAMS_OF_AGENT // MAX_STREAMS):
        assert parts.merge("a", replace(part, borrower_id=f"a/{number}"), 0.0) is None
    denied = parts.merge("a", replace(part, borrower_id="a/x"), 0.0)
    assert isinstance(denied, Invalidate)
    assert denied.reason is BorrowerEndReason.DENIED
    assert "limits" in denied.detail
    assert parts.merge("b", replace(part, borrower_id="b/1"), 0.0) is None, "another agent has room"
    assert parts.merge("b", replace(part, borrower_id="b/2"), 2 * EXPIRY_S) is None
    assert len(parts) == MAX_STREAMS


def test_parts_without_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts for one; a part costs what it has itself, and the oldest are forgotten first."""
    most = 100
    monkeypatch.setattr(message_reassembler, "MAX_STREAMS_OF_AGENT", most)
    parts, part = MessageReassembler(), Disconnect("a/1", 1, (), more=True)
    for number in range(most):
        assert parts.merge("a", replace(part, borrower_id=f"a/{number}"), number / most) is None
    assert isinstance(parts.merge("a", replace(part, borrower_id="a/x"), 1.0), Invalidate)
    assert len(parts) == most
    assert parts.merge("a", replace(part, borrower_id="a/0"), EXPIRY_S / 2) is None, "it is the newest now"
    assert parts.merge("a", replace(part, borrower_id="a/x"), EXPIRY_S + 0.5) is None
    assert len(parts) == most // 2 + 2
    assert parts.merge("a", replace(part, borrower_id="a/0", more=False), EXPIRY_S + 0.5) == replace(
        part, borrower_id="a/0", more=False
    )
    assert len(parts) == most // 2 + 1


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
