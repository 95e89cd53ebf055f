"""Encodes and decodes the frames of a connection; their content goes through `borrower_leader_codec`.

`channels` are those that both sides use: sublet's, or the parties' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

from msgspec.structs import replace

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import (
    MAX_COMMAND_BYTES,
    MAX_COMMANDS,
    MAX_ITEMS,
    MAX_SUBSCRIPTION_BYTES,
    SLICE_ITEMS,
)
from sublet_protocol.messages import borrower_leader_codec as codec
from sublet_protocol.messages.agent_secret import AgentSecret, is_key_of
from sublet_protocol.messages.borrower_leader import (
    PROTOCOL_VERSION,
    Disconnect,
    LeaderWanted,
    Ping,
    PingResponse,
    RevokeFinished,
    UpdateProgress,
)
from sublet_protocol.messages.field_checks import MalformedMessage, check_id, check_text
from sublet_protocol.messages.head_and_group_events import GroupEventPayload, StreamHead
from sublet_protocol.pubsub.agent_side_events import CallPoll, CommandsReplied, PollReplied, SendCommands
from sublet_protocol.pubsub.model import (
    CHANNELS,
    Channel,
    ChannelCatalog,
    Command,
    CommandRefusal,
    MailboxOverflow,
    MessageToNode,
    ReceivedCommand,
    SequencedMessage,
    Subscribe,
    UndecodableCommand,
    Unsubscribe,
)
from sublet_protocol.v1 import sublet_pb2 as pb

MAX_REPLY_BYTES = 64 << 20
"""Largest reply an agent reads."""

_STREAM_KEY = re.compile("0|[1-9][0-9]{0,18}")
_ENVELOPE_BYTES = 64
"""The approximate size of a delivery on the wire without its body."""


# --- requests -------------------------------------------------------------------------------------------------------


def encode_batch_request(batch: SendCommands, key: AgentSecret, channels: ChannelCatalog = CHANNELS) -> Any:
    """Return a `CommandBatch`."""
    return pb.CommandBatch(
        protocol_version=PROTOCOL_VERSION,
        subscriber_id=batch.subscriber_id,
        number=batch.number,
        commands=[encode_command(command, channels) for command in batch.commands],
        agent_key=key.reveal(),
    )


def encode_poll_request(poll: CallPoll, key: AgentSecret) -> Any:
    """Return a `PollRequest`."""
    return pb.PollRequest(
        protocol_version=PROTOCOL_VERSION,
        subscriber_id=poll.subscriber_id,
        acknowledged=poll.acknowledged,
        incarnation=poll.node_incarnation,
        hold_ms=round(poll.hold_s * 1000),
        agent_key=key.reveal(),
    )


def check_request(request: Any) -> str:
    """Return the subscriber id of a request. Raise `MalformedMessage`."""
    return check_id("subscriber_id", request.subscriber_id)


def find_excess(request: Any) -> str | None:
    """Return what a `CommandBatch` has too much of, before anything is built from it; None: nothing."""
    if (count := len(request.commands)) > MAX_COMMANDS:
        return f"{count} commands in a batch: the limit is {MAX_COMMANDS}; send several"
    items = 0
    for command in request.commands:
        items += count_items(command)
        if items > MAX_ITEMS:  # at once: the rest may be hundreds of thousands
            return f"{items} items in the commands of a batch: the limit is {MAX_ITEMS}; send several"
    return None


def count_items(command: Any) -> int:
    """Return for how many items a `Command` counts."""
    return codec.count_items(command.message) if command.WhichOneof("command") == "message" else 1


NOT_THE_AGENT = (
    "the agent key is not that of the subscriber id. An agent's id ends in the hash of its key: only the process that "
    "has drawn the key can send and receive for it."
)
"""Answered as UNAUTHENTICATED, whether or not there is such an agent."""


def take_agent_key(request: Any) -> bool:
    """Return whether the request is from the agent that it names. Its key is removed from it: nothing after this needs
    it.
    """
    key: bytes = request.agent_key
    request.ClearField("agent_key")
    return is_key_of(key, request.subscriber_id)


# --- commands -------------------------------------------------------------------------------------------------------


def encode_command(command: Command, channels: ChannelCatalog = CHANNELS) -> Any:
    """Return a `Command`."""
    match command:
        case Subscribe(channel, key):
            return pb.Command(subscribe=_encode_subject(channel, key, channels))
        case Unsubscribe(channel, key):
            return pb.Command(unsubscribe=_encode_subject(channel, key, channels))
        case MessageToNode(LeaderWanted() | Ping() | UpdateProgress() | RevokeFinished() | Disconnect() as message):
            return pb.Command(message=codec.encode_to_leader(message))
        case MessageToNode(GroupEventPayload(payload)):
            return pb.Command(group_event=payload)
        case MessageToNode(body):
            raise TypeError(f"{type(body).__name__} is not a message to a leader")
        case _:
            assert_never(command)


def decode_command(wire: Any, channels: ChannelCatalog = CHANNELS) -> ReceivedCommand:
    """Return a command, or `UndecodableCommand` with the reason."""
    try:
        match wire.WhichOneof("command"):
            case "subscribe":
                return Subscribe(*_decode_subject(wire.subscribe, channels))
            case "unsubscribe":
                return Unsubscribe(*_decode_subject(wire.unsubscribe, channels))
            case "message":
                return MessageToNode(codec.decode_to_leader(wire.message))
            case "group_event":
                return MessageToNode(_decode_event(wire.group_event))
            case _:
                return UndecodableCommand("a command: it is empty, or of a kind this version does not know")
    except MalformedMessage as error:
        return UndecodableCommand(str(error))


def _decode_event(payload: bytes) -> GroupEventPayload:
    if len(payload) > MAX_COMMAND_BYTES:
        raise MalformedMessage(f"an event of {len(payload)} bytes: at most {MAX_COMMAND_BYTES}")
    return GroupEventPayload(payload)


def _encode_subject(channel: str, key: str | None, channels: ChannelCatalog) -> Any:
    number: Any = channels.find_number(channel)
    if not number:
        raise UsageError(f"channel {channel!r}: it is none of this session's. These are: {', '.join(channels)}")
    if key is None:
        return pb.Subject(channel=number, all=True)
    return pb.Subject(channel=number, key=_check_key(key))


def _decode_subject(wire: Any, channels: ChannelCatalog) -> tuple[str, str | None]:
    channel = channels.find_name(wire.channel)
    if channel is None:
        raise MalformedMessage(f"channel {wire.channel}: not served here; these are: {', '.join(channels)}")
    if wire.WhichOneof("keys") == "all" and wire.all:
        return channel, None
    key = _check_key(wire.key)
    if channel == Channel.STREAM and not _STREAM_KEY.fullmatch(key):
        raise MalformedMessage(
            f"key {key[:40]!r}: a stream's is its number, 1 to 19 decimal digits, without zeros before it"
        )
    return channel, check_id("key", key) if channel == Channel.BORROWER else key


def _check_key(key: str) -> str:
    return check_text("key", key, MAX_SUBSCRIPTION_BYTES)


def split_message(message: object) -> Iterator[tuple[object, int]]:
    """Yield a message in parts that mean the same one after the other, and of how many items each is. A message that
    counts as one is not divided."""
    match message:
        case Ping(borrower_ids, sent_at) if len(borrower_ids) > SLICE_ITEMS:
            for start in range(0, len(borrower_ids), SLICE_ITEMS):
                ids = borrower_ids[start : start + SLICE_ITEMS]
                yield Ping(ids, sent_at), len(ids)
        case UpdateProgress(borrower_id, term, streams) if len(streams) > SLICE_ITEMS:
            for start in range(0, len(streams), SLICE_ITEMS):
                part = streams[start : start + SLICE_ITEMS]
                yield UpdateProgress(borrower_id, term, part), len(part)
        case Ping(borrower_ids):
            yield message, 1 + len(borrower_ids)
        case LeaderWanted(reclaim=reclaim):
            yield message, 1 + len(reclaim)
        case UpdateProgress(streams=streams) | Disconnect(streams=streams):
            yield message, 1 + len(streams)
        case _:
            yield message, 1


# --- replies --------------------------------------------------------------------------------------------------------


def encode_batch_reply(incarnation: str, errors: Iterable[CommandRefusal] = (), *, unknown: bool = False) -> Any:
    """Return a `CommandReply`."""
    return pb.CommandReply(
        protocol_version=PROTOCOL_VERSION,
        incarnation=incarnation,
        unknown_subscriber=unknown,
        errors=[pb.CommandRefusal(index=error.index, text=error.text) for error in errors],
    )


def encode_poll_reply(
    incarnation: str,
    deliveries: Iterable[SequencedMessage] = (),
    *,
    unknown: bool = False,
    channels: ChannelCatalog = CHANNELS,
) -> Any:
    """Return a `PollReply`."""
    return pb.PollReply(
        protocol_version=PROTOCOL_VERSION,
        incarnation=incarnation,
        unknown_subscriber=unknown,
        messages=[encode_delivery(delivery, channels) for delivery in deliveries],
    )


def decode_batch_reply(batch: SendCommands, wire: Any, jitter: float = 0.0) -> CommandsReplied:
    """Return the node's receipt, as an event for the agent-side machine."""
    errors = tuple(CommandRefusal(error.index, error.text) for error in wire.errors)
    return CommandsReplied(
        batch.subscriber_incarnation, batch.number, wire.incarnation, wire.unknown_subscriber, errors, jitter
    )


