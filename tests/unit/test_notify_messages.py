"""Messages of notifications: the order of versions, what is no message, and what a session takes of them."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES, MAX_NOTIFICATIONS_PER_S, MAX_NOTIFIED_CHANGES_PER_S
from sublet_storage.notify.changes import (
    ChangeNotification,
    MalformedNotification,
    NotificationHeartbeat,
    ObjectChange,
    group_change,
    node_change,
    space_change,
    stream_change,
)
from sublet_storage.notify.codec import MAX_CHANNELS, decode, encode
from sublet_storage.notify.drivers.listener_slots import decode_heads
from sublet_storage.notify.drivers.postgres import encode_payload
from sublet_storage.notify.received_notification_limiter import ReceivedNotificationLimiter


def test_versions_only_grow() -> None:
    """Also where something is deleted and made again."""
    lives = [
        [stream_change(1, 4, False), stream_change(1, 4, True)],
        [stream_change(1, 4, False), stream_change(1, 5, False)],
        [group_change("$share/g/#", 4), group_change("$share/g/#", 4, deleted=True), group_change("$share/g/#", 5)],
        [space_change("eu", 4), space_change("eu", 9), space_change("eu", 9, deleted=True), space_change("eu", 12)],
        [node_change("n", 100), node_change("n", 100, deleted=True), node_change("n", 101)],
    ]
    for life in lives:
        ranks = [change.order_key for change in life]
        assert ranks == sorted(set(ranks))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'{"e":["p","i"],"s":1,"b":0,"c":[]}',
        b'{"e":["p","i","space"],"s":1,"b":0,"c":[["a",1,0,{"filter":[[],[]]}]]}',
        b'{"e":["p","i","stream"],"s":1,"b":1,"c":[]}',
        b'{"e":["p","i","stream"],"s":true,"b":0,"c":[]}',
        b'{"e":["p","i","stream"],"s":1,"b":0,"c":[["k",-1,0,null,null]]}',
        b'{"e":["p","i","stream"],"s":1,"b":0,"c":[["k",1,0,[],null]]}',
        b'{"e":["p","i","stream"],"s":1,"b":0,"c":[["k",1,0,null,[2,2,1,""]]]}',
        b'{"e":["p","i","stream"],"s":1,"b":0,"c":[["k",1,0,null,[1,2,1,"!"]]]}',
        b'{"e":["","i","stream"],"s":1,"b":0,"c":[]}',
        b'{"p":"p","i":"i","h":{"a":1.5},"l":false}',
        b'{"p":"p","i":"i","h":[],"l":false}',
        b"[" * 100_000,
        b'{"p":"p","i":"i","h":{"a":' + b"9" * 5000 + b'},"l":false}',
        b" " * (MAX_NOTIFICATION_BYTES + 1),
    ],
    ids=lambda raw: ascii(raw[:70]),
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedNotification):
        decode(raw)


def said(channel: str, *changes: ObjectChange) -> bytes:
    return encode_payload(encode(ChangeNotification("p", "i", channel, 7, 6, changes)), 0).encode()


def test_only_heads_of_streams_are_taken() -> None:
    changes = [stream_change(7, 12, closed=False), stream_change(9, 2**62, closed=True)]
    assert decode_heads(said("stream", *changes)) == {7: 12, 9: 2**62}
    assert decode_heads(said("group", group_change("$share/g/#", 3))) == {}
    assert decode_heads(encode_payload(encode(NotificationHeartbeat("p", "i", {"stream": 7})), 0).encode()) == {}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"t0",
        b"t0{}",
        b"b0!!",
        b"\xff",
        said("stream", ObjectChange("stream", "x", 4), ObjectChange("stream", "9" * 5000, 4)),
    ],
)
def test_what_is_not_ours_is_left_out(payload: bytes) -> None:
    assert decode_heads(payload) == {}


@pytest.mark.conforms("X4")
def test_so_many_notifications_are_taken_a_second() -> None:
    rate = ReceivedNotificationLimiter()
    assert all(rate.take(5.0) for _ in range(MAX_NOTIFICATIONS_PER_S))
    assert not rate.is_first_refused
    assert [(rate.take(5.9), rate.is_first_refused) for _ in range(3)] == [
        (False, True),
        (False, False),
        (False, False),
    ]
    assert rate.take(6.0)


@pytest.mark.conforms("X4")
def test_so_many_changes_are_taken_a_second() -> None:
    rate = ReceivedNotificationLimiter()
    assert rate.take(5.0, MAX_NOTIFIED_CHANGES_PER_S - 1)
    assert [(rate.take(5.5, 2), rate.is_first_refused) for _ in range(2)] == [(False, True), (False, False)]
    assert rate.take(5.5, 1), "there is room for one"
    assert not rate.take(5.5, 1)
    assert rate.take(6.0, MAX_NOTIFIED_CHANGES_PER_S)
    assert not rate.take(7.0, 1, has_room=False)


@pytest.mark.conforms("X4")
def test_so_many_channels_are_in_a_heartbeat() -> None:
    channels = {str(number): 1 for number in range(MAX_CHANNELS)}
    heartbeat = NotificationHeartbeat("p", "i", channels, False)
    assert decode(encode(heartbeat)) == heartbeat
    with pytest.raises(MalformedNotification):
        decode(encode(NotificationHeartbeat("p", "i", {**channels, "more": 1}, False)))


def test_a_notification_may_be_as_long_as_the_limit() -> None:
    hello = encode(NotificationHeartbeat("p", "i", {}, False))
    longest = hello + b" " * (MAX_NOTIFICATION_BYTES - len(hello))
    assert decode(longest) == decode(hello)
    with pytest.raises(MalformedNotification, match="the longest is 6000"):
        decode(longest + b" ")
