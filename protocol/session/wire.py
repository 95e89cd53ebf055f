"""The session's own frames in wire form and back; what they carry goes through `protocol.codec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from protocol import codec
from protocol import sublet_pb2 as pb
from protocol.codec import MAX_TEXT, MalformedMessage
from protocol.events import GroupEvent, StreamHead
from protocol.messages import MAX_ID, PROTOCOL_VERSION, Disconnect, LeaderWanted, Ping, RevokeFinished, UpdateProgress
from protocol.session.steps import BatchAnswered, PollAnswered, SendBatch, StartPoll
from protocol.session.values import (
    Channel,
    Command,
    CommandError,
    Delivery,
    Gap,
    Malformed,
    ReceivedCommand,
    Send,
    Subscribe,
    Unsubscribe,
)

MAX_COMMANDS = 10_000
"""Most commands in one batch."""

MAX_KEY = MAX_TEXT
"""Longest key: a group's key is its subscription."""

MAX_EVENT_BYTES = 1 << 20
"""Largest event that an agent sends."""

MAX_REQUEST_BYTES = 8 << 20
"""Largest request a node reads."""

MAX_REPLY_BYTES = 64 << 20
"""Largest reply an agent reads."""

_CHANNELS: dict[str, Any] = {
    Channel.BORROWER: pb.CHANNEL_BORROWER,
    Channel.STREAM: pb.CHANNEL_STREAM,
    Channel.GROUP: pb.CHANNEL_GROUP,
}
_CHANNELS_BACK: dict[int, Channel] = {wire: Channel(name) for name, wire in _CHANNELS.items()}


# --- requests -------------------------------------------------------------------------------------------------------


def batch_request(batch: SendBatch) -> Any:
    """A `CommandBatch`."""
    return pb.CommandBatch(
        protocol_version=PROTOCOL_VERSION,
        subscriber_id=batch.subscriber_id,
        number=batch.number,
        commands=[encode_command(command) for command in batch.commands],
    )


def poll_request(poll: StartPoll) -> Any:
    """A `PollRequest`."""
    return pb.PollRequest(
        protocol_version=PROTOCOL_VERSION,
        subscriber_id=poll.subscriber_id,
        acknowledged=poll.acknowledged,
        incarnation=poll.incarnation,
        hold_ms=round(poll.hold_s * 1000),
    )


def check_subscriber_id(text: str) -> str:
    """Return `text` if it can be a subscriber id."""
    if not 0 < len(text) <= MAX_ID or "\0" in text:
        raise MalformedMessage(f"subscriber_id {text[:40]!r}: 1 to {MAX_ID} characters, without NUL")
    return text


# --- commands -------------------------------------------------------------------------------------------------------


def encode_command(command: Command) -> Any:
    """A `Command`."""
    match command:
        case Subscribe(channel, key):
            return pb.Command(subscribe=_subject(channel, key))
        case Unsubscribe(channel, key):
            return pb.Command(unsubscribe=_subject(channel, key))
        case Send(LeaderWanted() | Ping() | UpdateProgress() | RevokeFinished() | Disconnect() as message):
            return pb.Command(message=codec.encode_to_leader(message))
        case Send(GroupEvent(payload)):
            return pb.Command(group_event=payload)
        case Send(body):
            raise TypeError(f"{type(body).__name__} is not a message to a leader")
        case _:
            assert_never(command)


def decode_command(wire: Any) -> ReceivedCommand:
    """A command, or `Malformed` with the reason."""
    try:
        match wire.WhichOneof("command"):
            case "subscribe":
                return Subscribe(*_read_subject(wire.subscribe))
            case "unsubscribe":
                return Unsubscribe(*_read_subject(wire.unsubscribe))
            case "message":
                return Send(codec.decode_to_leader(wire.message))
            case "group_event":
                return Send(_read_event(wire.group_event))
            case _:
                return Malformed("a command: it is empty, or of a kind this version does not know")
    except MalformedMessage as error:
        return Malformed(str(error))


def _read_event(payload: bytes) -> GroupEvent:
    if len(payload) > MAX_EVENT_BYTES:
        raise MalformedMessage(f"an event of {len(payload)} bytes: at most {MAX_EVENT_BYTES}")
    return GroupEvent(payload)


def _subject(channel: str, key: str | None) -> Any:
    if key is None:
        return pb.Subject(channel=_CHANNELS[channel], all=True)
    return pb.Subject(channel=_CHANNELS[channel], key=key)


