"""Every message survives the wire; every malformed one is an error and nothing else."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import (
    MAX_ANTICHAIN,
    MAX_HOLD_S,
    MAX_NUMBER,
    MAX_STREAMS,
    MAX_SUBSCRIPTION_BYTES,
    MAX_WEIGHT,
    MIN_WEIGHT,
)
from sublet_protocol.messages import borrower_leader_codec as codec
from sublet_protocol.messages.borrower_leader import (
    Disconnect,
    Grant,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.messages.head_and_group_events import GroupEventPayload, StreamHead
from sublet_protocol.messages.wire_fields import encode_frontier
from sublet_protocol.pubsub import wire
from sublet_protocol.pubsub.model import (
    Channel,
    MailboxOverflow,
    MessageToNode,
    SequencedMessage,
    Subscribe,
    UndecodableCommand,
    Unsubscribe,
)
from sublet_protocol.v1 import sublet_pb2 as pb


def distinct(streams: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(streams, max_size=5, unique_by=lambda stream: stream.stream_id).map(tuple)


NATURAL = st.integers(0, 2**63 - 1)
ID = st.text(st.characters().filter(str.isprintable), min_size=1, max_size=20)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
TIME = st.floats(allow_nan=False, allow_infinity=False)
EPOCH = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2)
FRONTIER = st.lists(EPOCH, min_size=1, max_size=4).map(LowerFrontier.from_epochs)
CONSUMED = st.none() | st.builds(ConsumedFrontier, NATURAL, st.none() | FRONTIER)
ENDS = (st.tuples(NATURAL, NATURAL) | NATURAL.map(lambda end: (end, end))).map(sorted)
IN_DOUBT = st.none() | st.tuples(NATURAL, ENDS, st.floats(0, MAX_HOLD_S), CONSUMED).map(
    lambda parts: InDoubtRange(parts[0], parts[1][0], parts[1][1], *parts[2:])
)
HELD = st.builds(HeldGrant, NATURAL, NATURAL, NATURAL, CONSUMED)
HELD_GRANTS = distinct(HELD)
_PLAIN = (NATURAL, NATURAL, NATURAL, st.booleans(), NATURAL, st.none() | NATURAL, NATURAL)
ONE_PROGRESS = st.builds(StreamProgress, *_PLAIN, CONSUMED, IN_DOUBT, TEXT, NATURAL, st.booleans())
PROGRESS = distinct(ONE_PROGRESS)
RING = st.tuples(st.integers(0, 2**64), st.integers(0, 2**64)).filter(lambda ends: ends[0] < ends[1])


def is_empty_part(message: ToLeader) -> bool:
    """Others follow, and it has no streams: such a part is refused."""
    match message:
        case LeaderWanted():
            return message.more and not message.reclaim
        case Disconnect():
            return message.more and not message.streams
    return False


TO_LEADER: st.SearchStrategy[ToLeader] = st.one_of(
    st.builds(
        LeaderWanted,
        ID,
        ID,
        st.none() | NATURAL,
        st.floats(MIN_WEIGHT, MAX_WEIGHT),
        st.none() | ID,
        st.booleans(),
        HELD_GRANTS,
        ID,
        st.none() | ID,
        NATURAL,
        st.integers(0, MAX_NUMBER),
        st.booleans(),
    ),
    st.builds(Ping, st.lists(ID, max_size=5).map(tuple), TIME),
    st.builds(UpdateProgress, ID, NATURAL, PROGRESS),
    st.builds(RevokeFinished, ID, NATURAL, NATURAL, NATURAL),
    st.builds(Disconnect, ID, NATURAL, PROGRESS, TEXT, st.booleans()),
).filter(lambda message: not is_empty_part(message))
GRANT = st.tuples(
    ID,
    NATURAL,
    NATURAL,
    NATURAL,
    NATURAL,
    NATURAL,
    RING,
    ID,
    st.none() | NATURAL,
    CONSUMED,
    IN_DOUBT,
    st.binary(min_size=16, max_size=16).map(GrantSecret),
).map(lambda parts: Grant(*parts[:6], *parts[6], *parts[7:-1], grant_key=parts[-1]))
TO_BORROWER: st.SearchStrategy[ToBorrower] = st.one_of(
    st.builds(LeaderConnectResponse, ID, NATURAL, NATURAL, st.just("") | ID),
    st.builds(
        PingResponse,
        ID,
        NATURAL,
        TIME,
        TIME,
        st.lists(st.builds(GroupFrontier, ID, NATURAL, FRONTIER, FRONTIER)).map(tuple),
        st.lists(st.tuples(NATURAL, NATURAL)).map(tuple),
    ),
    GRANT,
    st.builds(Revoke, ID, NATURAL, NATURAL, NATURAL),
    st.builds(Revoked, ID, NATURAL, NATURAL, NATURAL),
    st.builds(ProgressSaved, ID, NATURAL, NATURAL, NATURAL, NATURAL, CONSUMED, IN_DOUBT),
    st.builds(Invalidate, ID, NATURAL, detail=TEXT),
)
CHANNEL = st.sampled_from(Channel)
HEAD = st.builds(StreamHead, NATURAL, NATURAL, st.booleans())
DELIVERY = st.one_of(
    st.builds(SequencedMessage, NATURAL, CHANNEL, ID, TO_BORROWER, NATURAL),
    st.builds(SequencedMessage, NATURAL, CHANNEL, ID, HEAD, version=NATURAL),
    st.builds(SequencedMessage, NATURAL, CHANNEL, ID, st.builds(GroupEventPayload, st.binary(max_size=50)), NATURAL),
    st.builds(
        SequencedMessage,
        NATURAL,
        st.just(""),
        st.just(""),
        st.builds(MailboxOverflow, NATURAL, st.lists(CHANNEL, max_size=3).map(tuple)),
    ),
)
SUBJECT = CHANNEL.flatmap(
    lambda channel: st.tuples(st.just(channel), st.none() | (NATURAL.map(str) if channel is Channel.STREAM else ID))
)
COMMAND = st.one_of(
    SUBJECT.map(lambda subject: Subscribe(*subject)),
    SUBJECT.map(lambda subject: Unsubscribe(*subject)),
    TO_LEADER.map(MessageToNode),
    st.builds(MessageToNode, st.builds(GroupEventPayload, st.binary())),
)


@settings(max_examples=300)
@given(TO_LEADER)
def test_messages_to_the_leader_survive_the_wire(message: ToLeader) -> None:
    read = codec.decode_to_leader(pb.ToLeader.FromString(codec.encode_to_leader(message).SerializeToString()))
    assert read == message
    assert type(read) is type(message)


@settings(max_examples=300)
@given(TO_BORROWER)
def test_messages_to_the_borrower_survive_the_wire(message: ToBorrower) -> None:
    read = codec.decode_to_borrower(pb.ToBorrower.FromString(codec.encode_to_borrower(message).SerializeToString()))
    assert read == message
    assert type(read) is type(message)


@given(COMMAND)
def test_commands_survive_the_wire(command: Subscribe | Unsubscribe | MessageToNode) -> None:
    assert wire.decode_command(pb.Command.FromString(wire.encode_command(command).SerializeToString())) == command


@given(DELIVERY)
def test_deliveries_survive_the_wire(delivery: SequencedMessage) -> None:
    encoded = wire.encode_delivery(delivery)
    assert wire.decode_delivery(pb.Delivery.FromString(encoded.SerializeToString())) == delivery
    assert wire.measure_body(delivery.body) > 0


def test_every_message_of_the_protocol_is_tried() -> None:
    """The strategies above name each member of the unions, so that a new message is not forgotten."""
    wire_names = _members(pb.ToLeader.DESCRIPTOR)
    assert wire_names == {kind.__name__ for kind in typing.get_args(ToLeader)}
    wire_names = _members(pb.ToBorrower.DESCRIPTOR)
    assert wire_names == {kind.__name__ for kind in typing.get_args(ToBorrower)}


@pytest.mark.parametrize(
    "least",
    [[], [[1], [1, 2]], [[]], [[3], [5]], [[1, 1], [2, 2]], [list(range(9))], [[n] for n in range(MAX_ANTICHAIN + 1)]],
)
def test_a_frontier_that_cannot_be_is_refused(least: list[list[int]]) -> None:
    wire_form = codec.encode_to_leader(UpdateProgress("b", 1, (StreamProgress(1, 1, 1),)))
    wire_form.update_progress.streams[0].consumed.lower.SetInParent()
    for epoch in least:
        wire_form.update_progress.streams[0].consumed.lower.least.add(dimensions=epoch)
    with pytest.raises(MalformedMessage, match=r"frontier of epochs|least: "):
        codec.decode_to_leader(wire_form)


@pytest.mark.parametrize("kind", [*typing.get_args(ToLeader), *typing.get_args(ToBorrower), HeldGrant, StreamProgress])
def test_every_field_of_a_message_is_on_the_wire(kind: type) -> None:
    fields = set(inspect.signature(kind).parameters) - {"hash_to"}
    on_wire = {field.name for field in pb.DESCRIPTOR.message_types_by_name[kind.__name__].fields} - {"hash_last"}
    assert fields == on_wire


@pytest.mark.conforms("X4", "R11")
@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_command_or_an_error(payload: bytes) -> None:
    try:
        parsed = pb.Command.FromString(payload)
    except DecodeError:
        return
    assert isinstance(wire.decode_command(parsed), Subscribe | Unsubscribe | MessageToNode | UndecodableCommand)


MINIMAL = {"borrower_id": "b", "subscription": "$share/g/a", "weight": 1.0, "starting_position": "latest"}


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"borrower_id": ""}, "borrower_id"),
        ({"borrower_id": "x" * 256}, "limit is 255"),
        ({"borrower_id": "a\0b"}, "NUL"),
        ({"subscription": "x" * (MAX_SUBSCRIPTION_BYTES + 1)}, f"limit is {MAX_SUBSCRIPTION_BYTES}"),
        ({"group_id": -1}, "never negative"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"session": ""}, "session"),
        ({"reclaim": [pb.HeldGrant()] * (MAX_STREAMS + 1)}, f"limit is {MAX_STREAMS}"),
        ({"reclaim": [pb.HeldGrant(position=-1)]}, "never negative"),
    ],
)
def test_hostile_fields_are_refused(fields: dict[str, object], rule: str) -> None:
    codec.decode_to_leader(pb.ToLeader(leader_wanted=pb.LeaderWanted(**MINIMAL)))  # type: ignore[arg-type]
    hostile = pb.ToLeader(leader_wanted=pb.LeaderWanted(**(MINIMAL | fields)))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage, match=rule) as refusal:
        codec.decode_to_leader(hostile)
    assert len(str(refusal.value)) < 300


@pytest.mark.conforms("X4")
def test_frontiers_of_a_group_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members of an atomic group get the same in the answers to their pings, each as a copy."""
    encoded: list[LowerFrontier] = []

    def encode(lower: LowerFrontier) -> Any:
        encoded.append(lower)
        return encode_frontier(lower)

    monkeypatch.setattr(codec, "encode_frontier", encode)
    consumed = LowerFrontier(tuple((number, -number) for number in range(MAX_ANTICHAIN)))
    lower = LowerFrontier(((MAX_ANTICHAIN, -1),))
    for number in range(100):
        response = PingResponse(f"a/{number}", 1, 1.0, 1.0, (GroupFrontier("encoded once", 1, consumed, lower),))
        answer = codec.encode_to_borrower(response)
        assert codec.decode_to_borrower(answer) == response
        answer.ping_response.epochs[0].ClearField("consumed")
    assert encoded == [consumed, lower]


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    "hostile",
    [
        pb.ToLeader(),
        pb.ToLeader(ping=pb.Ping(borrower_ids=["b"] * 10_001)),
        pb.ToLeader(ping=pb.Ping(sent_at=float("nan"))),
        pb.ToLeader(update_progress=pb.UpdateProgress(borrower_id="b", streams=[pb.StreamProgress()] * 100_001)),
        pb.ToLeader(disconnect=pb.Disconnect(borrower_id="b", term=-1)),
        pb.ToBorrower(),
        pb.ToBorrower(revoked=pb.Revoked(borrower_id="b")),
        pb.ToBorrower(invalidate=pb.Invalidate(borrower_id="b", reason=99)),  # type: ignore[arg-type]
        pb.ToBorrower(grant=pb.Grant(borrower_id="b", hash_from=2, hash_last=1, filter="#")),
        pb.ToBorrower(grant=pb.Grant(borrower_id="b", hash_last=1, filter="#", grant_key=bytes(15))),
    ],
)
def test_hostile_messages_are_refused(hostile: pb.ToLeader | pb.ToBorrower) -> None:
    with pytest.raises(MalformedMessage):
        codec.decode_to_leader(hostile) if isinstance(hostile, pb.ToLeader) else codec.decode_to_borrower(hostile)


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    "hostile",
    [
        pb.Command(),
        pb.Command(subscribe=pb.Subject()),
        pb.Command(subscribe=pb.Subject(channel=77, key="k")),  # type: ignore[arg-type]
        pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP)),
        pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key="k" * 70_001)),
        pb.Command(unsubscribe=pb.Subject(channel=pb.CHANNEL_GROUP, all=False)),
        pb.Command(message=pb.ToLeader()),
    ],
)
def test_hostile_commands_are_malformed(hostile: pb.Command) -> None:
    assert isinstance(wire.decode_command(hostile), UndecodableCommand)


def _members(message: Any) -> set[str]:
    return {field.message_type.name for field in message.oneofs[0].fields if field.message_type is not None}
