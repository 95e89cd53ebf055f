"""Notifications: their messages, and what a publisher sends when."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_NOTIFICATION_BYTES, MAX_NOTIFICATIONS_PER_S, MAX_NOTIFIED_CHANGES_PER_S
from sublet_protocol.tick import Tick
from sublet_storage.notify.changes import (
    ChangeNotification,
    MalformedNotification,
    Message,
    NotificationHeartbeat,
    NotifySettings,
    ObjectChange,
    group_change,
    node_change,
    space_change,
    stream_change,
)
from sublet_storage.notify.codec import HEAD_MARK, MAX_CHANNELS, MAX_NAME, MAX_NUMBER, VERSION_MARK, decode, encode
from sublet_storage.notify.drivers.listener_slots import decode_heads
from sublet_storage.notify.drivers.postgres import decode_payload, encode_payload
from sublet_storage.notify.publisher_machine import (
    ChangesQueued,
    Event,
    NotificationPublisherMachine,
    NotificationPublisherStatus,
    NotificationSendersOpened,
    PublisherCloseRequested,
)
from sublet_storage.notify.received_notification_limiter import ReceivedNotificationLimiter

SETTINGS = NotifySettings()


class Harness:
    """An announcer and what it says."""

    def __init__(self, most_waiting: int = 100) -> None:
        self.machine = NotificationPublisherMachine("p", "i", SETTINGS, most_waiting)
        self.wake_at: float | None = None

    def do(self, event: Event, now: float) -> list[Message]:
        outcome = self.machine.decide(event, now)
        self.wake_at = outcome.wake_at
        return [decode(message) for message in outcome.sends]

    def notify(self, now: float, *changes: ObjectChange) -> list[Message]:
        return self.do(ChangesQueued(changes), now)


def opened(limit: int | None = None) -> Harness:
    harness = Harness()
    harness.do(NotificationSendersOpened(limit), 0.0)
    return harness


def head(stream_id: int, head: int) -> ObjectChange:
    return stream_change(stream_id, head, False)


def sent(channel: str, sequence: int, *changes: ObjectChange) -> ChangeNotification:
    return ChangeNotification("p", "i", channel, sequence, sequence - 1, changes)


def hello(leaving: bool = False, **known: int) -> NotificationHeartbeat:
    return NotificationHeartbeat("p", "i", known, leaving)


@pytest.mark.conforms("D3")
def test_a_hello_and_numbers_for_each_channel() -> None:
    harness, group = Harness(), group_change("$share/g/#", 7, deleted=True)
    assert harness.do(NotificationSendersOpened(None), 0.0) == [hello()]
    assert harness.notify(1.0, head(1, 1)) == [sent("stream", 1, head(1, 1))]
    both = [sent("stream", 2, head(1, 2)), sent("space", 1, space_change("eu", 4))]
    assert harness.notify(2.0, head(1, 2), space_change("eu", 4)) == both
    assert harness.notify(3.0, group) == [sent("group", 1, group)]


@pytest.mark.conforms("D3", "D5")
def test_a_hello_after_every_max_idle() -> None:
    harness = opened()
    harness.notify(1.0, head(1, 1))
    assert harness.wake_at == 1.0 + SETTINGS.hello_interval_s
    assert harness.do(Tick(), 5.9) == []
    assert harness.do(Tick(), 6.0) == [hello(stream=1)]
    assert harness.wake_at == 11.0
    assert harness.do(Tick(), 11.0) == [hello(stream=1)]
    assert harness.do(NotificationSendersOpened(None), 11.5) == [hello(stream=1)], "to others, too"


def test_a_head_is_announced_before_it_is_known() -> None:
    """By one message with marks, where nothing waits and the rate allows it; it counts as sent."""
    harness = Harness()
    announce = partial(harness.machine.announce_head, 7)
    assert announce(0.0) is None, "nobody listens"
    harness.do(NotificationSendersOpened(None), 0.0)
    message = announce(1.0)
    assert message is not None
    marked = message.decode().replace(VERSION_MARK, "20").replace(HEAD_MARK, "10").encode()
    assert decode(marked) == sent("stream", 1, head(7, 10))
    assert announce(1.004) is None, "too early"
    assert announce(1.005) is not None
    assert harness.notify(1.006, head(8, 1)) == []
    assert announce(2.0) is None, "another change waits"
    assert harness.do(Tick(), 2.0) == [sent("stream", 3, head(8, 1))]
    assert announce(6.0) is not None
    assert harness.do(Tick(), 10.9) == []
    assert harness.do(Tick(), 11.0) == [hello(stream=4)]
    harness.do(PublisherCloseRequested(), 12.0)
    assert announce(13.0) is None


def test_changes_wait_for_the_first_endpoint() -> None:
    harness = Harness()
    assert harness.notify(0.0, head(1, 1)) == []
    assert harness.wake_at is None
    assert harness.machine.has_pending
    harness.notify(0.1, head(1, 2))
    assert harness.do(NotificationSendersOpened(None), 0.2) == [hello(), sent("stream", 1, head(1, 2))]


def test_the_first_after_a_silence_goes_at_once() -> None:
    """What follows closely goes together."""
    harness = opened()
    assert len(harness.notify(1.0, head(1, 1))) == 1
    assert harness.notify(1.001, head(1, 2)) == []
    assert harness.notify(1.002, head(1, 3), head(2, 9)) == []
    assert harness.wake_at == pytest.approx(1.005)
    assert harness.do(Tick(), 1.005) == [sent("stream", 2, head(1, 3), head(2, 9))]


def test_pauses_grow_under_load_only() -> None:
    harness = opened()
    machine, shortest, now = harness.machine, 1 / SETTINGS.max_sends_per_s, 1.0
    pauses = []
    for step in range(600):
        now = 1 + step * shortest / 2
        if harness.notify(now, head(1, step)):
            pauses.append(machine.ready_at - now)
    assert all(one <= other + 1e-9 for one, other in pairwise(pauses))
    assert pauses[:2] == pytest.approx([shortest, 1.2 * shortest])
    assert pauses[-1] == pytest.approx(10 * shortest)
    for step in range(3):
        now += 0.1
        harness.notify(now, head(1, 1000 + step))
    assert machine.ready_at - now == pytest.approx(shortest)


@pytest.mark.parametrize("jitter_s", [0.0, 0.003, 0.006])
def test_what_is_sent_at_intervals_is_first_at_once(jitter_s: float) -> None:
    harness = opened()
    machine, late_s = harness.machine, 0.0
    for step in range(1000):
        now = 1 + step / 100 + jitter_s * (step % 2)
        if not harness.notify(now, head(1, step)):
            late_s = max(late_s, machine.ready_at - now)
            assert harness.do(Tick(), machine.ready_at)
    assert late_s <= 1 / SETTINGS.max_sends_per_s
    assert machine.ready_at - now <= 2 / SETTINGS.max_sends_per_s


def test_an_older_change_replaces_no_newer_one() -> None:
    harness = Harness()
    harness.notify(0.0, space_change("eu", 4, deleted=True), space_change("eu", 4), space_change("eu", 3))
    newest = space_change("eu", 4, deleted=True)
    assert harness.do(NotificationSendersOpened(None), 0.1) == [hello(), sent("space", 1, newest)]


def test_too_long_goes_without_data_or_as_a_hole() -> None:
    harness = opened(300)
    (space,) = harness.notify(1.0, space_change("eu", 1, data={"filter": "x" * 300}), space_change("y" * 300, 1))
    assert space == sent("space", 2, space_change("eu", 1))


def test_many_changes_are_split_at_the_limit() -> None:
    harness = opened(500)
    outcome = harness.machine.decide(ChangesQueued(tuple(head(number, number) for number in range(100))), 1.0)
    assert all(len(message) <= 500 for message in outcome.sends)
    assert len(outcome.sends) == 10
    assert outcome.wake_at == pytest.approx(1.0 + SETTINGS.hello_interval_s)
    harness.notify(1.001, head(1, 200))
    assert harness.wake_at == pytest.approx(1.0 + 10 / SETTINGS.max_sends_per_s), "many messages use up the rate"


@pytest.mark.conforms("D3", "D4")
def test_of_too_many_the_oldest_is_left_out() -> None:
    """The numbers show it."""
    harness = Harness(most_waiting=2)
    harness.notify(0.0, head(1, 1), head(2, 1), head(3, 1))
    newest = sent("stream", 2, head(2, 1), head(3, 1))
    assert harness.do(NotificationSendersOpened(None), 0.0) == [hello(stream=1), newest]


def test_leaving_sends_what_waits_and_a_goodbye() -> None:
    harness = opened()
    harness.notify(1.0, head(1, 1))
    harness.notify(1.001, head(1, 2))
    goodbye = hello(leaving=True, stream=2)
    assert harness.do(PublisherCloseRequested(), 1.002) == [sent("stream", 2, head(1, 2)), goodbye]
    assert harness.machine.status is NotificationPublisherStatus.CLOSED
    assert harness.notify(2.0, head(1, 3)) == []
    assert harness.do(NotificationSendersOpened(None), 3.0) == []
    assert harness.wake_at is None


def test_who_never_could_speak_leaves_in_silence() -> None:
    harness = Harness()
    harness.notify(0.0, head(1, 1))
    assert harness.do(PublisherCloseRequested(), 1.0) == []


# --- messages: the order of versions, what is none, and what a session takes of them ----------------------------------


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
        b'{"e":["p","i","stream"],"s":18446744073709551616,"b":0,"c":[]}',
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


def test_names_and_numbers_go_up_to_their_limits() -> None:
    for largest in (
        ChangeNotification("p" * MAX_NAME, "i", "stream", MAX_NUMBER - 1, 0, ()),
        NotificationHeartbeat("p", "i" * MAX_NAME, {"c" * MAX_NAME: MAX_NUMBER - 1}, False),
    ):
        assert decode(encode(largest)) == largest
    with pytest.raises(MalformedNotification):
        decode(encode(NotificationHeartbeat("p" * (MAX_NAME + 1), "i", {})))


def test_settings_may_be_at_their_least() -> None:
    assert NotifySettings(poll_interval_s=0.5, catch_up_min_interval_s=0.5).check()
    with pytest.raises(InvalidSetting, match="poll_interval_s must be at least catch_up_min_interval_s"):
        NotifySettings(poll_interval_s=0.4, catch_up_min_interval_s=0.5).check()


@pytest.mark.parametrize("payload", [b"", b"t", b"b", b"b0!!", b"x0"])
def test_what_has_no_message_in_it_is_none(payload: bytes) -> None:
    assert decode_payload(payload) is None
