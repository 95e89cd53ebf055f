"""What a session hears of what nodes are told."""

from __future__ import annotations

import pytest

from sublet_storage.notify.changes import Change, Envelope, PublisherHeartbeat, group_change, stream_change
from sublet_storage.notify.codec import encode
from sublet_storage.notify.drivers.listener_slots import decode_heads
from sublet_storage.notify.drivers.postgres import encode_payload


def said(channel: str, *changes: Change) -> bytes:
    return encode_payload(encode(Envelope("p", "i", channel, 7, 6, changes)), 0).encode()


def test_only_heads_of_streams_are_taken() -> None:
    news = [stream_change(7, 12, closed=False), stream_change(9, 2**62, closed=True)]
    assert decode_heads(said("stream", *news)) == {7: 12, 9: 2**62}
    assert decode_heads(said("group", group_change("$share/g/#", 3))) == {}
    assert decode_heads(encode_payload(encode(PublisherHeartbeat("p", "i", {"stream": 7})), 0).encode()) == {}


@pytest.mark.parametrize(
    "payload",
    [b"", b"t0", b"t0{}", b"b0!!", b"\xff", said("stream", Change("stream", "x", 4), Change("stream", "9" * 5000, 4))],
)
def test_what_is_not_ours_is_left_out(payload: bytes) -> None:
    assert decode_heads(payload) == {}