def _read_subject(wire: Any) -> tuple[str, str | None]:
    channel = _CHANNELS_BACK.get(wire.channel)
    if channel is None:
        served = ", ".join(Channel)
        raise MalformedMessage(f"channel {wire.channel}: not served here; these are: {served}")
    if wire.WhichOneof("keys") == "all" and wire.all:
        return channel, None
    if not 0 < len(wire.key) <= MAX_KEY or "\0" in wire.key:
        raise MalformedMessage(f"key {wire.key[:40]!r}: 1 to {MAX_KEY} characters, without NUL, or all")
    return channel, wire.key


# --- replies --------------------------------------------------------------------------------------------------------


def batch_reply(incarnation: str, errors: Iterable[CommandError] = (), *, unknown: bool = False) -> Any:
    """A `CommandReply`."""
    return pb.CommandReply(
        protocol_version=PROTOCOL_VERSION,
        incarnation=incarnation,
        unknown_subscriber=unknown,
        errors=[pb.CommandError(index=error.index, text=error.text) for error in errors],
    )


def poll_reply(incarnation: str, deliveries: Iterable[Delivery] = (), *, unknown: bool = False) -> Any:
    """A `PollReply`."""
    return pb.PollReply(
        protocol_version=PROTOCOL_VERSION,
        incarnation=incarnation,
        unknown_subscriber=unknown,
        messages=[encode_delivery(delivery) for delivery in deliveries],
    )


def read_batch_reply(batch: SendBatch, wire: Any) -> BatchAnswered:
    """The node's receipt, as an event for the subscriber's machine."""
    errors = tuple(CommandError(error.index, error.text) for error in wire.errors)
    return BatchAnswered(batch.life, batch.number, wire.incarnation, wire.unknown_subscriber, errors)


def read_poll_reply(poll: StartPoll, wire: Any) -> PollAnswered:
    """What the poll brought, as an event for the subscriber's machine; raises `MalformedMessage`."""
    deliveries = tuple(decode_delivery(message) for message in wire.messages)
    return PollAnswered(poll.life, wire.incarnation, wire.unknown_subscriber, deliveries)


# --- deliveries -----------------------------------------------------------------------------------------------------


def encode_delivery(delivery: Delivery) -> Any:
    """A `Delivery`."""
    return pb.Delivery(
        sequence=delivery.sequence,
        channel=_CHANNELS.get(delivery.channel, pb.CHANNEL_UNSPECIFIED),
        key=delivery.key,
        predecessor=delivery.predecessor,
        version=delivery.version,
        **_body(delivery.body),
    )


def _body(body: Any) -> dict[str, Any]:
    match body:
        case StreamHead(stream_id, head, closed):
            return {"stream_head": pb.StreamHead(stream_id=stream_id, head=head, closed=closed)}
        case GroupEvent(payload):
            return {"group_event": payload}
        case Gap(dropped, channels):
            return {"gap": pb.Gap(dropped=dropped, channels=[_CHANNELS[channel] for channel in channels])}
        case _:
            return {"to_borrower": codec.encode_to_borrower(body)}


def decode_delivery(wire: Any) -> Delivery:
    """One message of a poll's reply; raises `MalformedMessage`."""
    body = _read_body(wire)
    channel: str = "" if isinstance(body, Gap) else _channel(wire.channel)
    return Delivery(wire.sequence, channel, wire.key, body, wire.predecessor, wire.version)


def _read_body(wire: Any) -> object:
    match wire.WhichOneof("body"):
        case "to_borrower":
            return codec.decode_to_borrower(wire.to_borrower)
        case "stream_head":
            return StreamHead(wire.stream_head.stream_id, wire.stream_head.head, wire.stream_head.closed)
        case "group_event":
            return GroupEvent(wire.group_event)
        case "gap":
            return Gap(wire.gap.dropped, tuple(_channel(one) for one in wire.gap.channels))
        case _:
            raise MalformedMessage("a delivery: it is empty, or of a kind this version does not know")


def _channel(wire: int) -> Channel:
    if wire not in _CHANNELS_BACK:
        raise MalformedMessage(f"channel {wire}: this version does not know it")
    return _CHANNELS_BACK[wire]


def body_size(body: object) -> int:
    """Bytes of a delivery's body on the wire, and a little for its envelope."""
    return 32 + int(pb.Delivery(**_body(body)).ByteSize())


def command_size(command: Command) -> int:
    """Bytes of a command on the wire, nearly."""
    return 4 + int(encode_command(command).ByteSize())
