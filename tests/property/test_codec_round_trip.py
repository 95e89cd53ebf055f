"""Every message survives the wire; every malformed one is an error and nothing else."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.domain import errors, limits
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_STREAMS
from sublet_protocol.domain.subscriptions import Bookmark, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages import borrower_leader as messages
from sublet_protocol.messages import borrower_leader_codec as codec
from sublet_protocol.messages import feed_messages, member_reads
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.messages.head_and_group_events import GroupEventPayload, StreamHead
from sublet_protocol.messages.wire_fields import encode_frontier
from sublet_protocol.pubsub import model, wire
from sublet_protocol.v1 import sublet_pb2 as pb

NATURAL, ID_NUMBER = st.integers(0, 2**63 - 1), st.integers(1, 2**63 - 1)
ID = st.text(st.characters().filter(str.isprintable), min_size=1, max_size=20)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
TIME = st.floats(allow_nan=False, allow_infinity=False)
BYTES = st.none() | st.binary(min_size=1, max_size=20)
EPOCH = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2)
FRONTIER = st.lists(EPOCH, min_size=1, max_size=4).map(LowerFrontier.from_epochs)
CONSUMED = st.none() | st.builds(ConsumedFrontier, NATURAL, st.none() | FRONTIER)
ENDS = (st.tuples(NATURAL, NATURAL) | NATURAL.map(lambda end: (end, end))).map(sorted)
IN_DOUBT = st.none() | st.tuples(NATURAL, ENDS, st.floats(0, limits.MAX_HOLD_S), CONSUMED).map(
    lambda parts: InDoubtRange(parts[0], parts[1][0], parts[1][1], *parts[2:])
)
RING = st.tuples(st.integers(0, 2**64), st.integers(0, 2**64)).filter(lambda ends: ends[0] < ends[1])


def several(streams: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw some of distinct streams."""
    return st.lists(streams, max_size=5, unique_by=lambda stream: stream.stream_id).map(tuple)


