"""What waits for one subscriber: who gives way when there is too much, and that it is always said."""

from __future__ import annotations

import pytest
from msgspec.structs import force_setattr

from sublet_protocol.domain.epoch_frontiers import GroupFrontier, LowerFrontier
from sublet_protocol.messages.borrower_leader import PingResponse
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.model import Channel, MailboxOverflow, SequencedMessage
from sublet_protocol.pubsub.subscriber_mailbox import (
    MESSAGE_BYTES,
    Mailbox,
    MailboxLimits,
    PrincipalUsage,
    QueuedMessage,
)
from sublet_protocol.v1 import sublet_pb2 as pb


def mailbox(**limits: int) -> Mailbox:
    """Bodies are texts of their own size."""
    return Mailbox(MailboxLimits(**limits))


def log(channel: str, body: str) -> QueuedMessage:
    return QueuedMessage(channel, "", body, len(body))


def state(key: str, body: str, version: int = 1) -> QueuedMessage:
    return QueuedMessage("price", key, body, len(body) + len(key), is_state=True, version=version)


def bodies(deliveries: tuple[SequencedMessage, ...]) -> list[object]:
    return [delivery.body for delivery in deliveries]


def emptied(box: Mailbox) -> list[object]:
    """All that it has, by as many replies as it takes."""
    seen: list[object] = []
    while box:
        deliveries = box.take()
        seen += bodies(deliveries)
        box.acknowledge(deliveries[-1].sequence)
    assert not list(box.find_leaks())
    return seen


@pytest.mark.conforms("R10")
def test_only_the_fullest_channel_gives_way() -> None:
    box = mailbox(messages=10)
    box.put(log("logs", "n1"))
    for number in range(10):
        box.put(log("chat", f"c{number}"))
    box.put(log("logs", "n2"))
    deliveries = box.take()
    assert bodies(deliveries) == [MailboxOverflow(10, ("chat",)), "n1", "n2"]
    assert [one.predecessor for one in deliveries] == [0, 0, 2]  # nothing is missing on the other channel
    box.put(log("chat", "c10"))
    assert box.take()[-1].predecessor == deliveries[0].sequence


@pytest.mark.conforms("R10")
def test_fullest_by_bytes_is_not_by_number() -> None:
    box = mailbox(bytes=100, messages=10)
    for number in range(9):
        box.put(log("chat", f"c{number}"))
    box.put(log("logs", "x" * 90))
    assert emptied(box) == [MailboxOverflow(1, ("logs",)), *(f"c{number}" for number in range(9))]


@pytest.mark.conforms("R10")
def test_overflows_of_several_channels_are_one_gap() -> None:
    box = mailbox(messages=10)
    for channel in ["logs"] * 11 + ["chat"] * 11:
        box.put(log(channel, "x"))
    box.put(log("logs", "last"))
    assert emptied(box) == [MailboxOverflow(22, ("logs", "chat")), "last"]


@pytest.mark.conforms("R10")
def test_a_state_never_overflows_by_repeats() -> None:
    box = mailbox(messages=2, bytes=100)
    for version in range(1, 1_000):
        box.put(state("gold", f"g{version}", version))
        box.put(state("tin", f"t{version}", version))
    assert [(one.body, one.version) for one in box.take()] == [("g999", 999), ("t999", 999)]
    for version in range(1_000, 2_000):  # handed out and not acknowledged: the newest of each waits behind
        box.put(state("gold", f"g{version}", version))
    assert bodies(box.take()) == ["g999", "t999", "g1999"]


@pytest.mark.conforms("R10")
@pytest.mark.parametrize("limits", [{"messages": 10}, {"bytes": 20}])
def test_too_many_states_for_the_mailbox_are_a_gap_too(limits: dict[str, int]) -> None:
    box = mailbox(**limits)
    for number in range(15):
        box.put(state(str(number), "x"))
    assert emptied(box) == [MailboxOverflow(11, ("price",)), "x", "x", "x", "x"]


@pytest.mark.conforms("R10", "X4")
def test_one_message_above_the_bound_is_a_gap() -> None:
    box = mailbox(bytes=100)
    box.put(log("logs", "x" * 101))
    box.put(log("logs", "small"))
    assert emptied(box) == [MailboxOverflow(1, ("logs",)), "small"]


@pytest.mark.conforms("X4")
def test_a_reply_that_is_full_has_no_gap_either() -> None:
    """It is repeated as it is until something is acknowledged, and may be as long as the bound says."""
    box = mailbox(bytes=3, reply_messages=3, reply_bytes=4)
    for body in ("ab", "cd"):
        box.put(log("logs", body))
        first = box.take()
    assert bodies(first) == ["ab", "cd"]
    box.put(log("logs", "e"))
    assert box.take() == first
    box.acknowledge(1)
    assert bodies(box.take()) == ["cd", "e"]
    box = mailbox(bytes=3, reply_messages=1)
    box.put(log("logs", "ab"))
    first = box.take()
    box.put(log("logs", "cdef"))
    assert box.take() == first
    assert emptied(box) == ["ab", MailboxOverflow(1, ("logs",))]


@pytest.mark.conforms("X4")
def test_a_principal_over_its_limit_gets_a_gap() -> None:
    """Others of its ids have left all that unread."""
    box = Mailbox(MailboxLimits(), usage := PrincipalUsage(True, unread_limit=MESSAGE_BYTES + 2))
    box.put(log("logs", "ab"))
    assert bodies(box.take()) == ["ab"]
    usage.unread_limit -= 1
    box.put(log("logs", "c"))
    assert emptied(box) == ["ab", MailboxOverflow(1, ("logs",))]


def test_the_leak_check_sees_what_is_left_behind() -> None:
    box = mailbox()
    letter = QueuedMessage("logs", "k", "once", 4, is_deduplicated=True)
    box.put(letter)
    assert not list(box.find_leaks())
    force_setattr(letter, "size", 5)
    force_setattr(letter, "body", "another")
    assert len(list(box.find_leaks())) == 2
    box.take()
    force_setattr(letter, "size", 6)
    assert len(list(box.find_leaks())) == 3


def test_a_head_takes_no_more_than_is_counted() -> None:
    delivery = SequencedMessage(1, Channel.STREAM, "7", StreamHead(2**63 - 1, 2**63 - 1, True), version=2**64 - 1)
    encoded = wire.encode_delivery(delivery)
    assert wire.decode_delivery(pb.Delivery.FromString(encoded.SerializeToString())) == delivery
    assert len(encoded.SerializeToString()) <= wire.measure_body(delivery.body)


def test_frontiers_take_no_more_than_is_counted() -> None:
    """In an answer to a ping, where they are measured by themselves."""
    frontier = LowerFrontier(tuple((number, -number) for number in range(300)))
    epochs = tuple(GroupFrontier(space, 2**40, frontier, frontier) for space in ("s", "of a longer name"))
    delivery = SequencedMessage(2**40, Channel.BORROWER, "", PingResponse("a/1", 2**62, 1.0, 9.0, epochs, ((1, 2),)))
    size = len(wire.encode_delivery(delivery).SerializeToString())
    assert size <= wire.measure_body(delivery.body) <= size + 100
