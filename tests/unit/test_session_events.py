"""A stream's head on the wire."""

from __future__ import annotations

from sublet_protocol.messages.channel_messages import StreamHead
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.model import Channel, DeliveredMessage
from sublet_protocol.v1 import sublet_pb2 as pb


def test_a_head_survives_the_wire() -> None:
    delivery = DeliveredMessage(1, Channel.STREAM, "7", StreamHead(2**63 - 1, 2**63 - 1, True), version=2**64 - 1)
    encoded = wire.encode_delivery(delivery)
    assert wire.decode_delivery(pb.Delivery.FromString(encoded.SerializeToString())) == delivery
    assert len(encoded.SerializeToString()) <= wire.body_size(delivery.body)
