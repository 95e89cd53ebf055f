"""What members of a group ask of a node, and are answered, is the same after the wire; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from sublet_protocol.domain.errors import InvalidFilter, ProtocolMismatch, SubletError
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.domain.topics import Filter
from sublet_protocol.messages.codec import MalformedMessage
from sublet_protocol.messages.feed import MAX_STREAMS
from sublet_protocol.messages.feed_fetch import (
    Found,
    Missing,
    Wanted,
    decode_epoch,
    decode_epoch_wanted,
    decode_found,
    decode_heads,
    decode_heads_wanted,
    decode_wanted,
    encode_epoch,
    encode_epoch_wanted,
    encode_found,
    encode_heads,
    encode_heads_wanted,
    encode_wanted,
)
from sublet_protocol.messages.messages import PROTOCOL_VERSION
from sublet_protocol.v1 import sublet_pb2 as pb

IDS = st.integers(1, MAX_OFFSET)
OFFSETS = st.integers(0, MAX_OFFSET)
FILTERS = st.sampled_from(["#", "a/+", "ü/☃/#", "+/b"]).map(Filter)
HEADS = st.dictionaries(IDS, st.tuples(OFFSETS, st.booleans()), max_size=20)


@st.composite
def founds(draw: st.DrawFn) -> Found:
    start, end, head = sorted(draw(st.tuples(OFFSETS, OFFSETS, OFFSETS)))
    return Found(start, end, head, draw(st.booleans()), draw(st.none() | st.binary(min_size=1, max_size=20)))


def wired(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(st.builds(Wanted, IDS, OFFSETS, FILTERS, IDS, IDS))
def test_what_is_wanted_is_the_same_after_the_wire(wanted: Wanted) -> None:
    assert decode_wanted(wired(encode_wanted(wanted))) == wanted


@given(founds() | st.builds(Missing, st.none() | OFFSETS))
def test_what_is_found_is_the_same_after_the_wire(found: Found | Missing) -> None:
    assert decode_found(wired(encode_found(found))) == found


@given(st.lists(IDS, max_size=20), HEADS, IDS)
def test_heads_and_epochs_are_the_same_after_the_wire(
    stream_ids: list[int], heads: dict[int, tuple[int, bool]], epoch: int
) -> None:
    assert decode_heads_wanted(wired(encode_heads_wanted(stream_ids))) == stream_ids
    assert decode_heads(wired(encode_heads(heads))) == heads
    decode_epoch_wanted(wired(encode_epoch_wanted()))
    assert decode_epoch(wired(encode_epoch(epoch))) == epoch


READ: dict[str, Any] = {
    "protocol_version": PROTOCOL_VERSION, "stream_id": 1, "position": 0, "filter": "#", "generation_id": 1,
    "limit_bytes": 1,
}  # fmt: skip


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("decode", "wire", "error", "story"),
    [
        (decode_wanted, pb.ReadRequest(**{**READ, "stream_id": 0}), MalformedMessage, "stream_id 0"),
        (decode_wanted, pb.ReadRequest(**{**READ, "position": -1}), MalformedMessage, "position -1"),
        (decode_wanted, pb.ReadRequest(**{**READ, "generation_id": 0}), MalformedMessage, "generation_id 0"),
        (decode_wanted, pb.ReadRequest(**{**READ, "limit_bytes": 0}), MalformedMessage, "limit_bytes 0"),
        (decode_wanted, pb.ReadRequest(**{**READ, "filter": ""}), InvalidFilter, "filter ''"),
        (decode_wanted, pb.ReadRequest(**{**READ, "filter": "a/#/b"}), InvalidFilter, "filter 'a/#/b'"),
        (decode_wanted, pb.ReadRequest(**{**READ, "protocol_version": 0}), ProtocolMismatch, "protocol version 0"),
        (decode_heads_wanted, pb.HeadsRequest(), ProtocolMismatch, "protocol version 0"),
        (
            decode_heads_wanted,
            pb.HeadsRequest(protocol_version=PROTOCOL_VERSION, stream_ids=[1, 0]),
            MalformedMessage,
            "stream_id 0",
        ),
        (
            decode_heads_wanted,
            pb.HeadsRequest(protocol_version=PROTOCOL_VERSION, stream_ids=[1] * (MAX_STREAMS + 1)),
            MalformedMessage,
            f"{MAX_STREAMS + 1} streams, and the limit is {MAX_STREAMS}",
        ),
        (decode_epoch_wanted, pb.SessionEpochRequest(), ProtocolMismatch, "protocol version 0"),
        (decode_found, pb.ReadReply(start=2, position=1, head=3), MalformedMessage, "from 2 to 1"),
        (decode_found, pb.ReadReply(start=1, position=3, head=2), MalformedMessage, "ends at 2"),
        (decode_found, pb.ReadReply(start=-1), MalformedMessage, "start -1"),
        (decode_found, pb.ReadReply(gone=pb.FeedGone(oldest=-1)), MalformedMessage, "oldest -1"),
        (decode_heads, pb.HeadsReply(heads=[pb.StreamHead(head=1)]), MalformedMessage, "stream_id 0"),
        (decode_heads, pb.HeadsReply(heads=[pb.StreamHead(stream_id=1, head=-1)]), MalformedMessage, "head -1"),
        (decode_epoch, pb.SessionEpochReply(), MalformedMessage, "epoch 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    decode: Callable[[Any], object], wire: Any, error: type[SubletError], story: str
) -> None:
    with pytest.raises(error, match=story):
        decode(wired(wire))