def decode_poll_reply(
    poll: CallPoll, wire: Any, jitter: float = 0.0, channels: ChannelCatalog = CHANNELS
) -> PollReplied:
    """Return what the poll brought, as an event for the agent-side machine. Raise `MalformedMessage`."""
    deliveries = tuple(decode_delivery(message, channels) for message in wire.messages)
    return PollReplied(poll.subscriber_incarnation, wire.incarnation, wire.unknown_subscriber, deliveries, jitter)


# --- deliveries -----------------------------------------------------------------------------------------------------


def encode_delivery(delivery: SequencedMessage, channels: ChannelCatalog = CHANNELS) -> Any:
    """Return a `Delivery`."""
    number: Any = channels.find_number(delivery.channel)
    return pb.Delivery(
        sequence=delivery.sequence,
        channel=number,
        key=delivery.key,
        predecessor=delivery.predecessor,
        version=delivery.version,
        **_encode_body(delivery.body, channels),
    )


def _encode_body(body: Any, channels: ChannelCatalog) -> dict[str, Any]:
    match body:
        case StreamHead(stream_id, head, closed):
            return {"stream_head": pb.StreamHead(stream_id=stream_id, head=head, closed=closed)}
        case GroupEventPayload(payload):
            return {"group_event": payload}
        case MailboxOverflow(dropped, names):
            numbers: list[Any] = [channels.find_number(name) for name in names]
            return {"gap": pb.Gap(dropped=dropped, channels=numbers)}
        case _:
            return {"to_borrower": codec.encode_to_borrower(body)}


