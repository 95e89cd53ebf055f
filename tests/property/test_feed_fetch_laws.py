"""What members of a group ask of a node, and are answered, is the same after the wire; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from sublet_protocol.domain.errors import InvalidFilter, InvalidSubscription, ProtocolMismatch, SubletError
from sublet_protocol.domain.limits import MAX_STREAMS
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.messages.member_reads import (
    FetchedPage,
    FetchPositionGone,
    FetchRequest,
    decode_fetch_reply,
    decode_fetch_request,
    decode_heads_reply,
    decode_heads_request,
    decode_session_epoch_reply,
    decode_session_epoch_request,
    encode_fetch_reply,
    encode_fetch_request,
    encode_heads_reply,
    encode_heads_request,
    encode_session_epoch_reply,
    encode_session_epoch_request,
)
from sublet_protocol.v1 import sublet_pb2 as pb

IDS = st.integers(1, MAX_OFFSET)
OFFSETS = st.integers(0, MAX_OFFSET)
FILTERS = st.sampled_from(["#", "a/+", "ü/☃/#", "+/b"]).map(TopicFilter)
HEADS = st.dictionaries(IDS, st.tuples(OFFSETS, st.booleans()), max_size=20)


@st.composite
def founds(draw: st.DrawFn) -> FetchedPage:
    start, end, head = sorted(draw(st.tuples(OFFSETS, OFFSETS, OFFSETS)))
    return FetchedPage(start, end, head, draw(st.booleans()), draw(st.none() | st.binary(min_size=1, max_size=20)))


def wired(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(st.builds(FetchRequest, IDS, OFFSETS, FILTERS, IDS, IDS, IDS))
def test_what_is_wanted_is_the_same_after_the_wire(wanted: FetchRequest) -> None:
    assert decode_fetch_request(wired(encode_fetch_request(wanted))) == wanted


@given(founds() | st.builds(FetchPositionGone, st.none() | OFFSETS))
def test_what_is_found_is_the_same_after_the_wire(found: FetchedPage | FetchPositionGone) -> None:
    assert decode_fetch_reply(wired(encode_fetch_reply(found))) == found


@given(st.lists(IDS, max_size=20, unique=True), HEADS, IDS)
def test_heads_and_epochs_are_the_same_after_the_wire(
    stream_ids: list[int], heads: dict[int, tuple[int, bool]], epoch: int
) -> None:
    assert decode_heads_request(wired(encode_heads_request(stream_ids))) == stream_ids
    assert decode_heads_reply(wired(encode_heads_reply(heads))) == heads
    name = (Subscription.parse("$share/g/a/#"), "etl")
    assert decode_session_epoch_request(wired(encode_session_epoch_request(str(name[0]), name[1]))) == name
    assert decode_session_epoch_reply(wired(encode_session_epoch_reply(epoch))) == epoch


READ: dict[str, Any] = {
    "protocol_version": PROTOCOL_VERSION, "stream_id": 1, "position": 0, "filter": "#", "generation_id": 1,
    "limit_bytes": 1, "grant_id": 1,
}  # fmt: skip


EPOCH: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "subscription": "$share/g/a/#"}


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("decode", "wire", "error", "story"),
    [
        (decode_fetch_request, pb.FetchRequest(**{**READ, "stream_id": 0}), MalformedMessage, "stream_id 0"),
        (decode_fetch_request, pb.FetchRequest(**{**READ, "position": -1}), MalformedMessage, "position -1"),
        (decode_fetch_request, pb.FetchRequest(**{**READ, "generation_id": 0}), MalformedMessage, "generation_id 0"),
        (decode_fetch_request, pb.FetchRequest(**{**READ, "limit_bytes": 0}), MalformedMessage, "limit_bytes 0"),
        (decode_fetch_request, pb.FetchRequest(**{**READ, "grant_id": 0}), MalformedMessage, "grant_id 0"),
        (decode_fetch_request, pb.FetchRequest(**{**READ, "filter": ""}), InvalidFilter, "filter ''"),
        (decode_fetch_request, pb.FetchRequest(**{**READ, "filter": "a/#/b"}), InvalidFilter, "filter 'a/#/b'"),
        (
            decode_fetch_request,
            pb.FetchRequest(**{**READ, "protocol_version": 0}),
            ProtocolMismatch,
            "protocol version 0",
        ),
        (decode_heads_request, pb.HeadsRequest(), ProtocolMismatch, "protocol version 0"),
        (
            decode_heads_request,
            pb.HeadsRequest(protocol_version=PROTOCOL_VERSION, stream_ids=[1, 0]),
            MalformedMessage,
            "stream_id 0",
        ),
        (
            decode_heads_request,
            pb.HeadsRequest(protocol_version=PROTOCOL_VERSION, stream_ids=[1] * (MAX_STREAMS + 1)),
            MalformedMessage,
            f"{MAX_STREAMS + 1} streams, and the limit is {MAX_STREAMS}",
        ),
        (decode_session_epoch_request, pb.SessionEpochRequest(), ProtocolMismatch, "protocol version 0"),
        (decode_session_epoch_request, pb.SessionEpochRequest(**EPOCH), MalformedMessage, "session: it is missing"),
        (
            decode_session_epoch_request,
            pb.SessionEpochRequest(**{**EPOCH, "subscription": "a/#", "session": "etl"}),
            InvalidSubscription,
            "subscription 'a/#'",
        ),
        (decode_fetch_reply, pb.FetchReply(start=2, position=1, head=3), MalformedMessage, "from 2 to 1"),
        (decode_fetch_reply, pb.FetchReply(start=1, position=3, head=2), MalformedMessage, "ends at 2"),
        (decode_fetch_reply, pb.FetchReply(start=-1), MalformedMessage, "start -1"),
        (decode_fetch_reply, pb.FetchReply(gone=pb.FeedGone(oldest=-1)), MalformedMessage, "oldest -1"),
        (decode_heads_reply, pb.HeadsReply(heads=[pb.StreamHead(head=1)]), MalformedMessage, "stream_id 0"),
        (decode_heads_reply, pb.HeadsReply(heads=[pb.StreamHead(stream_id=1, head=-1)]), MalformedMessage, "head -1"),
        (decode_session_epoch_reply, pb.SessionEpochReply(), MalformedMessage, "epoch 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    decode: Callable[[Any], object], wire: Any, error: type[SubletError], story: str
) -> None:
    with pytest.raises(error, match=story):
        decode(wired(wire))
