"""What a watcher takes and what it loses: in order, and counted."""

from __future__ import annotations

import json
from typing import Any

from borrower.watch import Missed, Seen, Sight, Watch
from protocol.events import GroupEvent
from protocol.session.values import Channel, Delivery, Gap
from sublet.cli.group_watch import _line

GROUP = "$share/g/#"


def delivered(watch: Watch, body: object) -> None:
    watch._delivered("n1:1", Delivery(1, Channel.GROUP, GROUP, body))


def event(number: int) -> GroupEvent:
    return GroupEvent(json.dumps({"event": "grant", "stream_id": number}).encode())


def taken(watch: Watch) -> list[Any]:
    """Numbers of events, and what was missed between them."""
    sights: list[Sight] = []
    while (sight := watch.take(0)) is not None:
        sights.append(sight)
    return [sight.event["stream_id"] if isinstance(sight, Seen) else sight for sight in sights]


def test_events_are_taken_in_their_order_with_the_gaps_between_them() -> None:
    watch = Watch(GROUP)
    for body in (event(1), Gap(7, (Channel.GROUP,)), event(2)):
        delivered(watch, body)
    assert taken(watch) == [1, Missed(7), 2]


def test_a_watcher_that_takes_nothing_loses_what_is_too_much_and_is_told_how_much() -> None:
    watch = Watch(GROUP, waiting=3)
    for number in range(8):
        delivered(watch, event(number))
    delivered(watch, Gap(10, (Channel.GROUP,)))
    assert taken(watch) == [0, 1, 2, Missed(15)]
    delivered(watch, event(9))
    assert taken(watch) == [9]


def test_what_comes_while_the_rest_is_taken_is_part_of_the_gap_so_that_the_order_holds() -> None:
    watch = Watch(GROUP, waiting=2)
    for number in range(3):
        delivered(watch, event(number))
    assert watch.take(0) == Seen({"event": "grant", "stream_id": 0})
    delivered(watch, event(3))
    assert taken(watch) == [1, Missed(2)]


def test_a_line_for_people_says_what_may_be_seen_again_and_moves_no_cursor() -> None:
    seized = {
        "at": "T",
        "event": "seize",
        "stream_id": 3,
        "position": 5,
        "until": 8,
        "agent": "a",
        "reason": "x\x1b[2J",
    }
    assert _line(seized) == "T  seize      stream 3 at 5  [5, 8) may be seen again  a  x\\x1b[2J"
    assert "seen again" not in _line(seized | {"until": 5})
    assert _line({"at": "T", "event": "step_down", "node": "n1", "reason": "idle"}) == "T  step_down  n1  idle"
