"""What is said on the short way, taken apart."""

from __future__ import annotations

import pytest

from storage.notify.shortcut import LONGEST_PAUSE_S, PAUSE_S, Pace, heads_of


@pytest.mark.parametrize(
    ("said", "heads"),
    [
        (b"", {}),
        (b"7:12", {7: 12}),
        (b"7:12 9:9223372036854775807", {7: 12, 9: 2**63 - 1}),
        (b"7:12 x:1 8: :9 8 -1:4 1:-4 7:1:2 9:3", {7: 12, 9: 3}),
        (b"7:" + b"9" * 5000, {}),
        (b"\xff\xfe:1", {}),
    ],
)
def test_what_is_not_ours_is_left_out(said: bytes, heads: dict[int, int]) -> None:
    assert heads_of(said) == heads


def test_a_publisher_speaks_the_more_seldom_the_more_listen_and_not_where_nobody_does() -> None:
    pace = Pace()
    assert not pace.may_speak(0, 0.0)
    for listeners in (1, 8):
        assert pace.may_speak(listeners, 1.0 * listeners)
        pace.spoke(alone=True, now=1.0 * listeners)
        assert not pace.may_speak(listeners, listeners + PAUSE_S * listeners * 0.9)
        assert pace.may_speak(listeners, listeners + PAUSE_S * listeners * 1.1)


def test_publishers_that_get_in_each_others_way_speak_more_seldom_until_they_do_not() -> None:
    pace, now, pauses = Pace(), 0.0, []
    for alone in [False] * 10 + [True] * 10:
        assert pace.may_speak(1, now)
        pace.spoke(alone, now)
        began = now
        while not pace.may_speak(1, now):
            now += PAUSE_S / 10
        pauses.append(now - began)
    assert pauses[:10] == sorted(pauses[:10])
    assert pauses[9] == pytest.approx(LONGEST_PAUSE_S, rel=0.01)
    assert pauses[10:] == sorted(pauses[10:], reverse=True)
    assert pauses[-1] == pytest.approx(PAUSE_S, rel=0.2)
