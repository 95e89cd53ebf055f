"""Messages of the protocol, made by its own descriptors with values that nobody sends, and then mutated as bytes: each
is decoded, or refused as malformed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from sublet_protocol.domain.errors import SubletError
from sublet_protocol.messages import borrower_leader_codec as codec
from sublet_protocol.messages import feed_messages, member_reads
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.pubsub import wire
from sublet_protocol.v1 import sublet_pb2 as pb

NUMBERS = (0, 1, 2, 7, -1, (1 << 31) - 1, 1 << 53, (1 << 63) - 1, -(1 << 63))
REALS = (0.0, 1.0, 0.001, -1.0, 1e300, float("nan"), float("inf"))
TEXTS = ("", "b", "$share/g/a/#", "earliest", "offset:7", "a\0b", "\u202e", "x" * 256, "x" * 5000, "1-17", "+")
DEPTH = 6
"""Messages within messages."""


def execute(seed: int, number: int) -> bool:
    """Return whether what came of this execution was decoded; if not, it was refused as it should be. Raises whatever
    else happens."""
    dice = random.Random(f"{seed}/{number}")
    kind, decode = dice.choice(_DECODERS)
    payload = _filled(kind, dice, DEPTH).SerializeToString()
    if number % 3:
        payload = _mutated(payload, dice)
    try:
        decode(kind.FromString(payload))
    except (DecodeError, SubletError) as refused:
        str(refused).encode("utf-8", "surrogatepass")
        return False
    return True


def _filled(kind: Any, dice: random.Random, depth: int) -> Any:
    """Return a message of that kind with most of its fields set; of a `oneof` the last that is."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.name == "protocol_version":
            made.protocol_version = PROTOCOL_VERSION if dice.randrange(50) else dice.randrange(9)
        elif dice.randrange(5) and not (field.containing_oneof and dice.randrange(2)):
            _fill(made, field, dice, depth)
    return made


def _fill(made: Any, field: FieldDescriptor, dice: random.Random, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.is_repeated:
        values = [_value(field, dice, depth - 1) for _ in range(dice.choice((0, 1, 1, 2, 3)) if depth else 0)]
        getattr(made, field.name).extend(values)
    elif field.message_type is None:
        setattr(made, field.name, _value(field, dice, depth))
    elif depth:
        getattr(made, field.name).CopyFrom(_value(field, dice, depth - 1))


def _value(field: FieldDescriptor, dice: random.Random, depth: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            assert field.message_type is not None
            return _filled(getattr(pb, field.message_type.name), dice, depth)
        case FieldDescriptor.CPPTYPE_STRING:
            text = dice.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return dice.choice(REALS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return dice.randrange(6)
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
            return _number(field, dice)
        case _:
            return abs(_number(field, dice))


def _number(field: FieldDescriptor, dice: random.Random) -> int:
    bits = 31 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 63
    return max(min(dice.choice(NUMBERS), (1 << bits) - 1), -(1 << bits))


def _mutated(payload: bytes, dice: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(dice.choice((1, 1, 2, 4))):
        place = dice.randrange(len(data) + 1)
        match dice.randrange(4):
            case 0:
                del data[place : place + dice.randrange(1, 9)]
            case 1:
                data[place:place] = dice.randbytes(dice.randrange(1, 5))
            case 2:
                data[place : place + 1] = bytes([dice.randrange(256)])
            case _:
                data[place:place] = data[place : place + dice.randrange(1, 64)] * dice.choice((1, 2, 50))
    return bytes(data)


def _batch(found: Any) -> None:
    wire.check_request(found)
    wire.find_excess(found)
    wire.take_agent_key(found)
    for command in found.commands:
        wire.decode_command(command)


def _deliveries(found: Any) -> None:
    for delivery in found.messages:
        wire.decode_delivery(delivery)


_DECODERS: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    (pb.CommandBatch, _batch),
    (pb.PollRequest, wire.check_request),
    (pb.PollReply, _deliveries),
    (pb.ToLeader, codec.decode_to_leader),
    (pb.ToBorrower, codec.decode_to_borrower),
    (pb.PublishRequest, feed_messages.decode_publish),
    (pb.PublishReply, lambda found: feed_messages.decode_published(found, 3)),
    (pb.HistoryRequest, feed_messages.decode_read),
    (pb.FollowRequest, feed_messages.decode_read),
    (pb.FeedPage, feed_messages.decode_page),
    (pb.FetchRequest, member_reads.decode_fetch_request),
    (pb.FetchReply, member_reads.decode_fetch_reply),
    (pb.HeadsRequest, member_reads.decode_heads_request),
    (pb.HeadsReply, member_reads.decode_heads_reply),
    (pb.SessionEpochRequest, member_reads.decode_session_epoch_request),
    (pb.SessionEpochReply, member_reads.decode_session_epoch_reply),
)
