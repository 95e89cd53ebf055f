"""What a watcher takes and what it loses: in order, and counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sublet.cli.base.command import Cli
from sublet.cli.groups.watch import _line, _Show
from sublet_borrower.node_client.group_event_watcher import (
    EventReceived,
    EventsDropped,
    GroupEventWatcher,
    LeaderInfo,
    WatchEvent,
)
from sublet_protocol.domain.errors import NotFound, Unavailable
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.channel_messages import GroupEvent
from sublet_protocol.pubsub.model import Channel, DeliveredMessage, MailboxOverflow

GROUP = "$share/g/#"


def delivered(watch: GroupEventWatcher, body: object, address: str = "n1:1") -> None:
    watch._delivered(address, DeliveredMessage(1, Channel.GROUP, GROUP, body))


def event(number: int) -> GroupEvent:
    return GroupEvent(json.dumps({"event": "grant", "stream_id": number}).encode())


def taken(watch: GroupEventWatcher) -> list[Any]:
    """Numbers of events, and what was missed between them."""
    sights: list[WatchEvent] = []
    while (sight := watch.next_event(0)) is not None:
        sights.append(sight)
    return [sight.event["stream_id"] if isinstance(sight, EventReceived) else sight for sight in sights]


def test_events_come_in_order_with_their_gaps() -> None:
    watch = GroupEventWatcher(GROUP)
    for body in (event(1), MailboxOverflow(7, (Channel.GROUP,)), event(2)):
        delivered(watch, body)
    assert taken(watch) == [1, EventsDropped(7), 2]


def test_what_is_too_much_is_lost_and_counted() -> None:
    watch = GroupEventWatcher(GROUP, waiting=3)
    for number in range(8):
        delivered(watch, event(number))
    delivered(watch, MailboxOverflow(10, (Channel.GROUP,)))
    assert taken(watch) == [0, 1, 2, EventsDropped(15)]
    delivered(watch, event(9))
    assert taken(watch) == [9]


def test_what_comes_after_a_loss_is_part_of_the_gap() -> None:
    watch = GroupEventWatcher(GROUP, waiting=2)
    for number in range(3):
        delivered(watch, event(number))
    assert watch.next_event(0) == EventReceived({"event": "grant", "stream_id": 0})
    delivered(watch, event(3))
    assert taken(watch) == [1, EventsDropped(2)]


# --- where the leader is ----------------------------------------------------------------------------------------------


class Followed(GroupEventWatcher):
    """A watch that only notes whom it would follow."""

    def __init__(self, *addresses: str) -> None:
        super().__init__(GROUP)
        for address in addresses:
            self._connect(address)

    def _connect(self, address: str) -> None:
        self._connections[address] = None  # type: ignore[assignment]
        self._unheard.add(address)

    def _let_go(self, address: str) -> None:
        del self._connections[address]

    def receives(self, address: str, by: str, leader: str | None, at: str | None = None) -> list[str]:
        """That node says who leads; whom it follows then."""
        reported = {"event": "leader", "group_id": 1, "node": leader, "term": 7, "address": at, "answered_by": by}
        delivered(self, GroupEvent(json.dumps(reported).encode()), address)
        return list(self._connections)


def test_an_unknown_leader_is_followed() -> None:
    """Once all nodes that are known have said who they are."""
    watch = Followed("localhost:1", "localhost:2", "localhost:3")
    assert watch.receives("localhost:2", "n2", "n1", "127.0.0.1:1") == ["localhost:1", "localhost:2", "localhost:3"]
    watch._lost("localhost:3", "silent")
    assert len(watch.receives("localhost:1", "n1", "n1", "127.0.0.1:1")) == 3, "it is known, by another address"
    assert watch.receives("localhost:2", "n2", "n4", "127.0.0.1:4")[3:] == ["127.0.0.1:4"]
    assert watch.receives("localhost:2", "n2", None)[3:] == ["127.0.0.1:4"]


def test_a_leader_is_not_followed_over_two_addresses() -> None:
    watch = Followed("localhost:1", "localhost:2")
    watch._lost("localhost:1", "silent")
    assert watch.receives("localhost:2", "n2", "n1", "127.0.0.1:1")[2:] == ["127.0.0.1:1"]
    assert watch.receives("127.0.0.1:1", "n1", "n1", "127.0.0.1:1")[2:] == ["127.0.0.1:1"]
    assert watch.receives("localhost:1", "n1", "n1", "127.0.0.1:1") == ["localhost:1", "localhost:2"]


def test_who_leads_is_told() -> None:
    watch = Followed("a:1")
    for leader in ("n1", "n2", None):
        watch.receives("a:1", "n1", leader, "b:1")
    assert [watch.next_event(0) for _ in range(3)] == [
        LeaderInfo(1, "n1", 7, is_led_here=True),
        LeaderInfo(1, "n2", 7, is_led_here=False),
        LeaderInfo(1, None, 7, is_led_here=False),
    ]


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_a_line_moves_no_cursor() -> None:
    of_stream = {"stream_id": 3, "position": 5, "redelivery_end": 8}
    seized = {"at": "T", "event": "force_release", "agent": "a", "reason": "x\x1b[2J", **of_stream}
    assert _line(seized) == "T  force_release  stream 3 at 5  [5, 8) may be seen again  a  x\\x1b[2J"
    assert "seen again" not in _line(seized | {"redelivery_end": 5})
    assert _line({"at": "T", "event": "step_down", "node": "n1", "reason": "idle"}) == "T  step_down      n1  idle"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_gap_says_how_much_was_lost(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(None, None, json=as_json, debug=False)
    with GroupEventWatcher(GROUP) as watch:
        _Show(cli, Subscription.parse(GROUP), watch, list)._miss(7)
    said = capsys.readouterr()
    assert "7 events were lost; `sublet groups history '$share/g/#'` has all that is durable." in said.err
    assert said.out == ('{"event":"gap","subscription":"$share/g/#","lost":7}\n' if as_json else "")


def test_a_watch_gives_up_where_no_node_answers() -> None:
    cli = Cli(None, None, json=False, debug=False)
    with GroupEventWatcher(GROUP) as watch:
        show = _Show(cli, Subscription.parse(GROUP), watch, list)
        show._look()
        show._give_up_at = 0.0
        with pytest.raises(Unavailable):
            show._look()
        show._answered(LeaderInfo(1, "n2", 7, is_led_here=False))
        show._look()
        with pytest.raises(NotFound, match="was deleted"):
            show._answered(LeaderInfo(None, None, None, is_led_here=False))
