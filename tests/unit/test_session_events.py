"""Blocks that travel with a stream's head: bounded, and refused where they make no sense."""

from __future__ import annotations

import pytest

from protocol import sublet_pb2 as pb
from protocol.codec import MalformedMessage
from protocol.errors import UsageError
from protocol.events import MAX_INLINE_BYTES, InlineBlock, StreamHead
from protocol.session import wire
from protocol.session.server import new_publisher
from protocol.session.values import Channel, Delivery, Subscribe


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("start", "end", "codec", "size", "named"),
    [
        (-1, 5, 0, 1, "-1 to 5"),
        (5, 5, 0, 1, "5 to 5"),
        (6, 5, 0, 1, "6 to 5"),
        (0, 1, -1, 1, "codec -1"),
        (0, 1, 1 << 15, 1, "codec 32768"),
        (0, 1, 0, MAX_INLINE_BYTES + 1, "65537 bytes"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused_at_both_ends(
    start: int, end: int, codec: int, size: int, named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        InlineBlock(start, end, codec, b"x" * size)
    block = pb.InlineBlock(start=start, end=end, codec=codec, payload=b"x" * size)
    wrong = pb.Delivery(channel=pb.CHANNEL_STREAM, key="7", stream_head=pb.StreamHead(stream_id=7, head=9, block=block))
    with pytest.raises(MalformedMessage, match=named):
        wire.decode_delivery(wrong)


@pytest.mark.parametrize("block", [None, InlineBlock(0, 1, 0, b""), InlineBlock(3, 9, 7, b"x" * MAX_INLINE_BYTES)])
def test_a_head_survives_the_wire_with_and_without_its_block(block: InlineBlock | None) -> None:
    delivery = Delivery(1, Channel.STREAM, "7", StreamHead(7, 9, True, block), version=19)
    encoded = wire.encode_delivery(delivery)
    assert wire.decode_delivery(pb.Delivery.FromString(encoded.SerializeToString())) == delivery
    assert len(encoded.SerializeToString()) <= wire.body_size(delivery.body)


def test_a_block_is_news_for_who_waits_and_is_not_kept_for_who_comes_later() -> None:
    node = new_publisher("n1")
    node.receive("waits", 1, [Subscribe(Channel.STREAM, "7")], 0.0)
    head = StreamHead(7, 9, block=InlineBlock(8, 9, 0, b"payload"))
    node.publish(Channel.STREAM, "7", head, 18)
    node.receive("late", 1, [Subscribe(Channel.STREAM, "7")], 0.0)
    told = [getattr(node.collect(name, 0.0), "deliveries", ()) for name in ("waits", "late")]
    assert [[one.body for one in deliveries] for deliveries in told] == [[head], [StreamHead(7, 9)]]


def test_a_block_beyond_the_last_offset_is_refused_before_it_is_sent() -> None:
    with pytest.raises(UsageError, match="9223372036854775807 or before"):
        InlineBlock(0, 2**63, 0, b"x")