def decode_delivery(wire: Any, channels: ChannelCatalog = CHANNELS) -> SequencedMessage:
    """Return one message of a poll's reply. Raise `MalformedMessage`."""
    body = _decode_body(wire, channels)
    channel = "" if isinstance(body, MailboxOverflow) else _decode_channel(wire.channel, channels)
    return SequencedMessage(wire.sequence, channel, wire.key, body, wire.predecessor, wire.version)


def _decode_body(wire: Any, channels: ChannelCatalog) -> object:
    match wire.WhichOneof("body"):
        case "to_borrower":
            return codec.decode_to_borrower(wire.to_borrower)
        case "stream_head":
            return StreamHead(wire.stream_head.stream_id, wire.stream_head.head, wire.stream_head.closed)
        case "group_event":
            return GroupEventPayload(wire.group_event)
        case "gap":
            return MailboxOverflow(
                wire.gap.dropped, tuple(_decode_channel(channel, channels) for channel in wire.gap.channels)
            )
        case _:
            raise MalformedMessage("a delivery: it is empty, or of a kind this version does not know")


def _decode_channel(number: int, channels: ChannelCatalog) -> str:
    if (name := channels.find_name(number)) is None:
        raise MalformedMessage(f"channel {number}: this version does not know it")
    return name


def measure_body(body: object) -> int:
    """Return the bytes of a delivery's body on the wire, approximately, with a little for its envelope."""
    match body:
        case StreamHead():
            return _ENVELOPE_BYTES
        case GroupEventPayload(payload):
            return _ENVELOPE_BYTES + len(payload)
        case PingResponse(epochs=epochs) if epochs:
            return measure_body(replace(body, epochs=())) + sum(map(codec.measure_group_frontier, epochs))
        case _:
            return _ENVELOPE_BYTES + int(pb.Delivery(**_encode_body(body, CHANNELS)).ByteSize())


def measure_command(command: Command, channels: ChannelCatalog = CHANNELS) -> tuple[int, int]:
    """Return the bytes of a command on the wire, nearly, and for how many items it counts."""
    encoded = encode_command(command, channels)
    return 4 + int(encoded.ByteSize()), count_items(encoded)