def numbered(kind: Any, numbers: int, *more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw messages of a borrower with so many numbers."""
    return st.builds(kind, ID, *[NATURAL] * numbers, *more)


HELD_GRANTS = several(st.builds(messages.HeldGrant, NATURAL, NATURAL, NATURAL, CONSUMED))
_PLAIN = (NATURAL, NATURAL, NATURAL, st.booleans(), NATURAL, st.none() | NATURAL, NATURAL)
PROGRESS = several(st.builds(messages.StreamProgress, *_PLAIN, CONSUMED, IN_DOUBT, TEXT, NATURAL, st.booleans()))


def is_empty_part(message: messages.ToLeader) -> bool:
    """Others follow, and it has no streams: such a part is refused."""
    match message:
        case messages.LeaderWanted():
            return message.more and not message.reclaim
        case messages.Disconnect():
            return message.more and not message.streams
    return False


_WHO = (ID, ID, st.none() | NATURAL, st.floats(limits.MIN_WEIGHT, limits.MAX_WEIGHT), st.none() | ID, st.booleans())
_WANTED = (*_WHO, HELD_GRANTS, ID, st.none() | ID, NATURAL, st.integers(0, limits.MAX_NUMBER), st.booleans())
TO_LEADER: st.SearchStrategy[messages.ToLeader] = st.one_of(
    st.builds(messages.LeaderWanted, *_WANTED),
    st.builds(messages.Ping, st.lists(ID, max_size=5, unique=True).map(tuple), TIME),
    numbered(messages.UpdateProgress, 1, PROGRESS),
    numbered(messages.RevokeFinished, 3),
    numbered(messages.Disconnect, 1, PROGRESS, TEXT, st.booleans()),
).filter(lambda message: not is_empty_part(message))
KEY = st.binary(min_size=16, max_size=16).map(GrantSecret)
GRANT = st.tuples(ID, *[NATURAL] * 5, RING, ID, st.none() | NATURAL, CONSUMED, IN_DOUBT, KEY).map(
    lambda parts: messages.Grant(*parts[:6], *parts[6], *parts[7:-1], grant_key=parts[-1])
)
_FRONTIERS = st.lists(st.builds(GroupFrontier, ID, NATURAL, FRONTIER, FRONTIER)).map(tuple)
TO_BORROWER: st.SearchStrategy[messages.ToBorrower] = st.one_of(
    numbered(messages.LeaderConnectResponse, 2, st.just("") | ID),
    numbered(messages.PingResponse, 1, TIME, TIME, _FRONTIERS, st.lists(st.tuples(NATURAL, NATURAL)).map(tuple)),
    GRANT,
    numbered(messages.Revoke, 3),
    numbered(messages.Revoked, 3),
    numbered(messages.ProgressSaved, 4, CONSUMED, IN_DOUBT),
    st.builds(messages.Invalidate, ID, NATURAL, detail=TEXT),
)
CHANNEL = st.sampled_from(model.Channel)
HEAD = st.builds(StreamHead, NATURAL, NATURAL, st.booleans())
EVENT = st.builds(GroupEventPayload, st.binary(max_size=50))
OVERFLOW = st.builds(model.MailboxOverflow, NATURAL, st.lists(CHANNEL, max_size=3).map(tuple))
DELIVERY = st.one_of(
    st.builds(model.SequencedMessage, NATURAL, CHANNEL, ID, TO_BORROWER, NATURAL),
    st.builds(model.SequencedMessage, NATURAL, CHANNEL, ID, HEAD, version=NATURAL),
    st.builds(model.SequencedMessage, NATURAL, CHANNEL, ID, EVENT, NATURAL),
    st.builds(model.SequencedMessage, NATURAL, st.just(""), st.just(""), OVERFLOW),
)
SUBJECT = CHANNEL.flatmap(
    lambda channel: st.tuples(
        st.just(channel), st.none() | (NATURAL.map(str) if channel is model.Channel.STREAM else ID)
    )
)
COMMAND = st.one_of(
    SUBJECT.map(lambda subject: model.Subscribe(*subject)),
    SUBJECT.map(lambda subject: model.Unsubscribe(*subject)),
    (TO_LEADER | EVENT).map(model.MessageToNode),
)
TIMELINES = st.none() | st.just("7312/00000002")
BOOKMARKS = st.builds(Bookmark, NATURAL, st.dictionaries(ID_NUMBER, NATURAL, max_size=5), TIMELINES)


@st.composite
def feed_pages(draw: st.DrawFn) -> feed_messages.FeedPage:
    start, end = draw(ENDS)
    gone = draw(st.booleans())
    oldest = draw(st.none() | NATURAL) if gone else None
    return feed_messages.FeedPage(
        draw(ID), draw(st.none() | BOOKMARKS), draw(NATURAL), start, end, draw(BYTES), gone, oldest
    )


@st.composite
def fetched_pages(draw: st.DrawFn) -> member_reads.FetchedPage:
    start, end, head = sorted(draw(st.tuples(NATURAL, NATURAL, NATURAL)))
    return member_reads.FetchedPage(start, end, head, draw(st.booleans()), draw(BYTES))


FILTERS = st.sampled_from(["#", "a/+", "ü/☃/#", "+/b"]).map(TopicFilter)
FETCH = st.builds(member_reads.FetchRequest, ID_NUMBER, NATURAL, FILTERS, ID_NUMBER, ID_NUMBER, ID_NUMBER)
FETCHED = fetched_pages() | st.builds(member_reads.FetchPositionGone, st.none() | NATURAL)
HEADS = st.dictionaries(ID_NUMBER, st.tuples(NATURAL, st.booleans()), max_size=20)
WIRE: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "to the leader": (TO_LEADER, codec.encode_to_leader, codec.decode_to_leader),
    "to the borrower": (TO_BORROWER, codec.encode_to_borrower, codec.decode_to_borrower),
    "command": (COMMAND, wire.encode_command, wire.decode_command),
    "delivery": (DELIVERY, wire.encode_delivery, wire.decode_delivery),
    "feed page": (feed_pages(), feed_messages.encode_page, feed_messages.decode_page),
    "fetch request": (FETCH, member_reads.encode_fetch_request, member_reads.decode_fetch_request),
    "fetch reply": (FETCHED, member_reads.encode_fetch_reply, member_reads.decode_fetch_reply),
    "heads request": (
        st.lists(ID_NUMBER, max_size=20, unique=True),
        member_reads.encode_heads_request,
        member_reads.decode_heads_request,
    ),
    "heads reply": (HEADS, member_reads.encode_heads_reply, member_reads.decode_heads_reply),
    "session epoch request": (
        st.just((Subscription.parse("$share/g/a/#"), "etl")),
        lambda name: member_reads.encode_session_epoch_request(str(name[0]), name[1]),
        member_reads.decode_session_epoch_request,
    ),
    "session epoch reply": (
        ID_NUMBER,
        member_reads.encode_session_epoch_reply,
        member_reads.decode_session_epoch_reply,
    ),
}


@pytest.mark.parametrize(("values", "encode", "decode"), WIRE.values(), ids=WIRE.keys())
def test_it_is_the_same_after_the_wire(
    values: st.SearchStrategy[Any], encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    @settings(max_examples=300 if values in (TO_LEADER, TO_BORROWER) else 100)
    @given(values)
    def law(value: object) -> None:
        encoded = encode(value)
        read = decode(type(encoded).FromString(encoded.SerializeToString()))
        assert read == value
        assert type(read) is type(value)

    law()


@given(DELIVERY)
def test_a_body_has_a_size(delivery: model.SequencedMessage) -> None:
    assert wire.measure_body(delivery.body) > 0


@pytest.mark.parametrize(("message", "union"), [(pb.ToLeader, messages.ToLeader), (pb.ToBorrower, messages.ToBorrower)])
def test_every_message_of_the_protocol_is_tried(message: Any, union: object) -> None:
    """The strategies above name each member of the unions, so that a new message is not forgotten."""
    fields = message.DESCRIPTOR.oneofs[0].fields
    wire_names = {field.message_type.name for field in fields if field.message_type is not None}
    assert wire_names == {kind.__name__ for kind in typing.get_args(union)}


@pytest.mark.parametrize(
    "kind",
    [
        *typing.get_args(messages.ToLeader), *typing.get_args(messages.ToBorrower),
        messages.HeldGrant, messages.StreamProgress,
    ],
)  # fmt: skip
def test_every_field_of_a_message_is_on_the_wire(kind: type) -> None:
    fields = set(inspect.signature(kind).parameters) - {"hash_to"}
    on_wire = {field.name for field in pb.DESCRIPTOR.message_types_by_name[kind.__name__].fields} - {"hash_last"}
    assert fields == on_wire


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
        frontiers = (GroupFrontier("encoded once", 1, consumed, lower),)
        response = messages.PingResponse(f"a/{number}", 1, 1.0, 1.0, frontiers)
        answer = codec.encode_to_borrower(response)
        assert codec.decode_to_borrower(answer) == response
        answer.ping_response.epochs[0].ClearField("consumed")
    assert encoded == [consumed, lower]


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("X4", "R11")
@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_command_or_an_error(payload: bytes) -> None:
    try:
        parsed = pb.Command.FromString(payload)
    except DecodeError:
        return
    expected = model.Subscribe | model.Unsubscribe | model.MessageToNode | model.UndecodableCommand
    assert isinstance(wire.decode_command(parsed), expected)


def wanted(**fields: Any) -> pb.ToLeader:
    minimal: dict[str, Any] = {
        "borrower_id": "b",
        "subscription": "$share/g/a",
        "weight": 1.0,
        "starting_position": "latest",
    }
    return pb.ToLeader(leader_wanted=pb.LeaderWanted(**(minimal | fields)))


def fetch(**fields: Any) -> pb.FetchRequest:
    minimal = {"stream_id": 1, "position": 0, "filter": "#", "generation_id": 1, "limit_bytes": 1, "grant_id": 1}
    return pb.FetchRequest(**(_OURS | minimal | fields))


def progress(least: list[list[int]]) -> Any:
    """Return progress with such a frontier."""
    made = codec.encode_to_leader(messages.UpdateProgress("b", 1, (messages.StreamProgress(1, 1, 1),)))
    made.update_progress.streams[0].consumed.lower.SetInParent()
    for epoch in least:
        made.update_progress.streams[0].consumed.lower.least.add(dimensions=epoch)
    return made


def reported(**fields: Any) -> pb.ToLeader:
    return pb.ToLeader(update_progress=pb.UpdateProgress(borrower_id="b", streams=[pb.StreamProgress(**fields)]))


def granted(**fields: Any) -> pb.ToBorrower:
    return pb.ToBorrower(grant=pb.Grant(borrower_id="b", filter="#", **fields))


_OURS: dict[str, Any] = {"protocol_version": messages.PROTOCOL_VERSION}
_EPOCH: dict[str, Any] = {**_OURS, "subscription": "$share/g/a/#"}
_ANY = MalformedMessage, "."
_NO_FRONTIER = MalformedMessage, r"frontier of epochs|least: "
NO_FRONTIERS: list[list[list[int]]] = [[], [[1], [1, 2]], [[]], [[3], [5]], [[1, 1], [2, 2]], [list(range(9))]]
NO_FRONTIERS += [[[n] for n in range(MAX_ANTICHAIN + 1)]]
_OTHER_VERSION = errors.ProtocolMismatch, "protocol version 0"
_MANY = f"{MAX_STREAMS + 1} streams, and the limit is {MAX_STREAMS}"
HOSTILE: list[tuple[Any, tuple[type[Exception], str]]] = [
    (wanted(borrower_id=""), (MalformedMessage, "borrower_id")),
    (wanted(borrower_id="x" * 256), (MalformedMessage, "limit is 255")),
    (wanted(borrower_id="a\0b"), (MalformedMessage, "NUL")),
    (
        wanted(subscription="x" * (limits.MAX_SUBSCRIPTION_BYTES + 1)),
        (MalformedMessage, f"limit is {limits.MAX_SUBSCRIPTION_BYTES}"),
    ),
    (wanted(group_id=-1), (MalformedMessage, "never negative")),
    *((wanted(weight=weight), (MalformedMessage, "weight")) for weight in (0.0, float("nan"), float("inf"))),
    (wanted(session=""), (MalformedMessage, "session")),
    (wanted(reclaim=[pb.HeldGrant()] * (MAX_STREAMS + 1)), (MalformedMessage, f"limit is {MAX_STREAMS}")),
    (wanted(reclaim=[pb.HeldGrant(position=-1)]), (MalformedMessage, "never negative")),
    *((progress(least), _NO_FRONTIER) for least in NO_FRONTIERS),
    (pb.ToLeader(), _ANY),
    (pb.ToLeader(ping=pb.Ping(borrower_ids=["b"] * 10_001)), _ANY),
    (pb.ToLeader(ping=pb.Ping(borrower_ids=["b", "c", "b"])), (MalformedMessage, "in it twice")),
    (pb.ToLeader(ping=pb.Ping(sent_at=float("nan"))), _ANY),
    (pb.ToLeader(update_progress=pb.UpdateProgress(borrower_id="b", streams=[pb.StreamProgress()] * 100_001)), _ANY),
    (pb.ToLeader(disconnect=pb.Disconnect(borrower_id="b", term=-1)), _ANY),
    (reported(in_doubt=pb.InDoubt(start=2, end=1)), (MalformedMessage, r"in doubt is \[2, 1\)")),
    (pb.ToBorrower(), _ANY),
    (pb.ToBorrower(revoked=pb.Revoked(borrower_id="b")), _ANY),
    (pb.ToBorrower(invalidate=pb.Invalidate(borrower_id="b", reason=99)), _ANY),  # type: ignore[arg-type]
    (granted(hash_from=2, hash_last=1, grant_key=bytes(16)), (MalformedMessage, "ends before it begins")),
    (granted(hash_last=1, grant_key=bytes(15)), (MalformedMessage, "15 bytes")),
    *(
        (fetch(**{name: value}), (MalformedMessage, f"{name} {value}"))
        for name, value in (("stream_id", 0), ("position", -1), ("generation_id", 0), ("limit_bytes", 0))
    ),
    (fetch(grant_id=0), (MalformedMessage, "grant_id 0")),
    *((fetch(filter=text), (errors.InvalidFilter, f"filter '{text}'")) for text in ("", "a/#/b")),
    (fetch(protocol_version=0), _OTHER_VERSION),
    (pb.HeadsRequest(), _OTHER_VERSION),
    (pb.HeadsRequest(**_OURS, stream_ids=[1, 0]), (MalformedMessage, "stream_id 0")),
    (pb.HeadsRequest(**_OURS, stream_ids=[1] * (MAX_STREAMS + 1)), (MalformedMessage, _MANY)),
    (pb.SessionEpochRequest(), _OTHER_VERSION),
    (pb.SessionEpochRequest(**_EPOCH), (MalformedMessage, "session: it is missing")),
    (
        pb.SessionEpochRequest(**{**_EPOCH, "subscription": "a/#", "session": "etl"}),
        (errors.InvalidSubscription, "subscription 'a/#'"),
    ),
    (pb.FetchReply(start=2, position=1, head=3), (MalformedMessage, "from 2 to 1")),
    (pb.FetchReply(start=1, position=3, head=2), (MalformedMessage, "ends at 2")),
    (pb.FetchReply(start=-1), (MalformedMessage, "start -1")),
    (pb.FetchReply(gone=pb.FeedGone(oldest=-1)), (MalformedMessage, "oldest -1")),
    (pb.HeadsReply(heads=[pb.StreamHead(head=1)]), (MalformedMessage, "stream_id 0")),
    (pb.HeadsReply(heads=[pb.StreamHead(stream_id=1, head=-1)]), (MalformedMessage, "head -1")),
    (pb.SessionEpochReply(), (MalformedMessage, "epoch 0")),
]
DECODE: dict[type, Callable[[Any], object]] = {
    pb.ToLeader: codec.decode_to_leader,
    pb.ToBorrower: codec.decode_to_borrower,
    pb.FetchRequest: member_reads.decode_fetch_request,
    pb.HeadsRequest: member_reads.decode_heads_request,
    pb.SessionEpochRequest: member_reads.decode_session_epoch_request,
    pb.FetchReply: member_reads.decode_fetch_reply,
    pb.HeadsReply: member_reads.decode_heads_reply,
    pb.SessionEpochReply: member_reads.decode_session_epoch_reply,
}


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(("hostile", "refusal"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_is_refused_by_name(hostile: Any, refusal: tuple[type[Exception], str]) -> None:
    error, rule = refusal
    sent = type(hostile).FromString(hostile.SerializeToString())
    with pytest.raises(error, match=rule) as refused:
        DECODE[type(hostile)](sent)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("minimal", [wanted(), fetch(), progress([[1] * 3, [2] * 3])])
def test_what_the_hostile_are_made_of_is_good(minimal: Any) -> None:
    DECODE[type(minimal)](minimal)


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
    assert isinstance(wire.decode_command(hostile), model.UndecodableCommand)
