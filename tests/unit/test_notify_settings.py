"""The times of notifications, and the versions of objects."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.notify.changes import (
    MalformedNotification,
    NotifySettings,
    group_change,
    node_change,
    space_change,
    stream_change,
)
from sublet_storage.notify.codec import MAX_MESSAGE, decode


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_time_is_positive_and_finite(value: float) -> None:
    with pytest.raises(
        InvalidSetting, match=f"^catch_up_jitter_s is {value}: it must be a positive number. Leave it out"
    ):
        replace(NotifySettings(), catch_up_jitter_s=value).check()


@pytest.mark.parametrize(
    ("changes", "story"),
    [
        (
            {"gap_window_s": 6.0},
            "hello_interval_s is 5.0 and gap_window_s is 6.0: hello_interval_s must be at least gap_window_s, because",
        ),
        ({"publisher_expiry_s": 5.0}, "publisher_expiry_s is 5.0 and hello_interval_s"),
        ({"tombstone_retention_s": 1.0}, "tombstone_retention_s is 1.0 and hello_interval_s"),
        ({"poll_interval_s": 0.1}, "poll_interval_s is 0.1 and catch_up_min_interval_s is 0.5"),
        ({"catch_up_interval_s": 0.9}, "catch_up_interval_s is 0.9 and poll_interval_s is 1"),
    ],
)
def test_times_fit_each_other(changes: dict[str, Any], story: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        replace(NotifySettings(), **changes).check()
    assert story in str(refusal.value)


def test_they_come_from_the_environment() -> None:
    assert NotifySettings.from_env({"SUBLET_NOTIFY_POLL_INTERVAL_S": "2.5"}) == NotifySettings(poll_interval_s=2.5)
    with pytest.raises(
        InvalidSetting,
        match=r"^SUBLET_NOTIFY_POLL_INTERVAL_S is 'often': it must be a positive number\. Leave it out",
    ):
        NotifySettings.from_env({"SUBLET_NOTIFY_POLL_INTERVAL_S": "often"})
    with pytest.raises(InvalidSetting, match=r"^SUBLET_NOTIFY_POLL_INTERVAL_S is -1\.0: it must be a positive number"):
        NotifySettings.from_env({"SUBLET_NOTIFY_POLL_INTERVAL_S": "-1"})


def test_they_can_be_scaled() -> None:
    scaled = NotifySettings().scaled(10).check()
    assert (scaled.hello_interval_s, scaled.max_sends_per_s) == (0.5, 2000)


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
        b" " * (MAX_MESSAGE + 1),
    ],
    ids=lambda raw: ascii(raw[:70]),
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedNotification):
        decode(raw)
